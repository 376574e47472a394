"""``shuffled_fw`` from plain numbers.

Each bound is held against a reference of its own, and what it says it is worth.
"""

import math

import numpy as np
import pytest
from helpers.accountants import DELTA
from opacus.accountants import PRVAccountant
from scipy.integrate import trapezoid
from scipy.optimize import brentq
from scipy.stats import norm as normal

import opacus_shuffle
from opacus_shuffle import Guarantee, PrivacyAssumptionWarning
from opacus_shuffle.accountants import compute_bound
from opacus_shuffle.accountants.mechanisms import ShuffledWeights
from opacus_shuffle.analysis.fenton_wilkinson import compute_delta

pytestmark = pytest.mark.filterwarnings("ignore::opacus_shuffle.PrivacyAssumptionWarning")


def run_of(noise_multiplier, sample_rate, steps, dimension, clip=1.0, batch_clip=None):
    return {
        "noise_multiplier": noise_multiplier,
        "sample_rate": sample_rate,
        "steps": steps,
        "dimension": dimension,
        "clip": clip,
        "batch_clip": batch_clip,
    }


# A budget that WS's formula answers with numbers above zero in every one of these; the first is
# WS Table I, ViT on CIFAR-100, for ε = 0.5 at δ = 5e-6.
RUNS = [
    run_of(0.27372, 0.02, 500, 85_800_000),
    run_of(0.5, 1.0, 1, 2),
    run_of(1.0, 0.1, 30, 1000, batch_clip=50.0),
    run_of(0.4, 0.05, 2000, 10**6, clip=0.1, batch_clip=0.2),
    run_of(0.3, 0.5, 7, 300, batch_clip=0.4),
    run_of(2.0, 0.25, 12, 360, batch_clip=math.inf),
]
TEN = run_of(0.3, 0.1, 10, 10**6)
every_run = pytest.mark.parametrize("run", RUNS, ids=lambda run: f"d={run['dimension']}")
single_steps = pytest.mark.parametrize("bound", ["published", "pair"])


def answer(bound="published", *, delta=DELTA, adjacency="zero_out", steps=1, **run):
    """One bound on equal steps."""
    mechanism = ShuffledWeights(num_users=1, **run)
    return compute_bound([(mechanism, steps)], delta=delta, bound=bound, adjacency=adjacency)


def spent(bound="published", **run):
    return answer(bound, **run).epsilon


# ---- certified


# WS Definition 1: what is certified is (ε, δ) of DP-SGD.
@pytest.mark.parametrize(
    ("sigma", "rate", "steps", "delta"),
    [
        *((1.0, 0.01, 1000, 1e-5), (0.5, 0.02, 10, 1e-4)),
        *(
            pytest.param(*run, marks=pytest.mark.zoo)
            for run in [(0.7, 0.1, 50, 1e-6), (4.0, 0.5, 100, 1e-5)]
        ),
    ],
)
def test_certified_is_opacus_own_prv_accountant_at_the_same_noise(sigma, rate, steps, delta):
    accountant = PRVAccountant()
    accountant.history = [(sigma, rate, steps)]
    composed = accountant._get_dprv(eps_error=0.01, delta_error=delta / 1000)
    below, _, above = composed.compute_epsilon(delta, delta / 1000, 0.01)
    ours = spent("certified", delta=delta, **run_of(sigma, rate, steps, 10**6))
    assert below <= ours <= 1.001 * above
    assert above - below < 0.1 * above


@pytest.mark.parametrize(
    ("sigma", "rate", "delta"), [(1.0, 0.5, 1e-5), (0.8, 0.1, 1e-4), (3.0, 0.9, 1e-6)]
)
def test_replacement_covers_the_record_that_turns_round_and_costs_no_more_than_two_records_left_out(
    sigma, rate, delta
):
    run = run_of(sigma, rate, 1, 100)
    replace = spent("certified", delta=delta, adjacency="replace", **run)
    assert spent("certified", delta=delta, **run) < replace

    # Gradient −c in place of c: the divergence of the two mixtures where one exceeds the other, by
    # the trapezoidal rule on a smooth function but for one kink: an error below the step squared,
    # 1e-8·σ², times δ''s slopes, of at most e^ε/σ².
    y = np.arange(-14 * sigma - 1, 14 * sigma + 1, 1e-4 * sigma)
    with_it, instead = (
        (1 - rate) * normal.pdf(y, 0, sigma) + rate * normal.pdf(y, at, sigma) for at in (1, -1)
    )
    assert trapezoid(np.maximum(with_it - math.exp(replace) * instead, 0), y) <= delta * (1 + 1e-6)

    # (ε, δ′) twice is (2ε, δ′ + e^ε·δ′). The share δ′ is solved for within 0.2 % here.
    share = delta
    while share * (1 + math.exp(spent("certified", delta=share, **run))) > delta * (1 - 0.002):
        share /= 2
    assert replace <= 2 * spent("certified", delta=share, **run)


@pytest.mark.parametrize(
    "delta", [1e-5, *(pytest.param(d, marks=pytest.mark.zoo) for d in (1e-300, 0.5))]
)
@pytest.mark.parametrize("sigma", [1e-6, 0.02, 0.3, 1e6])
def test_epsilon_is_a_number_however_little_or_much_the_noise(sigma, delta):
    for bound, adjacency in (
        *((bound, "zero_out") for bound in ("certified", "published", "pair")),
        ("certified", "replace"),
    ):
        for steps, rate in [(1, 1.0), (3000, 0.1)]:
            run = run_of(sigma, rate, steps, 1000)
            assert 0 <= spent(bound, adjacency=adjacency, delta=delta, **run) < math.inf


# ---- published


def reference(run, *, delta=DELTA):
    """WS Theorems 6, 2 and 1, one after the other."""
    rate, steps, clip = run["sample_rate"], run["steps"], run["clip"]
    share = delta / (2 * rate * steps)
    step = {"noise_std": run["noise_multiplier"] * clip, "dimension": run["dimension"]}
    norms = {"clip": clip, "batch_clip": run["batch_clip"] or clip}

    def excess(epsilon):
        return compute_delta(epsilon=epsilon, **step, **norms) - share

    # From far out, where one step keeps within δ, inwards: the last crossing counts.
    end = next(end for end in np.arange(400, -1, -0.5) if excess(max(end - 0.5, 0)) > 0)
    sampled = math.log1p(rate * math.expm1(brentq(excess, max(end - 0.5, 0), end, xtol=1e-13)))
    root = math.sqrt(2 * math.log(2 / delta) * steps * sampled**2)
    return min(steps * sampled, steps * sampled**2 / 2 + root)


@every_run
def test_published_is_theorem_6_then_2_then_1(run):
    expected = reference(run)
    assert expected > 0.01
    # Theorem 6's δ is off by 1e-13 (its terms are at most 1), which moves ε by that over δ's slope,
    # some δ of one step: 1e-6.
    assert spent("published", **run) == pytest.approx(expected, rel=1e-6)


@every_run
def test_one_dimension_is_plain_dp_sgd_by_theorems_1_and_2_and_proved(run):
    run = {**run, "dimension": 1}
    told = answer("published", **run)
    # The Gaussian's ε is enlarged by 1e-8.
    assert told.epsilon == pytest.approx(reference({**run, "batch_clip": None}), rel=1e-6)
    assert (told.guarantee, told.covers) == (Guarantee.PROVED, "every data set")
    assert told.epsilon >= spent("certified", **run) * (1 - 1e-3)


# WS Table III's ε = 0.5, and WS Theorem 6 denied.
def test_at_ws_own_setting_the_noise_is_0_27372_and_the_report_denies_the_budget():
    vit = {"dimension": 85_800_000, "sample_rate": 0.02, "num_users": 50_000, "steps": 500}
    with pytest.warns(PrivacyAssumptionWarning, match="covers no data set for certain"):
        sigma = opacus_shuffle.compute_noise_multiplier(
            "shuffled_fw", target_epsilon=0.5, target_delta=5e-6, bound="published", **vit
        )
    assert sigma == pytest.approx(0.27372, abs=5e-6)
    report = opacus_shuffle.privacy_report("shuffled_fw", noise_multiplier=sigma, delta=5e-6, **vit)
    told = {bound.bound: bound for bound in report.bounds}
    less = opacus_shuffle.privacy_bound(
        "shuffled_fw", noise_multiplier=sigma * (1 - 2e-4), delta=5e-6, bound="published", **vit
    )
    assert told["published"].epsilon <= 0.5 < less.epsilon
    assert 1.85 < told["pair"].lower <= told["pair"].epsilon == pytest.approx(1.92, abs=0.02)
    denied = "is no upper bound here: the pair of data sets of 'pair' has epsilon of at least 1.8"
    assert " ".join(str(report).split()).count(denied) == 1
    assert report.best is told["certified"]


# ---- what the bounds say of themselves


@single_steps
def test_what_is_about_single_steps_says_so_and_has_no_value_for_replacement(bound):
    told = answer(bound, **RUNS[2])
    assert told.guarantee is (Guarantee.PAIR if bound == "pair" else Guarantee.ESTIMATE)
    assert told.adversary.startswith("sees each step's permuted, noised gradient by itself")
    with pytest.raises(ValueError, match="certified"):
        answer(bound, adjacency="replace", **RUNS[2])


@single_steps
def test_of_several_layers_the_worst_counts(bound):
    layers = (10**6, 400, 20_000)
    alone = [spent(bound, **{**TEN, "dimension": d}) for d in layers]
    assert spent(bound, **{**TEN, "dimension": layers}) == max(alone) > alone[0]
    assert ShuffledWeights(noise_multiplier=1.0, num_users=1, dimension=(5,)).dimension == 5


def test_what_is_proved_knows_neither_dimension_nor_norm_and_no_bound_knows_the_scale():
    def of(bound, d, norm, clip=1.0):
        return spent(bound, **{**TEN, "dimension": d, "batch_clip": norm, "clip": clip})

    assert of("certified", 1, 0.3) == of("certified", 10**6, 30.0)
    # Products of the scale are rounded; slopes of log ε in log σ and log c′ are some tens here.
    for bound in ("published", "pair", "certified"):
        assert of(bound, 1000, 2.1, clip=7.0) == pytest.approx(of(bound, 1000, 0.3), rel=1e-12)


@pytest.mark.parametrize("ratio", [1.0, 1.5, 40.0])
def test_parameters_that_stay_count_as_the_gaussian_mechanism_that_they_are(ratio):
    stays = {"unshuffled_noise_multiplier": 0.3 * ratio}
    alone = spent("published", **{**TEN, "noise_multiplier": 0.3 * ratio, "dimension": 1})
    moves = spent("published", **TEN)
    assert spent("published", **TEN, **stays) == max(alone, moves)
    assert (alone > moves > 0) == (ratio < 2)
    for bound in ("pair", "certified"):
        assert spent(bound, **TEN, **stays) == spent(bound, **TEN)
    with pytest.raises(ValueError, match="unshuffled_noise_multiplier must be at least"):
        answer(**{**TEN, "unshuffled_noise_multiplier": 0.2})


# ---- the accountant
