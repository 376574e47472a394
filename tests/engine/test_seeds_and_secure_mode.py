"""A seed makes a run repeatable and not private, and says so; secure mode draws all that matters from the operating system."""

from __future__ import annotations

import copy
import json
import warnings

import opacus
import pytest
import torch
from helpers.toy import make_toy, run_epoch
from opacus.utils.adaptive_clipping.adaptive_clipping_utils import PrivacyEngineAdaptiveClipping
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset

from opacus_shuffle import PrivacyEngine, WeightShuffling
from opacus_shuffle.core.randomness import SecretGenerator
from opacus_shuffle.engine.privacy_engine import ShuffleMixin
from opacus_shuffle.engine.schemes import base

ACCOUNTANTS = [
    "shuffle_gauss",
    "subsampled_shuffle",
    "shuffled_checkin",
    "shuffled_fw",
    "shuffled_sums",
    "rdp",
]
every_accountant = pytest.mark.parametrize("accountant", ACCOUNTANTS)
quietly = pytest.mark.filterwarnings("ignore::UserWarning")


def weights_after(engine, toy, *, twice=False, **options):
    options = {"noise_multiplier": 2.0, "shuffle_weights": True, **options}
    toy = copy.deepcopy({**toy, "optimizer": None})
    toy["optimizer"] = torch.optim.SGD(toy["module"].parameters(), lr=0.05)
    made = engine.make_private(**toy, **options)
    run_epoch(made[0], made[1], made[-1], made[2] if len(made) > 3 else None)
    return torch.cat([parameter.detach().flatten() for parameter in made[0].parameters()])


@quietly
@every_accountant
def test_a_seed_repeats_sampling_noise_and_permutations_and_another_does_not(accountant):
    toy = make_toy()
    first, again, other = (
        weights_after(PrivacyEngine(accountant=accountant, seed=seed), toy) for seed in (0, 0, 1)
    )
    assert torch.equal(first, again)
    assert not torch.allclose(first, other)


@quietly
def test_a_second_run_of_a_seeded_engine_has_other_noise_than_the_first_and_is_repeatable_too():
    toy = make_toy()
    engines = [PrivacyEngine(accountant="shuffled_checkin", seed=0) for _ in range(2)]
    (first, second), (again, twice) = (
        [weights_after(engine, toy) for _ in range(2)] for engine in engines
    )
    assert torch.equal(first, again)
    assert torch.equal(second, twice)
    assert not torch.allclose(first, second)


def test_a_seed_says_once_that_the_run_is_not_private_and_so_do_report_and_dictionary(recwarn):
    engine = PrivacyEngine(accountant="shuffled_checkin", seed=0)
    model, optimizer, loader = engine.make_private(**make_toy(), noise_multiplier=2.0)
    run_epoch(model, optimizer, loader)
    assert len([each for each in recwarn if "not private" in str(each.message)]) == 1
    report = engine.privacy_report(1e-5)
    assert "This run is not private: whoever knows seed=0" in " ".join(str(report).split())
    assert "not private" in report._repr_html_()
    assert "not private: seed=0" in repr(report)
    assert json.loads(json.dumps(report.to_dict()))["predictable"] == ["seed=0"]
    assert report.to_dict()["private"] is False


@pytest.mark.filterwarnings("ignore:Secure RNG")
@pytest.mark.parametrize("which", ["data_loader", "noise_generator"])
def test_a_generator_of_the_user_is_said_to_make_the_run_predictable(which):
    toy, options = make_toy(), {}
    if which == "data_loader":
        toy["data_loader"] = DataLoader(
            toy["data_loader"].dataset, batch_size=6, generator=torch.Generator().manual_seed(1)
        )
    else:
        options["noise_generator"] = torch.Generator().manual_seed(1)
    engine = PrivacyEngine(accountant="shuffled_checkin")
    with pytest.warns(UserWarning, match=rf"not private: whoever knows .*{which}"):
        model, optimizer, loader = engine.make_private(**toy, noise_multiplier=2.0, **options)
    run_epoch(model, optimizer, loader)
    assert any(which in each for each in engine.privacy_report(1e-5).to_dict()["predictable"])


def test_a_secret_run_is_private_and_warns_of_nothing():
    engine = PrivacyEngine(accountant="shuffled_checkin")
    toy = make_toy()
    toy["data_loader"] = DataLoader(
        toy["data_loader"].dataset, batch_size=6, generator=SecretGenerator()
    )
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model, optimizer, loader = engine.make_private(**toy, noise_multiplier=2.0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        run_epoch(model, optimizer, loader)
    found = engine.privacy_report(1e-5).to_dict()
    assert (found["private"], found["predictable"]) == (True, [])


@quietly
def test_what_was_predictable_stays_so_in_a_checkpoint():
    saved = PrivacyEngine(accountant="shuffled_checkin", seed=0)
    run_epoch(*saved.make_private(**make_toy(), noise_multiplier=2.0))
    secret = PrivacyEngine(accountant="shuffled_checkin")
    secret.make_private(**make_toy(), noise_multiplier=2.0)
    secret.accountant.load_state_dict(saved.accountant.state_dict())
    assert secret.privacy_report(1e-5).to_dict()["predictable"] == ["seed=0"]
    plain = PrivacyEngine(accountant="shuffled_checkin").accountant
    plain.load_state_dict(saved.accountant.state_dict())
    assert plain.state_dict()["predictable"] == ["seed=0"]


AFTERWARDS = {
    "another generator": lambda optimizer, loader: setattr(
        optimizer, "generator", torch.Generator().manual_seed(0)
    ),
    "PyTorch's own": lambda optimizer, loader: setattr(optimizer, "generator", None),
    "a seed": lambda optimizer, loader: optimizer.generator.manual_seed(0),
    "a state": lambda optimizer, loader: optimizer.generator.set_state(
        torch.Generator().get_state()
    ),
    "a seed of the sampler": lambda optimizer, loader: loader.batch_sampler.generator.manual_seed(
        0
    ),
    "another generator of the sampler": lambda optimizer, loader: setattr(
        loader.batch_sampler, "generator", torch.Generator().manual_seed(0)
    ),
}


@quietly
@every_accountant
@pytest.mark.parametrize("change", AFTERWARDS)
def test_a_generator_that_is_no_secret_any_more_is_named_from_the_next_step_on(accountant, change):
    engine = PrivacyEngine(accountant=accountant)
    model, optimizer, loader = engine.make_private(
        **make_toy(), noise_multiplier=2.0, shuffle_weights=True
    )
    run_epoch(model, optimizer, loader)
    assert engine.privacy_report(1e-5).to_dict()["private"] is True
    AFTERWARDS[change](optimizer, loader)
    with pytest.warns(UserWarning, match="This run is not private: whoever knows") as told:
        run_epoch(model, optimizer, loader)
    assert len([each for each in told if "not private" in str(each.message)]) == 1
    report = engine.privacy_report(1e-5)
    (name,) = report.to_dict()["predictable"]
    assert report.to_dict()["private"] is False
    for text in (str(report), report.statement(), repr(report)):
        assert name in " ".join(text.split())
    assert "not private" in report.statement()


@quietly
@pytest.mark.parametrize("accountant", ["shuffled_checkin", "shuffled_sums", "prv"])
def test_a_secure_stream_that_was_seeded_before_the_run_is_named(accountant):
    engine = PrivacyEngine(accountant=accountant, secure_mode=True)
    engine.secure_rng.manual_seed(0)
    run_epoch(*engine.make_private(**make_toy(), noise_multiplier=2.0))
    assert engine.privacy_report(1e-5).to_dict()["predictable"] == ["optimizer.generator"]


@quietly
@pytest.mark.parametrize("afterwards", [True, False])
def test_a_generator_in_the_place_of_pytorch_s_own_is_named_with_opacus_s_accountants_too(
    afterwards,
):
    own, engine = torch.Generator().manual_seed(0), PrivacyEngine(accountant="rdp")
    passed = {} if afterwards else {"noise_generator": own}
    model, optimizer, loader = engine.make_private(**make_toy(), noise_multiplier=2.0, **passed)
    optimizer.generator = own
    run_epoch(model, optimizer, loader)
    assert engine.privacy_report(1e-5).to_dict()["predictable"] == ["optimizer.generator"]
    assert engine.privacy_report(1e-5).to_dict()["pytorch_noise"] is afterwards


@quietly
@pytest.mark.parametrize("accountant", ["shuffled_checkin", "rdp"])
def test_a_statement_tells_every_norm_that_rounds_were_clipped_to(accountant):
    engine = PrivacyEngine(accountant=accountant)
    model, optimizer, loader = engine.make_private(**make_toy(), noise_multiplier=2.0)
    run_epoch(model, optimizer, loader)
    assert "clipped to norm 1)" in engine.privacy_report(1e-5).statement()
    optimizer.max_grad_norm = 50.0
    run_epoch(model, optimizer, loader)
    assert "clipped to norm 1 to 50)" in engine.privacy_report(1e-5).statement()


@quietly
def test_the_noise_of_a_stock_engine_is_named_in_reports_of_our_accountants():
    stock = opacus.PrivacyEngine(accountant="shuffle_gauss")
    run_epoch(*stock.make_private(**make_toy(), noise_multiplier=20.0))
    report = stock.accountant.report(1e-5)
    assert (
        "whoever knows the state of the generator of opacus.PrivacyEngine's noise"
        in report.statement()
    )
    assert report.to_dict()["private"] is False


@quietly
def test_noise_participation_and_permutations_of_a_seed_are_different_streams(monkeypatch):
    made, uses = base.seeded_generator, []
    monkeypatch.setattr(
        base,
        "seeded_generator",
        lambda device, seed, use: uses.append(use) or made(device, seed, use),
    )
    engine = PrivacyEngine(accountant="shuffled_checkin", seed=0)
    _, optimizer, loader = engine.make_private(
        **make_toy(), noise_multiplier=2.0, shuffle_weights=True
    )
    assert len(uses) >= 3
    assert len(set(uses)) == len(uses)
    streams = [optimizer.generator, loader.batch_sampler.generator]
    assert (
        len({id(each) for each in streams}) == len({each.words(1).item() for each in streams}) == 2
    )


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        ({"seed": -1}, "seed"),
        ({"seed": 1.5}, "seed"),
        ({"seed": True}, "seed"),
        ({"seed": 0, "secure_mode": True}, "secure_mode"),
        ({"secure_mode": "yes"}, "secure_mode"),
    ],
)
def test_bad_seeds_are_refused_by_name(arguments, match):
    with pytest.raises(ValueError, match=match):
        PrivacyEngine(**arguments)


@quietly
@every_accountant
@pytest.mark.parametrize("secure", [True, False])
def test_noise_participation_and_permutations_are_drawn_from_the_cipher(
    accountant, secure, monkeypatch
):
    engine = PrivacyEngine(accountant=accountant, secure_mode=secure)
    model, optimizer, loader = engine.make_private(
        **make_toy(), noise_multiplier=2.0, shuffle_weights=True
    )
    assert isinstance(optimizer.generator, SecretGenerator)
    assert optimizer.generator.secure is secure
    assert isinstance(loader.batch_sampler.generator, SecretGenerator)

    def refuse(*_, **__):
        raise AssertionError("PyTorch's own generator was asked")

    for name in ("normal", "rand", "randperm", "randint"):
        monkeypatch.setattr(torch, name, refuse)
    before = [parameter.detach().clone() for parameter in model.parameters()]
    run_epoch(model, optimizer, loader)
    assert sum(steps for *_, steps in engine.accountant.history) == 4
    assert not any(
        torch.equal(old, new) for old, new in zip(before, model.parameters(), strict=True)
    )


@quietly
@pytest.mark.parametrize(
    "options",
    [
        {"grad_sample_mode": "ghost"},
        {"grad_sample_mode": "functorch", "local_noise": True},
        {"grad_sample_mode": "ew"},
        {"clipping": "per_layer", "max_grad_norm": [1.0] * 4},
        {"local_noise": True, "shuffle_weights": True},
    ],
    ids=str,
)
def test_secure_noise_has_the_size_that_is_accounted_in_every_way_of_training(options):
    engine = PrivacyEngine(accountant="shuffle_gauss", secure_mode=True)
    toy = {**make_toy(), **options}
    toy["module"][2].weight.data.zero_()
    made = engine.make_private(**toy, noise_multiplier=3.0)
    model, optimizer, loader = made[0], made[1], made[-1]
    criterion = made[2] if len(made) > 3 else nn.CrossEntropyLoss()
    stds = []
    for _ in range(4):
        for x, y in loader:
            optimizer.zero_grad()
            criterion(0 * model(x), y).backward()
            optimizer.step()
            stds.append(
                torch.cat([each.grad.flatten() for each in model.parameters()]).square().mean()
            )
    norm = 2.0 if "clipping" in options else 1.0
    scale = 6**0.5 if options.get("local_noise") else 1.0
    assert float(torch.stack(stds).mean().sqrt()) * 6 == pytest.approx(3.0 * norm * scale, rel=0.05)


def test_secure_mode_has_no_warning_of_being_off_and_refuses_seeds():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        engine = PrivacyEngine(accountant="rdp", secure_mode=True)
    with pytest.raises(ValueError, match="seed is prohibited in secure mode"):
        engine.make_private(**make_toy(), noise_multiplier=1.0, noise_generator=torch.Generator())
    module = nn.Linear(5, 3)
    parallel = DistributedDataParallel.__new__(DistributedDataParallel)
    nn.Module.__init__(parallel)
    parallel.module = module
    toy = {
        **make_toy(),
        "module": parallel,
        "optimizer": torch.optim.SGD(module.parameters(), lr=1.0),
    }
    with pytest.raises(ValueError, match="secure_mode=True is for one process"):
        engine.make_private(**toy, noise_multiplier=1.0)


def test_the_mixin_takes_seeds_before_other_engines_of_opacus():
    class Both(ShuffleMixin, PrivacyEngineAdaptiveClipping):
        pass

    with pytest.warns(UserWarning, match="seed=3"):
        assert Both(accountant="rdp", seed=3).seed == 3


@quietly
def test_a_generator_of_one_s_own_for_the_permutations_goes_before_the_seed():
    engine = PrivacyEngine(accountant="rdp", seed=0)
    own = torch.Generator().manual_seed(4)
    engine.make_private(
        **make_toy(), noise_multiplier=1.0, shuffle_weights=WeightShuffling(generator=own)
    )
    assert engine.shuffler._generator is own


class Augmented(Dataset):
    """Records that are other ones each time."""

    def __len__(self) -> int:
        return 24

    def __getitem__(self, index: int):
        return torch.full((5,), float(index)) + torch.rand(5), index % 3


@quietly
@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize(
    ("accountant", "options"),
    [
        ("shuffled_checkin", {}),
        ("shuffle_gauss", {"poisson_sampling": False}),
        ("rdp", {"poisson_sampling": False}),
    ],
)
def test_a_seed_repeats_what_workers_draw_and_the_order_of_a_loader_of_one_s_own(
    accountant, options, workers
):
    def batches():
        toy = make_toy()
        toy["data_loader"] = own = DataLoader(
            Augmented(), batch_size=6, num_workers=workers, shuffle=True
        )
        _, _, loader = PrivacyEngine(accountant=accountant, seed=0).make_private(
            **toy, noise_multiplier=2.0, **options
        )
        found = [x if workers else x.floor() for x, _ in loader]
        assert own.generator is own.sampler.generator is None
        return torch.cat(found)

    assert torch.equal(batches(), batches())
