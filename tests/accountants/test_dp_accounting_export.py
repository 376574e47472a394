"""What dp_accounting makes of an exported run is at least the truth, and hardly more."""

import sys

import numpy as np
import pytest
from helpers.hockey_sticks import gaussian_delta

from opacus_shuffle import RandomAllocation, ShuffledSums, ShuffleGauss
from opacus_shuffle.accountants import compute_bound, to_dp_accounting

pytest.importorskip("dp_accounting", reason="needs the extra dp-accounting")
distributions = pytest.importorskip("dp_accounting.pld.privacy_loss_distribution")


def allocated(batches, sigma, steps=None):
    return [(RandomAllocation(noise_multiplier=sigma, num_batches=batches), steps or batches)]


@pytest.mark.parametrize(
    ("batches", "sigma", "epochs", "delta"),
    [
        (100, 0.7, 10, 1e-9),
        (10, 5.0, 1, 1e-5),
        *(
            pytest.param(*case, marks=pytest.mark.zoo)
            for case in [(1000, 1.0, 1, 1e-5), (1000, 0.6, 10, 1e-5), (100_000, 0.5, 3, 1e-8)]
        ),
    ],
)
@pytest.mark.parametrize("composed", ["here", "there"])
def test_epochs_cost_over_there_what_they_cost_here(batches, sigma, epochs, delta, composed):
    steps = batches * epochs
    bound = compute_bound(allocated(batches, sigma, steps), delta=delta)
    if composed == "here":
        exported = to_dp_accounting(allocated(batches, sigma, steps))
    else:
        exported = to_dp_accounting(allocated(batches, sigma)).self_compose(epochs)
    assert bound.lower <= exported.get_epsilon_for_delta(delta) <= 1.001 * bound.epsilon


@pytest.mark.parametrize(
    "sigma", [1.0, *(pytest.param(s, marks=pytest.mark.zoo) for s in (0.5, 4.0))]
)
@pytest.mark.parametrize(("mechanism", "close"), [(RandomAllocation, 1.0005), (ShuffleGauss, 1.01)])
def test_one_report_is_the_gaussian_mechanism(sigma, mechanism, close):
    """Its δ is at least as large at every ε, below 0 too."""
    size = {"num_batches": 1} if mechanism is RandomAllocation else {"num_users": 1}
    exported = to_dp_accounting([(mechanism(noise_multiplier=sigma, **size), 1)])
    for epsilon in np.linspace(-6, 6, 41) / sigma:
        exact = gaussian_delta(1 / sigma, epsilon)
        assert exact - 1e-14 <= exported.get_delta_for_epsilon(epsilon)
    theirs = distributions.from_gaussian_mechanism(sigma)
    for delta in (0.05, 1e-3, 1e-6, 1e-9):
        epsilon = theirs.get_epsilon_for_delta(delta)
        # Cells of 0.03 deviations add 1.5e-4 of the variance; of δ that are 1.3 apart chords are
        # above by (log 1.3)²/8, which is one percent of δ and less of ε.
        assert exported.get_epsilon_for_delta(delta) <= close * epsilon


def test_an_epoch_costs_more_than_its_first_step_in_either_direction():
    """The step is a Poisson sample. Mixed-up directions would cost 11.0 together."""
    step = {"value_discretization_interval": 1e-3}
    theirs = distributions.from_gaussian_mechanism(0.7, sampling_prob=0.5, **step)
    both, twice = (
        theirs.compose(to_dp_accounting(allocated(2, 0.7), **step)),
        theirs.self_compose(2),
    )
    assert both.get_epsilon_for_delta(1e-9) > twice.get_epsilon_for_delta(1e-9)  # 11.8


@pytest.mark.parametrize("delta", [1e-5, pytest.param(1e-8, marks=pytest.mark.zoo)])
def test_it_composes_with_a_gaussian_release(delta):
    """A release with so much noise is one epoch of one batch, which this library composes, too."""
    noise = 20.0
    release = distributions.from_gaussian_mechanism(noise)
    composed = to_dp_accounting(allocated(1000, 0.8, 3000)).compose(release)
    rounds = [*allocated(1000, 0.8, 3000), *allocated(1, noise)]
    bound = compute_bound(rounds, delta=delta)
    assert bound.lower <= composed.get_epsilon_for_delta(delta) <= 1.001 * bound.epsilon


SUMS = ShuffledSums.build(noise_multiplier=3.0, num_users=1000, dimension=10)


@pytest.mark.parametrize(
    ("rounds", "adjacency"),
    [
        ([(SUMS, 2)], "zero_out"),
        pytest.param([(SUMS, 2)], "replace", marks=pytest.mark.zoo),
        (allocated(50, 1.5, 100), "replace"),
    ],
)
def test_sums_of_bits_and_replaced_records_have_their_certified_epsilon(rounds, adjacency):
    exported = to_dp_accounting(rounds, adjacency=adjacency)
    ((mechanism, count),) = rounds
    thrice = exported.self_compose(3)
    for delta in (1e-3, 1e-8):
        for composed, steps in ((exported, count), (thrice, 3 * count)):
            bound = compute_bound([(mechanism, steps)], delta=delta, adjacency=adjacency)
            epsilon = composed.get_epsilon_for_delta(delta)
            # What is certified is itself a little above the truth.
            assert bound.epsilon * 0.995 <= epsilon <= bound.epsilon * 1.02


def test_losses_are_rounded_up_to_a_multiple_of_the_interval():
    exported = to_dp_accounting([(ShuffleGauss(noise_multiplier=1e9, num_users=100), 1)])
    assert 0 < exported.get_epsilon_for_delta(1e-6) <= 1e-4


def test_it_asks_for_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "dp_accounting.pld", None)
    with pytest.raises(ImportError, match="dp-accounting"):
        to_dp_accounting(allocated(10, 1.0))


@pytest.mark.parametrize(
    ("rounds", "changed", "match"),
    [
        ([], {}, "rounds must not be empty"),
        (allocated(10, 1.0), {"value_discretization_interval": 0.0}, "interval"),
        (allocated(10, 1.0), {"adjacency": "add"}, "adjacency"),
        (allocated(10, 0.5), {"value_discretization_interval": 1e-6}, "larger interval"),
        (allocated(10, 0.01), {}, "noise_multiplier"),
        ([(ShuffleGauss(noise_multiplier=0.05, num_users=1), 1)], {}, "too fine"),
    ],
)
def test_bad_input_is_refused_by_name(rounds, changed, match):
    with pytest.raises(ValueError, match=match):
        to_dp_accounting(rounds, **changed)
