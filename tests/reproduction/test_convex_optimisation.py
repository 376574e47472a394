"""SCO's printed formulas, and the pan-private run: its noise, an intruder's view, its loss."""

import math

import printed_formulas
import pytest
import torch
from helpers.convex_problems import Quadratic, ac_sa, mean_excesses, seeded, solve
from pan_private import pan_private_accelerated_sgd, pan_private_noise
from scipy.stats import chi2

from opacus_shuffle.analysis import gaussian
from opacus_shuffle.core.randomness import SecretGenerator
from opacus_shuffle.sco import L2Ball, Objective, PrivacyBudget, Problem
from opacus_shuffle.sco.accelerated_sgd import (
    accelerated_step_sizes,
)

BUDGET = {"epsilon": 0.9, "delta": 1e-6}
COMMON = {"constraint": L2Ball(1.0), "lipschitz": 1.0, "smoothness": 1.0, **BUDGET}


class Flat(Objective):
    """Loses nothing anywhere: what a batch's gradients add up to is noise."""

    def __init__(self, dimension, log):
        self.dimension, self.log = dimension, log

    def _evaluate(self, theta, batch):
        self.log.append("records")
        return theta.new_zeros(len(batch)), theta.new_zeros(len(batch), self.dimension)


# SCO Algorithm 6, SCO Lemma C.4, by SCO Definition C.1 and SCO Definition C.2.
def test_there_is_noise_before_a_batchs_first_record_and_again_after_its_last(monkeypatch):
    """Then each view is a Gaussian mechanism of sensitivity 2L/b and deviation ζ, or more."""
    log, draw = [], SecretGenerator.precise_normals
    monkeypatch.setattr(
        SecretGenerator, "precise_normals", lambda *known: log.append("noise") or draw(*known)
    )
    options = {**COMMON, "lipschitz": 2.0, "batch_size": 20, "generator": seeded(0)}
    estimate = solve(pan_private_accelerated_sgd, Flat(3000, log), torch.zeros(65), **options)
    assert log == 3 * ["noise", "records", "noise"]
    low, high = chi2.ppf([1e-6, 1 - 1e-6], 3000)
    zeta = pan_private_noise(PrivacyBudget(**BUDGET), lipschitz=2.0, batch_size=20)
    for norm in estimate.history:
        assert low <= norm**2 / (2 * zeta**2) <= high


# SCO Lemma C.5.
def test_the_papers_noise_is_the_formula_and_the_tight_one_the_least():
    paper, tight = (
        pan_private_noise(
            PrivacyBudget(**BUDGET), lipschitz=1.5, batch_size=20, published=published
        )
        for published in (True, False)
    )
    assert paper == pytest.approx(math.sqrt(8 * 1.5**2 * math.log(2e6) / (20**2 * 0.9**2)))
    shift = 2 * 1.5 / 20
    assert gaussian.compute_epsilon(mu=shift / tight, delta=1e-6) <= 0.9
    assert gaussian.compute_epsilon(mu=shift / (tight * (1 - 1e-6)), delta=1e-6) > 0.9
    assert gaussian.compute_epsilon(mu=shift / paper, delta=1e-6) <= 0.9
    assert tight < paper


# SCO Definition C.2.
def test_the_statement_is_about_one_intrusion():
    run, data = pan_private_accelerated_sgd, torch.zeros(100, 2)
    privacy = solve(run, Quadratic(2), data, batch_size=30, **COMMON).privacy
    assert (privacy.epsilon, privacy.delta, privacy.rounds) == (0.9, 1e-6, 3)
    assert "inner state once" in privacy.adversary


# SCO Theorem C.3.
@pytest.mark.parametrize("published", [True, pytest.param(False, marks=pytest.mark.zoo)])
def test_the_mean_excess_is_below_the_bound(published):
    """A mean of 8 independent runs is within 4 standard errors but for 6e-5."""
    options = {**BUDGET, "published": published, "smoothness": 1.0, "users": 3000}
    excesses, bound = mean_excesses(pan_private_accelerated_sgd, 8, **options)
    assert excesses.mean() - 4 * excesses.std() / math.sqrt(8) <= bound < 1.8 * 2


@pytest.mark.parametrize("rounds", [10, 100])
def test_the_printed_steps_diverge_where_ours_converge(rounds):
    options = {"rounds": rounds, "smoothness": 1.0, "deviation": 0.0}
    printed = printed_formulas.accelerated_step_sizes(problem(), **options)
    ours = accelerated_step_sizes(distance=1.0, **options)
    ends = [abs(ac_sa(steps, lambda theta, t: theta, 1.0)) for steps in (printed, ours)]  # of θ²/2
    assert ends[0] > 5
    assert ends[1] < 1e-5


def problem(users=5000, dimension=7, lipschitz=1.5, diameter=2.5):
    """A ball about the start."""
    data, ball = torch.zeros(1, dimension).expand(users, dimension), L2Ball(diameter / 2)
    return Problem(Quadratic(dimension), data, constraint=ball, lipschitz=lipschitz, smoothness=1.0)


def test_the_printed_formulas_are_the_papers():
    n, d, lip, diam, eps, delta, beta = 5000, 7, 1.5, 2.5, 0.7, 1e-5, 3.0
    both, p = (problem(n, d, lip, diam), PrivacyBudget(eps, delta)), printed_formulas
    log = math.log(d / delta)
    assert p.sgd_batch_size(*both) == round(math.sqrt(d) * log / eps)
    assert p.sgd_step_size(*both, batch_size=60, rounds=83) == pytest.approx(
        eps * 60 * diam / (lip * math.sqrt(83) * (eps * 60 + math.sqrt(d) * lip * log))
    )
    assert p.accelerated_batch_size(*both, smoothness=beta) == round(
        n**0.6 * d**0.2 * lip**0.4 * log**0.4 / (eps**0.4 * beta**0.4 * diam**0.4)
    )
    assert p.accelerated_smoothing(*both) == pytest.approx(
        eps ** (2 / 3) * n ** (2 / 3) * lip / (d ** (1 / 3) * diam * log ** (2 / 3))
    )
    assert p.accelerated_deviation(*both, batch_size=60) == pytest.approx(
        math.sqrt(lip**2 / 60 + d * lip**2 * log**2 / (60**2 * eps**2))
    )
    full = math.log(n * d / delta)
    assert p.descent_rounds(*both) == min(n, round(eps**2 * n**2 / (d * full**2)))
    assert p.descent_step_size(both[0], rounds=50) == pytest.approx(diam / (lip * math.sqrt(50)))
    assert p.descent_smoothing(*both) == pytest.approx(
        lip / diam * min(math.sqrt(n), eps * n / (math.sqrt(d) * full**1.5))
    )
    steps = p.accelerated_step_sizes(both[0], rounds=3, smoothness=2.0, deviation=0.5)
    assert steps[1] == pytest.approx((5**1.5 * 0.5 / diam + 2.0) / 3)
