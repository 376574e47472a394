"""Describes which entries of a network's parameters may be permuted together."""

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

MAX_NAMED = 5
"""How many unreached parameters a message names."""


@dataclasses.dataclass(frozen=True)
class PermutationSpec(PermutationGroup):
    """A group of permutations of a network's parameters that keep its function.

    Attributes:
        factors: The sets of coordinates that are permuted, and the factors that contain them.
        blocks: For each tensor that moves, by its name in the network (tied ones once), the axes
            that consist of factors that move.
        shapes: Shapes of these tensors.
        buffers: The names of the buffers among them.
        aliases: Other names of tied parameters, by the name used here.
        unmoved: Names of the parameters that stay, with their sizes.
        unknown: Operations without a rule, with their numbers of calls. The axes that they touched
            are fixed.
        unreached: Parameters and buffers that no sample reached, or whose results were not used.
            Their effect is unknown, so they stay, with every axis that has the size of one of
            theirs.
        causes: For each parameter that stays, per axis the operation that fixed it, with its line
            of code and the name of the module.
        reads: Lines of code at which Python reads a value of a tensor. The network may take another
            path there on other inputs, which was not traced.
        level: ``"paper"``, ``"heads"`` or ``"residual"``, or another name for a specification that
            was made by hand.

    Formal Guarantees:
        Every permutation drawn by :meth:`sample` keeps the network's function, and training with an
        optimizer that treats the entries of a tensor alike. It is no privacy guarantee: permuting
        weights makes no ε smaller for every data set, and an adversary who knows the weights before
        an update can undo the permutation after it by matching.
    """

    unmoved: Mapping[str, int] = dataclasses.field(default_factory=dict)
    unknown: Mapping[str, int] = dataclasses.field(default_factory=dict)
    unreached: tuple[str, ...] = ()
    causes: Mapping[str, str] = dataclasses.field(default_factory=dict, compare=False)
    reads: tuple[str, ...] = dataclasses.field(default=(), compare=False)
    level: str = "residual"

    def shuffle_ratio(self, module: nn.Module) -> float:
        """Returns the fraction of parameter entries that some permutation moves, tied ones once."""
        self.tensors(module)
        return self._share_of(sum(parameter.numel() for parameter in module.parameters()))

    def _share_of(self, total: int) -> float:
        """Returns the number of parameter entries that move, divided by ``total``."""
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
        """Returns the size of the smallest orbit of an entry of a tensor; 1 if some entry stays."""
        instance_of("name", name, (str,))
        # If one factor moves two axes, entries on the diagonal stay on it, and others off it.
        movers: list[frozenset[int]] = [frozenset()]
        for block in self.blocks.get(name, ()):
            movers = [one | other for one in movers for _, other in self._pieces(block)]
        return min(math.prod(self.factors[number].size for number in one) for one in movers)

    def _pieces(self, block: Block) -> list[tuple[int, frozenset[int]]]:
        """Returns the sizes of the pieces of a block, and the free factors that move them."""
        pieces = []
        for term in block.terms:
            numbers = [number for number, _ in term.grid]
            size = math.prod(self.factors[number].size for number in numbers)
            pieces.append((size, frozenset(n for n in numbers if self.factors[n].free)))
        rest = block.size - sum(size for size, _ in pieces)
        return [*pieces, (rest, frozenset())] if rest else pieces

    def describe(self) -> str:
        """Returns the groups and the parameters as two tables, with explanations."""
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
            suffix, size = " (buffer)" if is_buffer else "", " x ".join(map(str, shape))
            tensors.append((name + suffix, size, moved, f"{self.smallest_orbit(name):,}"))
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
            lines += [*text_table(("tensor that stays", "fixed by"), list(self.causes.items())), ""]
        lines += [
            "The network's function stays the same. This is no privacy guarantee: epsilon does not "
            "become smaller for every data",
            "set, and an adversary who knows the weights before an update can match them with "
            "those after it.",
            "A size of 8 x 4 means 8 units in each of 4 groups or heads; log2 counts permutations.",
        ]
        if self.unknown:
            met = ", ".join(f"{name} ({count} calls)" for name, count in self.unknown.items())
            lines.append(f"Fixed by operations without a rule: {met}.")
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
                f"Buffers move too ({names}). If their values are public, they reveal the "
                "permutation."
            )
        return "\n".join(lines)

    def describe_unreached(self) -> str:
        """Returns a sentence on what no sample has reached, with the remedy; empty if nothing."""
        if not self.unreached:
            return ""
        more = len(self.unreached) - MAX_NAMED
        return (
            f"Not reached by the samples: {', '.join(self.unreached[:MAX_NAMED])}"
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
        with contextlib.suppress(Exception):  # the check reports errors better
            run_quietly(network, *call)
        check_calls(self, network, [call])


def _percentage(fraction: float) -> str:
    """Returns a fraction in percent, never rounded to 0 or 100."""
    if fraction in (0.0, 1.0):
        return f"{100 * fraction:.0f}%"
    return f"{min(max(100 * fraction, 0.001), 99.999):.3f}%"
