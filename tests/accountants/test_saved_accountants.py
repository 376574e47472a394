"""A saved accountant comes back as it was; a spoilt state, or one of another run, is refused and changes nothing."""

from __future__ import annotations

import copy
import dataclasses
import math
from collections import OrderedDict

import pytest
from helpers.accountants import (
    DELTA,
    accountant_of,
    every_accountant,
)

from opacus_shuffle import ShuffledCheckIn
from opacus_shuffle.accountants import ShuffleAccountant

pytestmark = pytest.mark.filterwarnings("ignore::opacus_shuffle.PrivacyAssumptionWarning")


@every_accountant
def test_state_survives_and_shares_nothing(kind):
    accountant = accountant_of(kind, [(2.0, 0.1, 5)], batch_size=100)
    state = accountant.state_dict()
    restored = ShuffleAccountant(kind)
    restored.load_state_dict(state)
    assert restored.get_epsilon(DELTA) == accountant.get_epsilon(DELTA)
    assert restored.state_dict() == state
    assert (restored.num_users, restored.batch_size, restored.emulated) == (1000, 100, False)
    restored.step(noise_multiplier=2.0, sample_rate=0.1)
    assert state["rounds"] == [(dataclasses.asdict(accountant.rounds[0][0]), 5)]
    assert accountant.history == [(2.0, 0.1, 5)]
    copied = copy.deepcopy(accountant)
    copied.step(noise_multiplier=9.0, sample_rate=0.1)
    assert accountant.history == [(2.0, 0.1, 5)]


def with_round(**changes):
    """Spoils the only round."""
    return lambda state: {**state, "rounds": [({**state["rounds"][0][0], **changes}, 5)]}


@every_accountant
@pytest.mark.parametrize(
    ("spoil", "named"),
    [
        (lambda state: {}, r"must hold mechanism, rounds"),
        (lambda state: None, r"must hold mechanism, rounds, .* got None"),
        (lambda state: {**state, "mechanism": "rdp"}, r"mechanism in state_dict must be one of"),
        (lambda state: {**state, "rounds": [((2.0,), 1)]}, r"rounds in state_dict must be"),
        (lambda state: {**state, "rounds": [(1, 2)]}, r"rounds in state_dict must be"),
        (
            with_round(noise_multiplier=math.nan),
            r"noise_multiplier must be a finite number, got nan",
        ),
        (with_round(sigma=1.0), r"a round of .* must hold noise_multiplier, num_users, .*'sigma'"),
        (
            lambda state: {**state, "rounds": [({"noise_multiplier": 2.0}, 5)]},
            r"a round of .* must hold noise_multiplier, num_users",
        ),
        (
            lambda state: {**state, "rounds": [(state["rounds"][0][0], 0)]},
            r"steps must be a whole number",
        ),
        (lambda state: {**state, "rounds": [3]}, r"rounds in state_dict must be a list of pairs"),
        (lambda state: {**state, "planned": {"noise_multiplier": 2.0}}, r"a round of .* must hold"),
        (lambda state: {**state, "fields": {"sigma": 1.0}}, r"unknown keyword.*sigma=1.0"),
        (lambda state: {**state, "fields": {3: 1.0}}, r"unknown keyword.*3=1.0"),
        (lambda state: {**state, "num_users": 999}, r"state_dict speaks of num_users=999"),
        (lambda state: {**state, "num_users": "x"}, r"num_users must be a number, got 'x'"),
        (
            lambda state: {**state, "batch_size": -1},
            r"batch_size must be a whole number of at least 1",
        ),
        (
            lambda state: {**state, "emulated": not state["emulated"]},
            r"state_dict speaks of .*emulated=True",
        ),
        (lambda state: {**state, "emulated": "no"}, r"emulated must be True or False, got 'no'"),
        (
            lambda state: {name: value for name, value in state.items() if name != "rounds"},
            r"must hold mechanism, rounds",
        ),
        (lambda state: {**state, "more": 1}, r"must hold mechanism, rounds, .*'more'"),
    ],
)
def test_a_spoilt_state_is_refused_and_changes_nothing(kind, spoil, named):
    accountant = accountant_of(kind, [(2.0, 0.1, 5)])
    assert accountant.rounds[0][1] == 5
    before = copy.deepcopy(accountant.__dict__)
    state = accountant.state_dict()
    spoilt = spoil(state)
    if isinstance(spoilt, dict):
        spoilt = OrderedDict(spoilt)
        spoilt._metadata = state._metadata
    with pytest.raises(ValueError, match=named):
        accountant.load_state_dict(spoilt)
    assert accountant.__dict__ == before


@every_accountant
@pytest.mark.parametrize("change", [{"num_users": 10**9}, {"sample_rate": 0.01}])
def test_a_saved_round_of_another_run_than_its_own_plan_or_population_is_refused(kind, change):
    if "sample_rate" in change and kind.sampling is None:
        change = {"num_users": 10**6}
    accountant = accountant_of(kind, [(2.0, 0.1, 5)])
    for planned in (None, accountant.rounds[0][0]):
        if planned is not None:
            accountant.plan(planned)
        elif kind.sampling is None or "sample_rate" in change:
            # nothing says what these were: a batch's size, or a rate, of a stock engine's run
            continue
        state = accountant.state_dict()
        state["rounds"] = [({**state["rounds"][0][0], **change}, 5)]
        with pytest.raises(ValueError, match="state_dict speaks of"):
            ShuffleAccountant(kind).load_state_dict(state)


@every_accountant
def test_a_saved_run_keeps_what_its_accountant_was_told_or_is_refused(kind):
    told = {"dimension": 50} if "dimension" in kind.field_names() else {}
    accountant = ShuffleAccountant(kind, batch_size=60, **told)
    for spoilt in [{"batch_size": 1}, *({**told, name: 2} for name in told)]:
        other = ShuffleAccountant(kind, **{"batch_size": 60, **told, **spoilt}).state_dict()
        with pytest.raises(ValueError, match="state_dict speaks of"):
            accountant.load_state_dict(other)
    accountant.load_state_dict(ShuffleAccountant(kind).state_dict())
    assert (accountant.batch_size, accountant.state_dict()["fields"]) == (60, told)


@pytest.mark.parametrize(
    "change", [{"num_users": 10**9}, {"emulated": False}, {"batch_size": 10**6}]
)
def test_what_turns_steps_into_rounds_cannot_be_changed_where_they_are_not_yet_rounds(change):
    accountant = ShuffleAccountant(
        ShuffledCheckIn
    )  # of a stock engine, which has not said how many users there are
    accountant.step(noise_multiplier=2.0, sample_rate=0.1)
    state = accountant.state_dict()
    assert state["rounds"] == [((2.0, 0.1), 1)]
    ShuffleAccountant(ShuffledCheckIn).load_state_dict(copy.deepcopy(state))
    state.update(change)
    with pytest.raises(ValueError, match="changed after it was saved"):
        ShuffleAccountant(ShuffledCheckIn).load_state_dict(state)


@pytest.mark.parametrize("name", ["predictable", "unchecked"])
def test_what_a_state_says_against_its_rounds_cannot_be_left_out(name):
    accountant = accountant_of(ShuffledCheckIn, [(2.0, 0.1, 5)])
    setattr(accountant, name, ("seed=0",))
    state = accountant.state_dict()
    restored = ShuffleAccountant(ShuffledCheckIn)
    restored.load_state_dict(state)
    assert restored.report(DELTA).to_dict()[name] == ["seed=0"]
    del state[name]
    with pytest.raises(ValueError, match="changed after it was saved"):
        ShuffleAccountant(ShuffledCheckIn).load_state_dict(state)
