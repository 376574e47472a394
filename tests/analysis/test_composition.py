"""From RDP to (ε, δ), the unshuffled Gaussian, and noise from a budget."""

from __future__ import annotations

import math
import warnings

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from opacus_shuffle.analysis import composition, gaussian, mean_ratio
from opacus_shuffle.analysis.composition import RELATIVE_ERROR, OrderCapWarning, epsilon_from_rdp

TABLE_1 = {"noise_multiplier": 9.48, "num_users": 60_000}
DELTA = 1 / 60_000


def rounds(count):
    return lambda orders: count * mean_ratio.compute_rdp(orders=orders, **TABLE_1)


# SG Table 1, row "Ours".
def test_table_1_of_the_paper_comes_out_with_orders_up_to_thirty():
    ours = [
        epsilon_from_rdp(rounds(count), delta=DELTA, orders=range(2, 31))[0]
        for count in range(1, 8)
    ]
    assert [round(value, 5) for value in ours] == [
        0.22820,
        0.22820,
        0.22821,
        0.22821,
        0.22821,
        0.22822,
        0.22822,
    ]


# SG Figure 1a (arXiv), with and without shuffling; no numbers are printed.
@pytest.mark.parametrize("count", [1, 10, 100, 1000, 10_000])
def test_shuffling_gains_more_than_a_hundredfold(count):
    shuffled, _ = epsilon_from_rdp(rounds(count), delta=DELTA)
    assert shuffled < gaussian.compute_epsilon(mu=count**0.5 / 9.48, delta=DELTA) / 100


# SG Lemma 1, SG Lemma 2: rounds add up, and the best order is taken.
@settings(max_examples=10)
@given(st.floats(0.5, 30), st.integers(1, 10**5), st.integers(1, 10**4), st.floats(1e-12, 0.1))
def test_epsilon_is_the_minimum_over_all_orders_and_rounded_up(sigma, users, count, delta):
    def rdp(orders):
        return count * mean_ratio.compute_rdp(
            noise_multiplier=sigma, num_users=users, orders=orders
        )

    with warnings.catch_warnings():
        warnings.simplefilter("error", OrderCapWarning)
        try:
            epsilon, order = epsilon_from_rdp(rdp, delta=delta)
        except OrderCapWarning:
            return
    top = int(2 * order) + 64
    orders = np.arange(2, min(top, mean_ratio.MAX_ORDER))
    lemma = rdp(orders) + (
        math.log(1 / delta) + (orders - 1) * np.log1p(-1 / orders) - np.log(orders)
    ) / (orders - 1)
    best = max(lemma.min(), 0.0)
    assert epsilon <= best * (1 + 2 * RELATIVE_ERROR) + 1e-15
    if order >= 2:
        assert epsilon >= best


def test_the_cap_on_orders_warns_and_stays_valid():
    with pytest.warns(OrderCapWarning, match="16384"):
        epsilon, order = epsilon_from_rdp(lambda orders: 1e-13 * orders, delta=1e-9)
    assert order == mean_ratio.MAX_ORDER
    assert 0 < epsilon < 1e-2


def test_an_rdp_that_is_not_finite_never_becomes_an_epsilon():
    with pytest.raises(ValueError, match="not finite"):
        epsilon_from_rdp(lambda orders: np.full_like(orders, np.nan), delta=1e-5)
    with pytest.raises(ValueError, match="not finite"):
        epsilon_from_rdp(lambda orders: np.where(orders > 5, np.inf, 1.0), delta=1e-5)


def test_the_conversion_is_opacus_own():
    from opacus.accountants.analysis.rdp import get_privacy_spent

    orders = [2.0, 5.0, 9.0, 17.0]
    rdp = [0.01 * order for order in orders]
    theirs, _ = get_privacy_spent(orders=orders, rdp=rdp, delta=1e-5)
    ours, _ = composition.epsilon_from_rdp(lambda vector: 0.01 * vector, delta=1e-5, orders=orders)
    assert theirs <= ours <= theirs * (1 + 2 * RELATIVE_ERROR)
