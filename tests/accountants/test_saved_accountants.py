"""A saved accountant comes back as it was.

A malformed state, or one of another run, is refused and changes nothing.
"""

from __future__ import annotations

import copy
import dataclasses

import pytest
from helpers.accountants import DELTA, accountant_of, every_accountant
from hypothesis import given, settings
from hypothesis import strategies as st

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
    "noise below 0": with_round(noise_multiplier=-1.0),
    "a field of another mechanism": with_round(sigma=1.0),
    "half a round": lambda state: {**state, "rounds": [(state["rounds"][0][0], 0.5)]},
    "something else for rounds": lambda state: {**state, "rounds": 3},
    "no users": lambda state: {**state, "num_users": 0},
    "a plan without its fields": lambda state: {**state, "planned": {"noise_multiplier": 2.0}},
    "noise that is somewhere": lambda state: {**state, "emulated": None},
    "one name for a list": lambda state: {**state, "predictable": "seed=0"},
    "fewer than no rounds replaced": lambda state: {**state, "rewound": -1},
    "less": lambda state: {name: value for name, value in state.items() if name != "rounds"},
}


@pytest.mark.parametrize("spoil", SPOILT.values(), ids=SPOILT)
def test_a_malformed_state_is_refused_and_changes_nothing(spoil):
    state = accountant_of(ShuffledCheckIn, [(2.0, 0.1, 5)]).state_dict()
    accountant = ShuffleAccountant(ShuffledCheckIn)
    before = copy.deepcopy(accountant.__dict__)
    with pytest.raises(ValueError, match="state_dict of shuffled_checkin is malformed"):
        accountant.load_state_dict(spoil(state))
    assert accountant.__dict__ == before


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
            accountant.load_state_dict(other.state_dict(), allow_rewind=True)
    for one in (None, {}, {**others[0].state_dict(), "mechanism": "rdp"}):
        with pytest.raises(ValueError, match="mechanism in state_dict must be"):
            accountant.load_state_dict(one)
    assert accountant.__dict__ == before


ROUND = ShuffledCheckIn(noise_multiplier=2.0, num_users=100, sample_rate=0.1)
moves = st.tuples(st.sampled_from(["run", "load", "rewind"]), st.booleans())


@settings(max_examples=100)
@given(st.lists(moves, max_size=20))
def test_no_load_removes_a_round_that_ran_here_silently(moves):
    """Every round has a number of its own, as equal noise does not make equal rounds."""
    accountants = [ShuffleAccountant(ShuffledCheckIn) for _ in range(2)]
    accounted, ran = [[], []], [set(), set()]
    for number, (move, one) in enumerate(moves):
        accountant, state = accountants[one], accountants[not one].state_dict()
        if move == "run":
            accountant.record(ROUND)
            accounted[one].append(number)
        elif accounted[one] and move == "load":
            with pytest.raises(ValueError, match=r"already accounted here.*allow_rewind=True"):
                accountant.load_state_dict(state)
        else:
            accountant.load_state_dict(state, allow_rewind=move == "rewind")
            accounted[one] = list(accounted[not one])
            ran[one] |= ran[not one]
        ran[one] |= set(accounted[one])
        assert len(accountant) == len(accounted[one])
        assert accountant.rewound >= len(ran[one] - set(accounted[one]))
