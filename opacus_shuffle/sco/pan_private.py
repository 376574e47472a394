"""``pan_private_accelerated_sgd``: accelerated SGD on a stream, by an algorithm whose inner state may be seen once.

Appendix C of Cheu, Joseph, Mao and Peng's shuffle-private convex optimisation (SCO). The algorithm itself is in
:mod:`opacus_shuffle.sco.pan_private_stream`; here its parameters are chosen and it is run on data.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from opacus_shuffle.sco.accelerated_sgd import AcceleratedPlan, AcceleratedSGD
from opacus_shuffle.sco.budget import PrivacyBudget
from opacus_shuffle.sco.pan_private_stream import PanPrivateAcceleratedSGD, pan_private_noise
from opacus_shuffle.sco.problem import Problem
from opacus_shuffle.sco.records import take
from opacus_shuffle.sco.result import Estimate, History, Round
from opacus_shuffle.sco.solver import Choices, Start, whole_batches


def pan_private_accelerated_sgd(
    problem: Problem,
    budget: PrivacyBudget,
    *,
    batch_size: int | None = None,
    inverse_step_sizes: Sequence[float] | None = None,
) -> Estimate:
    """Minimises the mean loss of a stream of records by pan-private accelerated SGD, in one pass and in the order given.

    Args:
        problem: What is to be minimised: directly if ``problem.smoothness`` is known (Theorem C.3, 2), else smoothed (Theorem
            C.3, 1). Its generator is of the noise.
        budget: What an intruder who also sees the output may learn; its calibration is
            :func:`~opacus_shuffle.sco.pan_private_stream.pan_private_noise`'s, and its ``honest_fraction`` must be 1.
        batch_size: b, records per step; by default the proved bound's best.
        inverse_step_sizes: L_1, …, L_T, one per step, which is itself 1/L_t. By default the proved bound's best.

    Returns:
        The estimate. Records beyond the last whole batch are not used.

    Raises:
        ValueError: If an argument is out of range, or a gradient is too long (without ``clip``).

    Formal Guarantees:
        (ε, δ)-pan-privacy (SCO Definition C.2) under replacement of one record, see
        :class:`~opacus_shuffle.sco.pan_private_stream.PanPrivateAcceleratedSGD`. The history may be published with the
        estimate: it is computed from the batches' gradients with both noises.
    """
    return PanPrivate(problem, budget, Choices(batch_size=batch_size, inverse_step_sizes=inverse_step_sizes)).solve()


class PanPrivate(AcceleratedSGD):
    """Pan-private accelerated SGD on records at hand (SCO Algorithm 6)."""

    algorithm = "pan-private accelerated SGD"
    interaction = "pan"

    def __init__(self, problem: Problem, budget: PrivacyBudget, choices: Choices) -> None:
        super().__init__(problem, budget, choices)
        if budget.honest_fraction != 1:
            raise ValueError(
                f"honest_fraction must be 1 for pan-private runs, which have no reports, got {budget.honest_fraction!r}"
            )

    def batches(self, users: Tensor, batch_size: int | None) -> list[Tensor]:
        """Returns the records in the order of the stream, in whole batches."""
        return self.ledger.claim_all(whole_batches(users, batch_size or 1))

    def noise(self, batch_size: int) -> float:
        """Returns ζ for the mean of so many gradients."""
        lipschitz, budget = self.problem.lipschitz, self.budget
        return pan_private_noise(
            lipschitz=lipschitz,
            batch_size=batch_size,
            epsilon=budget.epsilon,
            delta=budget.delta,
            calibration=budget.calibration,
        )

    def variance(self, size: int | None) -> float:
        """Returns the variance of two noises, for the sum of a batch: it does not depend on the batch's size."""
        return 2 * self.noise(1) ** 2

    def iterate(
        self, plan: AcceleratedPlan, groups: list[Tensor], start: Start
    ) -> tuple[Tensor, list[Round], dict[str, Any], int | None]:
        """Lets the algorithm read the stream; returns the answer, the history, the noise, and None: users send nothing."""
        noise = self.noise(len(groups[0]))
        algorithm = PanPrivateAcceleratedSGD(
            plan.gradients.objective,
            constraint=self.problem.constraint,
            lipschitz=self.problem.lipschitz,
            noise=noise,
            batch_size=len(groups[0]),
            inverse_step_sizes=plan.steps,
            initial=start.theta,
            clip=self.problem.clip,
            generator=self.problem.generator,
        )
        history = History(len(groups))
        for group in groups:
            gradient = algorithm.consume(take(self.problem.data, group))
            if gradient is not None:
                state = algorithm.state()
                history.add(users=state.records, gradient=gradient, theta=state.aggregate)
        return algorithm.output(), history.rounds, {"noise": noise}, None
