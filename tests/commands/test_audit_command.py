"""``opacus-shuffle audit``: what it prints, what it writes, what it refuses."""

from __future__ import annotations

import pytest
from helpers.command_json import checked_answer

from opacus_shuffle.commands.audit import AuditSettings, audit_small_training
from opacus_shuffle.commands.main import main

FEW = ["--trials", "1000", "--steps", "20", "--seed", "0"]


def test_the_published_setting_prints_two_pairs_of_data_sets_and_what_was_claimed(capsys):
    assert main(["audit", "--kind", "published", *FEW]) == 0
    printed = " ".join(capsys.readouterr().out.split())
    assert printed.count("claimed: published <= 0.5") == 2
    assert printed.count("claimed: certified") == 2
    assert "found: largest coordinate >=" in printed
    assert "found: sum of coordinates >=" in printed
    assert "what it does not contradict it does not prove" in printed


@pytest.mark.zoo
def test_a_small_training_run_is_re_aligned_and_contradicts_the_formula_but_not_the_certificate(
    capsys,
):
    arguments = ["audit", "--kind", "training", "--training-steps", "600", "--seed", "1", "--json"]
    assert main(arguments) == 0
    (result,) = checked_answer(capsys.readouterr().out)["audits"]
    found = {finding["name"]: finding for finding in result["findings"]}
    claimed = {claim["bound"]: claim["epsilon"] for claim in result["claims"]}
    assert list(found) == ["gradient", "shuffled gradient", "re-aligned"]
    assert found["re-aligned"]["recovered"] == 1.0
    assert result["contradicted"] == ["published"]
    assert claimed["published"] < found["re-aligned"]["lower"]["epsilon"] <= claimed["certified"]


@pytest.mark.zoo
def test_a_seed_repeats_the_audit_of_a_training_run():
    settings = AuditSettings(training_steps=100, seed=3)
    first, second = (audit_small_training(settings).to_dict() for _ in range(2))
    assert first == second
