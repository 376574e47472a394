"""Naming what is permuted in plain words: where it is in the network and what it is.

>>> common_place(["encoder.0.attention.query.weight", "encoder.0.attention.key.bias"])
'encoder.0.attention'
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Mapping, Sequence

import torch

from opacus_shuffle.permutation.finding.labels import Axis


def common_place(names: Sequence[str]) -> str:
    """Returns the innermost module that holds all these parameters."""
    levels = zip(*(name.split(".")[:-1] for name in names), strict=False)
    return ".".join(parts[0] for parts in itertools.takewhile(lambda parts: len(set(parts)) == 1, levels))


def name_factors(
    places: Mapping[Axis, Sequence[tuple[str, int]]],
    tensors: Mapping[str, torch.Tensor],
    *,
    heads: set[Axis],
    streams: set[Axis],
    contracted: set[Axis],
    outer: set[Axis],
) -> dict[Axis, str]:
    """Returns a unique name per free factor.

    Args:
        places: Per factor the (tensor, axis) pairs that it is found at.
        tensors: All tensors by name, in order.
        heads: Factors that count attention heads.
        streams: Factors of a residual stream.
        contracted: Factors that queries and keys are multiplied over.
        outer: Factors that others are inside of.
    """
    found: dict[Axis, str] = {}
    used: Counter[str] = Counter()
    for atom, where in places.items():
        names = list(dict.fromkeys(name for name, _ in where))
        place = common_place(names)
        if atom in streams:
            name = "residual stream" + (f" of {place}" if place else "")
        elif atom in heads:
            name = f"heads of {place or 'the network'}"
        elif atom in contracted:
            name = f"query and key dimensions of {place or 'the network'}"
        else:
            first = names[0].rpartition(".")[0] or names[0]
            kind = "channels" if tensors[names[0]].dim() > 2 else "units"
            name = f"{kind} of {first}"
        if atom in outer and atom not in heads:
            name = f"groups in {name}"
        used[name] += 1
        found[atom] = name if used[name] == 1 else f"{name} ({used[name]})"
    return found
