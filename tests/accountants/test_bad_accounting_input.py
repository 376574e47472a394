"""Mechanisms, bounds and accountants answer whatever one of their arguments is, or name it."""

from __future__ import annotations

import contextlib
import dataclasses

import pytest
from helpers.bad_calls import require_named_refusals
from opacus.accountants import create_accountant

import opacus_shuffle
from opacus_shuffle import PrivacyBound, PrivacyReport, ShuffledCheckIn, ShuffledSums, ShuffleVectorSum, accountants
from opacus_shuffle.core.guarantees import InconsistentBound

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]
ROUND = ShuffledCheckIn(noise_multiplier=5.0, num_users=1000, sample_rate=0.1)
QUESTION = {"delta": 1e-5, "bound": "certified", "adjacency": "zero_out"}
REPORT = {"delta": 1e-5, "adjacency": "zero_out"}


def fields_of(record):
    return {field.name: getattr(record, field.name) for field in dataclasses.fields(record)}


def accountant():
    one = create_accountant("shuffled_checkin")
    one.record(ROUND)
    return one


def test_bad_arguments_of_sums_described_by_their_bits_are_named():
    protocol = ShuffleVectorSum(num_users=1000, dimension=4, max_norm=1.0, epsilon=2.0, delta=1e-5)
    require_named_refusals(ShuffledSums, fields_of(ShuffledSums.of_protocol(protocol)))
    run = {"noise_multiplier": 2.0, "num_users": 1000, "sample_rate": 0.1, "dimension": 4}
    require_named_refusals(ShuffledSums.build, run)
    require_named_refusals(ShuffledSums.of_protocol, {"protocol": protocol, "num_users": 2000})


def test_bad_arguments_of_bounds_are_named():
    require_named_refusals(opacus_shuffle.privacy_bound, {"mechanism": ROUND, "steps": 2, **QUESTION})
    require_named_refusals(accountants.compute_bound, {"rounds": [(ROUND, 2)], **QUESTION})
    baseline = {"rounds": [(ROUND, 2)], **REPORT, "baseline": "local"}
    require_named_refusals(accountants.compute_baseline, baseline)
    for names in (accountants.bounds_of, accountants.baselines_of):
        require_named_refusals(names, {"mechanism": ShuffledCheckIn})
    noise = {"epsilon": lambda sigma: 1 / sigma, "target_epsilon": 1.0, "lowest": 1e-3}
    require_named_refusals(accountants.smallest_noise, noise)


def test_bad_arguments_of_reports_are_named():
    options = {"simulated": False, "emulated": False, "rewound": 0}
    require_named_refusals(PrivacyReport, {"rounds": [(ROUND, 2)], **REPORT, **options})


def test_bad_arguments_of_accountants_are_named():
    require_named_refusals(lambda **given: accountant().get_epsilon(**given), {**QUESTION, "orders": None})
    require_named_refusals(lambda **given: accountant().bound(**given), QUESTION)
    require_named_refusals(lambda **given: accountant().report(**given), REPORT)
    sizes = {"num_users": 100, "batch_size": 10, "local_noise": True}
    require_named_refusals(lambda **given: accountants.ShuffleAccountant(ShuffledCheckIn, **given) and None, sizes)

    def load(state_dict):
        other = accountants.ShuffleAccountant(ShuffledCheckIn)
        other.load_state_dict(state_dict)

    require_named_refusals(load, {"state_dict": accountant().state_dict()})


def test_bad_arguments_of_answers_made_by_hand_are_named():
    answer = opacus_shuffle.privacy_bound(ROUND, steps=2, delta=1e-5)
    fields = {name: value for name, value in fields_of(answer).items() if not isinstance(value, str)}
    words = {name: value for name, value in fields_of(answer).items() if isinstance(value, str)}

    def make(**given):
        with contextlib.suppress(InconsistentBound):  # what NaN, a negative epsilon and one below its lower value are
            PrivacyBound(**words, **given)

    require_named_refusals(make, fields, epsilon=None, lower=None)
