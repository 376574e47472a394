"""Checks of arguments name the argument whatever they are given; tests/test_bad_input.py tries many more values, slowly."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from opacus_shuffle import ShuffledSums, WeightShuffling, accountants, audit, sco
from opacus_shuffle.core import validation


@pytest.mark.parametrize(
    "value", [np.array([]), np.array(True), torch.tensor(True), torch.tensor([1.0, 2.0]), [], {}]
)
def test_no_array_is_one_of_the_choices(value):
    with pytest.raises(ValueError, match=r"^mode must be one of True, 'a', got"):
        validation.one_of("mode", value, (True, "a"))


def test_a_whole_number_may_have_a_largest_value():
    assert validation.integer("steps", 10, maximum=10) == 10
    with pytest.raises(
        ValueError, match=r"^steps must be a whole number of at least 1 \(and at most 10\), got 11"
    ):
        validation.integer("steps", 11, maximum=10)


@pytest.mark.parametrize(
    ("call", "named"),
    [
        (
            lambda: accountants.smallest_noise(
                lambda sigma: 1 / sigma, target_epsilon=1.0, lowest=float("nan")
            ),
            "lowest",
        ),
        (lambda: accountants.smallest_noise(None, target_epsilon=1.0), "epsilon"),
        (lambda: accountants.compute_bound(3, delta=1e-5), "rounds"),
        (lambda: accountants.bounds_of("shuffle_gauss"), "mechanism"),
        (lambda: ShuffledSums.of_protocol(None), "protocol"),
        (
            lambda: WeightShuffling(unshuffled_noise_multiplier=float("nan")),
            "unshuffled_noise_multiplier",
        ),
        (lambda: sco.Projection(lambda theta: theta, diameter=float("nan")), "diameter"),
        (lambda: audit.audit_gaussian(noise_multiplier=1.0, delta=1e-5, trials=10**15), "trials"),
        (
            lambda: audit.audit_permuted_gaussian(
                noise_multiplier=1, dimension=2, delta=0.1, steps=2**50, pair="oblique"
            ),
            "steps",
        ),
    ],
)
def test_what_hung_or_was_obscure_names_the_argument(call, named):
    with pytest.raises(ValueError, match=named):
        call()
