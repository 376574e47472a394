"""How each mechanism trains: ε is that of the plain numbers, a budget is kept and used up."""

from __future__ import annotations

import copy
import dataclasses
import math
import re

import pytest
import torch
from helpers.private_runs import OURS, Run
from helpers.toy import here, make_toy

from opacus_shuffle import (
    PrivacyAssumptionWarning,
    PrivacyEngine,
    compute_epsilon,
    compute_noise_multiplier,
)
from opacus_shuffle.accountants.bounds.registry import compute_bound
from opacus_shuffle.engine.schemes import Scheme

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")
DELTA = 1e-5
GAUSSIAN = ("shuffle_gauss", "subsampled_shuffle", "shuffled_checkin")
LOCAL = {"local_noise": True}
NUMBERS = {
    "shuffle_gauss": {"num_users": 6},
    "subsampled_shuffle": {"num_users": 24, "sample_rate": 0.25},
    "shuffled_checkin": {"num_users": 24, "sample_rate": 0.25},
}


# ---- ε and budgets --------------------------------------------------------------------------


@pytest.mark.parametrize("bound", ["published", "pair", "certified"])
@pytest.mark.parametrize("name", GAUSSIAN)
def test_epsilon_after_training_is_that_of_the_plain_numbers(name, bound):
    local = Run(name, **LOCAL).train().train().train()
    plain = {"noise_multiplier": 2.0, "steps": 12, "delta": DELTA, "bound": bound}
    expected = compute_epsilon(name, **NUMBERS[name], **plain)
    assert local.engine.get_epsilon(DELTA, bound=bound) == expected > 0
    # Without local noise the multiplier is that of the sum of the six reports that are expected.
    summed = Run(name, sigma=2.0 * math.sqrt(6)).train().train().train()
    assert summed.engine.get_epsilon(DELTA, bound=bound) == pytest.approx(expected, rel=1e-9)


# The noise of reports and of their sum differ by a factor, whatever the bound.
WAYS = {"published": LOCAL, "pair": LOCAL, "certified": {}}
BUDGETS = [(name, way, bound) for name in GAUSSIAN for bound, way in WAYS.items()]
BUDGETS += [("shuffled_fw", {"shuffle_weights": True}, bound) for bound in WAYS]
BUDGETS += [("shuffled_fw", {}, "published")]
CALIBRATED = [  # of all ways by all bounds, by default; the zoo's tests take the others
    ("shuffle_gauss", LOCAL, "pair"),
    ("shuffle_gauss", {}, "certified"),
    ("subsampled_shuffle", LOCAL, "published"),
    ("shuffled_checkin", LOCAL, "published"),
]


@pytest.mark.parametrize(
    ("name", "way", "bound"),
    [
        pytest.param(
            *(name, way, bound),
            marks=()
            if (name, way, bound) in CALIBRATED
            else pytest.mark.zoo
            if bound == "certified"
            else pytest.mark.slow,
        )
        for name, way, bound in BUDGETS
    ],
    ids=str,
)
def test_a_budget_is_kept_for_as_long_as_promised_and_used_up(name, way, bound):
    target = 30.0 if bound == "published" else 8.0  # Theorems 2 and 3 have a floor
    budget = {"target_epsilon": target, "target_delta": DELTA, "epochs": 1, "bound": bound}
    run = Run(name, sigma=None, records=93, batch_size=1, **budget, **way)
    run.train()
    assert run.accounted == 93  # of which Opacus's floats would make 92
    assert run.engine.get_epsilon(DELTA, bound=bound) <= target
    # The noise is the least up to 1e-4 of it, by a slope that is estimated up to a factor of 2.
    less = [
        (dataclasses.replace(mechanism, noise_multiplier=mechanism.noise_multiplier / 1.0002), 93)
        for mechanism, _ in run.engine.accountant.rounds
    ]
    assert compute_bound(less, delta=DELTA, bound=bound).epsilon > target
    assert run.train().engine.get_epsilon(DELTA, bound=bound) > target


def test_a_noise_is_told_that_no_bound_or_no_step_of_it_makes_good():
    budget = {"target_epsilon": 4.0, "target_delta": DELTA, "epochs": 2}
    with pytest.warns(PrivacyAssumptionWarning, match="certified"):
        run = Run("shuffle_gauss", sigma=None, bound="published", **budget, **LOCAL)
    run.train()
    again = {**run.toy, "module": run.model, "optimizer": run.optimizer, "data_loader": run.loader}
    with pytest.warns(UserWarning, match="already spent"):
        run.engine.make_private_with_epsilon(**again, **budget, **LOCAL)


@pytest.mark.parametrize("name", GAUSSIAN)
@pytest.mark.parametrize("sigma", [0.1, 0.6, 1.0, 3.0])
def test_reports_whose_own_noise_makes_one_step_cost_more_than_ten_are_warned_of(
    name, sigma, recwarn
):
    run = Run(name, sigma=sigma, **LOCAL)
    texts = [str(warning.message) for warning in recwarn]
    said = [text for text in texts if "is the noise of each report" in text]
    spent = compute_epsilon(run.engine.accountant.planned, steps=1, delta=DELTA)
    assert len(said) == (spent > 10)
    for sentence in said:
        assert f"noise_multiplier={sigma:g} with local_noise=True" in sentence
        assert float(re.search(r"epsilon = ([0-9.]+)", sentence)[1]) >= spent
        assert "accountant='shuffled_sums'" in sentence  # what to do


@pytest.mark.parametrize("name", ["shuffled_checkin", "shuffled_sums", "random_allocation", "gdp"])
def test_the_first_step_beyond_a_budget_s_epochs_is_warned_of_and_no_other(name, recwarn):
    budget = {"target_epsilon": 8.0, "target_delta": DELTA, "epochs": 1}
    run = Run(name, sigma=None, **budget, **OURS.get(name, {}))
    run.train()
    assert "target_epsilon is no longer guaranteed" not in str([*map(str, recwarn)])
    run.step(run.batch(0))
    assert "target_epsilon is no longer guaranteed" in str([*map(str, recwarn)])
    run.train()
    (said,) = [one for one in map(str, recwarn) if "no longer guaranteed" in one]
    assert "make_private_with_epsilon calibrated the noise for 4 steps" in said


@pytest.mark.parametrize("name", ["shuffled_checkin", "gdp"])
@pytest.mark.parametrize("target", [0.01, 8.0])
def test_noise_for_a_budget_in_which_nothing_can_be_learned_is_warned_of(name, target, recwarn):
    budget = {"target_epsilon": target, "target_delta": 0.01 * DELTA}
    Run(name, sigma=None, epochs=1, **budget)
    compute_noise_multiplier("shuffled_checkin", steps=4, **NUMBERS["shuffled_checkin"], **budget)
    said = [one for one in recwarn if "nothing can be learned" in str(one.message)]
    assert len(said) == 2 * (target < 1)


@pytest.mark.parametrize("name", ["shuffled_checkin", "gdp"])
def test_a_delta_that_allows_to_publish_a_record_is_warned_of(name):
    run = Run(name).train()
    with pytest.warns(PrivacyAssumptionWarning, match=r"delta = 0.05 is above 1/n = 0.0417"):
        run.engine.get_epsilon(0.05)
    one = {"noise_multiplier": 2.0, "steps": 1, **NUMBERS["shuffled_checkin"]}
    with pytest.warns(PrivacyAssumptionWarning, match="above 1/n"):
        compute_epsilon("shuffled_checkin", delta=0.05, **one)


def test_the_report_shows_every_bound_and_refuses_where_nothing_ran():
    run = Run("shuffled_checkin")
    with pytest.raises(ValueError, match="nothing to report"):
        run.engine.privacy_report(DELTA)
    assert Run("rdp").engine.get_epsilon(DELTA) == 0.0
    printed = str(run.train().engine.privacy_report(DELTA))
    assert "certified" in printed
    assert "added once to the sum" in printed


@pytest.mark.parametrize("name", ["shuffled_checkin", "rdp"])
def test_a_statement_tells_every_norm_that_rounds_were_clipped_to(name):
    run = Run(name).train()
    assert "clipped to norm 1)" in run.engine.privacy_report(DELTA).statement()
    run.optimizer.max_grad_norm = 50.0
    assert "clipped to norm 1 to 50)" in run.train().engine.privacy_report(DELTA).statement()


# ---- several calls --------------------------------------------------------------------------


def test_training_goes_on_with_the_same_engine_and_changes_no_meaning_of_what_ran():
    run = Run("shuffled_checkin", **LOCAL).train()
    toy = {**run.toy, "module": run.model, "optimizer": run.optimizer, "data_loader": run.loader}
    again = Run("shuffled_checkin", engine=run.engine, toy=toy, sigma=3.0, **LOCAL).train()
    assert again.engine.accountant.history == [(2.0, 0.25, 4), (3.0, 0.25, 4)]
    for change in ({"local_noise": False}, {"records": 48}, {"batch_size": 8}):
        with pytest.raises(ValueError, match="new PrivacyEngine"):
            Run("shuffled_checkin", engine=run.engine, **{**LOCAL, **change})
    assert again.train().accounted == 12


@pytest.mark.parametrize("name", ["shuffled_checkin", "rdp"])
@pytest.mark.parametrize("trained", [True, False])
def test_no_accountant_takes_the_place_of_the_one_that_steps_are_recorded_by(name, trained):
    run = Run(name)
    own = run.engine.accountant
    if trained:
        run.train()
    for other in (copy.deepcopy(own), None):
        with pytest.raises(ValueError, match="accountant cannot be replaced after make_private"):
            run.engine.accountant = other
    run.engine.accountant = own
    assert run.train().accounted == (1 + trained) * 4


@pytest.mark.parametrize("shuffle_weights", [True, False])
def test_an_error_at_the_very_end_of_make_private_leaves_nothing_behind(
    monkeypatch, shuffle_weights
):
    engine, toy = PrivacyEngine(accountant="shuffled_checkin"), make_toy()
    attach = Scheme.attach

    def interrupted(scheme, *parts, **generators):
        attach(scheme, *parts, **generators)
        raise KeyboardInterrupt

    monkeypatch.setattr(Scheme, "attach", interrupted)
    with pytest.raises(KeyboardInterrupt):
        engine.make_private(**toy, noise_multiplier=1.0, shuffle_weights=shuffle_weights)
    monkeypatch.undo()
    assert (engine.shuffler, engine.dataset, engine.accountant.planned) == (None, None, None)
    toy["module"](here(torch.randn(4, 5))).sum().backward()
    toy["optimizer"].step()  # plain again, and nothing is moved after it
    assert Run(engine=engine, toy=toy, **LOCAL).train().accounted == 4
