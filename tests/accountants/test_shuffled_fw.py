"""``shuffled_fw`` from plain numbers: each bound against a reference of its own, and what it says it is worth."""

from __future__ import annotations

import json
import math
import warnings

import mpmath
import numpy as np
import pytest
from opacus.accountants import PRVAccountant
from scipy.integrate import trapezoid
from scipy.stats import norm as normal

import opacus_shuffle
from opacus_shuffle import Guarantee, PrivacyAssumptionWarning
from opacus_shuffle.accountants import ShuffleAccountant, compute_baseline, compute_bound
from opacus_shuffle.accountants.mechanisms import ShuffledWeights
from opacus_shuffle.analysis import gaussian

pytestmark = pytest.mark.filterwarnings("ignore::opacus_shuffle.PrivacyAssumptionWarning")

DELTA = 1e-5
VIT = {"dimension": 85_800_000, "sample_rate": 0.02, "num_users": 50_000, "steps": 500}
"""WS Table I, ViT on CIFAR-100, at the clippings c = c′ = 1; δ = 5e-6, ε = 0.5."""

# A budget that WS's formula answers with numbers above zero in every one of these.
RUNS = [
    {"noise_multiplier": 0.27372, "sample_rate": 0.02, "steps": 500, "dimension": 85_800_000},
    {"noise_multiplier": 0.5, "sample_rate": 1.0, "steps": 1, "dimension": 2},
    {
        "noise_multiplier": 1.0,
        "sample_rate": 0.1,
        "steps": 30,
        "dimension": 1000,
        "batch_clip": 50.0,
    },
    {
        "noise_multiplier": 0.4,
        "sample_rate": 0.05,
        "steps": 2000,
        "dimension": 10**6,
        "clip": 0.1,
        "batch_clip": 0.2,
    },
    {"noise_multiplier": 0.3, "sample_rate": 0.5, "steps": 7, "dimension": 300, "batch_clip": 0.4},
    {
        "noise_multiplier": 2.0,
        "sample_rate": 0.25,
        "steps": 12,
        "dimension": 360,
        "batch_clip": math.inf,
    },
]
every_run = pytest.mark.parametrize("run", RUNS, ids=lambda run: f"d={run['dimension']}")


def answer(bound="published", *, delta=DELTA, adjacency="zero_out", **run):
    """One bound on equal steps."""
    steps = run.pop("steps", 1)
    mechanism = ShuffledWeights(num_users=run.pop("num_users", 1), **run)
    return compute_bound([(mechanism, steps)], delta=delta, bound=bound, adjacency=adjacency)


def spent(bound="published", **run):
    return answer(bound, **run).epsilon


# ---- certified
# --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("sigma", "rate", "steps", "delta"),
    [(1.0, 0.01, 1000, 1e-5), (0.7, 0.1, 50, 1e-6), (4.0, 0.5, 100, 1e-5), (0.5, 0.02, 10, 1e-4)],
)
def test_certified_is_opacus_own_prv_accountant_at_the_same_noise(sigma, rate, steps, delta):
    accountant = PRVAccountant()
    accountant.history = [(sigma, rate, steps)]
    composed = accountant._get_dprv(eps_error=0.01, delta_error=delta / 1000)
    below, _, above = composed.compute_epsilon(delta, delta / 1000, 0.01)
    ours = spent(
        "certified",
        noise_multiplier=sigma,
        sample_rate=rate,
        steps=steps,
        delta=delta,
        dimension=10**6,
    )
    assert below <= ours <= 1.001 * above
    assert above - below < 0.1 * above


@pytest.mark.parametrize(
    ("sigma", "rate", "delta"), [(1.0, 0.5, 1e-5), (0.8, 0.1, 1e-4), (3.0, 0.9, 1e-6)]
)
def test_replacement_covers_the_record_that_turns_round_and_costs_no_more_than_two_records_left_out(
    sigma, rate, delta
):
    run = {"noise_multiplier": sigma, "sample_rate": rate, "dimension": 100}
    zero_out, replace = (
        spent("certified", delta=delta, adjacency=each, **run) for each in ("zero_out", "replace")
    )
    assert zero_out < replace

    # Gradient −c in place of c: the divergence of the two mixtures where one exceeds the other, by
    # the trapezoidal rule on a smooth function but for one kink: an error below the step squared,
    # 1e-8·σ², times δ''s slopes, of at most e^ε/σ².
    y = np.arange(-14 * sigma - 1, 14 * sigma + 1, 1e-4 * sigma)
    with_it, instead = (
        (1 - rate) * normal.pdf(y, 0, sigma) + rate * normal.pdf(y, at, sigma) for at in (1, -1)
    )
    found = trapezoid(np.maximum(with_it - math.exp(replace) * instead, 0), y)
    assert found <= delta * (1 + 1e-6)

    # (ε, δ′) twice is (2ε, δ′ + e^ε·δ′). The share δ′ is solved for within 0.2 % here.
    share = delta
    while share * (1 + math.exp(spent("certified", delta=share, **run))) > delta * (1 - 0.002):
        share /= 2
    assert replace <= 2 * spent("certified", delta=share, **run)


def test_replacement_of_a_record_that_always_takes_part_is_the_gaussian_at_distance_two():
    exact = gaussian.compute_epsilon(mu=2 * math.sqrt(7) / 3.0, delta=DELTA)
    assert (
        spent("certified", noise_multiplier=3.0, steps=7, dimension=100, adjacency="replace")
        == exact
    )


@pytest.mark.parametrize("delta", [1e-5, 1e-300, pytest.param(0.5, marks=pytest.mark.zoo)])
@pytest.mark.parametrize("sigma", [1e-6, 0.02, 0.3, 1e6])
def test_epsilon_is_a_number_however_little_or_much_the_noise(sigma, delta):
    for bound, adjacency in [
        ("certified", "zero_out"),
        ("certified", "replace"),
        ("published", "zero_out"),
        ("pair", "zero_out"),
    ]:
        for steps, rate in [(1, 1.0), (3000, 0.1)]:
            run = {
                "noise_multiplier": sigma,
                "sample_rate": rate,
                "steps": steps,
                "dimension": 1000,
            }
            found = spent(bound, adjacency=adjacency, delta=delta, **run)
            assert 0 <= found < math.inf


# ---- published
# ------------------------------------------------------------------------------------------------------


def reference_delta(epsilon, sigma, d, c, batch_clip):
    """WS Eq. 30, 35, 36 and 38 for Lemma 2's vectors: ⟨f, g⟩ is cc′ in place and −cc′/(d−1) elsewhere; f′ = f + g."""
    log_c = -epsilon + (c**2 + 2 * c * batch_clip) / (2 * sigma**2)

    def below(product):
        same, other = (mpmath.exp(inner / sigma**2) for inner in (product, -product / (d - 1)))
        total, squares = same + (d - 1) * other, same**2 + (d - 1) * other**2
        variance = mpmath.log(squares / total**2 * mpmath.expm1(c**2 / sigma**2) + 1)
        mean = mpmath.log(total) + c**2 / (2 * sigma**2) - variance / 2
        return mpmath.ncdf((log_c - mean) / mpmath.sqrt(variance))

    return below(c * batch_clip) - mpmath.exp(epsilon) * below(c * (c + batch_clip))


def reference_step(delta, sigma, d, c, batch_clip):
    """The ε from which on one step keeps within δ: from far out, where it does, inwards, then halved."""
    if d == 1 or batch_clip == math.inf:  # the Gaussian mechanism

        def excess(epsilon):
            mu = mpmath.mpf(c) / sigma
            return (
                mpmath.ncdf(mu / 2 - epsilon / mu)
                - mpmath.exp(epsilon) * mpmath.ncdf(-mu / 2 - epsilon / mu)
                - delta
            )
    else:
        sigma, c, batch_clip = (mpmath.mpf(x) for x in (sigma, c, batch_clip))

        def excess(epsilon):
            return reference_delta(epsilon, sigma, d, c, batch_clip) - delta

    high, step = mpmath.mpf(400), mpmath.mpf(1)
    while high > step and excess(high) <= 0:
        high -= step
    low, high = high, high + step
    if excess(low) <= 0:
        low = mpmath.mpf(0)
        if excess(low) <= 0 and excess(high / 2) <= 0:
            return low
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if excess(middle) > 0 else (low, middle)
    return high


def reference_paper(run, *, delta=DELTA, split=0.5):
    """WS Theorems 6, 2 and 1, one after the other."""
    with mpmath.workdps(60):
        rate, steps, clip = mpmath.mpf(run["sample_rate"]), run["steps"], run.get("clip", 1.0)
        each = split * mpmath.mpf(delta) / (rate * steps)
        step = reference_step(
            each,
            run["noise_multiplier"] * clip,
            run["dimension"],
            clip,
            run.get("batch_clip", clip),
        )
        sampled = mpmath.log1p(rate * mpmath.expm1(step))
        root = mpmath.sqrt(
            2 * mpmath.log(1 / ((1 - split) * mpmath.mpf(delta))) * steps * sampled**2
        )
        return float(min(steps * sampled, steps * sampled**2 / 2 + root))


@every_run
def test_published_is_theorem_6_then_2_then_1(run):
    expected = reference_paper(run)
    assert expected > 0.01
    # The code's δ is off by 1e-13 (its terms are at most 1), which moves ε by that over δ's slope,
    # some δ of one step: 1e-6.
    assert spent("published", **run) == pytest.approx(expected, rel=1e-6)


@every_run
def test_one_dimension_is_plain_dp_sgd_by_theorems_1_and_2_and_proved(run):
    run = {**run, "dimension": 1}
    found = answer("published", **run)
    assert found.epsilon == pytest.approx(
        reference_paper(run), rel=1e-7
    )  # the Gaussian's ε is enlarged by 1e-8
    assert found.epsilon >= reference_paper(run)
    assert found.guarantee is Guarantee.PROVED
    assert found.covers == "every data set"
    assert found.epsilon >= spent("certified", **run) * (1 - 1e-3)
    mechanism = ShuffledWeights(
        num_users=1, **{key: value for key, value in run.items() if key != "steps"}
    )
    baseline = compute_baseline([(mechanism, run["steps"])], delta=DELTA, baseline="composition")
    assert baseline.epsilon == found.epsilon
    assert answer("published_optimised", **run).guarantee is Guarantee.PROVED


def test_at_ws_own_setting_the_noise_is_0_27372_and_the_report_denies_the_budget():
    with pytest.warns(PrivacyAssumptionWarning, match="covers no data set for certain"):
        sigma = opacus_shuffle.compute_noise_multiplier(
            "shuffled_fw", target_epsilon=0.5, target_delta=5e-6, bound="published", **VIT
        )
    assert sigma == pytest.approx(0.27372, abs=5e-6)
    report = opacus_shuffle.privacy_report("shuffled_fw", noise_multiplier=sigma, delta=5e-6, **VIT)
    found = {bound.bound: bound for bound in report.bounds}
    assert found["published"].epsilon == pytest.approx(0.5, rel=1e-6)
    assert found["pair"].lower > 1.85 > 3 * found["published"].epsilon
    assert found["pair"].epsilon == pytest.approx(1.92, abs=0.02)
    printed = " ".join(str(report).split())
    for name in ("published", "published_optimised"):
        assert f"{name} (0." in printed
    assert (
        printed.count(
            "is no upper bound here: the pair of data sets of 'pair' has epsilon of at least 1.8"
        )
        == 2
    )
    assert report.best is found["certified"]
    assert report.best.epsilon > 100


# ---- what the bounds say of themselves
# --------------------------------------------------------------------------------------


@pytest.mark.parametrize("bound", ["published", "published_optimised", "pair"])
def test_what_is_about_single_steps_says_so_and_has_no_value_for_replacement(bound):
    found = answer(bound, **RUNS[2])
    assert found.guarantee is (Guarantee.PAIR if bound == "pair" else Guarantee.ESTIMATE)
    assert found.adversary.startswith("sees each step's permuted, noised gradient by itself")
    with pytest.raises(ValueError, match="certified"):
        answer(bound, adjacency="replace", **RUNS[2])


@pytest.mark.parametrize("bound", ["published", "published_optimised", "pair"])
def test_of_several_layers_the_worst_counts(bound):
    layers = (10**6, 400, 20_000)
    run = {"noise_multiplier": 0.3, "sample_rate": 0.1, "steps": 10}
    found = spent(bound, dimension=layers, **run)
    assert (
        found
        == max(spent(bound, dimension=d, **run) for d in layers)
        > spent(bound, dimension=10**6, **run)
    )
    assert ShuffledWeights(noise_multiplier=1.0, num_users=1, dimension=(5,)).dimension == 5


def test_what_is_proved_knows_neither_the_dimension_nor_the_clippings_and_costs_no_less_than_the_estimates():
    run = {"noise_multiplier": 0.3, "sample_rate": 0.1, "steps": 10}
    for bound in ("published", "pair"):
        few, many = (spent(bound, dimension=d, **run) for d in (10, 10**6))
        assert many < few
    large, small = (
        spent("published", dimension=1000, batch_clip=norm, **run) for norm in (30.0, 0.3)
    )
    assert small < large
    assert (
        len(
            {
                spent("certified", dimension=d, batch_clip=norm, **run)
                for d in (1, 10**6)
                for norm in (0.3, 30.0)
            }
        )
        == 1
    )
    assert spent("published_optimised", dimension=1000, **run) <= spent(
        "published", dimension=1000, **run
    )
    # Products of the scale are rounded; slopes of log ε in log σ and log c′ are some tens here.
    for bound in ("published", "pair", "certified"):
        scaled = spent(bound, dimension=1000, clip=7.0, batch_clip=2.1, **run)
        assert scaled == pytest.approx(
            spent(bound, dimension=1000, clip=1.0, batch_clip=0.3, **run), rel=1e-12
        )


@pytest.mark.parametrize("ratio", [1.0, 1.5, 40.0])
def test_parameters_that_stay_count_as_the_gaussian_mechanism_that_they_are(ratio):
    run = {"noise_multiplier": 0.3, "sample_rate": 0.1, "steps": 10}
    stays = {"unshuffled_noise_multiplier": 0.3 * ratio}
    alone = spent("published", **{**run, "noise_multiplier": 0.3 * ratio}, dimension=1)
    moves = spent("published", dimension=10**6, **run)
    assert spent("published", dimension=10**6, **run, **stays) == max(alone, moves)
    assert (alone > moves > 0) == (ratio < 2)
    for bound in ("pair", "certified"):
        assert spent(bound, dimension=10**6, **run, **stays) == spent(bound, dimension=10**6, **run)
    with pytest.raises(ValueError, match="unshuffled_noise_multiplier must be at least"):
        ShuffledWeights(
            num_users=1, noise_multiplier=0.5, dimension=9, unshuffled_noise_multiplier=0.4
        )


# ---- the accountant
# ---------------------------------------------------------------------------------------------------------


def planned(**changes):
    run = {"noise_multiplier": 1.0, "sample_rate": 0.1, "dimension": 1000, "batch_clip": 50.0}
    return ShuffledWeights(**{**run, **changes})


def accountant(**weights):
    found = ShuffleAccountant(ShuffledWeights, **{"dimension": 1000, "batch_clip": 50.0, **weights})
    found.history = [(1.0, 0.1, 30)]
    return found


def test_it_can_be_told_of_the_weights_when_it_is_asked():
    known, unknown = accountant(), ShuffleAccountant(ShuffledWeights)
    unknown.history = known.history
    with pytest.raises(ValueError, match=r"does not know dimension.*engine\.accountant\.plan"):
        unknown.get_epsilon(DELTA)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        told = [
            unknown.get_epsilon(DELTA, bound="published", dimension=1000, batch_clip=50.0)
            for _ in range(2)
        ]
    assert told == [known.get_epsilon(DELTA, bound="published")] * 2
    assert sum(issubclass(each.category, PrivacyAssumptionWarning) for each in caught) == 1
    assert known.get_epsilon(DELTA, bound="published", dimension=1000, clip=1.0) == told[0]
    for other in ({"dimension": 1001}, {"batch_clip": 1.0}, {"clip": 2.0}):
        with pytest.raises(ValueError, match="leave it out"):
            known.get_epsilon(DELTA, **other)
    unknown.plan(planned())
    assert unknown.get_epsilon(DELTA, bound="published") == told[0]


STEP = {"num_users": 10, "steps": 1, "sample_rate": 1.0, "dimension": 5}


def test_a_tiny_batch_clip_has_every_bound_and_an_infinite_one_is_json():
    report = opacus_shuffle.privacy_report(
        "shuffled_fw", noise_multiplier=1.0, delta=1e-5, batch_clip=1e-20, **STEP
    )
    assert {row.bound for row in report.bounds} >= {"published", "pair", "certified"}
    unclipped = opacus_shuffle.privacy_report(
        "shuffled_fw", noise_multiplier=1.0, delta=1e-5, batch_clip=math.inf, **STEP
    )
    written = json.dumps(unclipped.to_dict(), allow_nan=False)
    assert json.loads(written)["settings"][0]["batch_clip"] is None
