"""``opacus-shuffle train``, as a user types it: accuracy, and a table of ε with its meaning."""

from __future__ import annotations

import pytest
from helpers.command_json import checked_answer
from torch.utils.data import TensorDataset

from opacus_shuffle.accountants.mechanisms import MECHANISMS
from opacus_shuffle.commands import train as command
from opacus_shuffle.commands.image_datasets import load_image_dataset
from opacus_shuffle.commands.main import main
from opacus_shuffle.commands.train import TrainingSettings, train

pytestmark = pytest.mark.filterwarnings(
    "ignore::opacus_shuffle.PrivacyAssumptionWarning", "ignore:This run is not private"
)
SHORT = ["train", "--epochs", "1", "--batch-size", "40"]


@pytest.fixture
def few_images(monkeypatch):
    """Training takes a tenth of its images, in ten rounds of 40."""
    few = [TensorDataset(*images[:400]) for images in load_image_dataset("mnist-5k")]
    monkeypatch.setattr(command, "load_image_dataset", lambda *_: few)


@pytest.mark.parametrize("accountant", MECHANISMS)
def test_it_trains_and_ends_with_accuracy_and_the_table(capsys, few_images, accountant):
    assert main([*SHORT, "--accountant", accountant]) == 0
    printed = " ".join(capsys.readouterr().out.split())
    local = MECHANISMS[accountant].noise_is_local
    noise = "0.5 (each record's own)" if local else f"{0.5 * 40**0.5:g} (the sum's)"
    for word in ("test accuracy", "(400 held-out images of mnist-5k)", "certified", "PROVED"):
        assert word in printed
    if accountant != "shuffled_sums":  # whose grid has the noise asked for or a little more
        assert f"noise multiplier: {noise}, clipping norm 1" in printed
    assert f"{accountant}, 10 rounds" in printed
    assert ("permuted 10 times" in printed) is (accountant == "shuffled_fw")


@pytest.mark.parametrize(
    ("accountant", "bound"),
    [
        pytest.param("subsampled_shuffle", "pair", marks=pytest.mark.zoo),
        ("shuffled_fw", "published"),
    ],
)
def test_a_budget_is_met_by_the_bound_it_is_about_and_said_to_be_no_more(
    capsys, few_images, accountant, bound
):
    budget = ["--target-epsilon", "2", "--bound", bound]
    assert main([*SHORT, "--accountant", accountant, *budget, "--json"]) == 0
    printed = checked_answer(capsys.readouterr().out)
    spent = {row["bound"]: row["epsilon"] for row in printed["bounds"]}
    assert 1.99 < spent[bound] <= 2.0 < spent["certified"]
    quoted = next(row for row in printed["bounds"] if row["bound"] == printed["quote"])
    assert quoted["guarantee"] == "PROVED"
    assert main([*SHORT, "--accountant", accountant, *budget]) == 0
    assert f"the budget, 2, is what the bound {bound!r} says" in capsys.readouterr().out


@pytest.mark.parametrize(
    "accountant", ["shuffled_checkin", pytest.param("shuffled_fw", marks=pytest.mark.zoo)]
)
def test_a_seed_repeats_a_run_that_is_then_not_private_and_no_seed_does_not(few_images, accountant):
    def trained(seed):
        settings = {"epochs": 1, "batch_size": 100, "accountant": accountant}
        result = train(TrainingSettings(**settings, seed=seed))
        return next(result.model.parameters()), result.report.to_dict()["private"]

    (first, private), (again, _) = trained(0), trained(0)
    assert first.equal(again)
    assert not private
    (secret, private), (another, _) = trained(None), trained(None)
    assert not secret.equal(another)
    assert private


@pytest.mark.parametrize(("noise", "weak"), [("0.5", True), ("30", False)])
def test_a_run_that_will_protect_next_to_nothing_is_said_to_before_it_trains(
    capsys, few_images, noise, weak
):
    assert main([*SHORT, "--noise-multiplier", noise]) == 0
    printed = capsys.readouterr()
    assert ("protects next to nothing" in printed.err) is weak
    if weak:
        spent = printed.out.split("To quote: epsilon = ")[1].split()[0]
        assert f"a proved epsilon of {spent}" in printed.err
        assert "opacus-shuffle compare" in printed.err


@pytest.mark.slow
def test_the_default_run_learns_the_digits():
    result = train(TrainingSettings(seed=0))
    assert result.accuracy > 0.85
