"""``shuffle_sgd``: noisy mini-batch SGD in which every user takes part in one round (SCO Algorithm 3, Theorem 4.1).

>>> import torch
>>> from opacus_shuffle.sco.constraints import L2Ball
>>> records = torch.randn(4000, 3, generator=torch.Generator().manual_seed(0)) + 0.5
>>> def distance(theta, batch):
...     return (batch - theta).norm(dim=1)
>>> estimate = shuffle_sgd(distance, records, constraint=L2Ball(2.0), lipschitz=1.0, epsilon=1.0, delta=1e-6, dimension=3,
...                        generator=torch.Generator().manual_seed(1))
>>> estimate.parameters["batch_size"], bool((estimate.theta - 0.5).norm() < 0.5), round(estimate.excess_loss_bound, 2)
(15, True, 0.17)
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from opacus_shuffle.core.validation import boolean, one_of, positive
from opacus_shuffle.sco.problem import Reports, prepare
from opacus_shuffle.sco.result import Estimate, History
from opacus_shuffle.sco.rounds import Budget, SequentialRounds, make_batches
from opacus_shuffle.sco.schedules import PARAMETERS, sgd_batch_size, sgd_bound
from opacus_shuffle.sco.users import UserLedger


def shuffle_sgd(
    loss: Any,
    data: Any,
    *,
    constraint: Any,
    lipschitz: float,
    epsilon: float,
    delta: float,
    initial: Tensor | None = None,
    dimension: int | None = None,
    diameter: float | None = None,
    batch_size: int | None = None,
    batches: Iterable[Any] | None = None,
    step_size: float | None = None,
    average: bool = True,
    parameters: str = "calibrated",
    calibration: str = "tight",
    honest_fraction: float = 1.0,
    clip: bool = False,
    generator: torch.Generator | None = None,
) -> Estimate:
    """Minimises users' mean loss by one pass of projected SGD, each batch's gradients summed by a shuffle protocol.

    Args:
        loss: A function ``loss(theta, batch)`` of a vector and a batch that answers one loss per record (it is called on
            batches of one: a record's loss must not depend on others), an :class:`~opacus_shuffle.sco.objective.Objective` (a
            Moreau envelope, say), or a pair ``(module, criterion)``. A module is left as it is: to use the estimate, pass
            ``objective = ModuleObjective(module, criterion)`` and call ``objective.load(estimate.theta)``.
        data: A tensor, or a tuple, list or dict of tensors, whose first dimension is the users.
        constraint: The convex set: :class:`~opacus_shuffle.sco.constraints.L2Ball`, ``Box``, an object with ``project`` and
            ``diameter``, or a projection theta -> theta (then ``diameter`` is needed).
        lipschitz: L: no user's gradient on the set is longer.
        epsilon: ε of the run, in (0, 15].
        delta: δ of the run, in (0, ½).
        initial: The start, shape (d,), projected onto the set; by default the module's parameters, or 0.
        dimension: d, where neither ``initial`` nor the loss or the constraint tells.
        diameter: At least the distance from the start to a minimiser; by default what the constraint tells. For a projection
            function: the set's diameter.
        batch_size: b, users per round; by default the proved bound's best.
        batches: Who takes part when, instead of ``batch_size``: vectors of user numbers, disjoint. They must not depend on the
            users' data.
        step_size: η; by default the proved bound's best.
        average: Whether to answer the mean of the iterates, as the theorem does, or the last one (nothing is proved for it).
        parameters: Defaults by the proved bound (``"calibrated"``) or by Theorem 4.1's formulas (``"printed"``).
        calibration: Noise of the protocol: ``"tight"`` or ``"published"``.
        honest_fraction: Share of every round's users that must follow the protocol, in [1/3, 1].
        clip: Cut longer gradients to ``lipschitz``, and report zero for a record whose gradient cannot be computed or is not
            finite (a wrong label, NaN in it, an envelope's loss steeper than ``lipschitz``). By default such records are
            refused, which is right for finding mistakes; in production pass True: whether an error was raised depends on the
            data, and can be observed. (An error that every record of a block of at least two has is raised even so: it is
            taken for a mistake in the call.)
        generator: Order of the users, rounding and noise; on the CPU, by default secret.

    Returns:
        The estimate. Users beyond the last whole batch are not used; ``privacy.num_users`` says how many were.

    Raises:
        ValueError: If an argument is out of range, a user is in two batches, or a gradient is too long (without ``clip``).

    Formal Guarantees:
        (ε, δ)-DP under replacement of one user's value, for every data set, against whoever sees all shuffled messages and the
        estimate: each user is in one round, which is (ε, δ)-DP whatever the rounds before it said. Excess loss: D²/(2ηT) +
        ηL_G²/2 (Lemma 4.2). SCO Algorithm 3 prints θ + ηg; descent is θ − ηg.
    """
    problem = prepare(
        loss,
        data,
        constraint=constraint,
        lipschitz=lipschitz,
        initial=initial,
        dimension=dimension,
        diameter=diameter,
        clip=clip,
        generator=generator,
    )
    boolean("average", average)
    printed = one_of("parameters", parameters, PARAMETERS) == "printed"
    budget = Budget(epsilon, delta, calibration, honest_fraction)
    reports = Reports.of(problem)
    formulas = budget.printed(problem)
    if batches is None and batch_size is None:
        planned = budget.planned(problem, reports)
        batch_size = formulas.sgd_batch_size() if printed else sgd_batch_size(planned, num_users=problem.num_users)
    ledger = UserLedger(problem.num_users)
    groups = make_batches(problem, ledger, torch.arange(problem.num_users), batch_size, batches)
    rounds = SequentialRounds(problem, reports, budget, groups)
    smallest = min(rounds.sizes)
    moment = max(rounds.oracle(size).second_moment(size) for size in rounds.sizes)
    if step_size is not None:
        step = positive("step_size", step_size)
    elif printed:
        step = formulas.sgd_step_size(smallest, len(groups))
    else:
        step = problem.distance / (moment * len(groups)) ** 0.5

    theta, total, history, reached = problem.initial, torch.zeros_like(problem.initial), History(len(groups)), 0
    for users in groups:
        total += theta
        gradient = rounds.gradient(theta, users)
        theta = problem.project(theta - step * gradient)
        reached += len(users)
        history.add(users=reached, gradient=gradient, theta=theta)
    bound = sgd_bound(
        rounds=len(groups),
        step_size=step,
        second_moment=moment,
        distance=problem.distance,
        diameter=problem.diameter,
        bias=reports.bias,
    )
    return Estimate(
        theta=problem.project(total / len(groups)) if average else theta,
        privacy=rounds.statement(rounds=len(groups), num_users=ledger.used),
        history=history.rounds,
        parameters={
            "algorithm": "SGD",
            "batch_size": smallest,
            "rounds": len(groups),
            "step_size": step,
            "lipschitz": problem.lipschitz,
            "distance": problem.distance,
            "parameters": parameters,
        },
        excess_loss_bound=problem.capped(bound + reports.smoothing_cost) if average else None,
    )
