"""Attacks: on PyTorch's generator, on permuted gradients, and on releases of shuffled weights."""

import math
import types

import mpmath
import numpy as np
import pytest
import torch
from generator_attack import contradictions
from helpers import attention_zoo, convolution_zoo, model_zoo
from helpers.canary_runs import DELTA, private
from helpers.model_zoo import build
from permuted_audits import (
    audit_published_setting,
    largest_coordinates,
    largest_normal,
    summed_coordinates,
)
from realignment import align
from released_weights import audit_released_weights
from scipy import stats

from opacus_shuffle.analysis import fenton_wilkinson
from opacus_shuffle.analysis.permuted_gaussian import pair_epsilon
from opacus_shuffle.analysis.shuffled_rounds import ShuffledRound, sampled_gaussian_epsilon
from opacus_shuffle.audit import audit_scores
from opacus_shuffle.core.randomness import SecretGenerator
from opacus_shuffle.permutation import find_permutations

SIZE = 25_600  # as many equations; their rank is 19,937, the bits of the Twister's state


@pytest.mark.slow
def test_pytorchs_noise_gives_its_generator_away():
    noise = torch.normal(0.0, 1.0, (SIZE,), generator=torch.Generator().manual_seed(7))
    assert contradictions(noise) == (19_937, 0, SIZE - 19_937)


@pytest.mark.slow
def test_no_twister_has_drawn_the_default_noise():
    rank, failing, holding = contradictions(SecretGenerator().normals(SIZE))
    assert rank == 19_937
    # Each equation that is left fails with probability one half; seven standard deviations: 3e-12.
    assert failing > (failing + holding) / 2 - 3.5 * math.sqrt(failing + holding)


def fixed(values):
    """A source of given exponentials."""
    return types.SimpleNamespace(standard_exponential=lambda size: np.array(values[:size]))


@pytest.mark.parametrize("count", [1, 2, 1000, 85_800_000, 5 * 10**14])
def test_the_largest_normal_is_the_quantile_it_should_be_far_into_the_tail(count):
    exponential = [1e-16, 1e-9, 1e-3, 0.5, 3.0, 30.0]
    largest = largest_normal(count, len(exponential), fixed(exponential))
    with mpmath.workdps(60):
        for z, e in zip(largest, exponential, strict=True):
            # The log of the largest one's distribution function at z must be −e. A relative error η
            # of z changes it by η·|z|·count·φ(z)/Φ(z); scipy's inverse has an error of 1e-13.
            z = mpmath.mpf(float(z))
            slope = abs(z) * count * mpmath.npdf(z) / mpmath.ncdf(z)
            assert abs(count * mpmath.log1p(-mpmath.ncdf(-z)) + e) <= 1e-13 * slope + 1e-15 * e


@pytest.mark.zoo
def test_the_largest_coordinate_is_that_of_vectors_drawn_in_full():
    """The Kolmogorov-Smirnov test of two samples of one distribution fails once in 10⁹."""
    rng, runs, sigma, dimension, steps, rate = np.random.default_rng(2), 100_000, 0.5, 3, 4, 0.3
    vectors = sigma * rng.standard_normal((runs, steps, dimension))
    null = vectors.max(axis=(1, 2)) / sigma
    vectors[..., 0] += rng.random((runs, steps)) < rate
    alternative = vectors.max(axis=(1, 2)) / sigma
    run = {"shift": 1 / sigma, "dimension": dimension, "steps": steps, "sample_rate": rate}
    drawn = largest_coordinates(**run, trials=runs, rng=rng)
    for full, short in zip((null, alternative), drawn, strict=True):
        assert stats.ks_2samp(full, short).pvalue > 1e-9


@pytest.mark.zoo
def test_the_score_is_the_likelihood_ratio_of_the_sum_of_a_permuted_vector():
    """Whole vectors are drawn, permuted and added up."""
    d, sigma, runs, rng = 7, 0.8, 40_000, np.random.default_rng(1)
    gradient = np.r_[0.0, np.full(d - 1, 1 / math.sqrt(d - 1))]
    permuted = rng.permuted(np.tile(gradient, (runs, 1)), axis=1)
    sums = (permuted + sigma * rng.standard_normal((runs, d))).sum(1) / (sigma * math.sqrt(d))
    mean = math.sqrt((d - 1) / d) / sigma
    direct = summed_coordinates(mean=mean, steps=1, sample_rate=1.0, trials=runs, rng=rng)[1]
    assert stats.ks_2samp(mean * sums - mean**2 / 2, direct).pvalue > 1e-6


def largest_of_twenty():
    """The exact ε of a pair, δ, and a function that draws the scores of an audit."""
    step = ShuffledRound(noise_multiplier=0.5, num_users=20, sample_rate=0.5, sampling="poisson")
    _, exact = pair_epsilon([(step, 3)], delta=0.05)
    run = {"shift": 1 / 0.5, "dimension": 20, "steps": 3, "sample_rate": 0.5, "trials": 2000}
    return exact, 0.05, lambda rng: largest_coordinates(**run, rng=rng)


def sum_of_four():
    """The same for the sum of four coordinates, whose ε is at most 0.1 % above the exact one."""
    noise = 2.0 * math.sqrt(4 / 3)
    step = ShuffledRound(noise_multiplier=noise, num_users=1, sample_rate=0.5, sampling="poisson")
    exact = sampled_gaussian_epsilon([(step, 3)], delta=0.02)
    run = {"mean": 1 / noise, "steps": 3, "sample_rate": 0.5, "trials": 2000}
    return exact, 0.02, lambda rng: summed_coordinates(**run, rng=rng)


@pytest.mark.zoo
@pytest.mark.parametrize("pair", [largest_of_twenty, sum_of_four])
def test_audits_exceed_the_exact_epsilon_of_the_pair_no_more_often_than_stated(pair):
    exact, delta, draw = pair()
    rng, audits, confidence = np.random.default_rng(3), 300, 0.5
    errors = sum(
        audit_scores(*draw(rng), delta=delta, confidence=confidence).epsilon > exact
        for _ in range(audits)
    )
    assert errors <= stats.binom.isf(1e-9, audits, 1 - confidence)


# WS Table VI.
@pytest.mark.parametrize(("pair", "least"), [("all_but_one", 5.0), ("oblique", 4.0)])
def test_the_sum_shows_more_than_the_formula_claims(pair, least):
    result = audit_published_setting(target_epsilon=0.5, pair=pair, trials=20_000, seed=1)
    assert [claim.bound for claim in result.claims] == ["published", "certified"]
    assert [claim.bound for claim in result.contradicted] == ["published"]
    # Without errors, 10,000 counted runs would show log(10,000/3.7).
    assert least < result.largest.lower.epsilon <= math.log(10_000)


ZOO = {**model_zoo.NETWORKS, **convolution_zoo.CONVOLUTIONS, **attention_zoo.TRANSFORMERS}
# Plain layers, one factor twice in a tensor, channels inside groups, residual streams, packed and
# separate heads.
ARCHITECTURES = (
    "mlp",
    "mixture_of_experts",
    "conv_net",
    "grouped_conv",
    "resnet",
    "torch_encoder_post_norm",
    "opacus_encoder",
    "torch_encoder_decoder",
)
LEVELS = ("paper", "heads", "residual")
DISPLACEMENTS = (0.0, 0.01, 0.1, 0.3)


def spec_of(name, level="residual", **options):
    module, sample = build(ZOO[name], **options)
    return module, find_permutations(module, sample, groups=level)


def copies(module):
    return {name: value.detach().clone() for name, value in module.state_dict().items()}


def released(spec, before, displacement, seed):
    """A later release, displaced by a fraction of each tensor's root mean square, and its plan."""
    generator = torch.Generator().manual_seed(seed)
    after = {
        name: value
        + displacement
        * value.double().square().mean().sqrt()
        * torch.randn(value.shape, generator=generator)
        for name, value in before.items()
    }
    after = {name: value.to(before[name].dtype) for name, value in after.items()}
    for name, aliases in spec.aliases.items():
        after |= {alias: after[name] for alias in aliases}
    displaced = {name: value.clone() for name, value in after.items()}
    plan = spec.sample(generator)
    spec.move({name: [after[name]] for name in spec.blocks}, plan)
    return after, plan, displaced


@pytest.mark.parametrize(
    ("name", "level", "options"),
    [
        ("mlp", "residual", {}),
        pytest.param("torch_encoder_post_norm", "residual", {}, marks=pytest.mark.zoo),
        pytest.param(
            "torch_encoder_post_norm", "residual", {"dtype": torch.float32}, marks=pytest.mark.zoo
        ),
        ("torch_encoder_post_norm", "residual", {"dtype": torch.bfloat16}),
        *(
            pytest.param(name, level, {}, marks=pytest.mark.zoo)
            for name in ARCHITECTURES
            for level in LEVELS
        ),
    ],
)
def test_every_row_is_put_back_after_steps_of_up_to_30_percent(name, level, options):
    module, spec = spec_of(name, level, **options)
    before = copies(module)
    for seed, displacement in enumerate(DISPLACEMENTS):
        after, plan, displaced = released(spec, before, displacement, seed)
        alignment = align(spec, before, after)
        assert alignment.recovered(plan) == 1.0
        assert alignment.plan == plan
        undone = alignment.undo(after)
        assert all(torch.equal(undone[key], displaced[key]) for key in displaced)
        assert all(undone[key].dtype == before[key].dtype for key in before)


PER_LAYER = {"clipping": "per_layer", "max_grad_norm": [0.5] * 4}


def audit(run, steps=100):
    generator = torch.Generator().manual_seed(9)
    return audit_released_weights(**run, steps=steps, delta=DELTA, generator=generator)


@pytest.mark.parametrize(
    ("mode", "options"),
    [
        ("hooks", {}),
        *(pytest.param(mode, {}, marks=pytest.mark.zoo) for mode in ("functorch", "ghost")),
        pytest.param("hooks", PER_LAYER, marks=pytest.mark.zoo),
    ],
)
def test_an_adversary_who_sees_released_weights_sees_the_gradients(mode, options):
    result = audit(private(shuffle_weights=True, sigma=0.3, mode=mode, **options))
    gradient, _, realigned = result.findings
    assert realigned.recovered == 1.0
    # In double precision the scores agree except for rounding, so the counts are the same.
    assert realigned.lower == gradient.lower
    assert gradient.lower.epsilon > 0


@pytest.mark.zoo
def test_theorem_6_is_below_what_the_shuffled_gradients_show():
    """All other gradients are zero, which meets the conditions of the theorem.

    The orbit of the canary's entry has 8 entries, however, and not 8032.
    """
    sizes = {"sizes": (1000, 8, 3), "sigma": 0.4, "dtype": torch.float32}
    run = private("shuffled_fw", **sizes, shuffle_weights=True, batch_clip=1.0)
    result = audit({**run, "loss": lambda model, batch: 0.0 * model(batch[0]).sum()}, steps=300)
    published, certified = result.claims
    d = run["engine"].accountant.planned.dimension
    formula = fenton_wilkinson.compute_epsilon(noise_std=0.4, delta=DELTA, dimension=d)
    assert published.epsilon == formula
    gradient, shuffled, realigned = (finding.lower.epsilon for finding in result.findings)
    assert published.epsilon < shuffled < gradient <= certified.epsilon
    assert abs(realigned - gradient) < 0.5  # Single precision.
    assert result.contradicted == (published,)
