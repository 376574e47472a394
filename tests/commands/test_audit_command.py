"""``opacus-shuffle audit``: its output, and runs with a seed."""

from __future__ import annotations

from helpers.command_json import checked_answer

from opacus_shuffle.commands.main import main


def test_a_seed_repeats_an_audit_that_does_not_contradict_the_certified_bound(capsys):
    def audited():
        assert main(["audit", "--steps", "200", "--seed", "1", "--json"]) == 0
        return checked_answer(capsys.readouterr().out)

    first = audited()
    assert first == audited()
    (result,) = first["audits"]
    assert [finding["name"] for finding in result["findings"]] == ["gradient"]
    assert 0 < result["findings"][0]["lower"]["epsilon"] <= result["claims"][0]["epsilon"]
    assert result["contradicted"] == []


def test_an_audit_prints_its_claim_and_its_finding(capsys):
    assert main(["audit", "--steps", "100", "--training-steps", "100"]) == 0
    printed = " ".join(capsys.readouterr().out.split())
    for text in ("claimed: certified <= 9.998", "found: gradient >=", "not thereby proved"):
        assert text in printed
