"""Whatever forks, is saved, loaded, taken back or copied: an account holds the releases that it says, or refuses.

Every round of the model has a number of its own, and all have the same noise, so that nothing but
names tells them apart.
"""

from __future__ import annotations

import copy
import json
import os
import pickle

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from opacus_shuffle.accountants.lineage import Lineage, count


class Account:
    """An account by its lineage, and the releases that it really holds and has ever known of."""

    def __init__(self, process: int) -> None:
        self.process, self.lineage, self.releases, self.known = process, Lineage(), [], set()

    @property
    def history(self) -> list[tuple[str, int]]:
        return [("round", len(self.releases))] if self.releases else []

    def run(self, release: int) -> None:
        self.releases.append(release)
        self.known.add(release)
        self.lineage.reach(len(self.releases))

    def forked(self, process: int) -> Account:
        child = copy.deepcopy(self)
        child.process, child.lineage._own = process, self.lineage._own  # as a forked process has it
        return child

    def loads(self, other: Account, *, allow_rewind: bool) -> None:
        told = json.loads(json.dumps(other.lineage.as_state(other.history)))
        lineage = Lineage.from_state(told, other.history, len(other.releases))
        if allow_rewind or not self.releases:
            self.lineage, self.releases = self.lineage.replaced_by(lineage), list(other.releases)
        else:
            short, long = sorted((self.releases, other.releases), key=len)
            if long[: len(short)] != short:
                with pytest.raises(ValueError, match=r"another run .* or has parted"):
                    self.lineage.longer_of(self.history, lineage, other.history)
                return
            self.lineage, history = self.lineage.longer_of(self.history, lineage, other.history)
            assert count(history) == len(long)
            self.releases = list(long)
        self.known |= other.known


steps = st.lists(
    st.tuples(
        st.sampled_from(["run", "run", "fork", "copy", "load", "rewind"]),
        st.integers(0, 99),
        st.integers(0, 99),
    ),
    min_size=5,
    max_size=40,
)


@settings(max_examples=300, deadline=None)
@given(steps)
def test_an_account_holds_every_release_of_its_run_once_and_tells_what_was_left_out(steps):
    accounts, getpid = [Account(1), Account(2)], os.getpid
    try:
        for number, (what, first, second) in enumerate(steps):
            one, other = accounts[first % len(accounts)], accounts[second % len(accounts)]
            os.getpid = lambda process=one.process: process
            if what == "run":
                one.run(number)
            elif what == "fork":
                accounts.append(one.forked(process=number + 3))
            elif what == "copy":
                accounts.append(pickle.loads(pickle.dumps(one)))
            else:
                one.loads(other, allow_rewind=what == "rewind")
            for account in accounts:
                assert account.lineage.rounds == len(account.releases) == len(set(account.releases))
                assert account.lineage.rewound == len(account.known - set(account.releases))
    finally:
        os.getpid = getpid


@pytest.mark.parametrize(
    "spoil",
    [
        lambda state: {**state, "rounds": [["a", 3, 3]]},
        lambda state: {**state, "rounds": state["rounds"] * 2},
        lambda state: {**state, "rounds": [[*state["rounds"][0][:2], 1]]},
        lambda state: {**state, "rounds": [[3, 4, 4]]},
        lambda state: {**state, "rounds": [[state["rounds"][0][0], True, 4]]},
        lambda state: {**state, "digest": ""},
        lambda state: {**state, "more": 1},
        lambda state: {"rounds": state["rounds"]},
        lambda state: None,
    ],
)
def test_names_that_were_changed_are_refused(spoil):
    run = Lineage()
    run.reach(4)
    state = run.as_state([("round", 4)])
    assert Lineage.from_state(state, [("round", 4)], 4) == run
    with pytest.raises(ValueError, match=r"changed|rounds .* in state_dict"):
        Lineage.from_state(spoil(state), [("round", 4)], 4)


@pytest.mark.parametrize("entries", [[("loud", 2)], [("round", 1), ("loud", 1)]])
def test_the_same_rounds_held_differently_are_refused(entries):
    run = Lineage()
    run.reach(2)
    saved = run.replaced_by(run)
    run.reach(4)
    with pytest.raises(ValueError, match="changed after it was saved"):
        run.longer_of([("round", 4)], saved, entries)
