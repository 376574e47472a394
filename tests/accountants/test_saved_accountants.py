"""A saved accountant comes back as it was.

A spoilt state, or one of another run, is refused and changes nothing.
"""

from __future__ import annotations

import copy
import dataclasses
from collections import OrderedDict

import pytest
from helpers.accountants import DELTA, accountant_of, every_accountant

from opacus_shuffle import ShuffledCheckIn
from opacus_shuffle.accountants import ShuffleAccountant

pytestmark = pytest.mark.filterwarnings("ignore::opacus_shuffle.PrivacyAssumptionWarning")


@every_accountant
def test_state_survives_and_shares_nothing(kind):
    accountant = accountant_of(kind, [(2.0, 0.1, 5)], batch_size=100)
    accountant.predictable, accountant.unchecked = ("seed=0",), ("a file",)
    state = accountant.state_dict()
    restored = ShuffleAccountant(kind)
    restored.load_state_dict(state)
    assert restored.get_epsilon(DELTA) == accountant.get_epsilon(DELTA)
    assert restored.state_dict() == state
    assert (restored.num_users, restored.batch_size, restored.emulated) == (1000, 100, False)
    report = restored.report(DELTA).to_dict()
    assert (report["predictable"], report["unchecked"]) == (["seed=0"], ["a file"])
    restored.step(noise_multiplier=2.0, sample_rate=0.1)
    copied = copy.deepcopy(accountant)
    copied.step(noise_multiplier=9.0, sample_rate=0.1)
    assert state["rounds"] == [(dataclasses.asdict(accountant.rounds[0][0]), 5)]
    assert accountant.history == [(2.0, 0.1, 5)]


def with_round(**changes):
    """Spoils the only round."""
    return lambda state: {**state, "rounds": [({**state["rounds"][0][0], **changes}, 5)]}


SPOILT = {
    "more noise": with_round(noise_multiplier=9.0),
    "a smaller sample": with_round(sample_rate=0.01),
    "a field of another mechanism": with_round(sigma=1.0),
    "more users in a round": with_round(num_users=10**9),
    "fewer rounds": lambda state: {**state, "rounds": [(state["rounds"][0][0], 1)]},
    "no rounds": lambda state: {**state, "rounds": []},
    "something else for rounds": lambda state: {**state, "rounds": 3},
    "more users": lambda state: {**state, "num_users": 10**9},
    "a smaller batch": lambda state: {**state, "batch_size": 1},
    "noise of the sum": lambda state: {**state, "emulated": True},
    "another plan": lambda state: {**state, "planned": {"noise_multiplier": 2.0}},
    "no seed": lambda state: {**state, "predictable": []},
    "no file": lambda state: {**state, "unchecked": []},
    "less": lambda state: {name: value for name, value in state.items() if name != "rounds"},
    "more": lambda state: {**state, "more": 1},
}


@pytest.mark.parametrize("spoil", SPOILT.values(), ids=SPOILT)
def test_a_state_that_was_changed_is_refused_and_changes_nothing(spoil):
    accountant = accountant_of(ShuffledCheckIn, [(2.0, 0.1, 5)])
    accountant.predictable, accountant.unchecked = ("seed=0",), ("a file",)
    state = accountant.state_dict()
    spoilt = OrderedDict(spoil(state))
    spoilt._metadata = state._metadata
    for one in (accountant, ShuffleAccountant(ShuffledCheckIn)):
        before = copy.deepcopy(one.__dict__)
        with pytest.raises(ValueError, match="changed after it was saved; load the checkpoint"):
            one.load_state_dict(spoilt)
        assert one.__dict__ == before


@every_accountant
def test_the_state_of_another_run_is_refused_and_changes_nothing(kind):
    accountant = ShuffleAccountant(
        kind, num_users=1000, batch_size=100, local_noise=kind.noise_is_local
    )
    accountant.plan(accountant_of(kind, [(2.0, 0.1, 5)]).rounds[0][0])
    before = copy.deepcopy(accountant.__dict__)
    differences = [
        {"num_users": 999},
        {"batch_size": 99},
        *([{"local_noise": False}] if kind.noise_is_local else []),
        *([{"dimension": 50}] if "dimension" in kind.field_names() else []),
    ]
    others = [accountant_of(kind, [(2.0, 0.1, 5)], **changed) for changed in differences]
    if kind.sampling is not None:  # of a smaller rate than the plan's
        others.append(accountant_of(kind, [(2.0, 0.05, 5)]))
    for other in others:
        with pytest.raises(ValueError, match=r"state_dict is of a run .*this accountant of one"):
            accountant.load_state_dict(other.state_dict())
    state = others[0].state_dict()
    for one in (None, {}, {**state, "mechanism": "rdp"}, dict(state), OrderedDict(state)):
        with pytest.raises(
            ValueError, match=r"mechanism in state_dict must be|has lost its _metadata"
        ):
            accountant.load_state_dict(one)
    assert accountant.__dict__ == before
