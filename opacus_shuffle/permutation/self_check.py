"""Checking numerically that permuted weights compute the same function, in double precision.

The weights are perturbed first, because a norm with scale 1 and shift 0, or a bias that is still zero, would hide that it was
forgotten.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import NoReturn

import torch
from torch import nn

from opacus_shuffle.core.progress import enter_phase
from opacus_shuffle.networks.rollback import rolled_back
from opacus_shuffle.networks.running import without_graph
from opacus_shuffle.networks.sample_input import Call
from opacus_shuffle.permutation.action import GroupAction
from opacus_shuffle.permutation.finding.cheap_products import Frugal
from opacus_shuffle.permutation.group import PermutationPlan
from opacus_shuffle.permutation.in_double import PerturbedWeights

MASK = 1e8
"""Entries beyond this are masks (-1e9, the lowest number of a type) and say nothing about the usual size of outputs."""

TOLERANCE = 1e-9
"""Relative to an output, or to the median one if it is smaller. Summing in another order in double precision stays some 1e5
times below in the deepest networks met, and the smallest breakage met (a forgotten bias of the queries) was 1e6 times above."""

MISSED = 1 / 8
"""How often two copies of a permutation of n things may go unnoticed: a draw takes both alike once in n! times, and a draw of
one cycle over all once in (n-1)! times."""


def check_calls(action: GroupAction, network: nn.Module, calls: Sequence[Call]) -> None:
    """Refuses a group with a permutation that changes what the network computes on these arguments, by name.

    The first is tried in both modes, the others in evaluation mode; with two permutations at least in all.
    """
    enter_phase("checking")
    action.tensors(network)
    for args, kwargs in calls:  # what Python keeps for a size must not be made in double precision first: it would stay
        with contextlib.suppress(Exception), rolled_back(network):
            Frugal(network)(lambda: without_graph(lambda: network.eval()(*args, **kwargs)))  # noqa: B023
    generator = torch.Generator().manual_seed(20_230_101)
    weights = PerturbedWeights(network, generator, buffers=True)
    known = []
    try:
        known = [weights.run(calls[0], training=False)]
    except Exception:  # some buffers are masks, indices or probabilities, and mean nothing perturbed
        weights = PerturbedWeights(network, generator, buffers=False)
    references = []
    for number, call in enumerate(calls):
        references.append({False: known.pop() if known else _reference(network, weights, call, training=False)})
        if number == 0:
            trained = _reference(network, weights, call, training=True)
            if not _same(references[0][False], trained):  # or this mode computes what the other did
                references[0][True] = trained
    moved: list[PermutationPlan] = []
    for call, reference in zip(calls, references, strict=True):
        _Check(action, network, weights, call, reference, generator, moved).run(more=1 if len(calls) == 1 else 0)
    if not any(bool(each.any()) for reference in references for mode in reference.values() for each in mode):
        raise ValueError(f"{type(network).__name__} gives only zeros on the sample input: give another, so it can be checked")


def _reference(network: nn.Module, weights: PerturbedWeights, call: Call, *, training: bool) -> list[torch.Tensor]:
    """Returns what the network computes before anything is permuted."""
    try:
        return weights.run(call, training=training)
    except ValueError:
        raise
    except Exception as error:
        raise ValueError(
            f"{type(network).__name__} does not run in double precision, so nothing can be checked: "
            f"{type(error).__name__}: {error}"
        ) from error


def _same(ones: list[torch.Tensor], others: list[torch.Tensor]) -> bool:
    """Returns whether results are equal, bit by bit."""
    return len(ones) == len(others) and all(map(torch.equal, ones, others))


class _Check:
    """Permutes weights and compares what the network computes on one input with what it did, by mode of the network."""

    def __init__(
        self,
        action: GroupAction,
        network: nn.Module,
        weights: PerturbedWeights,
        call: Call,
        references: Mapping[bool, list[torch.Tensor]],
        generator: torch.Generator,
        moved: list[PermutationPlan],
    ) -> None:
        self._action, self._network, self._weights = action, network, weights
        self._call, self._references, self._generator = call, references, generator
        self._rounding = {training: [0.0] * len(reference) for training, reference in references.items()}
        self._rounding_known = False
        self._moved = moved  # one after the other, also by the checks on other inputs

    def run(self, *, more: int) -> None:
        """Tries as many permutations as tell copies of one apart, and this many more at least, if any is needed."""
        for plan in self._plans(more):
            if (worst := self._change(plan)) > TOLERANCE:
                self._blame(plan, worst)

    def _plans(self, more: int) -> Iterator[PermutationPlan]:
        """Yields a permutation that leaves nothing in place, and then others."""
        yield _without_fixed_points(self._action.sample(self._generator))
        smallest = min((factor.size for factor in self._action.factors if factor.free), default=2)
        left = -math.log(MISSED) - math.lgamma(smallest)
        for _ in range(max(more, math.ceil(left / math.lgamma(smallest + 1)))):
            yield self._action.sample(self._generator)

    def _change(self, plan: PermutationPlan) -> float:
        """Returns how far the outputs get, beyond what rounding explains; what is within it needs no look at rounding."""
        self._move(plan)
        worst = self._distance()
        if worst > TOLERANCE:
            self._back()
            self._learn_rounding()
            self._move(plan)
            worst = self._distance()
            self._back()
        return worst

    def _distance(self) -> float:
        return max(
            _difference(*each)
            for training, reference in self._references.items()
            for each in zip(reference, self._weights.run(self._call, training=training), self._rounding[training], strict=True)
        )

    def _learn_rounding(self) -> None:
        if not self._rounding_known:
            for training, reference in self._references.items():
                nearly = self._weights.run_rounded_otherwise(self._call, self._generator, training=training)
                self._rounding[training] = [_rounding(*pair) for pair in zip(reference, nearly, strict=True)]
        self._rounding_known = True

    def _move(self, plan: PermutationPlan) -> None:
        self._action.move({name: [self._weights.stored[name]] for name in self._action.blocks}, plan)
        self._moved.append(plan)

    def _back(self) -> None:
        """Undoes all that was moved."""
        while self._moved:
            self._move(self._action.invert(self._moved.pop()))
            self._moved.pop()

    def _blame(self, plan: PermutationPlan, worst: float) -> NoReturn:
        name = type(self._network).__name__
        still = self._action.identity()
        for number, factor in enumerate(self._action.factors):
            if factor.free:
                tables = list(still.tables)
                tables[number] = plan.tables[number]
                if (alone := self._change(PermutationPlan(tuple(tables)))) > TOLERANCE:
                    members = ", ".join(dict.fromkeys(name for name, _ in self._action.perm_to_axes[factor.name]))
                    raise ValueError(
                        f"this PermutationSpec changes what {name} computes: permuting {factor.name!r} moves "
                        f"{members} and the outputs by {alone:.1e} of their size. Something that belongs to it is missing or "
                        "must stay in place. If it was found and not made by hand, tracing has lost these where their values "
                        "leave PyTorch: declare that module's axes (see register_permutation)"
                    )
        raise ValueError(
            f"this PermutationSpec changes what {name} computes by {worst:.1e} of the outputs' size, though none of its "
            "permutations does alone: use find_permutations"
        )


def _without_fixed_points(plan: PermutationPlan) -> PermutationPlan:
    """Makes each permutation one cycle over all it moves: a uniform draw often leaves two things in place."""
    return PermutationPlan(
        tuple(
            table if table is None else torch.empty_like(table).scatter_(-1, table, table.roll(1, -1)) for table in plan.tables
        )
    )


def _difference(one: torch.Tensor, two: torch.Tensor, rounding: float) -> float:
    """Returns the largest change of an entry, relative to it or to what is usual in its tensor; infinite if no number."""
    if one.shape != two.shape or not torch.equal(torch.isfinite(one), torch.isfinite(two)):
        return float("inf")
    finite = torch.isfinite(one)
    if not torch.equal(one[~finite], two[~finite]):
        return float("inf")
    before, after = one[finite].abs(), (one - two)[finite].abs()
    usual = before[(before > 0) & (before < MASK)]
    if not len(before) or not bool(after.any()):
        return 0.0
    scale = float(usual.median()) if len(usual) else 1.0
    return float(((after - rounding).clamp(min=0) / before.clamp(min=scale)).max())


def _rounding(one: torch.Tensor, two: torch.Tensor) -> float:
    """Returns how far results are apart whose weights differ in what rounding may change, with a margin of 1000."""
    if one.shape != two.shape:
        return 0.0
    both = torch.isfinite(one) & torch.isfinite(two) & (one.abs() < MASK)
    return 1e3 * float((one - two)[both].abs().max()) if bool(both.any()) else 0.0
