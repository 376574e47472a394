"""Sums by shuffling answer whatever one of their arguments is, or name it."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from helpers.bad_calls import require_named_refusals

from opacus_shuffle.protocols import Messages, ShuffleScalarSum, ShuffleVectorSum, noise_variance

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]
GENERATOR = torch.Generator()
PROMISE = {"epsilon": 1.0, "delta": 1e-5, "calibration": "tight"}


def test_bad_arguments_of_protocols_are_named():
    sizes = {"num_users": 100, "dimension": 3, "max_norm": 1.0}
    rounds = {"honest_fraction": 1.0, "rounds": 2, "sample_rate": 0.5}
    require_named_refusals(ShuffleVectorSum, {**sizes, **PROMISE, **rounds})
    noise = {"noise_multiplier": 1.0, "delta": 1e-5, "honest_fraction": 1.0, "rounds": 2}
    require_named_refusals(ShuffleVectorSum.with_noise_multiplier, {**sizes, **noise})
    require_named_refusals(
        ShuffleScalarSum, {"num_users": 100, "max_value": 1.0, **PROMISE, "honest_fraction": 0.9}
    )
    require_named_refusals(noise_variance, {"dimension": 3, "max_norm": 1.0, **PROMISE})


def test_bad_arguments_of_sums_of_vectors_are_named():
    protocol = ShuffleVectorSum(num_users=20, dimension=3, max_norm=1.0, epsilon=5.0, delta=1e-5)
    require_named_refusals(protocol.randomize, {"x": torch.zeros(3), "generator": GENERATOR})
    require_named_refusals(protocol.simulate, {"X": torch.zeros(20, 3), "generator": GENERATOR})
    reports = [protocol.randomize(torch.zeros(3)) for _ in range(20)]
    require_named_refusals(protocol.shuffle, {"messages": reports, "generator": GENERATOR})
    require_named_refusals(protocol.analyze, {"messages": protocol.shuffle(reports)})


def test_bad_arguments_of_sums_of_numbers_are_named():
    protocol = ShuffleScalarSum(num_users=20, max_value=1.0, epsilon=5.0, delta=1e-5)
    require_named_refusals(protocol.randomize, {"x": 0.5, "generator": GENERATOR})
    users = ("X must hold", "num_users")
    require_named_refusals(
        protocol.simulate, {"x": torch.zeros(20), "generator": GENERATOR}, x=users
    )


def test_bad_arguments_of_messages_are_named():
    sizes = {"bits_per_report": 5, "granularity": 2, "num_reports": 1}
    require_named_refusals(Messages, {"bits": np.zeros((3, 1), np.uint8), **sizes})
