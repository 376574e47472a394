"""Shuffle-private convex optimisation: optimisers take a problem and a privacy budget.

The paper is "Shuffle Private Stochastic Convex Optimization" (Cheu, Joseph, Mao, Peng, ICLR 2022),
SCO for short. Its sums of bounded vectors by multi-message shuffling are in
:mod:`opacus_shuffle.protocols`. ``docs/sums_and_optimisation.rst`` has examples.
"""

from opacus_shuffle.sco.accelerated_sgd import shuffle_accelerated_sgd
from opacus_shuffle.sco.constraints import Box, Constraint, L2Ball
from opacus_shuffle.sco.gradient_descent import shuffle_gradient_descent, shuffle_sgd
from opacus_shuffle.sco.losses import absolute_loss, hinge_loss, logistic_loss, squared_loss
from opacus_shuffle.sco.moreau import MoreauEnvelope
from opacus_shuffle.sco.objective import Objective
from opacus_shuffle.sco.problem import PrivacyBudget, Problem
from opacus_shuffle.sco.solver import Estimate
from opacus_shuffle.sco.strongly_convex import shuffle_strongly_convex

__all__ = [
    "Box",
    "Constraint",
    "Estimate",
    "L2Ball",
    "MoreauEnvelope",
    "Objective",
    "PrivacyBudget",
    "Problem",
    "absolute_loss",
    "hinge_loss",
    "logistic_loss",
    "shuffle_accelerated_sgd",
    "shuffle_gradient_descent",
    "shuffle_sgd",
    "shuffle_strongly_convex",
    "squared_loss",
]
