"""``shuffle_sgd``: noisy mini-batch SGD in which every user takes part in one round.

Algorithm 3 and Theorem 4.1 of Cheu, Joseph, Mao and Peng's shuffle-private convex optimisation (SCO).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import Tensor

from opacus_shuffle.sco.budget import PrivacyBudget
from opacus_shuffle.sco.oracle import sgd_batch_size, sgd_bound
from opacus_shuffle.sco.problem import Problem
from opacus_shuffle.sco.result import Estimate
from opacus_shuffle.sco.solver import Choices, Phase, Solver, Start


def shuffle_sgd(
    problem: Problem,
    budget: PrivacyBudget,
    *,
    batch_size: int | None = None,
    batches: Iterable[Any] | None = None,
    step_size: float | None = None,
    average: bool = True,
) -> Estimate:
    """Minimises users' mean loss by one pass of projected SGD, each batch's gradients summed by a shuffle protocol.

    Args:
        problem: What is to be minimised; it need not be smooth.
        budget: What may be revealed.
        batch_size: b, users per round; by default the proved bound's best.
        batches: Who takes part when, instead of ``batch_size``: vectors of user numbers, disjoint. They must not depend on the
            users' data.
        step_size: η; by default the proved bound's best.
        average: Whether to answer the mean of the iterates, as the theorem does, or the last one (nothing is proved for it).

    Returns:
        The estimate. Users beyond the last whole batch are not used; ``privacy.num_users`` says how many were.

    Raises:
        ValueError: If an argument is out of range, a user is in two batches, or a gradient is too long (without ``clip``).

    Formal Guarantees:
        (ε, δ)-DP under replacement of one user's value, for every data set, against whoever sees all shuffled messages and the
        estimate: each user is in one round, which is (ε, δ)-DP whatever the rounds before it said. Excess loss: D²/(2ηT) +
        ηL_G²/2 (Lemma 4.2). SCO Algorithm 3 prints θ + ηg; descent is θ − ηg. Theorem 4.1 has an L too much in η.
    """
    choices = Choices(batch_size=batch_size, batches=batches, step_size=step_size, average=average)
    return _SGD(problem, budget, choices).solve()


class _SGD(Solver):
    """Mini-batch SGD (SCO Algorithm 3)."""

    algorithm = "SGD"

    def run(self, users: Tensor, start: Start) -> Phase:
        problem, gradients, size = self.problem, self.problem.own_gradients(), self.choices.batch_size
        if size is None and self.choices.batches is None:
            size = sgd_batch_size(self.oracle(self.planned_variance()), num_users=len(users))
        groups = self.batches(users, size)
        count, protocols = len(groups), self.protocols(groups)
        moment = max(self.oracle(each.variance).second_moment(size) for size, each in protocols.items())
        step = self.choices.step_size or start.distance / (moment * count) ** 0.5
        theta, history = self.descend(groups, protocols, gradients, start.theta, step)
        bound = sgd_bound(
            rounds=count,
            step_size=step,
            second_moment=moment,
            distance=start.distance,
            diameter=problem.diameter,
            bias=gradients.bias,
        )
        chosen = {"batch_size": min(protocols), "rounds": count, "step_size": step}
        return Phase(
            theta,
            problem.capped(bound + gradients.smoothing_cost) if self.choices.average else None,
            history,
            {**chosen, "lipschitz": problem.lipschitz, "distance": start.distance},
            max(protocol.bits_per_user for protocol in protocols.values()),
        )
