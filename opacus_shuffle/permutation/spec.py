"""Describing which entries of a network's parameters may be permuted together."""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Mapping
from typing import Any

from torch import nn

from opacus_shuffle.core.tables import text_table
from opacus_shuffle.core.validation import instance_of
from opacus_shuffle.networks.running import unwrap
from opacus_shuffle.networks.sample_input import call_of, run_quietly
from opacus_shuffle.permutation.float64_check import check_calls
from opacus_shuffle.permutation.group import PermutationGroup
from opacus_shuffle.permutation.moving.layout import Block

MOST_NAMED = 5
"""How many unreached parameters a message names."""


@dataclasses.dataclass(frozen=True)
class PermutationSpec(PermutationGroup):
    """The group of permutations of a network's parameters under which its function stays as it is.

    Attributes:
        factors: What is permuted, and what that lies inside of.
        blocks: Per tensor that moves, by its name in the network (tied ones once), the axes made of
            factors that move.
        shapes: Shapes of these tensors.
        buffers: Those of them that are buffers.
        aliases: Other names of tied parameters, by the one used here.
        unmoved: Names of the parameters that stay, with their sizes.
        unknown: Operations without a rule that were met, with their numbers of calls: what they
            touched stays.
        unreached: Parameters and buffers that the sample did not reach: nobody knows what they do,
            so they stay, with every axis whose size they have. Also those that stay because nobody
            used what was made of them.
        causes: Why parameters stay that do, by name: per axis the operation that has fixed it,
            where it is in the network, and the line of code.
        reads: Lines of code at which Python reads a value of a tensor. The network may take another
            path there on other inputs, which was not traced.
        level: ``"paper"``, ``"heads"`` or ``"residual"``; or what its maker calls it.

    Formal Guarantees:
        Whatever is drawn by :meth:`sample`, the network's function stays as it is, and so does
        training with an optimizer that treats the entries of a tensor alike. Nothing here says
        anything about privacy: no ε gets smaller for every data set by permuting weights, and
        whoever knows the weights before an update can undo the permutation after it by matching.
    """

    unmoved: Mapping[str, int] = dataclasses.field(default_factory=dict)
    unknown: Mapping[str, int] = dataclasses.field(default_factory=dict)
    unreached: tuple[str, ...] = ()
    causes: Mapping[str, str] = dataclasses.field(default_factory=dict, compare=False)
    reads: tuple[str, ...] = dataclasses.field(default=(), compare=False)
    level: str = "residual"

    def shuffle_ratio(self, module: nn.Module) -> float:
        """Returns the share of parameter entries that some permutation moves, tied ones once."""
        self.tensors(module)
        return self._share_of(sum(parameter.numel() for parameter in module.parameters()))

    def _share_of(self, total: int) -> float:
        """Returns the fraction of so many entries that the moving entries of parameters are."""
        moved = [
            round(self.moved_fraction(name) * math.prod(shape))
            for name, shape in self.shapes.items()
            if name not in self.buffers
        ]
        return sum(moved) / max(total, 1)

    def moved_fraction(self, name: str) -> float:
        """Returns the fraction of a tensor's entries that some permutation moves."""
        instance_of("name", name, (str,))
        stay = 1.0
        for block in self.blocks.get(name, ()):
            moved = sum(size for size, movers in self._pieces(block) if movers)
            stay *= 1 - moved / block.size
        return 1 - stay

    def smallest_orbit(self, name: str) -> int:
        """Returns to how many places an entry can get, at least; 1 if some entry stays."""
        instance_of("name", name, (str,))
        # Entries on the diagonal of a factor that moves two axes stay there; others never get to
        # it.
        kinds: list[frozenset[int]] = [frozenset()]
        for block in self.blocks.get(name, ()):
            kinds = [kind | movers for kind in kinds for _, movers in self._pieces(block)]
        return min(math.prod(self.factors[number].size for number in kind) for kind in kinds)

    def _pieces(self, block: Block) -> list[tuple[int, frozenset[int]]]:
        """Returns pieces that tile axes: how many entries, and the free factors that move them."""
        pieces = []
        for term in block.terms:
            numbers = [number for number, _ in term.grid]
            size = math.prod(self.factors[number].size for number in numbers)
            pieces.append((size, frozenset(n for n in numbers if self.factors[n].free)))
        rest = block.size - sum(size for size, _ in pieces)
        return [*pieces, (rest, frozenset())] if rest else pieces

    def describe(self) -> str:
        """Returns the groups and the parameters as two tables, and what to know about them."""
        groups, tensors = [], []
        for number, factor in enumerate(self.factors):
            if factor.free:
                copies = self.copies(number)
                size = f"{factor.size}" + (f" x {copies}" if copies > 1 else "")
                members = [f"{name}[{axis}]" for name, axis in self.perm_to_axes[factor.name]]
                more = f", and {len(members) - 3} more" if len(members) > 3 else ""
                moves = ", ".join(members[:3]) + more
                groups.append((factor.name, size, f"{self.log2_size_of(number):.1f}", moves))
        total = sum(self.unmoved.values())
        for name, shape in self.shapes.items():
            is_buffer = name in self.buffers
            moved = _percentage(self.moved_fraction(name))
            kind, form = " (buffer)" if is_buffer else "", " x ".join(map(str, shape))
            tensors.append((name + kind, form, moved, f"{self.smallest_orbit(name):,}"))
            total += 0 if is_buffer else math.prod(shape)
        tensors += [(name, f"{count:,} entries", "0%", "1") for name, count in self.unmoved.items()]
        lines = [
            f"Permutations of level {self.level!r}: {_percentage(self._share_of(total))} of "
            f"{total:,} parameters move; "
            f"log2 of the group's size is {self.log2_size():,.1f}.",
            "",
            *text_table(("permuted together", "size", "log2", "moves"), groups),
            "",
            *text_table(("tensor", "shape", "moved", "smallest orbit"), tensors),
            "",
        ]
        if self.causes:
            lines += [*text_table(("what stays", "was fixed by"), list(self.causes.items())), ""]
        lines += [
            "The network's function stays as it is. This is no privacy guarantee: no epsilon "
            "becomes smaller for every data",
            "set, what does not move gains nothing, and whoever knows the weights before an update "
            "can match them with those",
            "after it.",
            "Size 8 x 4: 8 things in each of 4 groups or heads that they are inside of; log2 "
            "counts permutations.",
        ]
        if self.unknown:
            met = ", ".join(f"{name} ({count} calls)" for name, count in self.unknown.items())
            lines.append(f"Kept in place by operations without a rule: {met}.")
        if self.unreached:
            lines.append(self.describe_unreached().rstrip())
        if self.reads:
            lines.append(
                f"Python reads values at {', '.join(self.reads)}. Where they decide what the "
                "network does next, only the paths of the samples were traced."
            )
        if self.buffers:
            names = ", ".join(self.buffers)
            lines.append(
                f"Buffers move too ({names}): where their values are known, they show the "
                "permutation."
            )
        return "\n".join(lines)

    def describe_unreached(self) -> str:
        """Returns a sentence on what no sample has reached, with the remedy; empty if nothing."""
        if not self.unreached:
            return ""
        more = len(self.unreached) - MOST_NAMED
        return (
            f"Not reached by the samples: {', '.join(self.unreached[:MOST_NAMED])}"
            f"{f' and {more} more' if more > 0 else ''}. Their effect is unknown, so they stay, "
            "with every axis that has the size of one of theirs (pass more_samples to "
            "find_permutations that reach them, or delete them). "
        )

    def check(self, module: nn.Module, sample_input: Any = None) -> None:
        """Checks in double precision that permuted weights keep outputs and gradients.

        Args:
            module: The network; it is not changed.
            sample_input: As for :func:`~opacus_shuffle.permutation.find.find_permutations`.

        Raises:
            ValueError: If they do not; it names the group and the parameters concerned.
        """
        network = unwrap(module)
        call = call_of(network, sample_input)
        with contextlib.suppress(Exception):  # the check says better why it does not run
            run_quietly(network, *call)
        check_calls(self, network, [call])


def _percentage(fraction: float) -> str:
    """Returns a share as text, never rounded to all or nothing."""
    if fraction in (0.0, 1.0):
        return f"{100 * fraction:.0f}%"
    return f"{min(max(100 * fraction, 0.001), 99.999):.3f}%"
