"""Checks of arguments name the argument; tests/test_bad_input.py tries many more values, slowly."""

import functools
import math
import sys
from fractions import Fraction

import numpy as np
import pytest
import torch

from opacus_shuffle import ShuffledSums, WeightShuffling, accountants, audit, sco
from opacus_shuffle.core import validation
from opacus_shuffle.core.guarantees import Guarantee, PrivacyBound


@pytest.mark.parametrize(
    ("check", "low", "high"),
    [
        (validation.positive, 5e-324, sys.float_info.max),
        (validation.not_negative, 0.0, sys.float_info.max),
        (functools.partial(validation.positive, infinite=True), 5e-324, math.inf),
        (functools.partial(validation.not_negative, infinite=True), 0.0, math.inf),
        (validation.moderate, 1e-100, 1e100),
        (validation.noise_level, 1e-6, 1e12),
        (validation.open_unit_interval, 5e-324, 1 - 2.0**-53),
        (validation.sampling_rate, 5e-324, 1.0),
        (validation.integer, 1, 2**53),
        (functools.partial(validation.integer, minimum=0, maximum=10), 0, 10),
    ],
)
def test_a_range_has_its_ends_and_nothing_beyond(check, low, high):
    assert (check("steps", low), check("steps", high)) == (low, high)
    below = low - 1 if isinstance(low, int) else np.nextafter(low, -1.0)
    above = high + 2 if isinstance(low, int) else np.nextafter(high, math.inf)
    bad = [below, math.nan, -math.inf, True, "1", None, 1j, [1.0], np.array([1.0])]
    for value in [*bad, torch.tensor(1.0), *([] if high == math.inf else [above, math.inf])]:
        with pytest.raises(ValueError, match=r"^steps must "):
            check("steps", value)


def test_numbers_of_other_types_are_taken_for_what_they_are():
    assert validation.finite_number("rate", Fraction(1, 4)) == 0.25
    assert validation.integer("steps", 60_000.0) == 60_000
    with pytest.raises(ValueError, match="rate must be a finite number, got inf"):
        validation.finite_number("rate", Fraction(10**400, 3))
    with pytest.raises(ValueError, match=r"^steps must be a whole number of at least 1 .*\(and at"):
        validation.integer("steps", 2.5)


@pytest.mark.parametrize(
    "value", [np.array([]), np.array(True), torch.tensor(True), torch.tensor([1.0, 2.0]), [], {}]
)
def test_no_array_is_one_of_the_choices(value):
    with pytest.raises(ValueError, match=r"^mode must be one of True, 'a', got"):
        validation.one_of("mode", value, (True, "a"))


@pytest.mark.parametrize("orders", [1.0, [], [2.0, 1.0], [math.nan], 101, "many", [[2.0]], None])
def test_orders_are_numbers_above_one_that_are_not_too_large(orders):
    assert validation.renyi_orders(2, maximum=100).tolist() == [2.0]
    for several in ((1.5, 100), iter([1.5, 100])):
        assert validation.renyi_orders(several, maximum=100).tolist() == [1.5, 100]
    with pytest.raises(ValueError, match=r"^orders must be .* in \(1, 100\]"):
        validation.renyi_orders(orders, maximum=100)


def test_a_place_that_is_taken_is_refused_but_for_the_same_definition_again():
    first, again = (type("Mine", (), {}) for _ in range(2))
    validation.check_unregistered("the name", None, first)
    validation.check_unregistered("the name", first, again)
    for holder, newcomer in ((first, dict), (lambda: 1, lambda: 2), (dict, None)):
        with pytest.raises(ValueError, match=r"the name belongs to .*: choose another name"):
            validation.check_unregistered("the name", holder, newcomer)


def test_unknown_keywords_are_listed_with_what_may_have_been_meant():
    with pytest.raises(
        ValueError, match=r"f\(\) got .*sigm=1.0.*known: delta, sigma.*did you mean sigma"
    ):
        validation.reject_unknown("f()", {"sigm": 1.0}, ["sigma", "delta"])
    with pytest.raises(ValueError, match="did you mean --sigma"):
        validation.reject_unknown("f()", {"sigm": 1.0}, parameters={"sigma": "--sigma"})


bound_with = functools.partial(
    PrivacyBound,
    **{"mechanism": "shuffle_gauss", "bound": "certified", "epsilon": 0.25, "delta": 1e-5},
    **{"adjacency": "zero_out", "guarantee": Guarantee.PROVED, "covers": "all", "rounds": 1},
)


@pytest.mark.parametrize(
    ("call", "named"),
    [
        (
            lambda: accountants.smallest_noise(lambda x: 1 / x, target_epsilon=math.nan),
            "target_epsilon",
        ),
        (lambda: accountants.smallest_noise(None, target_epsilon=1.0), "epsilon"),
        (lambda: accountants.compute_bound(3, delta=1e-5), "rounds"),
        (lambda: accountants.bounds_of("shuffle_gauss"), "mechanism"),
        (lambda: ShuffledSums.of_protocol(None), "protocol"),
        (lambda: WeightShuffling(unshuffled_noise_multiplier=math.nan), "unshuffled_noise_mult"),
        (lambda: sco.L2Ball(math.nan), "radius"),
        (lambda: bound_with(epsilon="0.1"), "epsilon"),
        (lambda: bound_with(lower="0.1"), "lower"),
        (lambda: bound_with(epsilon=True), "epsilon must be a number"),
        (lambda: audit.audit_gaussian(noise_multiplier=1.0, delta=1e-5, trials=10**15), "trials"),
    ],
)
def test_what_hung_or_was_obscure_names_the_argument(call, named):
    with pytest.raises(ValueError, match=named):
        call()
