"""Opacus creates the accountants by name, whatever is imported, reloaded or missing."""

from __future__ import annotations

import subprocess
import sys

import pytest
from helpers.accountants import (
    every_accountant,
)
from opacus.accountants import create_accountant, register_accountant

import opacus_shuffle

pytestmark = pytest.mark.filterwarnings("ignore::opacus_shuffle.PrivacyAssumptionWarning")


@every_accountant
def test_opacus_creates_it_by_name(accountant_class):
    assert type(create_accountant(accountant_class.mechanism())) is accountant_class


# In another process: here a second table of accountants would stand beside the one that tests have imported.
IMPORTED_AND_RELOADED = """
import importlib, sys
for name in ('matplotlib', 'mlxtend', 'tqdm', 'flwr', 'transformers', 'triton'):
    sys.modules[name] = None
import opacus_shuffle, opacus_shuffle.accountants, opacus_shuffle.commands.main
print('without extras', flush=True)
from opacus.accountants import create_accountant
importlib.reload(opacus_shuffle.accountants)
create_accountant('shuffled_checkin')
print('accountants reloaded', flush=True)
importlib.reload(opacus_shuffle)
for name in [each for each in sys.modules if each.startswith('opacus_shuffle')]:
    del sys.modules[name]
import opacus_shuffle
create_accountant('shuffle_gauss')
print('all imported anew', flush=True)
"""


@pytest.fixture(scope="module")
def fresh_interpreter():
    """What a fresh interpreter printed that imported everything, reloaded the accountants, and then all."""
    return subprocess.run([sys.executable, "-c", IMPORTED_AND_RELOADED], capture_output=True, text=True, check=False)


@pytest.mark.parametrize("done", ["without extras", "accountants reloaded", "all imported anew"])
def test_importing_needs_none_of_the_extras_and_registration_survives_reloads(fresh_interpreter, done):
    assert done in fresh_interpreter.stdout.splitlines(), fresh_interpreter.stderr


def test_a_stranger_of_the_same_name_is_not_overwritten():
    from opacus.accountants import RDPAccountant
    from opacus.accountants.registry import _ACCOUNTANTS

    ours = _ACCOUNTANTS["shuffle_gauss"]
    register_accountant("shuffle_gauss", RDPAccountant, force=True)
    try:
        with pytest.raises(ValueError, match="already registered"):
            opacus_shuffle.accountants.register_accountants()
    finally:
        register_accountant("shuffle_gauss", ours, force=True)
