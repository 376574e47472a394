"""Computes the parameters that SCO prints, for comparison with those of this library.

SCO is Cheu, Joseph, Mao and Peng's paper on shuffle-private convex optimisation.

Logarithms are natural, and every constant inside O() is 1. D is the diameter of the set, as in the
paper. This library's own choices use the distance from the start to a minimiser instead, which is
half as much for a ball around the start. Batch and step sizes are passed to the optimisers. For
some of them nothing is proved:

    * Theorem 4.1 has an L inside the bracket of η. It does not follow from L_G² = L² +
      O(dL²log²(d/δ)/(b²ε²)), on which the proof is based, and is correct only for L = 1.
    * Theorem 4.3 and Lemma 4.4 print L_t = ((T+2)^{3/2}σ/D + β)/(t+1), which need not converge
      (:mod:`opacus_shuffle.sco.accelerated_sgd`).

>>> import torch
>>> from opacus_shuffle.sco import L2Ball, PrivacyBudget, Problem, logistic_loss, shuffle_sgd
>>> data = torch.nn.functional.normalize(torch.ones(10_000, 10), dim=1), torch.ones(10_000)
>>> problem = Problem(logistic_loss, data, constraint=L2Ball(1.0), lipschitz=1.0, dimension=10)
>>> budget = PrivacyBudget(epsilon=1.0, delta=1e-6)
>>> size = sgd_batch_size(problem, budget)
>>> accelerated = accelerated_batch_size(problem, budget, smoothness=1.0)
>>> size, accelerated, round(accelerated_smoothing(problem, budget), 2)
(51, 917, 16.88)
>>> step = sgd_step_size(problem, budget, batch_size=size, rounds=10_000 // size)
>>> estimate = shuffle_sgd(problem, budget, batch_size=size, step_size=step)
>>> estimate.choices["rounds"]
196
"""

from __future__ import annotations

import math

from opacus_shuffle.sco.gradient_descent import clamp
from opacus_shuffle.sco.problem import PrivacyBudget, Problem


def sgd_batch_size(problem: Problem, budget: PrivacyBudget) -> int:
    """Returns Theorem 4.1's b = √d·log(d/δ)/ε."""
    return clamp(_noise(problem, budget), problem.num_users)


def sgd_step_size(
    problem: Problem, budget: PrivacyBudget, *, batch_size: int, rounds: int
) -> float:
    """Returns Theorem 4.1's η = εbD/(L√T(εb + √d·L·log(d/δ)))."""
    share = batch_size / (batch_size + problem.lipschitz * _noise(problem, budget))
    return problem.constraint.diameter / (problem.lipschitz * math.sqrt(rounds)) * share


def accelerated_batch_size(problem: Problem, budget: PrivacyBudget, *, smoothness: float) -> int:
    """Returns Theorem 4.3's b = n^{3/5}·(√d·log(d/δ)/ε)^{2/5}·(L/(βD))^{2/5}."""
    ratio = problem.lipschitz / (smoothness * problem.constraint.diameter)
    return clamp(
        problem.num_users**0.6 * (_noise(problem, budget) * ratio) ** 0.4, problem.num_users
    )


def accelerated_deviation(problem: Problem, budget: PrivacyBudget, *, batch_size: int) -> float:
    """Returns the σ of Theorem 4.3's proof: √(L²/b + dL²log²(d/δ)/(b²ε²))."""
    return problem.lipschitz * math.sqrt(
        1 / batch_size + (_noise(problem, budget) / batch_size) ** 2
    )


def accelerated_step_sizes(
    problem: Problem, *, rounds: int, smoothness: float, deviation: float
) -> list[float]:
    """Returns Theorem 4.3's L_1, …, L_T = ((T+2)^{3/2}σ/D + β)/(t+1)."""
    top = (rounds + 2) ** 1.5 * deviation / problem.constraint.diameter + smoothness
    return [top / (step + 1) for step in range(1, rounds + 1)]


def accelerated_smoothing(problem: Problem, budget: PrivacyBudget) -> float:
    """Returns Theorem 4.7's β = (L/D)·(εn/(√d·log(d/δ)))^{2/3}."""
    return (
        problem.lipschitz
        / problem.constraint.diameter
        * (problem.num_users / _noise(problem, budget)) ** (2 / 3)
    )


def descent_rounds(problem: Problem, budget: PrivacyBudget) -> int:
    """Returns Lemma B.6's T = min(n, ε²n²/(d·log²(nd/δ)))."""
    return clamp(
        min(problem.num_users, (_full(problem, budget) / _log(problem, budget)) ** 2),
        problem.num_users,
    )


def descent_step_size(problem: Problem, *, rounds: int) -> float:
    """Returns Lemma B.6's η = D/(L√T)."""
    return problem.constraint.diameter / (problem.lipschitz * math.sqrt(rounds))


def descent_smoothing(problem: Problem, budget: PrivacyBudget) -> float:
    """Returns Theorem 4.9's β = (L/D)·min(√n, εn/(√d·log^{3/2}(nd/δ)))."""
    smaller = min(
        math.sqrt(problem.num_users), _full(problem, budget) / _log(problem, budget) ** 1.5
    )
    return problem.lipschitz / problem.constraint.diameter * smaller


def _noise(problem: Problem, budget: PrivacyBudget) -> float:
    """Returns √d·log(d/δ)/ε."""
    return (
        math.sqrt(problem.dimension) * math.log(problem.dimension / budget.delta) / budget.epsilon
    )


def _full(problem: Problem, budget: PrivacyBudget) -> float:
    """Returns εn/√d."""
    return budget.epsilon * problem.num_users / math.sqrt(problem.dimension)


def _log(problem: Problem, budget: PrivacyBudget) -> float:
    """Returns log(nd/δ)."""
    return math.log(problem.num_users * problem.dimension / budget.delta)
