"""Mechanisms, bounds and accountants answer whatever one of their arguments is, or name it."""

import contextlib
import dataclasses

import pytest
from helpers.bad_calls import require_named_refusals
from opacus.accountants import create_accountant

import opacus_shuffle
from opacus_shuffle import (
    Guarantee,
    PrivacyBound,
    PrivacyReport,
    ShuffledCheckIn,
    ShuffledSums,
    ShuffleVectorSum,
    accountants,
)
from opacus_shuffle.core.guarantees import Adjacency, InconsistentBound

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


def load(state_dict):
    accountants.ShuffleAccountant(ShuffledCheckIn).load_state_dict(state_dict)


def answer_by_hand(**given):
    with contextlib.suppress(
        InconsistentBound
    ):  # what NaN, a negative epsilon and one below its lower value are
        PrivacyBound("m", "b", covers="every data set", **given)


PROTOCOL = ShuffleVectorSum(num_users=1000, dimension=4, max_norm=1.0, epsilon=2.0, delta=1e-5)
ANSWER = {
    "epsilon": 1.0,
    "delta": 1e-5,
    "adjacency": Adjacency.ZERO_OUT,
    "guarantee": Guarantee.PROVED,
    "rounds": 2,
}
HISTORY = {"rounds": [(ROUND, 2)]}
CALLS = {
    "sums": (ShuffledSums, fields_of(ShuffledSums.of_protocol(PROTOCOL))),
    "sums for a noise": (
        ShuffledSums.build,
        {"noise_multiplier": 2.0, "num_users": 1000, "sample_rate": 0.1, "dimension": 4},
    ),
    "sums of a protocol": (ShuffledSums.of_protocol, {"protocol": PROTOCOL, "num_users": 2000}),
    "sums in epochs": (ShuffledSums.of_protocol, {"protocol": PROTOCOL, "num_batches": 5}),
    "bound of one round": (
        opacus_shuffle.privacy_bound,
        {"mechanism": ROUND, "steps": 2, **QUESTION},
    ),
    "bound": (accountants.compute_bound, {**HISTORY, **QUESTION}),
    "names of bounds": (accountants.bounds_of, {"mechanism": ShuffledCheckIn}),
    "noise": (
        accountants.smallest_noise,
        {"epsilon": lambda sigma: 1 / sigma, "target_epsilon": 1.0},
    ),
    "report": (
        PrivacyReport,
        {**HISTORY, **REPORT, "simulated": False, "emulated": False, "rewound": 0},
    ),
    "epsilon of an accountant": (
        lambda **given: accountant().get_epsilon(**given),
        {**QUESTION, "orders": None},
    ),
    "bound of an accountant": (lambda **given: accountant().bound(**given), QUESTION),
    "report of an accountant": (lambda **given: accountant().report(**given), REPORT),
    "accountant": (
        lambda **given: accountants.ShuffleAccountant(ShuffledCheckIn, **given) and None,
        {"num_users": 100, "batch_size": 10, "local_noise": True},
    ),
    "state": (load, {"state_dict": accountant().state_dict()}),
    "answer made by hand": (answer_by_hand, ANSWER),
}


@pytest.mark.parametrize("name", CALLS)
def test_bad_arguments_are_named(name):
    call, arguments = CALLS[name]
    said = {"epsilon": None} if call is answer_by_hand else {}  # any number is one, or inconsistent
    require_named_refusals(call, arguments, **said)
