"""Buffers that records flow into are named."""

from __future__ import annotations

import copy
import io
import pickle
import warnings

import pytest
import torch
from helpers.toy import make_toy, run_epoch
from torch import nn

from opacus_shuffle import PrivacyEngine
from opacus_shuffle.core.guarantees import PrivacyAssumptionWarning
from opacus_shuffle.networks.batch_state import StateWatch


class Statistics(nn.Module):
    """Keeps a running mean that its output does not use."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how
        self.register_buffer("mean", torch.zeros(40))
        self.register_buffer("constant", torch.ones(40))
        self.bank, self.table = [], {"fixed": torch.ones(1)}

    def forward(self, x):
        with torch.no_grad():
            if self.how == "in place" and self.training and len(x):
                self.mean.lerp_(x.mean(0), 0.1)
            if self.how == "attribute" and self.training and len(x):
                self.centre = x.mean(0)
            if self.how == "list" and self.training and len(x):
                self.bank.append(x.detach())
            if self.how == "dictionary" and self.training and len(x):
                self.table["means"] = x.mean(0).detach()
            if self.how == "anew" and self.training and len(x):
                self.mean = 0.9 * self.mean + 0.1 * x.mean(0)
        return x * self.constant


def private(how: str, **keywords):
    toy = make_toy()
    toy["module"].insert(1, Statistics(how))
    engine = PrivacyEngine(accountant="rdp")
    made = engine.make_private(**toy, noise_multiplier=2.0, poisson_sampling=False, **keywords)
    return engine, toy["module"], made


@pytest.mark.parametrize("mode", ["hooks", "ew"])
@pytest.mark.parametrize("how", ["in place", "anew"])
def test_a_buffer_that_a_training_pass_changes_is_named_then_and_whenever_it_leaves(how, mode):
    engine, network, (model, optimizer, loader) = private(how, grad_sample_mode=mode)
    with pytest.warns(PrivacyAssumptionWarning, match=r"buffer '1\.mean' of the network changes"):
        run_epoch(model, optimizer, loader)
    for leaves in (
        network.state_dict,
        model.state_dict,
        lambda: engine.save_checkpoint(path=io.BytesIO(), module=model, optimizer=optimizer),
    ):
        with pytest.warns(PrivacyAssumptionWarning, match=r"buffer '1\.mean'"):
            leaves()
    with warnings.catch_warnings():
        warnings.simplefilter("error", PrivacyAssumptionWarning)
        run_epoch(model, optimizer, loader)  # once is enough
        copied = pickle.loads(pickle.dumps(copy.deepcopy(network)))
    assert copied[1].mean.shape == (40,)


def test_buffers_that_stay_and_passes_in_evaluation_are_nothing_to_warn_of():
    with warnings.catch_warnings():
        warnings.simplefilter("error", PrivacyAssumptionWarning)
        warnings.filterwarnings("ignore", "poisson_sampling=False")
        engine, network, (model, optimizer, loader) = private("constant")
        run_epoch(model, optimizer, loader)
        network[1].how = "in place"
        model.eval()
        model(torch.randn(3, 5))
        model.train()
        model.state_dict()
        network.load_state_dict(network.state_dict())
        model(torch.randn(0, 5))
        again = engine.make_private(
            module=model,
            optimizer=optimizer,
            data_loader=loader,
            noise_multiplier=2.0,
            max_grad_norm=1.0,
            poisson_sampling=False,
        )
    for hooks in (network._forward_pre_hooks, network._forward_hooks):
        assert (
            sum(isinstance(getattr(each, "__self__", None), StateWatch) for each in hooks.values())
            == 1
        )
    with pytest.warns(PrivacyAssumptionWarning, match=r"1\.mean") as told:
        again[0](torch.randn(3, 5))
    assert len(told) == 1


@pytest.mark.parametrize(
    ("how", "name"), [("attribute", "centre"), ("list", "bank"), ("dictionary", "table")]
)
def test_an_attribute_that_a_training_pass_changes_is_named_once_and_does_not_leave_with_the_weights(
    how, name
):
    _, network, (model, optimizer, loader) = private(how)
    network[0].width = torch.ones(())
    with pytest.warns(
        PrivacyAssumptionWarning, match=rf"'1\.{name}' of the network changes"
    ) as told:
        run_epoch(model, optimizer, loader)
    assert sum(isinstance(each.message, PrivacyAssumptionWarning) for each in told) == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error", PrivacyAssumptionWarning)
        model.state_dict()
        run_epoch(model, optimizer, loader)
