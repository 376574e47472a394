"""``opacus-shuffle audit``: its output, and runs with a seed."""

from helpers.command_json import checked_answer

from opacus_shuffle.commands.main import main
from opacus_shuffle.core.rounding import round_down


def test_a_seed_repeats_an_audit_that_does_not_contradict_the_certified_bound(capsys):
    arguments = ["audit", "--steps", "100", "--noise-multiplier", "0.2", "--seed", "1"]
    assert main([*arguments, "--json"]) == 0
    (result,) = checked_answer(capsys.readouterr().out)["audits"]
    found = result["findings"][0]["lower"]["epsilon"]
    assert 0 < found <= result["claims"][0]["epsilon"]
    assert result["contradicted"] == []
    assert main(arguments) == 0
    printed = " ".join(capsys.readouterr().out.split())
    for text in ("claimed: certified <=", f"found: gradient >= {round_down(found)} ", "from below"):
        assert text in printed
