"""Sums by shuffling answer whatever one of their arguments is, or name it."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from helpers.bad_calls import require_named_refusals

from opacus_shuffle.protocols.calibration import noise_variance
from opacus_shuffle.protocols.messages import Messages
from opacus_shuffle.protocols.scalar_sum import ShuffleScalarSum
from opacus_shuffle.protocols.vector_sum import ShuffleVectorSum

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]
GENERATOR = torch.Generator()
PROMISE = {"epsilon": 1.0, "delta": 1e-5, "calibration": "tight"}
SIZES = {"num_users": 100, "dimension": 3, "max_norm": 1.0}
ROUNDS = {"honest_fraction": 1.0, "rounds": 2}
VECTORS = ShuffleVectorSum(20, 3, 1.0, 5.0, 1e-5)
NUMBERS = ShuffleScalarSum(20, 1.0, 5.0, 1e-5)
REPORTS = [VECTORS.randomize(torch.zeros(3)) for _ in range(20)]
CALLS = {
    "ShuffleVectorSum": (ShuffleVectorSum, {**SIZES, **PROMISE, **ROUNDS, "sample_rate": 0.5}, {}),
    "with_noise_multiplier": (
        ShuffleVectorSum.with_noise_multiplier,
        {**SIZES, **ROUNDS, "noise_multiplier": 1.0, "delta": 1e-5},
        {},
    ),
    "ShuffleScalarSum": (
        ShuffleScalarSum,
        {"num_users": 100, "max_value": 1.0, **PROMISE, "honest_fraction": 0.9},
        {},
    ),
    "noise_variance": (noise_variance, {"dimension": 3, "max_norm": 1.0, **PROMISE}, {}),
    "randomize": (VECTORS.randomize, {"x": torch.zeros(3), "generator": GENERATOR}, {}),
    "simulate": (VECTORS.simulate, {"X": torch.zeros(20, 3), "generator": GENERATOR}, {}),
    "shuffle": (VECTORS.shuffle, {"messages": REPORTS, "generator": GENERATOR}, {}),
    "analyze": (VECTORS.analyze, {"messages": VECTORS.shuffle(REPORTS)}, {}),
    "randomize a number": (NUMBERS.randomize, {"x": 0.5, "generator": GENERATOR}, {}),
    "simulate numbers": (
        NUMBERS.simulate,
        {"x": torch.zeros(20), "generator": GENERATOR},
        {"x": ("X must hold", "num_users")},
    ),
    "Messages": (
        Messages,
        {
            "bits": np.zeros((3, 1), np.uint8),
            "bits_per_report": 5,
            "granularity": 2,
            "num_reports": 1,
        },
        {},
    ),
}


@pytest.mark.parametrize("name", CALLS)
def test_bad_arguments_are_named(name):
    function, valid, said = CALLS[name]
    require_named_refusals(function, valid, **said)
