"""AC-SA's step sizes, batch sizes and bound against slow runs and brute force (docs/proofs/20)."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from opacus_shuffle.sco.acceleration import (
    accelerated_batch_size,
    accelerated_bound,
    accelerated_momentum,
    accelerated_step_sizes,
    best_smoothing,
)
from opacus_shuffle.sco.descent_bound import Oracle


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


@settings(max_examples=100, deadline=None)
@given(
    st.lists(st.floats(0.01, 1.0), min_size=1, max_size=4),
    st.integers(1, 60),
    st.floats(1.0, 5.0),
    st.integers(0, 2**31),
)
def test_the_accelerated_bound_holds_without_noise_on_every_quadratic(
    curvatures, rounds, slack, seed
):
    curvatures, start = (
        np.array(curvatures),
        np.random.default_rng(seed).normal(size=len(curvatures)),
    )
    distance, smoothness = float(np.linalg.norm(start)), slack * float(curvatures.max())

    def value(theta):
        return float((curvatures * theta**2).sum() / 2)

    steps = accelerated_step_sizes(
        rounds=rounds, smoothness=smoothness, deviation=0.0, distance=distance
    )
    bound = accelerated_bound(
        steps,
        smoothness=smoothness,
        deviation=0.0,
        distance=distance,
        start_gap=value(start),
        diameter=1e9,
    )
    assert value(ac_sa(steps, lambda theta: curvatures * theta, start)) <= bound * (1 + 1e-9)


@settings(max_examples=100, deadline=None)
@given(st.integers(1, 300), st.floats(0.01, 100), st.floats(0.01, 100), st.floats(0.1, 10))
def test_the_evaluated_bound_is_at_most_the_closed_form_and_its_weight_is_the_best(
    rounds, smoothness, deviation, distance
):
    gap = 3.0
    steps = accelerated_step_sizes(
        rounds=rounds, smoothness=smoothness, deviation=deviation, distance=distance
    )
    weight = 2 * steps[0] - 2 * smoothness
    bound = accelerated_bound(
        steps,
        smoothness=smoothness,
        deviation=deviation,
        distance=distance,
        start_gap=gap,
        diameter=1.0,
    )
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
            + alpha
            * size
            / 2
            * (((theta - minimiser) ** 2).sum() - ((after - minimiser) ** 2).sum())
            - alpha * error @ (theta - minimiser)
            + alpha * (error @ error) / (2 * (size - alpha))
        )
        assert value(final) <= right + 1e-9


def test_steps_that_grow_shorter_weights_cost_the_diameter_and_too_long_ones_have_no_bound():
    flat = [4.0 / (t + 1) for t in range(1, 6)]
    rising = [4.0 * (1 + 0.1 * t) / (t + 1) for t in range(1, 6)]
    options = {"smoothness": 1.0, "deviation": 0.3, "distance": 1.0, "start_gap": 1.0}
    assert accelerated_bound(flat, diameter=1.0, **options) == accelerated_bound(
        flat, diameter=50.0, **options
    )
    assert accelerated_bound(rising, diameter=1.0, **options) < accelerated_bound(
        rising, diameter=50.0, **options
    )
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
        beta = (
            best_smoothing(rounds=rounds, lipschitz=1.3, distance=2.0)
            if smoothness is None
            else smoothness
        )
        weight = deviation / 2.0 * math.sqrt((rounds + 1) * (rounds + 2) * (2 * rounds + 3) / 6)
        cost = 1.3**2 / (2 * beta) if smoothness is None else 0.0
        return closed_form(rounds, beta, deviation, 2.0, 1.3 * 2.0, weight) + cost

    chosen = accelerated_batch_size(oracle, num_users=users, smoothness=smoothness, distance=2.0)
    assert value(chosen) <= min(value(size) for size in range(1, users + 1)) * (1 + 1e-9)


def test_the_accelerated_batch_size_grows_as_the_theorem_says():
    """n^{3/5} s^{2/5}: where noise dominates the sampling error (s² ≫ b) and n is large, the exponents show."""
    sizes = [
        accelerated_batch_size(
            Oracle(lipschitz=1.0, dimension=10, variance=v),
            num_users=n,
            smoothness=100.0,
            distance=1.0,
        )
        for n, v in [(10**7, 1e9), (10**9, 1e9), (10**9, 1e11)]
    ]
    assert math.log(sizes[1] / sizes[0]) / math.log(100) == pytest.approx(0.6, abs=0.05)
    assert math.log(sizes[2] / sizes[1]) / math.log(10) == pytest.approx(0.4, abs=0.05)


def test_the_best_smoothing_balances_its_two_costs():
    def cost(beta):
        return 2 / (51 * 52) * beta * 1.5**2 + 2.0**2 / (2 * beta)

    best = best_smoothing(rounds=50, lipschitz=2.0, distance=1.5)
    assert cost(best) <= min(cost(best * factor) for factor in (0.5, 0.99, 1.01, 2.0))
