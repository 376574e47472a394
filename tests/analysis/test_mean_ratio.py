"""Exact moments of the mean ratio against slow references, and SG Theorems 2 and 3 as printed."""

import math

import mpmath
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from scipy import integrate
from scipy.stats import binom, norm

from opacus_shuffle import compute_epsilon
from opacus_shuffle.analysis import mean_ratio, subsampling

# The documented relative error of compute_rdp; every comparison with an exact value uses it.
RELATIVE_ERROR = 1e-10

sigmas = st.floats(0.3, 100.0)
populations = st.integers(1, 10**9)
rates = st.floats(1e-3, 1.0)


def mp_rdp(*, noise_multiplier, num_users, order, rate=1.0, sampling=None):
    """λ!/n^λ·[x^λ] A(x)^n by binary powering with 80 digits."""
    with mpmath.workdps(80):
        u = 1 / mpmath.mpf(noise_multiplier) ** 2
        gamma = mpmath.mpf(rate)
        moments = [mpmath.exp(u * k * (k - 1) / 2) for k in range(order + 1)]
        users = num_users
        if sampling == "poisson":
            moments = [1 if k == 0 else 1 - gamma + gamma * a for k, a in enumerate(moments)]
        if sampling == "fixed_size":
            users = round(rate * num_users)
            gamma = mpmath.mpf(users) / num_users

        def product(a, b):
            return [mpmath.fsum(a[i] * b[m - i] for i in range(m + 1)) for m in range(order + 1)]

        base = [a / mpmath.factorial(k) for k, a in enumerate(moments)]
        power = [mpmath.mpf(1)] + [mpmath.mpf(0)] * order
        exponent = users
        while exponent:
            if exponent % 2:
                power = product(power, base)
            exponent //= 2
            base = product(base, base) if exponent else base
        means = [power[k] * mpmath.factorial(k) / mpmath.mpf(users) ** k for k in range(order + 1)]
        if sampling == "fixed_size":
            total = mpmath.fsum(
                mpmath.binomial(order, j) * (1 - gamma) ** (order - j) * gamma**j * means[j]
                for j in range(order + 1)
            )
        else:
            total = means[order]
        return mpmath.log(total) / (order - 1)


# SG Theorem 1, whose sum is the coefficient of a power of a series (SG Algorithm 1).
# Fewer users than orders; check-in: 2n + 2 on either side of the order exercises both ways to
# raise a series to a power.
@settings(max_examples=40)
@example(0.5, 1, 60, 1.0, None)
@example(30.0, 17, 60, 1.0, None)
@example(3.0, 29, 60, 0.3, "poisson")
@example(0.5, 30, 61, 0.3, "poisson")
@given(
    sigmas, populations, st.integers(2, 24), rates, st.sampled_from([None, "poisson", "fixed_size"])
)
def test_rdp_matches_eighty_digit_series_powers(sigma, users, order, rate, sampling):
    rate = 1.0 if sampling is None else rate
    if sampling == "fixed_size" and round(rate * users) < 1:
        return
    exact = mp_rdp(
        noise_multiplier=sigma, num_users=users, order=order, rate=rate, sampling=sampling
    )
    rdp = mean_ratio.compute_rdp(
        noise_multiplier=sigma, num_users=users, orders=order, sample_rate=rate, sampling=sampling
    )
    assert rdp == pytest.approx(float(exact), rel=RELATIVE_ERROR)


# SG Corollary 1.
@given(sigmas, populations, rates, st.sampled_from([None, "poisson"]))
def test_rdp_never_exceeds_unshuffled(sigma, users, rate, sampling):
    orders = np.array([1.01, 1.5, 2, 2.5, 3, 7.3, 20, 40])
    rdp = mean_ratio.compute_rdp(
        noise_multiplier=sigma,
        num_users=users,
        orders=orders,
        sample_rate=1.0 if sampling is None else rate,
        sampling=sampling,
    )
    assert np.all(rdp > 0)
    assert np.all(rdp <= orders / (2 * sigma**2))


# SG Definition 3: the divergence as an integral.
@pytest.mark.zoo
def test_fractional_orders_lie_above_the_truth():
    sigma = 1.0
    for order in (1.5, 2.5, 3.3):

        def moment(y, x, order=order):
            ratio = (
                math.exp((2 * x - 1) / (2 * sigma**2)) + math.exp((2 * y - 1) / (2 * sigma**2))
            ) / 2
            return ratio**order * norm.pdf(x, scale=sigma) * norm.pdf(y, scale=sigma)

        truth, error = integrate.dblquad(moment, -8, 12, -8, 12, epsabs=1e-7)
        rdp = mean_ratio.compute_rdp(noise_multiplier=sigma, num_users=2, orders=order)
        assert rdp >= math.log(truth - error) / (order - 1)


def theorem_2(order, sigma, reports, rate):
    """E[R^λ] by Theorem 2, from the exact RDP of that many reports: λ an integer, term by term."""

    def shuffled(power):  # e^{(j−1)·ε(j)}
        rdp = mean_ratio.compute_rdp(noise_multiplier=sigma, num_users=reports, orders=power)
        return math.exp((power - 1) * rdp)

    second = min(4 * (shuffled(2) - 1), 2 * shuffled(2))
    total = 1 + rate**2 * math.comb(order, 2) * second
    return total + sum(
        2 * rate**power * math.comb(order, power) * shuffled(power) for power in range(3, order + 1)
    )


def theorem_3(order, sigma, users, rate, slack):
    """The RDP by Theorem 3 at one Δ: few reports have the probability e^{−Δ²nγ/2} at most."""
    few = math.exp(-(slack**2) * users * rate / 2) * theorem_2(order, sigma, 1, rate)
    many = theorem_2(order, sigma, int((1 - slack) * users * rate) + 1, rate)
    return math.log(few + many) / (order - 1)


# SG Theorem 2, SG Theorem 3.
def test_theorems_match_the_twenty_digit_values(reference):
    for row in reference["subsampled_shuffle_theorem2_rdp"]:
        rdp = subsampling.compute_rdp(
            noise_multiplier=row["sigma"],
            num_users=row["n"],
            sample_rate=row["m"] / row["n"],
            orders=row["order"],
            sampling="fixed_size",
        )
        assert rdp == pytest.approx(float(row["rdp"]), rel=1e-10), row
    for row in reference["shuffled_checkin_theorem3_rdp"]:
        setting = row["sigma"], row["n"], row["rate"]
        printed = theorem_3(row["order"], *setting, row["Delta"])
        assert printed == pytest.approx(float(row["rdp"]), rel=1e-9), row


# SG Figure 1a (ICLR), SG Appendix D: (12, 1e-5)-local reports have the first σ where any other
# report is a neighbour, the second where one of zero is. Appendix D's orders end at 20.
@pytest.mark.parametrize(
    ("sigma", "users", "steps", "top", "epsilon"),
    [
        (0.8633, 60_000, 1000, 2000, 0.522),
        (0.4316, 60_000, 100_000, 2000, 6.44),
        *(
            pytest.param(*run, marks=pytest.mark.zoo)
            for run in [
                (0.8633, 60_000, 10_000, 2000, 0.558),
                (0.8633, 60_000, 100_000, 2000, 0.709),
                (0.4316, 60_000, 1000, 2000, 3.41),
                (0.4316, 60_000, 10_000, 2000, 4.97),
            ]
        ),
        (0.8633, 50_000, 8333, 20, 0.578),
        (0.4316, 50_000, 8333, 20, 5.005),
    ],
)
@pytest.mark.filterwarnings("ignore::opacus_shuffle.PrivacyAssumptionWarning")
def test_the_papers_runs_have_the_epsilon_that_the_errata_say(sigma, users, steps, top, epsilon):
    run = {"noise_multiplier": sigma, "num_users": users, "sample_rate": 60 / users}
    how = {"steps": steps, "delta": 1e-5, "bound": "published", "orders": range(2, top + 1)}
    found = compute_epsilon("subsampled_shuffle", **run, **how)
    assert float(f"{found:.{len(str(epsilon)) - 2}f}") == epsilon


# SG Equation 11 (ICLR), SG Equation 17 (arXiv), with k/n in the place of γ and the round in which
# nobody reports.
@settings(max_examples=25)
@given(st.floats(0.4, 10.0), st.integers(1, 30), st.floats(0.01, 0.99), st.integers(2, 12))
def test_check_in_is_the_mixture_over_how_many_report(sigma, users, rate, order):
    setting = {"noise_multiplier": sigma, "num_users": users, "orders": order}
    moments = [1.0] + [
        math.exp(
            (order - 1)
            * mean_ratio.compute_rdp(sample_rate=k / users, sampling="fixed_size", **setting)
        )
        for k in range(1, users + 1)
    ]
    mixture = binom.pmf(range(users + 1), users, rate) @ moments
    exact = mean_ratio.compute_rdp(sample_rate=rate, sampling="poisson", **setting)
    # 1 + x has an error of 1e-16, and so has x, which may be far below 1.
    assert math.exp((order - 1) * exact) == pytest.approx(mixture, rel=1e-9)


@pytest.mark.parametrize(
    ("sigma", "users", "rate"),
    [(2.0, 500, 0.1), (1.0, 40, 0.3), (5.0, 10**5, 0.01), (3.0, 9, 0.05)],
)
@pytest.mark.parametrize("order", [2, 3, 9])
def test_theorem_3_takes_the_best_of_32_values_of_delta(sigma, users, rate, order):
    # Of those that leave the same number of reports the largest counts, which is the best.
    slacks = np.geomspace(min(0.5, 1 / math.sqrt(users * rate)), 1.0, 32)
    best = min(theorem_3(order, sigma, users, rate, float(slack)) for slack in slacks)
    rdp = subsampling.compute_rdp(
        noise_multiplier=sigma,
        num_users=users,
        sample_rate=rate,
        orders=order,
        sampling="poisson",
    )
    assert rdp == pytest.approx(best, rel=1e-9)


@given(st.floats(0.3, 20.0), st.integers(2, 10**6), st.floats(0.01, 0.9))
def test_theorem_2_is_never_below_the_exact_value(sigma, users, rate):
    if round(rate * users) < 1:
        return
    setting = {"noise_multiplier": sigma, "num_users": users, "sample_rate": rate}
    printed, exact = (
        module.compute_rdp(sampling="fixed_size", orders=np.arange(2, 33), **setting)
        for module in (subsampling, mean_ratio)
    )
    assert np.all(printed >= exact * (1 - 1e-10))


def test_theorem_3_as_printed_can_fall_below_the_exact_value_of_its_own_pair():
    # Why the accountants take the larger of the two: with n·γ < 1 the rate given one participant is
    # 1/n, not γ.
    setting = {"num_users": 2, "sample_rate": 1e-4, "sampling": "poisson", "orders": 40}
    printed, exact = (
        module.compute_rdp(noise_multiplier=2.0, **setting) for module in (subsampling, mean_ratio)
    )
    assert (printed, exact) == (pytest.approx(0.0178, abs=1e-4), pytest.approx(4.0708, abs=1e-4))
