"""Opacus creates the accountants by name, whatever is imported, reloaded or missing."""

from __future__ import annotations

import importlib
import multiprocessing
import os
import sys

import pytest
from helpers.accountants import (
    every_accountant,
)
from opacus.accountants import RDPAccountant, create_accountant, registry

import opacus_shuffle

pytestmark = pytest.mark.filterwarnings("ignore::opacus_shuffle.PrivacyAssumptionWarning")


@every_accountant
def test_opacus_creates_it_by_name(kind):
    assert create_accountant(kind.name).mechanism_class is kind


def reload_everything():
    importlib.reload(opacus_shuffle.accountants)
    create_accountant("shuffled_checkin")
    importlib.reload(opacus_shuffle)
    for name in [each for each in sys.modules if each.startswith("opacus_shuffle")]:
        del sys.modules[name]
    importlib.import_module("opacus_shuffle")
    create_accountant("shuffle_gauss")


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system does not fork")
def test_registration_survives_reloads():
    # In another process: here a second table of accountants would stand beside the one that tests
    # have imported.
    child = multiprocessing.get_context("fork").Process(target=reload_everything)
    child.start()
    child.join()
    assert child.exitcode == 0


@pytest.mark.parametrize("stranger", [RDPAccountant, lambda *, patience: RDPAccountant()])
def test_a_stranger_of_the_same_name_is_not_overwritten_and_nothing_else_is_registered(
    stranger, monkeypatch
):
    monkeypatch.setitem(registry._ACCOUNTANTS, "shuffled_checkin", stranger)
    monkeypatch.delitem(registry._ACCOUNTANTS, "shuffle_gauss")
    with pytest.raises(
        ValueError, match="already registered as shuffled_checkin: register those under other names"
    ):
        opacus_shuffle.accountants.register_accountants()
    assert registry._ACCOUNTANTS["shuffled_checkin"] is stranger
    assert "shuffle_gauss" not in registry._ACCOUNTANTS
