"""What an intruder sees at every time, worked out by linear algebra; and that the stream is AC-SA."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from helpers.convex_problems import solve
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import chi2

from opacus_shuffle.analysis import gaussian
from opacus_shuffle.sco import L2Ball, Objective, PrivacyBudget, pan_private_accelerated_sgd
from opacus_shuffle.sco.acceleration import AcceleratedIterates
from opacus_shuffle.sco.bounded_gradients import BoundedGradients
from opacus_shuffle.sco.pan_private import PanPrivateAcceleratedSGD, pan_private_noise

BUDGET = {"epsilon": 0.9, "delta": 1e-6}
FAR = L2Ball(1e9)


class Linear(Objective):
    """⟨θ, x⟩: the gradient is the record, wherever θ is."""

    def __init__(self, dimension):
        self.dimension = dimension

    def _evaluate(self, theta, batch):
        return batch @ theta, batch


class Quadratic(Linear):
    """‖θ − x‖²/2."""

    def _evaluate(self, theta, batch):
        return (theta - batch).square().sum(1) / 2, theta - batch


def stream(
    objective,
    noise=0.0,
    batch_size=3,
    rounds=3,
    constraint=FAR,
    lipschitz=1e6,
    clip=False,
    kind=None,
    **options,
):
    steps = [5.0 / (t + 1) for t in range(1, rounds + 1)]
    start = torch.zeros(objective.dimension, dtype=torch.float64)
    return (kind or PanPrivateAcceleratedSGD)(
        BoundedGradients(objective, lipschitz, clip),
        AcceleratedIterates(constraint.project, start, steps),
        noise=noise,
        batch_size=batch_size,
        **options,
    )


def views(records, draws, noise=0.7):
    """What is seen at each time, with everything that is published: one vector per intrusion time."""
    noises = iter(draws)

    class Scripted(PanPrivateAcceleratedSGD):
        """The algorithm with its noises given in advance (standard, one per draw)."""

        def _draw(self):
            return noise * torch.tensor([next(noises)], dtype=torch.float64)

    algorithm = stream(Linear(1), noise, kind=Scripted)
    states, published = [algorithm.state()], []
    for record in records:
        gradient = algorithm.consume(torch.tensor([[record]], dtype=torch.float64))
        published += [] if gradient is None else [float(gradient)]
        states.append(algorithm.state())
    end = [*published, float(algorithm.output())]
    return [
        np.array([float(s.theta), float(s.aggregate), float(s.middle), float(s.gradient), *end])
        for s in states
    ]


def test_state_and_all_that_is_published_differ_by_one_gaussian_mechanism_at_every_time():
    """The views are linear in noises and records: a record's shift is measured in the noises' covariance, exactly."""
    batch_size, rounds, noise = 3, 3, 0.7
    count, draws = batch_size * rounds, 2 * rounds

    nothing = views([0.0] * count, [0.0] * draws)
    by_noise = [views([0.0] * count, np.eye(draws)[k]) for k in range(draws)]
    largest = 0.0
    for record in range(count):
        moved = views(list(2.0 * np.eye(count)[record]), [0.0] * draws)  # from −L to L, with L = 1
        for time in range(count + 1):
            factors = np.stack([by_noise[k][time] - nothing[time] for k in range(draws)], axis=1)
            shift = moved[time] - nothing[time]
            covered, _, rank, _ = np.linalg.lstsq(factors, shift, rcond=1e-10)
            assert np.allclose(
                factors @ covered, shift, atol=1e-9
            )  # else the noise does not hide it at all
            assert rank <= draws
            mu = float(np.linalg.norm(covered))
            assert mu <= 2 / (batch_size * noise) * (1 + 1e-9)
            largest = max(largest, mu)
    assert largest == pytest.approx(2 / (batch_size * noise))


def test_the_noise_in_the_state_is_as_claimed_at_every_time():
    """Loss 0: what is left in the running gradient is noise, of variance ζ²; in what a batch gives, of 2ζ²."""
    dimension, noise = 3000, 0.3
    algorithm = stream(
        Linear(dimension),
        noise=noise,
        batch_size=2,
        rounds=3,
        generator=torch.Generator().manual_seed(0),
    )
    low, high = chi2.ppf([1e-6, 1 - 1e-6], dimension) / dimension
    before = algorithm.state().gradient
    for time in range(6):
        assert low <= float(algorithm.state().gradient.square().mean()) / noise**2 <= high
        whole = algorithm.consume(torch.zeros(1, dimension))
        if time % 2:
            assert low <= float(whole.square().mean()) / (2 * noise**2) <= high
            assert not torch.equal(before, algorithm.state().gradient)
            before = algorithm.state().gradient
        else:
            assert whole is None
            assert torch.equal(before, algorithm.state().gradient)
    assert float(algorithm.state().gradient.abs().max()) == 0


def test_nothing_but_the_state_is_remembered():
    """In particular no generator, from which noise could be told."""
    algorithm = stream(Linear(2), noise=1.0)
    algorithm.consume(torch.ones(1, 2))
    first, second = (stream(Linear(2), noise=1.0) for _ in range(2))
    torch.manual_seed(0)
    assert not torch.equal(first.state().gradient, second.state().gradient)
    remembered = [value for value in vars(algorithm).values() if isinstance(value, torch.Tensor)]
    assert len(remembered) == 1
    assert torch.equal(remembered[0], algorithm.state().gradient)


@settings(max_examples=25, deadline=None)
@given(st.integers(1, 4), st.integers(1, 6), st.integers(0, 2**31))
def test_without_noise_it_is_ac_sa_however_the_records_come(batch_size, rounds, seed):
    rng = torch.Generator().manual_seed(seed)
    records = torch.randn(batch_size * rounds, 2, generator=rng, dtype=torch.float64)
    ball = L2Ball(0.8)
    one, many = (
        stream(Quadratic(2), batch_size=batch_size, rounds=rounds, constraint=ball)
        for _ in range(2)
    )
    theta = aggregate = torch.zeros(2, dtype=torch.float64)
    for t in range(1, rounds + 1):
        batch = records[(t - 1) * batch_size : t * batch_size]
        middle = 2 / (t + 2) * theta + t / (t + 2) * aggregate
        assert torch.allclose(one.state().middle, middle)
        theta = ball.project(theta - (middle - batch).mean(0) / (5.0 / (t + 1)))
        aggregate = 2 / (t + 2) * theta + t / (t + 2) * aggregate
        for record in batch:
            one.consume(record[None])
        many.consume(batch)
    assert torch.allclose(one.output(), aggregate)
    assert torch.allclose(many.output(), aggregate)


def test_the_papers_noise_is_the_formula_and_the_tight_one_the_least():
    paper, tight = (
        pan_private_noise(
            PrivacyBudget(**BUDGET, calibration=calibration), lipschitz=1.5, batch_size=20
        )
        for calibration in ("published", "tight")
    )
    assert paper == pytest.approx(math.sqrt(8 * 1.5**2 * math.log(2e6) / (20**2 * 0.9**2)))
    shift = 2 * 1.5 / 20
    assert gaussian.compute_epsilon(mu=shift / tight, delta=1e-6) <= 0.9
    assert gaussian.compute_epsilon(mu=shift / (tight * (1 - 1e-6)), delta=1e-6) > 0.9
    assert gaussian.compute_epsilon(mu=shift / paper, delta=1e-6) <= 0.9
    assert tight < paper


def test_the_stream_is_read_once_and_to_the_end():
    algorithm = stream(Quadratic(2), batch_size=2, rounds=2)
    with pytest.raises(
        ValueError, match="from 1 to 2, which is what this batch still takes, got 3"
    ):
        algorithm.consume(torch.zeros(3, 2))
    algorithm.consume(torch.zeros(1, 2))
    assert algorithm.room == 1
    with pytest.raises(ValueError, match="the output comes at the stream's end, got 1 records"):
        algorithm.output()
    algorithm.consume(torch.zeros(1, 2))
    algorithm.consume(torch.zeros(2, 2))
    assert algorithm.room == 0
    with pytest.raises(ValueError, match="records must number"):
        algorithm.consume(torch.zeros(1, 2))


def test_a_refused_record_leaves_no_trace():
    algorithm = stream(Quadratic(2), lipschitz=1.0)
    with pytest.raises(
        ValueError, match="lipschitz must bound every user's gradient, got 1 and a longer gradient"
    ):
        algorithm.consume(torch.tensor([[3.0, 4.0]]))
    assert algorithm.state().records == 0
    assert float(algorithm.state().gradient.abs().max()) == 0
    cut = stream(Quadratic(2), lipschitz=1.0, clip=True)
    cut.consume(torch.tensor([[3.0, 4.0]]))
    assert float(cut.state().gradient.norm()) == pytest.approx(1 / 3)


@pytest.mark.parametrize("together", [1, 3])
def test_a_record_that_cannot_be_used_counts_as_zero_where_long_ones_are_cut(together):
    objective = Objective.from_loss(lambda t, x: (t - x).square().sum(1).sqrt(), dimension=2)
    with pytest.raises(
        ValueError, match="finite"
    ):  # no gradient at the kink, where autograd finds NaN
        stream(objective, batch_size=3).consume(torch.zeros(3, 2))
    algorithm = stream(objective, batch_size=3, clip=True, lipschitz=1.0)
    records = torch.tensor([[1.0, 1.0], [math.nan, 0.0], [1.0, 1.0]])
    answers = [
        algorithm.consume(records[first : first + together]) for first in range(0, 3, together)
    ]
    assert torch.allclose(answers[-1], torch.full((2,), -2 / 3 / math.sqrt(2), dtype=torch.float64))


def test_states_are_copies():
    algorithm = stream(Quadratic(2))
    algorithm.state().theta.add_(1.0)
    assert float(algorithm.state().theta.abs().max()) == 0


@pytest.mark.parametrize("smoothness", [1.0, None])
@pytest.mark.parametrize("calibration", ["published", "tight"])
def test_the_mean_excess_is_below_the_bound(calibration, smoothness):
    mean, excesses, runs = torch.tensor([0.4, -0.3], dtype=torch.float64), [], 8
    users = 3000 if smoothness else 300  # the generic envelope takes its time
    for seed in range(runs):
        rng = torch.Generator().manual_seed(seed)
        data = mean + 0.2 * (2 * torch.rand(users, 2, generator=rng, dtype=torch.float64) - 1)
        estimate = solve(pan_private_accelerated_sgd,
            Quadratic(2), data, constraint=L2Ball(1.0), lipschitz=1.8, smoothness=smoothness, calibration=calibration,
            generator=rng, **BUDGET
        )  # fmt: skip
        excesses.append(float((estimate.theta - mean).square().sum()) / 2)
    assert np.mean(excesses) - 4 * np.std(excesses) / math.sqrt(runs) <= estimate.excess_loss_bound
    budget = PrivacyBudget(**BUDGET, calibration=calibration)
    size = estimate.choices["batch_size"]
    assert estimate.choices["noise"] == pan_private_noise(budget, lipschitz=1.8, batch_size=size)


def test_the_statement_is_about_one_intrusion():
    estimate = solve(
        pan_private_accelerated_sgd,
        Quadratic(2),
        torch.zeros(100, 2),
        constraint=L2Ball(1.0),
        lipschitz=1.0,
        smoothness=1.0,
        batch_size=30,
        **BUDGET,
    )
    privacy = estimate.privacy
    assert (privacy.interaction, privacy.rounds, privacy.num_users, privacy.bits_per_user) == (
        "pan",
        3,
        90,
        None,
    )
    assert "inner state once" in privacy.adversary
    assert len(estimate.history) == 3


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"epsilon": 1.0, "calibration": "published"},
            "epsilon must be below 1 for calibration='published'",
        ),
        ({"epsilon": -1.0}, "epsilon must be positive"),
        ({"honest_fraction": 0.5}, "honest_fraction must be 1 for pan-private runs"),
        ({"delta": 1.0}, "delta must be at least 1e-200 and below 1/2"),
        ({"calibration": "loose"}, "calibration must be one of"),
        ({"batch_size": 101}, r"batch_size must be .* \(and at most 100\)"),
        ({"batch_size": 0}, "batch_size must be a whole number"),
    ],
)
def test_nonsense_is_refused(change, message):
    options = {
        "constraint": L2Ball(1.0),
        "lipschitz": 3.0,
        "smoothness": 1.0,
        "batch_size": 10,
        **BUDGET,
    }
    with pytest.raises(ValueError, match=message):
        solve(
            pan_private_accelerated_sgd, Quadratic(2), torch.zeros(100, 2), **{**options, **change}
        )


@pytest.mark.parametrize(
    ("change", "message"),
    [({"noise": -1.0}, "noise must not be negative"), ({"batch_size": 1.5}, "batch_size")],
)
def test_nonsensical_streams_are_refused(change, message):
    with pytest.raises(ValueError, match=message):
        stream(Quadratic(2), **change)
