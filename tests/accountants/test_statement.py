"""A statement is what people paste into papers: it leaves out nothing that the report says, and promises no more."""

from __future__ import annotations

import pytest

from opacus_shuffle import ShuffledCheckIn, ShuffledSums, ShuffleGauss
from opacus_shuffle.accountants.report import PrivacyReport
from opacus_shuffle.core.rounding import round_up

CHECK_IN = ShuffledCheckIn(noise_multiplier=5.0, num_users=60_000, sample_rate=0.1)


def test_a_statement_names_the_model_and_all_numbers_that_the_accounting_was_made_with():
    report = PrivacyReport([(CHECK_IN, 5540)], delta=1e-5, max_grad_norms=[0.5])
    said = report.statement("Our digit classifier")
    assert said.startswith("Our digit classifier was trained by 5,540 rounds of shuffled_checkin (")
    for part in (
        "noise multiplier 5",
        "users 60,000",
        "sampling rate 0.1",
        "clipped to norm 0.5",
        f"({round_up(report.best.epsilon)}, 1e-05)-differentially private for every data set in zero-out adjacency",
        "trusting the shuffler alone",
        "sees every shuffled report of every round",
        "compared with a run in which one record's report is noise alone",
        "(certified; ",
        "docs/proofs, pages 1",
    ):
        assert part in said, part
    assert "protects next to nothing" not in said


def test_changed_noise_is_told_as_its_range_and_replacement_as_such():
    louder = ShuffledCheckIn(noise_multiplier=6.0, num_users=60_000, sample_rate=0.1)
    said = PrivacyReport([(louder, 3), (CHECK_IN, 3)], delta=1e-5, adjacency="replace").statement()
    assert said.startswith("The model was trained by 6 rounds")
    assert "noise multiplier 5 to 6" in said
    assert "replacement adjacency" in said
    assert "one record is any other record" in said


@pytest.mark.parametrize("delta", [1e-5, 0.3])
def test_what_the_report_warns_of_the_statement_warns_of(delta):
    report = PrivacyReport([(ShuffleGauss(noise_multiplier=0.3, num_users=6), 4)], delta=delta, num_users=24, emulated=True)
    text, said = (" ".join(each.split()) for each in (str(report), report.statement()))
    for sentence in ("protects next to nothing", "the noise was added once to the sum"):
        assert sentence in text
        assert sentence in said
    above = f"delta = {delta:.3g} is above 1/n = 0.0417"
    assert (above in text) is (above in said) is (delta > 1 / 24)


def test_a_delta_of_one_over_n_is_not_above_it():
    assert "above 1/n" not in PrivacyReport([(CHECK_IN, 1)], delta=1 / 60_000).statement()


def test_a_run_that_others_can_draw_again_is_promised_nothing():
    said = PrivacyReport([(CHECK_IN, 1)], delta=1e-5, predictable=("seed=0",)).statement()
    assert "This run is not private: whoever knows seed=0" in said
    assert said.index("not private") < said.index("With secret randomness, this training would be (")
    assert "This training is" not in said


def test_a_statement_of_sums_cites_their_proofs():
    run = ShuffledSums.build(noise_multiplier=1.5, num_users=4000, sample_rate=0.1, dimension=100)
    said = PrivacyReport([(run, 10)], delta=1e-5).statement()
    assert "secret coins, docs/proofs, pages 2, 3 and 8" in said


@pytest.mark.parametrize("model", [None, 3, b"x"])
def test_a_model_that_is_no_name_is_refused(model):
    with pytest.raises(ValueError, match="model must be a str"):
        PrivacyReport([(CHECK_IN, 1)], delta=1e-5).statement(model)
