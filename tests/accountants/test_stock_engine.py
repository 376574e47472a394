"""The stock ``opacus.PrivacyEngine`` with our accountants, after ``import opacus_shuffle``."""

import math
import warnings

import opacus
import pytest
import torch
from helpers.accountants import WEIGHTS
from helpers.toy import ONE_NOISE, make_toy, run_epoch

import opacus_shuffle
from opacus_shuffle import PrivacyAssumptionWarning, ShuffledWeights, compute_epsilon

pytestmark = pytest.mark.filterwarnings("ignore::opacus_shuffle.PrivacyAssumptionWarning")
every_accountant = pytest.mark.parametrize("name", ONE_NOISE)
TEN_STEPS = {"records": 640, "batch_size": 64}


def made_private(name, noise_multiplier, *, max_grad_norm=1.0, **toy):
    """A stock engine, and what it makes; of shuffled weights it cannot know how many there are."""
    engine = opacus.PrivacyEngine(accountant=name)
    if name == "shuffled_fw":
        engine.accountant.plan(ShuffledWeights(noise_multiplier=1.0, num_users=1, **WEIGHTS))
    asked = {**make_toy(**toy), "max_grad_norm": max_grad_norm}
    return engine, *engine.make_private(**asked, noise_multiplier=noise_multiplier)


@every_accountant
def test_the_stock_engine_learns_n_and_b_in_its_step_hook(name):
    # The noise of shuffled weights is the server's, and not divided.
    sigma, weights = (2.0, WEIGHTS) if name == "shuffled_fw" else (2.0 * math.sqrt(64), {})
    engine, *made = made_private(name, sigma, **TEN_STEPS)
    run_epoch(*made)
    numbers = (
        {"num_users": 64} if name == "shuffle_gauss" else {"num_users": 640, "sample_rate": 0.1}
    )
    expected = compute_epsilon(
        name, noise_multiplier=2.0, steps=10, delta=1e-5, **numbers, **weights
    )
    assert engine.get_epsilon(1e-5) == pytest.approx(expected, rel=1e-9)
    assert expected > 0
    assert (engine.accountant.num_users, engine.accountant.batch_size) == (640, 64)


@every_accountant
@pytest.mark.parametrize(
    ("records", "batch"), [(98, 2), pytest.param(930, 10, marks=pytest.mark.slow), (99, 50)]
)
def test_the_stock_engine_s_rounding_never_makes_epsilon_smaller(name, records, batch):
    engine, model, optimizer, loader = made_private(name, 8.0, records=records, batch_size=batch)
    run_epoch(model, optimizer, loader)
    (mechanism, _), *_ = engine.accountant.rounds
    assert engine.accountant.num_users == records
    shares = 1 if name == "shuffled_fw" else batch
    assert 8.0 / mechanism.noise_multiplier >= math.sqrt(shares) * (1 - 1e-9)


@pytest.mark.parametrize("name", ["shuffled_checkin", "subsampled_shuffle"])
def test_a_step_over_two_batches_is_a_round_of_twice_their_rate(name):
    """A record may be in either of them."""
    engine, model, optimizer, loader = made_private(name, 16.0, **TEN_STEPS)
    model.allow_grad_accumulation()  # which Opacus refuses else where batches are samples
    batches = iter(loader)
    for x, y in (next(batches), next(batches)):
        torch.nn.functional.cross_entropy(model(x), y).backward()
    optimizer.step()
    ((mechanism, steps),) = engine.accountant.rounds
    assert (mechanism.num_users, steps) == (640, 1)
    assert mechanism.sample_rate == pytest.approx(0.2, rel=1e-12)


def test_shuffled_weights_that_nobody_has_described_are_refused_before_an_update():
    engine = opacus.PrivacyEngine(accountant="shuffled_fw")
    budget = {"target_epsilon": 4.0, "target_delta": 1e-5, "epochs": 2}
    model, optimizer, loader = engine.make_private_with_epsilon(
        **make_toy(), **budget, num_users=24, **WEIGHTS
    )
    before = [parameter.detach().clone() for parameter in model.parameters()]
    with pytest.raises(ValueError, match="does not know dimension: describe a round"):
        run_epoch(model, optimizer, loader)
    assert all(map(torch.equal, before, model.parameters()))
    optimizer.zero_grad()
    engine.accountant.plan(
        ShuffledWeights(noise_multiplier=1.0, num_users=24, sample_rate=0.25, **WEIGHTS)
    )
    for _ in range(2):
        run_epoch(model, optimizer, loader)
    assert 3.9 < engine.get_epsilon(1e-5) <= 4.0


def test_what_no_update_may_be_made_with_is_refused_before_it():
    _, model, *rest = made_private("shuffled_fw", 2.0, max_grad_norm=2.0)
    before = [parameter.detach().clone() for parameter in model.parameters()]
    with pytest.raises(ValueError, match=r"max_grad_norm is 2\.0, but .* accounts for clip=1\.0"):
        run_epoch(model, *rest)
    assert all(map(torch.equal, before, model.parameters()))
    # int(49 * (1 / 49)) is 0, and the gradient divided by it not finite.
    _, model, *rest = made_private("shuffled_checkin", 2.0, records=49, batch_size=1)
    with pytest.raises(ValueError, match="expected_batch_size"):
        run_epoch(model, *rest)
    assert all(torch.isfinite(parameter).all() for parameter in model.parameters())


@pytest.mark.parametrize(
    ("name", "named"),
    [
        ("shuffled_sums", r"train with opacus_shuffle\.PrivacyEngine"),
        ("random_allocation", r"train with opacus_shuffle\.PrivacyEngine"),
        *(
            (name, f"{name} accounts for .* random samples")
            for name in ("shuffled_fw", "shuffled_checkin", "subsampled_shuffle")
        ),
    ],
)
def test_a_stock_engine_s_batches_must_be_random_samples_and_sums_need_another_engine(name, named):
    with pytest.raises(ValueError, match=named):
        opacus.PrivacyEngine(accountant=name).make_private(
            **make_toy(), noise_multiplier=1.0, poisson_sampling=False
        )


def warned_of(word, engine_class, name, *, train=False, toy=None, **keywords):
    """The warnings with a word in them, of an engine's ``make_private`` and perhaps an epoch."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        engine = engine_class(accountant=name)
        made = engine.make_private(**make_toy(**(toy or {})), **keywords)
        if train:
            run_epoch(*made)
    return [str(warning.message) for warning in caught if word in str(warning.message)]


FLAGS = [{"local_noise": True}, {"shuffle_weights": True}, {"local_noise": True, "aggregator": 0}]


@pytest.mark.parametrize("flags", FLAGS)
def test_flags_that_a_stock_engine_does_not_read_are_named_with_the_engine_that_does(flags):
    noise = {"noise_multiplier": 50.0}
    (warned,) = warned_of("ignores", opacus.PrivacyEngine, "shuffled_checkin", **noise, **flags)
    assert f"ignores {', '.join(flags)}: use opacus_shuffle.PrivacyEngine" in warned
    nothing = dict.fromkeys(flags, False)
    assert not warned_of("ignores", opacus.PrivacyEngine, "shuffled_checkin", **noise, **nothing)


@pytest.mark.parametrize("name", ["shuffle_gauss", "subsampled_shuffle", "shuffled_checkin"])
@pytest.mark.parametrize("engine_class", [opacus.PrivacyEngine, opacus_shuffle.PrivacyEngine])
def test_noise_of_the_sum_that_was_meant_for_each_report_is_doubted_once(name, engine_class):
    run = {"toy": TEN_STEPS, "train": True, "noise_multiplier": 1.1}
    (said,) = warned_of("local_noise=True", engine_class, name, **run)
    assert "noise_multiplier=1.1" in said
    assert "each report carries only 0.14" in said
    own = {"noise_multiplier": 5.0, "local_noise": True}
    assert not warned_of("local_noise=True", opacus_shuffle.PrivacyEngine, name, **own)


@pytest.mark.parametrize(
    ("name", "told"), [("shuffle_gauss", 1), ("subsampled_shuffle", 1), ("shuffled_checkin", 0)]
)
def test_a_stock_engine_s_coins_are_told_of_where_batches_of_one_size_are_accounted(name, told):
    said = warned_of("of one size", opacus.PrivacyEngine, name, noise_multiplier=20.0)
    assert len(said) == told


def test_a_stock_engine_s_generator_is_told_of_and_an_unproved_epsilon_names_the_proved_one():
    engine, *made = made_private("shuffled_checkin", 50.0)
    run_epoch(*made)
    report = engine.accountant.report(1e-5)
    assert "generator of opacus.PrivacyEngine's noise, which is no cipher" in str(
        report.predictable
    )
    assert (report.emulated, report.simulated) == (True, True)
    with pytest.warns(PrivacyAssumptionWarning, match="emulating batches of the expected size"):
        engine.accountant.get_epsilon(1e-5, bound="pair")
