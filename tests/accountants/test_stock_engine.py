"""The stock ``opacus.PrivacyEngine`` with our accountants, after ``import opacus_shuffle``."""

from __future__ import annotations

import math
import warnings

import opacus
import pytest
import torch
from helpers.toy import ONE_NOISE, make_toy, run_epoch

import opacus_shuffle
from opacus_shuffle import ShuffledCheckIn, ShuffledWeights, compute_epsilon
from opacus_shuffle.accountants import ShuffleAccountant

pytestmark = pytest.mark.filterwarnings("ignore::opacus_shuffle.PrivacyAssumptionWarning")
every_accountant = pytest.mark.parametrize("name", ONE_NOISE)
WEIGHTS = {"dimension": 1000, "batch_clip": 50.0}


def engine_of(name):
    """A stock engine; of shuffled weights it cannot know how many there are, and its noise is the server's: not divided."""
    engine = opacus.PrivacyEngine(accountant=name)
    if name == "shuffled_fw":
        engine.accountant.plan(ShuffledWeights(noise_multiplier=1.0, num_users=1, **WEIGHTS))
    return engine


@every_accountant
def test_the_stock_engine_learns_n_and_b_in_its_step_hook(name):
    engine = engine_of(name)
    sigma, weights = (2.0, WEIGHTS) if name == "shuffled_fw" else (2.0 * math.sqrt(64), {})
    model, optimizer, loader = engine.make_private(
        **make_toy(records=640, batch_size=64), noise_multiplier=sigma
    )
    run_epoch(model, optimizer, loader)
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
    toy = make_toy(records=records, batch_size=batch)
    engine = engine_of(name)
    model, optimizer, loader = engine.make_private(**toy, noise_multiplier=8.0)
    run_epoch(model, optimizer, loader)
    rounds = engine.accountant.rounds
    assert engine.accountant.num_users == records
    shares = 1 if name == "shuffled_fw" else batch
    assert 8.0 / rounds[0][0].noise_multiplier >= math.sqrt(shares) * (1 - 1e-9)
    # and where the data set cannot be seen: n down, B up
    blind = ShuffleAccountant(
        engine.accountant.mechanism_class, **(WEIGHTS if name == "shuffled_fw" else {})
    )
    blind.get_optimizer_hook_fn(1 / len(loader))(optimizer)
    blind.history = [(8.0, 1 / len(loader), len(loader))]
    for bound in ("pair", "certified"):
        # 50 of 99 is a rate a little above the loader's 1/2, which is what the blind one goes by.
        snapped = (
            1 / len(loader) / rounds[0][0].sample_rate if name == "subsampled_shuffle" else 1.0
        )
        known = engine.accountant.get_epsilon(1e-5, bound=bound)
        assert blind.get_epsilon(1e-5, bound=bound) >= known * min(snapped, 1.0)


@pytest.mark.parametrize("name", ["shuffled_checkin", "subsampled_shuffle"])
def test_a_step_over_two_batches_is_a_round_of_twice_their_rate(name):
    """A record may be in either of them."""
    engine = opacus.PrivacyEngine(accountant=name)
    model, optimizer, loader = engine.make_private(
        **make_toy(records=640, batch_size=64), noise_multiplier=16.0
    )
    model.allow_grad_accumulation()  # which Opacus refuses else where batches are samples
    batches = iter(loader)
    for x, y in (next(batches), next(batches)):
        torch.nn.functional.cross_entropy(model(x), y).backward()
    optimizer.step()
    ((mechanism, steps),) = engine.accountant.rounds
    assert (mechanism.num_users, mechanism.sample_rate, steps) == (
        640,
        pytest.approx(0.2, rel=1e-12),
        1,
    )


def test_the_stock_engine_calibrates_shuffled_weights_when_told_how_many_and_refuses_when_not():
    engine = opacus.PrivacyEngine(accountant="shuffled_fw")
    budget = {"target_epsilon": 4.0, "target_delta": 1e-5, "epochs": 2}
    with pytest.raises(ValueError, match=r"make_private_with_epsilon\(\.\.\., dimension=\.\.\.\)"):
        engine.make_private_with_epsilon(**make_toy(), **budget)
    model, optimizer, loader = engine.make_private_with_epsilon(
        **make_toy(), **budget, num_users=24, **WEIGHTS
    )
    for _ in range(2):
        run_epoch(model, optimizer, loader)
    with pytest.raises(ValueError, match="does not know dimension"):
        engine.get_epsilon(1e-5)
    spent = engine.accountant.get_epsilon(1e-5, **WEIGHTS)
    assert 3.9 < spent <= 4.0


def test_a_norm_that_is_not_the_described_one_is_refused_before_the_update():
    engine = engine_of("shuffled_fw")
    model, optimizer, loader = engine.make_private(
        **{**make_toy(), "max_grad_norm": 2.0}, noise_multiplier=2.0
    )
    before = [parameter.detach().clone() for parameter in model.parameters()]
    with pytest.raises(
        ValueError, match=r"max_grad_norm is 2\.0, but shuffled_fw accounts for clip=1\.0"
    ):
        run_epoch(model, optimizer, loader)
    assert all(torch.equal(old, new) for old, new in zip(before, model.parameters(), strict=True))


def test_the_stock_engine_s_zero_batch_size_is_refused_before_it_spoils_the_weights():
    toy = make_toy(records=49, batch_size=1)
    engine = opacus.PrivacyEngine(accountant="shuffled_checkin")
    model, optimizer, loader = engine.make_private(**toy, noise_multiplier=2.0)
    assert optimizer.expected_batch_size == 0  # int(49 * (1 / 49))
    with pytest.raises(ValueError, match="expected_batch_size"):
        run_epoch(model, optimizer, loader)
    assert all(torch.isfinite(parameter).all() for parameter in model.parameters())


@pytest.mark.parametrize(
    "name", ["shuffled_fw", "shuffled_checkin", "subsampled_shuffle", "shuffled_sums"]
)
def test_a_stock_engine_s_batches_must_be_random_samples_and_sums_need_another_engine(name):
    named = (
        r"train with opacus_shuffle\.PrivacyEngine"
        if name == "shuffled_sums"
        else f"{name} accounts for .* random samples"
    )
    with pytest.raises(ValueError, match=named):
        opacus.PrivacyEngine(accountant=name).make_private(
            **make_toy(), noise_multiplier=1.0, poisson_sampling=False
        )


def sentences(caught, word):
    return [str(each.message) for each in caught if word in str(each.message)]


@pytest.mark.parametrize(
    "flags",
    [{"local_noise": True}, {"shuffle_weights": True}, {"local_noise": True, "aggregator": 0}],
)
def test_flags_that_a_stock_engine_does_not_read_are_named_with_the_engine_that_does(flags):
    with pytest.warns(
        UserWarning, match=f"not read {', '.join(flags)}: .*use opacus_shuffle.PrivacyEngine"
    ):
        opacus.PrivacyEngine(accountant="shuffled_checkin").make_private(
            **make_toy(), noise_multiplier=50.0, **flags
        )


def test_flags_that_ask_for_nothing_pass_in_silence():
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        engine = opacus.PrivacyEngine(accountant="shuffled_checkin")
        engine.make_private(
            **make_toy(), noise_multiplier=50.0, local_noise=False, shuffle_weights=False
        )
        for noise in (
            {"noise_multiplier": 5.0, "local_noise": True, "shuffle_weights": True},
            {"noise_multiplier": 50.0},
        ):
            opacus_shuffle.PrivacyEngine(accountant="shuffled_checkin").make_private(
                **make_toy(), **noise
            )
    assert not sentences(caught, "not read")
    assert not sentences(caught, "local_noise=True")


@pytest.mark.parametrize("name", ["shuffle_gauss", "subsampled_shuffle", "shuffled_checkin"])
def test_noise_of_the_sum_that_was_meant_for_each_report_is_doubted_once_by_both_engines(name):
    for engine_class in (opacus.PrivacyEngine, opacus_shuffle.PrivacyEngine):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            engine = engine_class(accountant=name)
            model, optimizer, loader = engine.make_private(
                **make_toy(records=640, batch_size=64), noise_multiplier=1.1
            )
            run_epoch(model, optimizer, loader)
        (sentence,) = sentences(caught, "local_noise=True")
        assert "noise_multiplier=1.1" in sentence
        assert "each report carries 0.14" in sentence
        assert engine.get_epsilon(1e-5) > 10


@pytest.mark.filterwarnings("ignore:Secure RNG")
@pytest.mark.parametrize(
    ("accountant", "told"),
    [("shuffle_gauss", 1), ("subsampled_shuffle", 1), ("shuffled_checkin", 0)],
)
def test_a_stock_engine_s_coins_are_told_of_where_batches_of_one_size_are_accounted(
    accountant, told
):
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        opacus.PrivacyEngine(accountant=accountant).make_private(
            **make_toy(), noise_multiplier=20.0
        )
    assert (
        len([each for each in found if "accounts for batches of one size" in str(each.message)])
        == told
    )


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_the_remedies_that_a_stock_engine_s_run_is_answered_with_work():
    engine = opacus.PrivacyEngine(accountant="shuffled_fw")
    run_epoch(*engine.make_private(**make_toy(), noise_multiplier=2.0))
    with pytest.raises(
        ValueError, match="does not know dimension: describe a round with"
    ) as refused:
        engine.get_epsilon(1e-5)
    assert "num_users = len" not in str(refused.value)
    passed = engine.accountant.get_epsilon(1e-5, dimension=1)
    engine.accountant.plan(
        ShuffledWeights(noise_multiplier=2.0, num_users=24, sample_rate=0.25, dimension=1)
    )
    assert engine.get_epsilon(1e-5) == passed > 0
    plain = ShuffleAccountant(ShuffledCheckIn)
    plain.step(noise_multiplier=2.0, sample_rate=0.25)
    with pytest.raises(ValueError, match=r"set engine.accountant.num_users = len\(dataset\)"):
        plain.get_epsilon(1e-5)
    plain.num_users = 24
    assert plain.get_epsilon(1e-5) > 0
