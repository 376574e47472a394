"""With Opacus's own accountants and no flag of ours the engine is Opacus, bit by bit, under ``torch.manual_seed``."""

from __future__ import annotations

import copy

import opacus
import pytest
import torch
from helpers.toy import make_toy, run_epoch
from opacus.utils.batch_memory_manager import BatchMemoryManager
from torch import nn
from torch.utils.data import DataLoader

from opacus_shuffle import PrivacyEngine
from opacus_shuffle.core.guarantees import PrivacyAssumptionWarning

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")
ADAPTIVE = {
    "target_unclipped_quantile": 0.5,
    "clipbound_learning_rate": 0.2,
    "max_clipbound": 10.0,
    "min_clipbound": 0.1,
    "unclipped_num_std": 1.0,
}


def trained(engine_class, toy, *, accountant="rdp", epochs=2, physical=None, **options):
    """What is seen of a run: its batches, its weights at the end, what was accounted and the state of PyTorch's generator."""
    toy = copy.deepcopy({**toy, "optimizer": None})
    toy["optimizer"] = torch.optim.SGD(toy["module"].parameters(), lr=0.05)
    if options.get("clipping") == "per_layer":
        toy["max_grad_norm"] = [1.0] * len(list(toy["module"].parameters()))
    torch.manual_seed(7)
    engine = engine_class(accountant=accountant)
    make = engine.make_private_with_epsilon if "target_epsilon" in options else engine.make_private
    made = make(**toy, **options)
    model, optimizer, loader, criterion = (
        made[0],
        made[1],
        made[-1],
        made[2] if len(made) > 3 else None,
    )
    batches = []
    for _ in range(epochs):
        if physical:
            with BatchMemoryManager(
                data_loader=loader, max_physical_batch_size=physical, optimizer=optimizer
            ) as split:
                run_epoch(model, optimizer, split, criterion)
        else:
            run_epoch(model, optimizer, _noted(loader, batches), criterion)
    weights = [parameter.detach() for parameter in model.parameters()]
    seen = (
        len(loader),
        optimizer.noise_multiplier,
        optimizer.expected_batch_size,
        engine.accountant.history,
    )
    return [*batches, *weights, torch.get_rng_state()], seen


def _noted(loader, batches):
    for x, y in loader:
        batches.append(x)
        yield x, y


@pytest.mark.parametrize(
    ("size", "options"),
    [
        ((24, 6), {}),
        ((930, 10), {"epochs": 1}),  # 92 batches
        ((98, 2), {"epochs": 1}),  # an expected batch size of 1
        ((100, 30), {"accountant": "gdp"}),
        ((24, 6), {"poisson_sampling": False, "shuffle": True}),
        ((24, 6), {"grad_sample_mode": "functorch"}),
        ((24, 6), {"grad_sample_mode": "ew", "poisson_sampling": False}),
        ((24, 6), {"grad_sample_mode": "ghost"}),
        ((24, 6), {"clipping": "per_layer"}),
        ((240, 24), {"clipping": "adaptive", **ADAPTIVE}),
        ((24, 6), {"physical": 2}),
        (
            (24, 6),
            {
                "accountant": "gdp",
                "noise_multiplier": None,
                "target_epsilon": 3.0,
                "target_delta": 1e-5,
                "epochs": 2,
            },
        ),
        pytest.param((24, 6), {"num_workers": 2}, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_with_opacus_s_own_accountants_the_engine_is_opacus_bit_by_bit(size, options):
    options = {"noise_multiplier": 1.0, **options}
    loader = {name: options.pop(name) for name in ("shuffle", "num_workers") if name in options}
    toy = make_toy(records=size[0], batch_size=size[1], **loader)
    if options["noise_multiplier"] is None:
        del options["noise_multiplier"]
    (ours, seen), (stock, expected) = (
        trained(_with_epochs(each, options), toy, **options)
        for each in (PrivacyEngine, opacus.PrivacyEngine)
    )
    assert seen == expected
    assert len(ours) == len(stock)
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(ours, stock, strict=True))


def _with_epochs(engine_class, options):
    """``epochs`` is a keyword of ours here, and of ``make_private_with_epsilon``."""
    if "target_epsilon" not in options:
        return engine_class

    class WithEpochs(engine_class):
        def make_private_with_epsilon(self, **keywords):
            return super().make_private_with_epsilon(epochs=2, **keywords)

    return WithEpochs


def test_a_generator_of_the_loader_or_of_the_noise_is_opacus_s_affair_as_well():
    toy = make_toy()
    data = toy["data_loader"].dataset

    def run(engine_class):
        loader = DataLoader(data, batch_size=6, generator=torch.Generator().manual_seed(5))
        noise = torch.Generator().manual_seed(6)
        return trained(
            engine_class,
            {**toy, "data_loader": loader},
            noise_multiplier=1.0,
            noise_generator=noise,
        )

    (ours, *rest), (stock, *theirs) = run(PrivacyEngine), run(opacus.PrivacyEngine)
    assert rest == theirs
    assert all(map(torch.equal, ours, stock))


@pytest.mark.parametrize(
    "change",
    [
        {"module": nn.Sequential(nn.Linear(5, 3), nn.BatchNorm1d(3))},
        {"clipping": "sideways"},
        {"grad_sample_mode": "thoughts"},
    ],
    ids=str,
)
def test_what_opacus_refuses_is_refused_with_its_kind_of_error(change):
    toy = make_toy()
    if "module" in change:
        change = {**change, "optimizer": torch.optim.SGD(change["module"].parameters(), lr=0.1)}

    def refusal(engine_class):
        try:
            return engine_class(accountant="rdp").make_private(
                **{**toy, "noise_multiplier": 1.0, **change}
            )
        except Exception as error:
            return error

    stock, ours = refusal(opacus.PrivacyEngine), refusal(PrivacyEngine)
    assert isinstance(stock, Exception)
    assert isinstance(ours, type(stock))


def test_an_expected_batch_size_of_zero_which_opacus_divides_by_is_refused_by_name():
    with pytest.raises(ValueError, match="expected_batch_size of 0"):
        PrivacyEngine(accountant="rdp").make_private(
            **make_toy(records=49, batch_size=1), noise_multiplier=1.0
        )


def _steps_on(rows, **options):
    model, optimizer, loader = PrivacyEngine(accountant="rdp").make_private(
        **make_toy(), noise_multiplier=1.0, **options
    )
    for x, y in loader:
        if len(x) > 2:
            nn.functional.cross_entropy(model(rows(x)), rows(y)).backward()
            return optimizer.step()
    raise AssertionError("no batch is large enough")


def test_fewer_gradients_than_records_are_warned_of_as_opacus_s_own_tests_have_them_and_more_are_refused():
    with pytest.warns(UserWarning, match="got gradients of 2 records, this batch has"):
        _steps_on(lambda batch: batch[:2])
    with pytest.raises(ValueError, match=r"got gradients of \d+ records, this batch has"):
        _steps_on(lambda batch: batch.repeat_interleave(2, dim=0))
    with pytest.raises(ValueError, match="got gradients of 2 records, this batch has"):
        _steps_on(lambda batch: batch[:2], shuffle_weights=True)


def test_a_flag_of_ours_makes_noise_and_participation_secret_with_opacus_s_accountants_too():
    def run():
        toy = make_toy()
        torch.manual_seed(7)
        _, optimizer, loader = PrivacyEngine(accountant="rdp").make_private(
            **toy, noise_multiplier=1.0, shuffle_weights=True
        )
        return torch.randn(4, generator=optimizer.generator), loader.batch_sampler.generator

    (first, sampling), (second, _) = run(), run()
    assert not torch.equal(first, second)
    assert sampling is not None


@pytest.mark.parametrize("name", ["rdp", "prv", "gdp"])
def test_batches_that_opacus_s_accountants_do_not_assume_are_warned_of(name):
    engine = PrivacyEngine(accountant=name)
    with pytest.warns(
        PrivacyAssumptionWarning,
        match=f"{name} accounts for Poisson samples, .*no ε of it is a guarantee",
    ):
        engine.make_private(**make_toy(), noise_multiplier=1.0, poisson_sampling=False)


@pytest.mark.parametrize(
    ("name", "target", "match"),
    [
        (
            "rdp",
            1e308,
            "target_epsilon must be at most 1e.06 with accountant 'rdp'",
        ),  # Opacus's search never ended
        ("prv", 1e3, "target_epsilon must be at most 400 with accountant 'prv'"),
        ("rdp", 1e-308, "finds no noise for target_epsilon=1e-308 .*budget is too low"),
        ("gdp", 100.0, "finds no noise for target_epsilon=100.0 .*use another accountant"),
    ],
)
def test_targets_for_which_opacus_finds_no_noise_are_named(name, target, match):
    with pytest.raises(ValueError, match=match):
        PrivacyEngine(accountant=name).make_private_with_epsilon(
            **make_toy(), target_epsilon=target, target_delta=1e-5, epochs=1
        )
