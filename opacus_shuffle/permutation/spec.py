"""Describing which entries of a network's parameters may be permuted together: ``PermutationSpec``."""

from __future__ import annotations

import dataclasses
import json
import math
from collections import Counter
from collections.abc import Mapping
from typing import Any

from torch import nn

from opacus_shuffle.core.tables import text_table
from opacus_shuffle.core.validation import instance_of, one_of
from opacus_shuffle.networks.running import unwrap
from opacus_shuffle.networks.sample_input import call_of
from opacus_shuffle.permutation.action import GroupAction
from opacus_shuffle.permutation.float64_check import check_calls
from opacus_shuffle.permutation.moving.layout import Block, Factor, Term


@dataclasses.dataclass(frozen=True)
class PermutationSpec(GroupAction):
    """The group of permutations of a network's parameters under which its function stays as it is.

    Attributes:
        factors, blocks, shapes, buffers, aliases: What moves, as of
            :class:`~opacus_shuffle.permutation.action.GroupAction`, which applies permutations;
            :class:`~opacus_shuffle.permutation.group.PermutationGroup` draws and composes them.
        unmoved: Names of the parameters that stay, with their sizes.
        unknown: Operations without a rule that were met, with their numbers of calls: what they
            touched stays.
        unreached: Parameters and buffers that the sample did not reach: nobody knows what they do,
            so they stay, with every axis whose size they have. Also those that stay because nobody
            used what was made of them.
        causes: Why parameters stay that do, by name: per axis the operation that has fixed it,
            where it is in the network, and the line of code.
        decisions: Places where values decide what the network does next, with the number of ways
            that were followed.
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
    decisions: Mapping[str, int] = dataclasses.field(default_factory=dict, compare=False)
    level: str = "residual"

    def shuffle_ratio(self, module: nn.Module) -> float:
        """Returns the fraction of the network's parameter entries that some permutation moves (tied tensors counted once)."""
        self.tensors(module)
        total = sum(parameter.numel() for parameter in module.parameters())
        return self._share_of(total)

    def _share_of(self, total: int) -> float:
        """Returns the fraction of so many entries that the moving entries of parameters are."""
        sizes = {
            name: math.prod(shape)
            for name, shape in self.shapes.items()
            if name not in self.buffers
        }
        return (
            sum(round(self.moved_fraction(name) * size) for name, size in sizes.items()) / total
            if total
            else 0.0
        )

    def moved_fraction(self, name: str) -> float:
        """Returns the fraction of a tensor's entries that some permutation moves."""
        instance_of("name", name, (str,))
        stay = 1.0
        for block in self.blocks.get(name, ()):
            moved = sum(
                math.prod(self.factors[number].size for number, _ in term.grid)
                for term in block.terms
                if any(self.factors[number].free for number, _ in term.grid)
            )
            stay *= 1 - moved / block.size
        return 1 - stay

    def smallest_orbit(self, name: str) -> int:
        """Returns to how many places an entry of the tensor can get, at least; 1 if some entry stays."""
        # Entries on the diagonal of a factor that moves two axes stay there; others never get to
        # it.
        return min(
            math.prod(self.factors[number].size for number in moved) for moved in self._movers(name)
        )

    def largest_orbit(self, name: str) -> int:
        """Returns to how many places an entry of the tensor can get, at most."""
        return max(
            math.prod(
                self.factors[number].size - again
                for number, times in moved.items()
                for again in range(times)
            )
            for moved in self._movers(name)
        )

    def _movers(self, name: str) -> list[Counter[int]]:
        """Returns for each kind of entry the free factors that move it, with the number of axes in which they do."""
        instance_of("name", name, (str,))
        kinds = [Counter[int]()]
        for block in self.blocks.get(name, ()):
            terms = [
                Counter(number for number, _ in term.grid if self.factors[number].free)
                for term in block.terms
            ]
            covered = sum(
                math.prod(self.factors[number].size for number, _ in term.grid)
                for term in block.terms
            )
            if covered < block.size:
                terms.append(Counter())
            kinds = [kind + term for kind in kinds for term in terms]
        return kinds

    def describe(self) -> str:
        """Returns the groups and the parameters as two tables in plain words, and what to know about them."""
        groups, tensors = [], []
        for number, factor in enumerate(self.factors):
            if factor.free:
                copies = self.copies(number)
                size = f"{factor.size}" + (f" x {copies}" if copies > 1 else "")
                members = [f"{name}[{axis}]" for name, axis in self.perm_to_axes[factor.name]]
                more = f", and {len(members) - 3} more" if len(members) > 3 else ""
                groups.append(
                    (
                        factor.name,
                        size,
                        f"{self.log2_size_of(number):.1f}",
                        ", ".join(members[:3]) + more,
                    )
                )
        for name, shape in self.shapes.items():
            kind = " (buffer)" if name in self.buffers else ""
            moved = _percentage(self.moved_fraction(name))
            tensors.append(
                (name + kind, " x ".join(map(str, shape)), moved, f"{self.largest_orbit(name):,}")
            )
        tensors += [(name, f"{count:,} entries", "0%", "1") for name, count in self.unmoved.items()]
        total = sum(self.unmoved.values())
        total += sum(
            math.prod(shape) for name, shape in self.shapes.items() if name not in self.buffers
        )
        lines = [
            f"Permutations of level {self.level!r}: {_percentage(self._share_of(total))} of "
            f"{total:,} parameters move; "
            f"log2 of the group's size is {self.log2_size():,.1f}.",
            "",
            *text_table(("permuted together", "size", "log2", "moves"), groups),
            "",
            *text_table(("tensor", "shape", "moved", "largest orbit"), tensors),
            "",
            *(
                text_table(("what stays", "was fixed by"), list(self.causes.items()))
                if self.causes
                else ()
            ),
            *([""] if self.causes else ()),
            "The network's function stays as it is. This is no privacy guarantee: no epsilon "
            "becomes smaller for every data",
            "set, what does not move gains nothing, and whoever knows the weights before an update "
            "can match them with those",
            "after it.",
        ]
        if any(" x " in row[1] for row in groups):
            lines.append(
                "Size 8 x 4: 8 things in each of 4 groups or heads that they are inside of; log2 "
                "counts permutations."
            )
        if self.unknown:
            met = ", ".join(f"{name} ({count} calls)" for name, count in self.unknown.items())
            lines.append(
                f"Kept in place by operations without a rule (see register_permutation): {met}."
            )
        if self.unreached:
            lines.append(self.describe_unreached())
        if self.decisions:
            ways = {
                place: f"{count} way{'s' * (count != 1)} followed"
                for place, count in self.decisions.items()
            }
            places = ", ".join(f"{place} ({count})" for place, count in ways.items())
            lines.append(f"Values decide what the network does at {places}.")
        if self.buffers:
            names = ", ".join(self.buffers)
            lines.append(
                f"Buffers move too ({names}): where their values are known, they show the "
                "permutation."
            )
        return "\n".join(lines)

    def describe_unreached(self) -> str:
        """Says what no sample has reached, what stays for that, and what can be done about it."""
        return (
            f"Not reached by the sample: {', '.join(self.unreached)}. They stay, with every axis "
            "whose size they have, "
            "since nobody knows what they do (pass more_samples to find_permutations that reach "
            "them, or delete them)."
        )

    def check(self, module: nn.Module, sample_input: Any = None) -> None:
        """Runs the network in double precision with perturbed and permuted weights: its outputs must stay as they are.

        Args:
            module: The network; it is not changed.
            sample_input: As for :func:`~opacus_shuffle.permutation.find.find_permutations`.

        Raises:
            ValueError: If they do not; it names the group and the parameters concerned.
        """
        network = unwrap(module)
        check_calls(self, network, [call_of(network, sample_input)])

    def to_dict(self) -> dict[str, Any]:
        """Returns plain values, for JSON."""
        return json.loads(json.dumps(dataclasses.asdict(self)))

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> PermutationSpec:
        """Returns the specification that :meth:`to_dict` described.

        Raises:
            ValueError: If the data are not such a description.
        """
        try:
            return cls(
                factors=tuple(
                    Factor(
                        str(each["name"]),
                        int(each["size"]),
                        tuple(each["inside"]),
                        bool(each["free"]),
                    )
                    for each in data["factors"]
                ),
                blocks={
                    name: tuple(_block(each) for each in blocks)
                    for name, blocks in data["blocks"].items()
                },
                shapes={
                    name: tuple(int(size) for size in shape)
                    for name, shape in data["shapes"].items()
                },
                buffers=tuple(one_of("buffers", name, data["shapes"]) for name in data["buffers"]),
                aliases={name: tuple(names) for name, names in data["aliases"].items()},
                unmoved={name: int(size) for name, size in data["unmoved"].items()},
                unknown={name: int(count) for name, count in data["unknown"].items()},
                unreached=tuple(
                    instance_of("unreached", name, (str,)) for name in data.get("unreached", ())
                ),
                causes={
                    name: instance_of("causes", cause, (str,))
                    for name, cause in data.get("causes", {}).items()
                },
                decisions={place: int(count) for place, count in data.get("decisions", {}).items()},
                level=instance_of("level", data["level"], (str,)),
            )
        except (LookupError, TypeError, AttributeError, ValueError, RuntimeError) as error:
            raise ValueError(
                f"data is no description of a PermutationSpec (see to_dict): {error!r}"
            ) from error


def _block(data: Mapping[str, Any]) -> Block:
    terms = [
        Term(int(each["offset"]), tuple((int(n), int(stride)) for n, stride in each["grid"]))
        for each in data["terms"]
    ]
    return Block(int(data["start"]), int(data["stop"]), int(data["size"]), tuple(terms))


def _percentage(fraction: float) -> str:
    """Returns a share as text, never rounded to all or nothing."""
    if fraction in (0.0, 1.0):
        return f"{100 * fraction:.0f}%"
    return f"{min(max(100 * fraction, 0.001), 99.999):.3f}%"
