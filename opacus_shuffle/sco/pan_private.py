"""``pan_private_accelerated_sgd``: accelerated SGD on a stream, by an algorithm looked at once.

Algorithm 6 and Appendix C of Cheu, Joseph, Mao and Peng's shuffle-private convex optimisation
(SCO). No shuffler: one party reads record after record, and adds Gaussian noise before the first
record of a batch and again after the last.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from opacus_shuffle.accountants.calibrate import smallest_noise
from opacus_shuffle.analysis import gaussian
from opacus_shuffle.core.randomness import stream_of
from opacus_shuffle.sco.accelerated_sgd import AcceleratedSGD
from opacus_shuffle.sco.problem import PrivacyBudget, Problem
from opacus_shuffle.sco.solver import Estimate, Plan, Start


def pan_private_accelerated_sgd(
    problem: Problem, budget: PrivacyBudget, *, batch_size: int | None = None
) -> Estimate:
    """Minimises the mean loss of a stream of records, in one pass and in the order given.

    Args:
        problem: What is to be minimised: directly if ``problem.smoothness`` is known (Theorem C.3,
            2), else smoothed (Theorem C.3, 1). Its generator is of the noise, and then part of the
            inner state: whoever has it can take the noise off.
        budget: What an intruder who also sees the output may learn; its calibration is
            :func:`pan_private_noise`'s, and its ``honest_fraction`` must be 1.
        batch_size: b, records per step; by default the proved bound's best.

    Returns:
        The estimate. Records beyond the last whole batch are not used.

    Raises:
        ValueError: If an argument is out of range, or a gradient is too long (without ``clip``).

    Formal Guarantees:
        (ε, δ)-pan-privacy (SCO Definition C.2) under replacement of one record: of the inner state
        at any one time between two records (iterates, and the batch's running sum with its noise),
        the history, and the output. Let the record be in batch t. Seen before the record: the state
        does not depend on it, and everything else does through the batch's sum, to which the second
        noise is yet to come. Seen after the record within batch t: the state shows its sum with the
        first noise, and all else follows from that. Seen later: all follows from the sum with both
        noises. Each is one Gaussian mechanism of sensitivity 2L/b and standard deviation ζ at
        least, post-processed. What is in memory while a record is worked on is not covered.
    """
    return PanPrivate(problem, budget, batch_size=batch_size).solve()


def pan_private_noise(budget: PrivacyBudget, *, lipschitz: float, batch_size: int) -> float:
    """Returns ζ, the standard deviation per coordinate of either noise on a batch's mean gradient.

    Replacing a record moves that mean by at most 2L/b. ``"tight"`` takes the smallest ζ whose
    Gaussian mechanism is (ε, δ)-DP, ``"published"`` ζ² = 8L²ln(2/δ)/(b²ε²) (SCO Algorithm 6), for ε
    below 1. Both are rounded up.

    Raises:
        ValueError: If the budget is none of a pan-private run.
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


class PanPrivate(AcceleratedSGD):
    """Accelerated SGD on a stream of records (SCO Algorithm 6)."""

    algorithm = "pan-private accelerated SGD"
    interaction = "pan"

    def order(self) -> Tensor:
        """Returns the records in the order of the stream."""
        return torch.arange(self.problem.num_users)

    def variance(self, batch_size: int | None) -> float:
        """Returns the variance of two noises, for the sum of a batch, whatever its size."""
        return 2 * self.noise(1) ** 2

    def noise(self, batch_size: int) -> float:
        """Returns ζ for batches of this size."""
        lipschitz = self.problem.lipschitz
        return pan_private_noise(self.budget, lipschitz=lipschitz, batch_size=batch_size)

    def plan(self, batch_size: int, rounds: int, start: Start) -> Plan:
        """Returns accelerated SGD's plan, and ζ with it."""
        plan = super().plan(batch_size, rounds, start)
        return plan._replace(choices={**plan.choices, "noise": self.noise(batch_size)})

    def mean_gradient(self, plan: Plan, theta: Tensor, users: Tensor, rounds: int) -> Tensor:
        """Reads a batch of the stream; returns its mean gradient with both noises, shape (d,)."""
        # Whoever looks in between two records sees this sum, in which there is noise already.
        state = self._draw(plan)
        for rows in self.reports(plan, theta, users):
            state = state + rows.sum(0) / len(users)
        # Whoever has seen it knows the first noise: the answer needs one of its own.
        mean = state + self._draw(plan)
        self.history.append(float(mean.norm()))
        return mean

    def _draw(self, plan: Plan) -> Tensor:
        """Returns a noise vector."""
        stream = stream_of(self.problem.generator)
        return plan.choices["noise"] * stream.precise_normals(self.problem.dimension)
