"""Algorithm 6 of shuffle-private convex optimisation (SCO): pan-private accelerated SGD.

The paper is by Cheu, Joseph, Mao and Peng; pan-privacy is its Appendix C. There is no shuffler: one
party reads record after record. It adds Gaussian noise to a batch's sum before the first record of
the batch, and again after the last. The iteration, its step sizes and its bound are those of
:func:`opacus_shuffle.sco.shuffle_accelerated_sgd`.

>>> import torch
>>> from opacus_shuffle.sco import L2Ball, logistic_loss
>>> stream = torch.eye(2).repeat(500, 1), torch.ones(1000)
>>> known = {"constraint": L2Ball(1.0), "lipschitz": 1.0, "smoothness": 0.25, "dimension": 2}
>>> budget = PrivacyBudget(epsilon=1.0, delta=1e-6)
>>> estimate = pan_private_accelerated_sgd(Problem(logistic_loss, stream, **known), budget)
>>> estimate.privacy.trusted
'the algorithm, except for that one intrusion'
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from opacus_shuffle.accountants.calibrate import smallest_noise
from opacus_shuffle.analysis import gaussian
from opacus_shuffle.core.guarantees import EVERY_DATA_SET, Guarantee, PrivacyBound
from opacus_shuffle.core.randomness import stream_of
from opacus_shuffle.sco.accelerated_sgd import AcceleratedSGD
from opacus_shuffle.sco.problem import PrivacyBudget, Problem
from opacus_shuffle.sco.solver import Estimate, Plan, Start


def pan_private_accelerated_sgd(
    problem: Problem,
    budget: PrivacyBudget,
    *,
    batch_size: int | None = None,
    published: bool = False,
) -> Estimate:
    """Minimises the mean loss of a stream of records, in one pass and in the given order.

    Args:
        problem: The problem, minimised directly if ``problem.smoothness`` is known (Theorem C.3,
            2), else smoothed (Theorem C.3, 1). Its generator draws the noise and is part of the
            inner state: anyone who has it can remove the noise.
        budget: What an intruder who also sees the output may learn. Its ``honest_fraction`` must
            be 1.
        batch_size: b, records per step; by default the one with the smallest proved bound.
        published: Whether the noise is the paper's; see :func:`pan_private_noise`.

    Returns:
        The estimate; its ``privacy`` is a :class:`~opacus_shuffle.core.guarantees.PrivacyBound`.
        Records beyond the last whole batch are not used.

    Raises:
        ValueError: If an argument is out of range, or a gradient is too long (without ``clip``).

    Formal Guarantees:
        (ε, δ)-pan-privacy (SCO Definition C.2) under replacement of one record: of the inner state
        at any one time between two records (iterates, and the batch's running sum with its noise),
        the history, and the output. Let the record be in batch t. If the intruder looks before the
        record, the state does not depend on it, and everything else depends on it through the
        batch's sum, to which the second noise is added later. If the intruder looks after the
        record but within batch t, the state shows the record's sum with the first noise, and
        everything else follows from that. If the intruder looks later, everything follows from the
        sum with both noises. Each view is one Gaussian mechanism of sensitivity 2L/b and standard
        deviation ζ or more, post-processed. The memory while a record is processed is not covered.
    """
    solver = PanPrivateSGD(problem, budget, batch_size=batch_size)
    solver.published = published
    return solver.solve()


def pan_private_noise(
    budget: PrivacyBudget, *, lipschitz: float, batch_size: int, published: bool = False
) -> float:
    """Returns ζ, the standard deviation per coordinate of either noise on a batch's mean gradient.

    Replacing a record moves that mean by at most 2L/b. By default ζ is the smallest whose Gaussian
    mechanism is (ε, δ)-DP. If ``published``, ζ² = 8L²ln(2/δ)/(b²ε²) (SCO Algorithm 6), for ε below
    1. Both are rounded up.

    Raises:
        ValueError: If the budget does not suit a pan-private run.
    """
    if budget.honest_fraction != 1:
        raise ValueError(
            "honest_fraction must be 1 for pan-private runs, which have no reports, got "
            f"{budget.honest_fraction!r}"
        )
    epsilon, delta, shift = budget.epsilon, budget.delta, 2 * lipschitz / batch_size
    if not published:
        multiplier = smallest_noise(
            lambda sigma: gaussian.compute_epsilon(mu=1 / sigma, delta=delta),
            target_epsilon=epsilon,
        )
        return math.nextafter(shift * multiplier, math.inf)
    if epsilon >= 1:
        raise ValueError(
            f"epsilon must be below 1 for published=True (SCO Lemma C.5), got {epsilon!r}"
        )
    return math.nextafter(shift * math.sqrt(2 * math.log(2 / delta)) / epsilon, math.inf)


class PanPrivateSGD(AcceleratedSGD):
    """Accelerated SGD on a stream of records (SCO Algorithm 6)."""

    algorithm = "pan-private accelerated SGD"
    published = False

    def order(self) -> Tensor:
        """Returns the records in the order of the stream."""
        return torch.arange(self.problem.num_users)

    def planned_variance(self) -> float:
        """Returns the variance of two noises, for the sum of a batch of any size."""
        return 2 * self.noise(1) ** 2

    def round_variance(self, batch_size: int, rounds: int) -> float:
        """Returns the same, for batches of this size."""
        return self.planned_variance()

    def noise(self, batch_size: int) -> float:
        """Returns ζ for batches of this size."""
        return pan_private_noise(
            self.budget,
            lipschitz=self.problem.lipschitz,
            batch_size=batch_size,
            published=self.published,
        )

    def plan(self, batch_size: int, rounds: int, start: Start) -> Plan:
        """Returns the plan of accelerated SGD, with ζ among its choices."""
        plan = super().plan(batch_size, rounds, start)
        return plan._replace(choices={**plan.choices, "noise": self.noise(batch_size)})

    def mean_gradient(self, plan: Plan, theta: Tensor, users: Tensor, rounds: int) -> Tensor:
        """Reads a batch of the stream; returns its mean gradient with both noises, shape (d,)."""
        # An intruder who looks between two records sees this sum, which already has noise.
        state = self._draw(plan)
        for batch in self.batches_of(plan, users):
            rows = self.problem.bounded_gradients(plan.objective, theta, batch)
            state = state + rows.sum(0) / len(users)
        # The intruder then knows the first noise, so the result needs a second one.
        mean = state + self._draw(plan)
        self.history.append(float(mean.norm()))
        return mean

    def statement(self, batch_size: int, rounds: int) -> PrivacyBound:
        """Returns the guarantee of a run: it covers one intrusion."""
        return PrivacyBound(
            mechanism="pan_private_sums",
            bound="certified",
            epsilon=self.budget.epsilon,
            delta=self.budget.delta,
            adjacency="replace",
            guarantee=Guarantee.PROVED,
            covers=EVERY_DATA_SET,
            rounds=rounds,
            trusted="the algorithm, except for that one intrusion",
            adversary="sees the whole inner state once, at a time of its choice, and the output",
        )

    def _draw(self, plan: Plan) -> Tensor:
        """Draws a noise vector."""
        stream = stream_of(self.problem.generator)
        return plan.choices["noise"] * stream.precise_normals(self.problem.dimension)
