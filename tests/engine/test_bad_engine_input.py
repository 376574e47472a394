"""The engine answers whatever one of its arguments is, or names it."""

from __future__ import annotations

import contextlib

import pytest
import torch
from helpers.bad_calls import require_named_refusals
from helpers.toy import make_toy
from torch import nn

from opacus_shuffle import PrivacyEngine

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]
OURS = "the run's own"
"""Stands for a part of the run that the call makes."""
PARTS = {"module": OURS, "optimizer": OURS}
LOCAL = {"noise_multiplier": 2.0, "max_grad_norm": 1.0, "local_noise": True}
OPTIONS = {
    "batch_first": True,
    "loss_reduction": "mean",
    "poisson_sampling": True,
    "clipping": "flat",
    "noise_generator": torch.Generator(),
    "grad_sample_mode": "hooks",
    "wrap_model": True,
    "rand_on_empty": False,
    "shuffle_weights": False,
}


def given(options):
    return {name: value for name, value in options.items() if value is not OURS}


def make_private(accountant, **options):
    engine, toy = PrivacyEngine(accountant=accountant), {**make_toy(), **given(options)}
    return engine, *engine.make_private(**toy)


def trained(accountant="shuffled_checkin"):
    engine, model, optimizer, loader = make_private(
        accountant, noise_multiplier=2.0, local_noise=accountant != "rdp"
    )
    for x, y in loader:
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
    return engine, {"module": model, "optimizer": optimizer}


def test_bad_arguments_of_an_engine_are_named():
    options = {"accountant": "shuffled_checkin", "secure_mode": False, "seed": 3}
    require_named_refusals(lambda **asked: PrivacyEngine(**asked) and None, options)


@pytest.mark.parametrize(
    ("accountant", "options"),
    [
        ("shuffled_checkin", {**PARTS, "data_loader": OURS, **LOCAL, **OPTIONS}),
        (
            "shuffled_checkin",
            {**LOCAL, "criterion": nn.CrossEntropyLoss(), "grad_sample_mode": "ghost"},
        ),
        ("shuffled_fw", {"noise_multiplier": 1.0, "max_grad_norm": 1.0, "shuffle_weights": True}),
        ("shuffled_sums", {"noise_multiplier": 1.0, "max_grad_norm": 1.0, "aggregator": None}),
        ("rdp", {**PARTS, "data_loader": OURS, "noise_multiplier": 2.0, "max_grad_norm": 1.0}),
    ],
)
def test_bad_arguments_of_make_private_are_named(accountant, options):
    require_named_refusals(
        lambda **asked: make_private(accountant, **asked) and None,
        options,
        poisson_sampling=None,  # None is the scheme's own
        shuffle_weights=None,
    )


def test_bad_arguments_of_budgets_are_named():
    def make(**asked):
        PrivacyEngine(accountant="shuffled_checkin").make_private_with_epsilon(
            **{**make_toy(), **asked}
        )

    budget = {
        "target_epsilon": 1.0,
        "target_delta": 1e-5,
        "epochs": 1,
        "max_grad_norm": 1.0,
        "local_noise": True,
    }
    require_named_refusals(make, {**budget, "bound": "certified", "adjacency": "zero_out"})


@pytest.mark.parametrize("accountant", ["shuffled_checkin", "rdp"])
def test_bad_arguments_of_checkpoints_are_named(tmp_path, accountant):
    engine, parts = trained(accountant)
    path = tmp_path / "run.pt"

    def save(**options):
        engine.save_checkpoint(**{"path": path, **parts, **given(options)})

    def load(**options):
        with contextlib.suppress(FileNotFoundError):
            engine.load_checkpoint(**{"path": path, **parts, **given(options)})

    require_named_refusals(save, {"checkpoint_dict": {}, **PARTS})
    save()
    require_named_refusals(load, {"path": str(path), **PARTS, "allow_rewind": False}, path=None)


def test_bad_arguments_of_what_an_engine_answers_are_named():
    engine, _ = trained()
    require_named_refusals(engine.privacy_report, {"delta": 1e-5, "adjacency": "zero_out"})
    require_named_refusals(
        engine.get_epsilon, {"delta": 1e-5, "bound": "certified", "adjacency": "zero_out"}
    )
