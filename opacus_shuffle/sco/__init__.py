"""Shuffle-private convex optimisation: a problem and a privacy budget go into an optimiser, an estimate comes out.

The paper is "Shuffle Private Stochastic Convex Optimization" (Cheu, Joseph, Mao, Peng, ICLR 2022), SCO for short. Its sums of
bounded vectors by multi-message shuffling are :mod:`opacus_shuffle.protocols`.

>>> import torch
>>> from opacus_shuffle.sco import L2Ball, PrivacyBudget, Problem, logistic_loss, shuffle_accelerated_sgd
>>> generator = torch.Generator().manual_seed(0)
>>> features = torch.nn.functional.normalize(torch.randn(20_000, 5, generator=generator), dim=1)
>>> labels = torch.where(features[:, 0] > 0, 1.0, -1.0)
>>> problem = Problem(logistic_loss, (features, labels), constraint=L2Ball(5.0), lipschitz=1.0, smoothness=0.25, dimension=5,
...                   generator=generator)
>>> estimate = shuffle_accelerated_sgd(problem, PrivacyBudget(epsilon=1.0, delta=1e-6))
>>> estimate.privacy.epsilon, estimate.privacy.rounds_per_user, bool(estimate.theta[0] > 2)
(1.0, 1, True)
"""

from opacus_shuffle.sco.accelerated_sgd import shuffle_accelerated_sgd
from opacus_shuffle.sco.budget import PrivacyBudget
from opacus_shuffle.sco.constraints import Box, Constraint, L2Ball, Projection, as_constraint
from opacus_shuffle.sco.gradient_descent import shuffle_gradient_descent
from opacus_shuffle.sco.losses import Link, absolute_loss, hinge_loss, logistic_loss, squared_loss
from opacus_shuffle.sco.module_objective import ModuleObjective
from opacus_shuffle.sco.moreau import MoreauEnvelope
from opacus_shuffle.sco.objective import LinearObjective, Objective
from opacus_shuffle.sco.pan_private import pan_private_accelerated_sgd
from opacus_shuffle.sco.problem import Problem
from opacus_shuffle.sco.result import Estimate
from opacus_shuffle.sco.sgd import shuffle_sgd
from opacus_shuffle.sco.strongly_convex import shuffle_strongly_convex

__all__ = [
    "Box",
    "Constraint",
    "Estimate",
    "L2Ball",
    "LinearObjective",
    "Link",
    "ModuleObjective",
    "MoreauEnvelope",
    "Objective",
    "PrivacyBudget",
    "Problem",
    "Projection",
    "absolute_loss",
    "as_constraint",
    "hinge_loss",
    "logistic_loss",
    "pan_private_accelerated_sgd",
    "shuffle_accelerated_sgd",
    "shuffle_gradient_descent",
    "shuffle_sgd",
    "shuffle_strongly_convex",
    "squared_loss",
]
