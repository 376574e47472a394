"""The text of :meth:`PermutationSpec.describe`: what is permuted, how much of the network moves, and what does not.

>>> import torch
>>> from opacus_shuffle.permutation import find_permutations
>>> network = torch.nn.Sequential(torch.nn.Linear(4, 6), torch.nn.ReLU(), torch.nn.Linear(6, 2))
>>> len(find_permutations(network).describe().splitlines())
15
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from opacus_shuffle.permutation.spec import PermutationSpec


def describe(spec: PermutationSpec) -> str:
    """Two tables and what to know about them."""
    groups = [("permuted together", "size", "log2", "moves")]
    for factor in spec.factors:
        if factor.free:
            copies = math.prod(spec.factors[outer].size for outer in factor.inside)
            bits = copies * math.lgamma(factor.size + 1) / math.log(2)
            size = f"{factor.size}" + (f" x {copies}" if copies > 1 else "")
            members = [f"{name}[{axis}]" for name, axis in spec.perm_to_axes[factor.name]]
            more = f", and {len(members) - 3} more" if len(members) > 3 else ""
            groups.append((factor.name, size, f"{bits:.1f}", ", ".join(members[:3]) + more))
    tensors = [("tensor", "shape", "moved", "largest orbit")]
    for name, shape in spec.shapes.items():
        kind = " (buffer)" if name in spec.buffers else ""
        tensors.append(
            (name + kind, " x ".join(map(str, shape)), _percent(spec.moved_fraction(name)), f"{spec.largest_orbit(name):,}")
        )
    for name, count in spec.unmoved.items():
        tensors.append((name, f"{count:,} entries", "0%", "1"))
    moved = sum(spec.moved_fraction(name) * math.prod(shape) for name, shape in spec.shapes.items() if name not in spec.buffers)
    total = sum(math.prod(shape) for name, shape in spec.shapes.items() if name not in spec.buffers) + sum(
        spec.unmoved.values()
    )
    lines = [
        f"Permutations of level {spec.level!r}: {_percent(moved / total if total else 0.0)} of {total:,} parameters move; "
        f"log2 of the group's size is {spec.log2_size():,.1f}.",
        "",
        *_table(groups),
        "",
        *_table(tensors),
        "",
        "The network's function stays as it is. This is no privacy guarantee: no epsilon becomes smaller for every data set, "
        "what",
        "does not move gains nothing, and whoever knows the weights before an update can match them with those after it.",
    ]
    if any(" x " in row[1] for row in groups):
        lines.append("Size 8 x 4: 8 things in each of 4 groups or heads that they are inside of; log2 counts permutations.")
    if spec.unknown:
        met = ", ".join(f"{name} ({count} calls)" for name, count in spec.unknown.items())
        lines.append(f"Kept in place by operations without a rule (see register_permutation): {met}.")
    if spec.buffers:
        lines.append(f"Buffers move too ({', '.join(spec.buffers)}): where their values are known, they show the permutation.")
    return "\n".join(lines)


def _percent(fraction: float) -> str:
    """A share, never rounded to all or nothing."""
    if fraction in (0.0, 1.0):
        return f"{100 * fraction:.0f}%"
    return f"{min(max(100 * fraction, 0.001), 99.999):.3f}%"


def _table(rows: Sequence[Sequence[str]]) -> list[str]:
    """Aligned columns under a rule."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    ruled = [rows[0], ["-" * width for width in widths], *rows[1:]]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in ruled]
