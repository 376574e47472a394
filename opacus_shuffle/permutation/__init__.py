"""Finds, draws and applies permutations of weights that keep a network's function.

    * ``find`` finds them with the modules in ``finding/`` (docs/how_permutations_are_found.rst).
    * ``spec`` describes the result. It is a ``group``, which draws and inverts permutations, and
      applies them to a network. ``float64_check`` checks that the function stays the same.
    * ``moving/`` moves the entries of tensors, with PyTorch or with Triton.
    * ``network`` lists the tensors that can move, and turns fused kernels off.

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

# The engine needs the other two. The finder takes time to import, so it is imported on first use.
__getattr__, __dir__ = imports.lazy_attributes(
    __name__, {"find_permutations": f"{__name__}.find", "find": ""}
)
