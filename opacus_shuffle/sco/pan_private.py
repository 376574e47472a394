"""``pan_private_accelerated_sgd``: accelerated SGD on a stream, by an algorithm that may be looked at once.

Algorithm 6 and Appendix C of Cheu, Joseph, Mao and Peng's shuffle-private convex optimisation
(SCO). No shuffler: one party reads record after record, and adds Gaussian noise before the first
record of a batch and again after the last.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import torch
from torch import Tensor

from opacus_shuffle.accountants.calibrate import smallest_noise
from opacus_shuffle.analysis import gaussian
from opacus_shuffle.core.randomness import stream_of
from opacus_shuffle.core.validation import integer, not_negative
from opacus_shuffle.sco.accelerated_sgd import AcceleratedSGD
from opacus_shuffle.sco.acceleration import AcceleratedIterates
from opacus_shuffle.sco.bounded_gradients import BoundedGradients
from opacus_shuffle.sco.problem import PrivacyBudget, Problem
from opacus_shuffle.sco.records import number_of_users, take
from opacus_shuffle.sco.result import Estimate
from opacus_shuffle.sco.solver import Plan, Start


def pan_private_accelerated_sgd(
    problem: Problem, budget: PrivacyBudget, *, batch_size: int | None = None
) -> Estimate:
    """Minimises the mean loss of a stream of records by pan-private accelerated SGD, in one pass and in the order given.

    Args:
        problem: What is to be minimised: directly if ``problem.smoothness`` is known (Theorem C.3,
            2), else smoothed (Theorem C.3, 1). Its generator is of the noise.
        budget: What an intruder who also sees the output may learn; its calibration is
            :func:`pan_private_noise`'s, and its ``honest_fraction`` must be 1.
        batch_size: b, records per step; by default the proved bound's best.

    Returns:
        The estimate. Records beyond the last whole batch are not used.

    Raises:
        ValueError: If an argument is out of range, or a gradient is too long (without ``clip``).

    Formal Guarantees:
        (ε, δ)-pan-privacy (SCO Definition C.2) under replacement of one record, see
        :class:`PanPrivateAcceleratedSGD`. The history may be published with the estimate: it is
        computed from the batches' gradients with both noises.
    """
    return PanPrivate(problem, budget, batch_size=batch_size).solve()


def pan_private_noise(budget: PrivacyBudget, *, lipschitz: float, batch_size: int) -> float:
    """Returns ζ, the standard deviation per coordinate of each of a batch's two noises, for the mean of its gradients.

    Replacing a record moves that mean by at most 2L/b. ``"tight"`` takes the smallest ζ whose
    Gaussian mechanism is (ε, δ)-DP, ``"published"`` ζ² = 8L²ln(2/δ)/(b²ε²) (SCO Algorithm 6), for ε
    below 1. Both are rounded up.
    """
    if budget.honest_fraction != 1:
        raise ValueError(
            "honest_fraction must be 1 for pan-private runs, which have no reports, got "
            f"{budget.honest_fraction!r}"
        )
    epsilon, delta, shift = budget.epsilon, budget.delta, 2 * lipschitz / batch_size
    if budget.calibration == "tight":
        multiplier = smallest_noise(
            lambda sigma: gaussian.compute_epsilon(mu=1 / sigma, delta=delta),
            target_epsilon=epsilon,
        )
        return math.nextafter(shift * multiplier, math.inf)
    if epsilon >= 1:
        raise ValueError(
            "epsilon must be below 1 for calibration='published' (SCO Lemma C.5), got "
            f"{epsilon!r}; use 'tight'"
        )
    return math.nextafter(shift * math.sqrt(2 * math.log(2 / delta)) / epsilon, math.inf)


@dataclasses.dataclass(frozen=True)
class PanState:
    """All that the algorithm remembers between two records, and an intruder sees; vectors of shape (d,).

    Gradients are taken at ``middle``; ``gradient`` is the batch's running sum, with noise from
    before its first record.
    """

    records: int
    theta: Tensor
    aggregate: Tensor
    middle: Tensor
    gradient: Tensor


class PanPrivateAcceleratedSGD:
    """Accelerated SGD on a stream, one record after the other (SCO Algorithm 6).

    Args:
        gradients: What gives a record's gradient, none longer than L.
        iterates: Where the steps begin, how long they are, and the set that they stay in; the
            algorithm ends after T·b records, T the number of steps.
        noise: ζ (:func:`pan_private_noise`).
        batch_size: b.
        generator: Of the noise, on the CPU; for tests: it is part of the inner state, and tells
            past and future noise. By default every noise has a fresh secret generator that is
            forgotten.

    Raises:
        ValueError: If the noise or the batch size is out of range.

    Formal Guarantees:
        Given ζ by :func:`pan_private_noise`, (state at any one time between two calls, everything
        that :meth:`consume` returned, output) is (ε, δ)-DP under replacement of one record of the
        stream. Let the record be in batch t. Seen before the record: the state does not depend on
        it, and everything else does through the batch's sum, to which the second noise is yet to
        come. Seen after the record within batch t: the state shows its sum with the first noise,
        and all else follows from that. Seen later: all follows from the sum with both noises. Each
        is one Gaussian mechanism of sensitivity 2L/b and standard deviation ζ at least,
        post-processed. What is in memory while a record is worked on is not covered.
    """

    def __init__(
        self,
        gradients: BoundedGradients,
        iterates: AcceleratedIterates,
        *,
        noise: float,
        batch_size: int,
        generator: torch.Generator | None = None,
    ) -> None:
        self._gradients, self._iterates, self._generator = gradients, iterates, generator
        self._noise, self.batch_size = (
            not_negative("noise", noise),
            integer("batch_size", batch_size),
        )
        self._records = 0
        self._gradient = self._draw()

    @property
    def room(self) -> int:
        """How many records the batch still takes; 0 after the last."""
        return 0 if self._iterates.finished else self.batch_size - self._records % self.batch_size

    def consume(self, records: Any) -> Tensor | None:
        """Reads one record, or several of the same batch at once (an intruder then comes before or after them).

        Args:
            records: A batch of the objective's, of at most :attr:`room` records.

        Returns:
            If this ended a batch, its mean gradient with both noises, shape (d,), which is not
            remembered; else None.

        Raises:
            ValueError: If there is no room, or a gradient is too long (without ``clip``); nothing
                is then read.
        """
        count = number_of_users(records)
        if not 1 <= count <= self.room:
            raise ValueError(
                f"records must number from 1 to {self.room}, which is what this batch still takes, "
                f"got {count}"
            )
        rows = self._gradients.rows(self._iterates.middle, records)
        self._gradient = self._gradient + rows.sum(0) / self.batch_size
        self._records += count
        if self._records % self.batch_size:
            return None
        whole = self._gradient + self._draw()
        self._iterates.advance(whole)
        self._gradient = torch.zeros_like(whole) if self._iterates.finished else self._draw()
        return whole

    def state(self) -> PanState:
        """Returns what an intruder sees now."""
        vectors = (
            self._iterates.theta,
            self._iterates.aggregate,
            self._iterates.middle,
            self._gradient,
        )
        return PanState(self._records, *(vector.clone() for vector in vectors))

    def output(self) -> Tensor:
        """Returns the estimate, shape (d,).

        Raises:
            ValueError: If the stream has not ended.
        """
        if not self._iterates.finished:
            raise ValueError(
                f"the output comes at the stream's end, got {self._records} records so far; "
                "consume the rest"
            )
        return self._iterates.aggregate.clone()

    def _draw(self) -> Tensor:
        """Returns a noise vector."""
        return self._noise * stream_of(self._generator).precise_normals(
            self._gradients.objective.dimension
        )


class PanPrivate(AcceleratedSGD):
    """Pan-private accelerated SGD on records at hand (SCO Algorithm 6)."""

    algorithm = "pan-private accelerated SGD"
    interaction = "pan"

    def order(self) -> Tensor:
        """Returns the records in the order of the stream."""
        return torch.arange(self.problem.num_users)

    def variance(self, batch_size: int | None) -> float:
        """Returns the variance of two noises, for the sum of a batch: it does not depend on the batch's size."""
        return (
            2 * pan_private_noise(self.budget, lipschitz=self.problem.lipschitz, batch_size=1) ** 2
        )

    def plan(self, batch_size: int, rounds: int, start: Start) -> Plan:
        """Returns accelerated SGD's plan, and ζ with it."""
        plan = super().plan(batch_size, rounds, start)
        noise = pan_private_noise(
            self.budget, lipschitz=self.problem.lipschitz, batch_size=batch_size
        )
        return plan._replace(choices={**plan.choices, "noise": noise})

    def iterate(self, plan: Plan, groups: list[Tensor], start: Start) -> Tensor:
        """Lets the algorithm read the stream, and returns its output."""
        iterates = AcceleratedIterates(self.problem.project, start.theta, plan.steps)
        algorithm = PanPrivateAcceleratedSGD(
            plan.gradients,
            iterates,
            noise=plan.choices["noise"],
            batch_size=len(groups[0]),
            generator=self.problem.generator,
        )
        for group in groups:
            gradient = algorithm.consume(take(self.problem.data, group))
            assert gradient is not None  # a group is a whole batch
            self.history.append(float(gradient.norm()))
        return algorithm.output()
