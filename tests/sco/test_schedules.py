"""The schedules against slow runs of the algorithms, brute force over their choices, and the printed formulas."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from opacus_shuffle.protocols.calibration import noise_variance
from opacus_shuffle.sco.descent_plan import DescentBound, Setting, descent_candidates, plan_descent
from opacus_shuffle.sco.printed import Printed, printed_step_sizes
from opacus_shuffle.sco.rounds import Budget
from opacus_shuffle.sco.schedules import (
    Oracle,
    accelerated_batch_size,
    accelerated_bound,
    accelerated_momentum,
    accelerated_step_sizes,
    best_smoothing,
    sgd_batch_size,
    sgd_bound,
    smoothing_for_accelerated,
    smoothing_for_gradient_descent,
)


def ac_sa(steps, gradient, start, project=lambda theta: theta):
    """AC-SA as Lan (2012) writes it, slowly."""
    theta = aggregate = np.asarray(start, dtype=float)
    for t, size in enumerate(steps, 1):
        alpha = 2 / (t + 2)
        middle = alpha * theta + (1 - alpha) * aggregate
        theta = project(theta - gradient(middle) / size)
        aggregate = alpha * theta + (1 - alpha) * aggregate
    return aggregate


def closed_form(rounds, smoothness, deviation, distance, gap, weight):
    """The bound for L_t = (2β + s)/(t+1), as derived by hand."""
    start = 2 / ((rounds + 1) * (rounds + 2)) * (gap + (2 * smoothness + weight) * distance**2 / 2)
    return start + deviation**2 * (2 * rounds + 3) / (6 * weight)


# ---- accelerated ------------------------------------------------------------------------------------------------------------


@settings(max_examples=100, deadline=None)
@given(st.lists(st.floats(0.01, 1.0), min_size=1, max_size=4), st.integers(1, 60), st.floats(1.0, 5.0), st.integers(0, 2**31))
def test_the_accelerated_bound_holds_without_noise_on_every_quadratic(curvatures, rounds, slack, seed):
    curvatures, start = np.array(curvatures), np.random.default_rng(seed).normal(size=len(curvatures))
    distance, smoothness = float(np.linalg.norm(start)), slack * float(curvatures.max())

    def value(theta):
        return float((curvatures * theta**2).sum() / 2)

    steps = accelerated_step_sizes(rounds=rounds, smoothness=smoothness, deviation=0.0, distance=distance)
    bound = accelerated_bound(
        steps, smoothness=smoothness, deviation=0.0, distance=distance, start_gap=value(start), diameter=1e9
    )
    assert value(ac_sa(steps, lambda theta: curvatures * theta, start)) <= bound * (1 + 1e-9)


@settings(max_examples=100, deadline=None)
@given(st.integers(1, 300), st.floats(0.01, 100), st.floats(0.01, 100), st.floats(0.1, 10))
def test_the_evaluated_bound_is_at_most_the_closed_form_and_its_weight_is_the_best(rounds, smoothness, deviation, distance):
    gap = 3.0
    steps = accelerated_step_sizes(rounds=rounds, smoothness=smoothness, deviation=deviation, distance=distance)
    weight = 2 * steps[0] - 2 * smoothness
    bound = accelerated_bound(steps, smoothness=smoothness, deviation=deviation, distance=distance, start_gap=gap, diameter=1.0)
    exact = deviation / distance * math.sqrt((rounds + 1) * (rounds + 2) * (2 * rounds + 3) / 6)
    assert weight == pytest.approx(exact, rel=1e-6, abs=1e-9 * smoothness)
    assert bound <= closed_form(rounds, smoothness, deviation, distance, gap, exact) * (1 + 1e-9)
    for other in (0.9, 1.1):
        assert closed_form(rounds, smoothness, deviation, distance, gap, exact) <= closed_form(
            rounds, smoothness, deviation, distance, gap, other * exact
        )


def test_one_step_of_the_proof_holds_with_any_gradient_error():
    """The per-step inequality, on random quadratics, points and errors: no expectation is taken."""
    rng = np.random.default_rng(0)
    for _ in range(2000):
        curvatures, t = rng.uniform(0, 1, 3), int(rng.integers(1, 20))
        alpha, minimiser = 2 / (t + 2), rng.normal(size=3) * 0.1
        size = alpha * 1.0 + rng.exponential()  # β = 1
        theta, aggregate, error = rng.normal(size=(3, 3))

        def value(point, curvatures=curvatures, minimiser=minimiser):
            return float((curvatures * (point - minimiser) ** 2).sum() / 2)

        middle = alpha * theta + (1 - alpha) * aggregate
        after = theta - (curvatures * (middle - minimiser) + error) / size
        final = alpha * after + (1 - alpha) * aggregate
        right = (
            (1 - alpha) * value(aggregate)
            + alpha * size / 2 * (((theta - minimiser) ** 2).sum() - ((after - minimiser) ** 2).sum())
            - alpha * error @ (theta - minimiser)
            + alpha * (error @ error) / (2 * (size - alpha))
        )
        assert value(final) <= right + 1e-9


@pytest.mark.parametrize("rounds", [10, 100])
def test_the_printed_steps_diverge_where_ours_converge(rounds):
    options = {"rounds": rounds, "smoothness": 1.0, "deviation": 0.0, "distance": 1.0}
    printed, ours = printed_step_sizes(**options), accelerated_step_sizes(**options)
    assert abs(ac_sa(printed, lambda theta: theta, 1.0)) > 5
    assert abs(ac_sa(ours, lambda theta: theta, 1.0)) < 1e-5
    bounds = {"smoothness": 1.0, "deviation": 0.0, "distance": 1.0, "start_gap": 0.5, "diameter": 2.0}
    assert accelerated_bound(printed, **bounds) is None
    assert 0.5 * ac_sa(ours, lambda theta: theta, 1.0) ** 2 <= accelerated_bound(ours, **bounds)


def test_steps_that_grow_shorter_weights_cost_the_diameter_and_too_long_ones_have_no_bound():
    flat = [4.0 / (t + 1) for t in range(1, 6)]
    rising = [4.0 * (1 + 0.1 * t) / (t + 1) for t in range(1, 6)]
    options = {"smoothness": 1.0, "deviation": 0.3, "distance": 1.0, "start_gap": 1.0}
    assert accelerated_bound(flat, diameter=1.0, **options) == accelerated_bound(flat, diameter=50.0, **options)
    assert accelerated_bound(rising, diameter=1.0, **options) < accelerated_bound(rising, diameter=50.0, **options)
    assert accelerated_bound([accelerated_momentum(1)], diameter=1.0, **options) is None
    assert accelerated_bound(flat, diameter=2.0, bias=0.1, **options) == pytest.approx(
        accelerated_bound(flat, diameter=2.0, **options) + 0.2
    )


@pytest.mark.parametrize("smoothness", [0.01, 1.0, 30.0, None])
@pytest.mark.parametrize("users", [1, 7, 600])
@pytest.mark.parametrize("variance", [1e-4, 1.0, 300.0])
def test_the_accelerated_batch_size_is_the_best_of_all(smoothness, users, variance):
    oracle = Oracle(lipschitz=1.3, dimension=5, variance=variance)

    def value(size):
        rounds = users // size
        deviation = oracle.deviation(size)
        beta = best_smoothing(rounds=rounds, lipschitz=1.3, distance=2.0) if smoothness is None else smoothness
        weight = deviation / 2.0 * math.sqrt((rounds + 1) * (rounds + 2) * (2 * rounds + 3) / 6)
        cost = 1.3**2 / (2 * beta) if smoothness is None else 0.0
        return closed_form(rounds, beta, deviation, 2.0, 1.3 * 2.0, weight) + cost

    chosen = accelerated_batch_size(oracle, num_users=users, smoothness=smoothness, distance=2.0)
    assert value(chosen) <= min(value(size) for size in range(1, users + 1)) * (1 + 1e-9)


def test_the_accelerated_batch_size_grows_as_the_theorem_says():
    """n^{3/5} s^{2/5}: where noise dominates the sampling error (s² ≫ b) and n is large, the exponents show."""
    sizes = [
        accelerated_batch_size(Oracle(lipschitz=1.0, dimension=10, variance=v), num_users=n, smoothness=100.0, distance=1.0)
        for n, v in [(10**7, 1e9), (10**9, 1e9), (10**9, 1e11)]
    ]
    assert math.log(sizes[1] / sizes[0]) / math.log(100) == pytest.approx(0.6, abs=0.05)
    assert math.log(sizes[2] / sizes[1]) / math.log(10) == pytest.approx(0.4, abs=0.05)


def test_the_best_smoothing_balances_its_two_costs():
    def cost(beta):
        return 2 / (51 * 52) * beta * 1.5**2 + 2.0**2 / (2 * beta)

    best = best_smoothing(rounds=50, lipschitz=2.0, distance=1.5)
    assert cost(best) <= min(cost(best * factor) for factor in (0.5, 0.99, 1.01, 2.0))


# ---- SGD --------------------------------------------------------------------------------------------------------------------


@settings(max_examples=100, deadline=None)
@given(st.floats(0.1, 10), st.integers(1, 100), st.floats(1e-3, 1e4), st.integers(1, 10_000))
def test_the_sgd_batch_size_minimises_its_bound(lipschitz, dimension, variance, users):
    oracle = Oracle(lipschitz=lipschitz, dimension=dimension, variance=variance)

    def value(size):  # D L_G / √T, squared, but for D² and with T = n/b
        return oracle.second_moment(size) * size

    chosen = sgd_batch_size(oracle, num_users=users)
    assert 1 <= chosen <= users
    neighbours = [size for size in (chosen - 1, chosen + 1) if 1 <= size <= users]
    # b = s rounded: b + s²/b is flat there, its neighbours at most (1/2)²/(s b) better
    assert all(value(chosen) <= value(size) * (1 + 0.25 / chosen**2) for size in neighbours)


def test_the_sgd_bound_is_lemma_4_2_and_least_at_the_default_step():
    def bound(step):
        return sgd_bound(rounds=100, step_size=step, second_moment=4.0, distance=3.0)

    best = 3.0 / math.sqrt(4.0 * 100)
    assert bound(best) == pytest.approx(3.0 * 2.0 / 10)
    assert bound(best) < min(bound(0.9 * best), bound(1.1 * best))
    assert sgd_bound(rounds=100, step_size=best, second_moment=4.0, distance=3.0, diameter=6.0, bias=0.5) == bound(best) + 3


# ---- gradient descent -------------------------------------------------------------------------------------------------------

BOUND = DescentBound(
    rounds=200,
    num_users=500,
    oracle=Oracle(lipschitz=1.0, dimension=10, variance=50.0),
    granularity=6,
    distance=1.0,
    diameter=2.0,
)


@pytest.mark.parametrize("bias", [0.0, 0.01])
@pytest.mark.parametrize("smoothness", [0.01, 1.0, 20.0, 500.0])
def test_the_descent_step_is_the_best_allowed(smoothness, bias):
    bound = dataclasses.replace(BOUND, oracle=dataclasses.replace(BOUND.oracle, bias=bias))
    step = bound.best_step(smoothness=smoothness)
    grid = [factor * step for factor in np.geomspace(0.01, 100, 401) if factor * step <= 2 / smoothness]
    assert step <= 2 / smoothness
    assert bound.value(step, smoothness=smoothness) <= min(bound.value(x, smoothness=smoothness) for x in grid) * (1 + 1e-6)


def test_smoothing_and_step_are_the_best_together():
    def value(step, beta):
        proved = BOUND.value(step, smoothness=beta)
        return math.inf if proved is None else proved + 1.0 / (2 * beta)

    step = BOUND.best_step(smoothness=None, lipschitz=1.0)
    pairs = [(a * step, 2 * b / step) for a in np.geomspace(0.2, 5, 41) for b in np.geomspace(0.2, 5, 41)]
    # a longer step with less smoothing, or the reverse, never gains: β is at its cap, where the drift is largest
    assert value(step, 2 / step) <= min(value(a, b) for a, b in pairs if b >= 2 / a * 0.999) * (1 + 1e-3)


def test_steps_beyond_two_over_beta_have_no_bound():
    assert BOUND.value(2.0, smoothness=1.0) is not None
    assert BOUND.value(2.01, smoothness=1.0) is None


def test_two_runs_drift_apart_no_faster_than_is_proved():
    """Huber losses, data that differ in one user, the rounding coupled as in the proof; mean over independent pairs of runs."""
    rng = np.random.default_rng(1)
    users, dimension, rounds, g, step, pairs = 20, 3, 60, 2, 0.8, 400
    width = 2.0 / g
    targets = rng.normal(size=(users, dimension))
    other = targets.copy()
    other[0] = -targets[0] * 2

    def gradients(theta, data):  # of Huber's loss of the norm: 1-Lipschitz, 1-smooth
        offset = theta[:, None, :] - data[None]
        return offset / np.maximum(np.linalg.norm(offset, axis=2, keepdims=True), 1.0)

    def rounded(values, uniforms):
        return width * (np.floor((values + 1.0) / width + uniforms)) - 1.0

    first = second = np.zeros((pairs, dimension))
    bound = DescentBound(
        rounds=rounds,
        num_users=users,
        oracle=Oracle(lipschitz=1.0, dimension=dimension, variance=1.0),
        granularity=g,
        distance=1.0,
        diameter=2.0,
    )
    total = np.zeros(pairs)
    for _ in range(rounds):
        total += np.linalg.norm(first - second, axis=1) / rounds
        shared = rng.uniform(size=(pairs, users, dimension))
        apart = shared.copy()
        apart[:, 0] = rng.uniform(size=(pairs, dimension))
        noise = rng.normal(size=(pairs, dimension)) * 0.3
        first = first - step * (rounded(gradients(first, targets), shared).mean(1) + noise)
        second = second - step * (rounded(gradients(second, other), apart).mean(1) + noise)
    plain = step * rounds / users  # what Lemma B.5 would say
    assert total.mean() + 4 * total.std() / math.sqrt(pairs) <= bound._drift(step, 1.0)
    assert bound._drift(step, 1.0) > plain


def test_candidates_are_powers_of_two_up_to_the_lemmas_number():
    noisy = Oracle(lipschitz=1.0, dimension=1, variance=10_000.0)  # s = 100
    assert descent_candidates(noisy, num_users=1000) == [1, 2, 4, 8, 16, 32, 64, 100]
    assert descent_candidates(dataclasses.replace(noisy, variance=1e-9), num_users=6) == [1, 2, 4, 6]


def test_the_planned_number_of_rounds_is_near_the_best_candidate_with_real_protocols():
    budget = Budget(1.0, 1e-5, "tight", 1.0)
    setting = Setting(
        dimension=4, num_users=300, reported=1.0, lipschitz=1.0, distance=1.0, diameter=2.0, bias=0.0, budget=budget
    )

    def proved(rounds):
        plan = plan_descent(setting, rounds=rounds, smoothness=1.0)
        return plan.bound.value(plan.step_size, smoothness=1.0)

    # the plan guesses the grid by its worst case, g₁/√T; real ones are finer
    assert proved(None) <= 1.1 * min(proved(rounds) for rounds in (1, 4, 16, 64, 300))


# ---- as printed -------------------------------------------------------------------------------------------------------------


def test_the_printed_formulas_are_the_papers():
    n, d, lip, diam, eps, delta, beta = 5000, 7, 1.5, 2.5, 0.7, 1e-5, 3.0
    printed = Printed(num_users=n, dimension=d, lipschitz=lip, diameter=diam, epsilon=eps, delta=delta)
    log = math.log(d / delta)
    assert printed.sgd_batch_size() == round(math.sqrt(d) * log / eps)
    assert printed.sgd_step_size(60, 83) == pytest.approx(
        eps * 60 * diam / (lip * math.sqrt(83) * (eps * 60 + math.sqrt(d) * lip * log))
    )
    assert printed.accelerated_batch_size(beta) == round(
        n**0.6 * d**0.2 * lip**0.4 * log**0.4 / (eps**0.4 * beta**0.4 * diam**0.4)
    )
    assert printed.accelerated_smoothing() == pytest.approx(
        eps ** (2 / 3) * n ** (2 / 3) * lip / (d ** (1 / 3) * diam * log ** (2 / 3))
    )
    full = math.log(n * d / delta)
    assert printed.descent_rounds() == min(n, round(eps**2 * n**2 / (d * full**2)))
    assert printed.descent_step_size(50) == pytest.approx(diam / (lip * math.sqrt(50)))
    assert printed.descent_smoothing() == pytest.approx(lip / diam * min(math.sqrt(n), eps * n / (math.sqrt(d) * full**1.5)))
    assert printed_step_sizes(rounds=3, smoothness=2.0, deviation=0.5, distance=4.0)[1] == pytest.approx(
        (5**1.5 * 0.5 / 4.0 + 2.0) / 3
    )


SIZE = {"num_users": 3000, "dimension": 6, "lipschitz": 2.0, "diameter": 3.0, "epsilon": 1.0, "delta": 1e-6}


def test_smoothing_planners_answer_the_optimisers_choices():
    printed = Printed(**SIZE)
    assert smoothing_for_accelerated(parameters="printed", **SIZE) == printed.accelerated_smoothing()
    assert smoothing_for_gradient_descent(parameters="printed", **SIZE) == printed.descent_smoothing()
    variance = noise_variance(dimension=6, max_norm=2.0, epsilon=1.0, delta=1e-6, calibration="tight")
    size = accelerated_batch_size(
        Oracle(lipschitz=2.0, dimension=6, variance=variance), num_users=3000, smoothness=None, distance=3.0
    )
    expected = best_smoothing(rounds=3000 // size, lipschitz=2.0, distance=3.0)
    assert smoothing_for_accelerated(**SIZE) == pytest.approx(expected)
    assert smoothing_for_gradient_descent(**SIZE) > 0


@pytest.mark.parametrize("planner", [smoothing_for_accelerated, smoothing_for_gradient_descent])
@pytest.mark.parametrize("parameters", ["printed", "calibrated"])
def test_more_users_deserve_less_smoothing(planner, parameters):
    few, many = (planner(**{**SIZE, "num_users": n}, parameters=parameters) for n in (500, 50_000))
    assert many > few


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_users": 0}, "num_users"),
        ({"dimension": 1.5}, "dimension"),
        ({"lipschitz": -1.0}, "lipschitz"),
        ({"diameter": math.inf}, "diameter"),
        ({"epsilon": 16.0}, "epsilon must not exceed 15"),
        ({"delta": 0.6}, "delta must be below 1/2"),
        ({"parameters": "best"}, "parameters must be one of 'calibrated', 'printed'"),
        ({"calibration": "best"}, "calibration"),
        ({"honest_fraction": 0.0}, "honest_fraction"),
    ],
)
@pytest.mark.parametrize("planner", [smoothing_for_accelerated, smoothing_for_gradient_descent])
def test_planners_refuse_nonsense(planner, change, message):
    with pytest.raises(ValueError, match=message):
        planner(**{**SIZE, **change})
