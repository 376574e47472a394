"""Permutations of weights that leave a network's function alone: found, drawn and applied.

    * ``find`` finds them, by the means of ``finding/`` (docs/how_permutations_are_found.rst tells
      how).
    * ``spec`` describes what was found. It is a ``group``, which draws and inverts permutations and
      moves a network's tensors by them. ``float64_check`` makes sure that the function stays.
    * ``moving/`` moves the entries of tensors fast, with PyTorch or with Triton.
    * ``network`` says what of a network can move at all, and has attention computed plainly.

>>> import torch
>>> from opacus_shuffle.permutation import find_permutations
>>> layer = torch.nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
>>> encoder = torch.nn.Sequential(torch.nn.Linear(3, 16), layer, torch.nn.Linear(16, 2))
>>> spec = find_permutations(encoder, torch.zeros(2, 5, 3))
>>> round(spec.log2_size(), 1)
224.1
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from opacus_shuffle.core import imports
from opacus_shuffle.permutation.group import PermutationPlan
from opacus_shuffle.permutation.spec import PermutationSpec

if TYPE_CHECKING:
    from opacus_shuffle.permutation.find import find_permutations

__all__ = [
    "PermutationPlan",
    "PermutationSpec",
    "find_permutations",
]

# The engine needs the other two; only who finds permutations waits for what finds them.
__getattr__, __dir__ = imports.lazy_attributes(
    __name__, {"find_permutations": f"{__name__}.find", "find": ""}
)
