"""An account holds the releases that it says, or refuses.

That is so whatever forks, is saved, loaded, taken back or copied.

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

from opacus_shuffle.accountants.lineage import Lineage, number_of_rounds


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
        self.lineage.name_rounds(len(self.releases))

    def forked(self, process: int) -> Account:
        child = copy.deepcopy(self)
        child.process = process
        vars(child.lineage).update(vars(self.lineage))  # a fork keeps all, unlike a copy
        return child

    def loads(self, other: Account, *, allow_rewind: bool) -> None:
        told = json.loads(json.dumps(other.lineage.as_state(other.history)))
        lineage = Lineage.from_state(told, other.history)
        if allow_rewind or not self.releases:
            self.lineage, self.releases = self.lineage.rewound_to(lineage), list(other.releases)
        else:
            short, long = sorted((self.releases, other.releases), key=len)
            if long[: len(short)] != short:
                with pytest.raises(ValueError, match=r"another run .* or has parted"):
                    self.lineage.reconcile(self.history, lineage, other.history)
                return
            self.lineage, history = self.lineage.reconcile(self.history, lineage, other.history)
            assert number_of_rounds(history) == len(long)
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


@settings(max_examples=300)
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
        lambda state: {**state, "rounds": [["a", 4, 4]]},
        lambda state: {**state, "rounds": [[state["rounds"][0][0], 4, 3]]},
        lambda state: {**state, "digest": ""},
        lambda state: {"rounds": state["rounds"]},
        lambda state: {"digest": state["digest"]},
        lambda state: None,
    ],
)
def test_names_and_rounds_that_were_changed_are_refused(spoil):
    run = Lineage()
    run.name_rounds(4)
    state = run.as_state([("round", 4)])
    assert Lineage.from_state(state, [("round", 4)]) == run
    for names, rounds in ((spoil(state), [("round", 4)]), (state, [("round", 3)])):
        with pytest.raises(ValueError, match="changed after it was saved"):
            Lineage.from_state(names, rounds)


@pytest.mark.parametrize("entries", [[("loud", 2)], [("round", 1), ("loud", 1)]])
def test_the_same_rounds_held_differently_are_refused(entries):
    run = Lineage()
    run.name_rounds(2)
    saved = run.rewound_to(run)
    run.name_rounds(4)
    with pytest.raises(ValueError, match="changed after it was saved"):
        run.reconcile([("round", 4)], saved, entries)
