"""WS Theorem 6 against Eq. 83, term by term with many digits.

What solving it for ε promises is here, too. That the formula is no bound is shown by
``tests/accountants/test_shuffled_fw.py``, whose report denies it.
"""

import math

import mpmath
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from opacus_shuffle.analysis import gaussian
from opacus_shuffle.analysis.fenton_wilkinson import (
    compute_delta,
    compute_epsilon,
)


def equation_83(epsilon, sigma, d, c, batch_clip):
    """WS Eq. 25 with the letters of Eq. 83, in 80 digits."""
    with mpmath.workdps(80):
        epsilon, sigma, d, c, batch_clip = (
            mpmath.mpf(x) for x in (epsilon, sigma, d, c, batch_clip)
        )

        def spread(product):  # σ_Z, and the sum in ζ
            exponential = mpmath.exp(-d * product / ((d - 1) * sigma**2))
            total = 1 + (d - 1) * exponential
            return mpmath.sqrt(
                mpmath.log(
                    (1 + (d - 1) * exponential**2) / total**2 * mpmath.expm1(c**2 / sigma**2) + 1
                )
            ), mpmath.log(total)

        s1, log_total = spread(c * batch_clip)
        zeta1 = -log_total
        s2, log_total = spread(c * (c + batch_clip))
        zeta2 = -log_total - c**2 / sigma**2
        return mpmath.ncdf(s1 / 2 + (zeta1 - epsilon) / s1) - mpmath.exp(epsilon) * mpmath.ncdf(
            s2 / 2 + (zeta2 - epsilon) / s2
        )


def log_floats(low, high):
    return st.floats(math.log(low), math.log(high)).map(math.exp)


dimensions = st.floats(math.log(2), math.log(1e12)).map(lambda x: round(math.exp(x)))
clips = log_floats(0.01, 100)
norms = log_floats(0.01, 100)  # c'/c
ratios = log_floats(0.05, 50)  # σ/c
epsilons = st.floats(0, 8)
targets = log_floats(1e-10, 0.5)

# δ is the difference of two terms that are at most 1 where it is small; their arguments, below 20,
# have relative errors of some 2⁻⁵² that Φ, of slope 0.4 at most, passes on. The same for one more
# ulp of σ, from its multiplication by the clip.
ROUNDING = 1e-13


# ---- the formula
# ----------------------------------------------------------------------


# WS Theorem 6 at the pair of WS Lemma 2, by the terms of WS Lemma 3.
@given(epsilons, ratios, dimensions, clips, norms)
@example(0.1976, 0.27372, 85_800_000, 1.0, 1.0)
@example(0.0, 50.0, 2, 1.0, 1.0)
@example(1.0, 0.05, 10**12, 1.0, 1e-2)
def test_delta_is_equation_83(epsilon, ratio, d, clip, norm):
    sigma, batch_clip = ratio * clip, norm * clip
    delta = compute_delta(
        epsilon=epsilon, noise_std=sigma, dimension=d, clip=clip, batch_clip=batch_clip
    )
    assert abs(delta - equation_83(epsilon, sigma, d, clip, batch_clip)) <= 1e-10


@given(epsilons, ratios, clips, norms)
def test_one_coordinate_is_the_unshuffled_gaussian(epsilon, ratio, clip, norm):
    delta = compute_delta(
        epsilon=epsilon, noise_std=ratio * clip, dimension=1, clip=clip, batch_clip=norm * clip
    )
    # A difference of Φ(·) ≤ 1 and e^ε·Φ(·) ≤ 1: some ulps of 1.
    assert delta == pytest.approx(
        math.exp(gaussian.log_delta(mu=1 / ratio, epsilon=epsilon)), abs=1e-13
    )


@given(
    st.one_of(st.floats(0, 1e4), st.just(0.0)),
    log_floats(1e-6, 1e12),
    st.integers(1, 2**53),
    st.one_of(log_floats(1e-12, 1e12), st.just(0.0), st.just(math.inf)),
    log_floats(1e-300, 0.999),
)
def test_nothing_is_ever_nan(epsilon, ratio, d, norm, target):
    delta = compute_delta(epsilon=epsilon, noise_std=ratio, dimension=d, batch_clip=norm)
    assert delta <= 1
    assert not math.isnan(delta)
    root = compute_epsilon(noise_std=ratio, delta=target, dimension=d, batch_clip=norm)
    assert 0 <= root < math.inf


# ---- solving it


@settings(max_examples=20)
@given(ratios, targets, dimensions, norms)
def test_the_epsilon_found_is_enough_and_so_is_more_but_not_less(ratio, target, d, norm):
    rest = dict(noise_std=ratio, dimension=d, batch_clip=norm)
    epsilon = compute_epsilon(delta=target, **rest)
    assert compute_delta(epsilon=epsilon, **rest) <= target + ROUNDING
    for more in np.concatenate([np.geomspace(1e-9, 10, 300), np.linspace(0.01, 100, 300)]):
        assert compute_delta(epsilon=epsilon + more, **rest) <= target + ROUNDING
    if epsilon > 1e-6:
        below = epsilon * (1 - np.geomspace(1e-10, 1e-4, 25))
        assert max(compute_delta(epsilon=point, **rest) for point in below) > target
