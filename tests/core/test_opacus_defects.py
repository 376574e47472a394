"""The known defects of Opacus: found by what they do, refused by name, not imagined."""

from __future__ import annotations

import warnings

import opacus
import pytest
import torch
from opacus.grad_sample import GradSampleModule
from opacus.layers import DPMultiheadAttention
from opacus.utils.adaptive_clipping import adaptive_clipping_utils
from opacus.utils.adaptive_clipping.adaptive_clipping_utils import PrivacyEngineAdaptiveClipping
from torch import nn

from opacus_shuffle.core import opacus_compat
from opacus_shuffle.core.opacus_compat import (
    adaptive_ghost_clips,
    attention_mixes_batch,
    refuse_broken_attention,
    refuse_tied_ghost,
    refuse_unclipped_engine,
    tied_parameters,
)


@pytest.fixture
def fresh():
    """Answers that are found again, and not kept for the other tests."""
    for answer in (attention_mixes_batch, adaptive_ghost_clips):
        answer.cache_clear()
    yield
    for answer in (attention_mixes_batch, adaptive_ghost_clips):
        answer.cache_clear()


def same_as_pytorch(*, batch_first: bool, heads: int) -> bool:
    """Whether Opacus's attention is that of PyTorch with the same weights."""
    theirs, ours = (
        nn.MultiheadAttention(4, heads, batch_first=batch_first),
        DPMultiheadAttention(4, heads, batch_first=batch_first),
    )
    ours.load_state_dict(theirs.state_dict())
    x = torch.randn(3, 5, 4)
    return torch.allclose(theirs(x, x, x)[0], ours(x, x, x)[0], atol=1e-5)


def test_the_answer_about_attention_agrees_with_pytorchs():
    assert attention_mixes_batch() is not same_as_pytorch(batch_first=True, heads=2)
    assert same_as_pytorch(batch_first=False, heads=2)
    assert same_as_pytorch(batch_first=True, heads=1)


@pytest.mark.skipif(opacus.__version__ != "1.6.0", reason="what is known of this version")
def test_opacus_1_6_0_has_both_defects():
    assert attention_mixes_batch()
    assert not adaptive_ghost_clips()


def test_finding_out_moves_no_random_state_and_warns_of_nothing(fresh):
    state, device = torch.get_rng_state(), torch.get_default_device()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        attention_mixes_batch()
        adaptive_ghost_clips()
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.get_default_device() == device


def test_broken_attention_is_refused_with_its_path(monkeypatch):
    network = nn.Sequential(nn.Linear(4, 4), nn.ModuleDict({"attention": DPMultiheadAttention(4, 2, batch_first=True)}))
    monkeypatch.setattr(opacus_compat, "attention_mixes_batch", lambda: True)
    with pytest.raises(ValueError, match=r"batch_first=True at 1.attention, .*#825.*batch_first=False"):
        refuse_broken_attention(network)
    with pytest.raises(ValueError, match=r"batch_first=True at _module.1.attention, "):
        refuse_broken_attention(GradSampleModule(network))
    with pytest.raises(ValueError, match="at the module itself, "):
        refuse_broken_attention(network[1]["attention"])
    monkeypatch.setattr(opacus_compat, "attention_mixes_batch", lambda: False)
    refuse_broken_attention(network)


@pytest.mark.parametrize(
    "layer",
    [DPMultiheadAttention(4, 2), DPMultiheadAttention(4, 1, batch_first=True), nn.MultiheadAttention(4, 2, batch_first=True)],
    ids=["time first", "one head", "PyTorch's own"],
)
def test_right_attention_is_not_refused(layer, monkeypatch):
    monkeypatch.setattr(opacus_compat, "attention_mixes_batch", lambda: True)
    refuse_broken_attention(nn.Sequential(layer))
    with pytest.raises(ValueError, match="batch_first=True at 1, which"):  # the broken one beside it alone
        refuse_broken_attention(nn.Sequential(layer, DPMultiheadAttention(4, 2, batch_first=True)))


def test_an_engine_that_does_not_clip_is_refused(monkeypatch):
    class Mine(PrivacyEngineAdaptiveClipping):
        pass

    monkeypatch.setattr(opacus_compat, "adaptive_ghost_clips", lambda: False)
    with pytest.raises(ValueError, match=r"engine is a Mine, .*does not clip each record's gradient.*use a PrivacyEngine"):
        refuse_unclipped_engine(Mine())
    refuse_unclipped_engine(opacus.PrivacyEngine())
    monkeypatch.setattr(opacus_compat, "adaptive_ghost_clips", lambda: True)
    refuse_unclipped_engine(Mine())


def test_a_repaired_engine_is_seen_to_clip(fresh, monkeypatch):
    loss = adaptive_clipping_utils.DPLossFastGradientAdaptiveClipping
    averaged = loss.__call__

    def per_record(self, *args, **kwargs):
        reduction, self.criterion.reduction = self.criterion.reduction, "none"
        try:
            result = averaged(self, *args, **kwargs)
        finally:
            self.criterion.reduction = reduction
        result.loss_per_sample = result.loss_per_sample.flatten()
        return result

    monkeypatch.setattr(loss, "__call__", per_record)
    assert adaptive_ghost_clips()


def test_an_engine_that_cannot_be_tried_is_not_trusted(fresh, monkeypatch):
    def fail():
        raise TypeError("the interface has changed")

    monkeypatch.setattr(opacus_compat, "_clipped_mean", fail)
    assert not adaptive_ghost_clips()


def tied_network() -> nn.Sequential:
    network = nn.Sequential(nn.Embedding(5, 3), nn.Linear(3, 3), nn.Linear(3, 5, bias=False))
    network[2].weight = network[0].weight
    return network


def test_tied_parameters_are_listed_with_all_their_names():
    assert tied_parameters(tied_network()) == {"0.weight": ["0.weight", "2.weight"]}
    assert tied_parameters(nn.Linear(2, 2)) == {}


def test_ghost_clipping_of_tied_parameters_is_refused_as_opacus_does():
    network = tied_network()
    with pytest.raises(ValueError, match=r"module has tied parameters, 0.weight = 2.weight, .*use grad_sample_mode='hooks'"):
        refuse_tied_ghost(network)
    engine = opacus.PrivacyEngine()
    data = torch.utils.data.DataLoader(torch.zeros(4, 2, dtype=torch.long), batch_size=2)
    private, *_ = engine.make_private(
        module=network,
        optimizer=torch.optim.SGD(network.parameters(), lr=0.1),
        data_loader=data,
        criterion=nn.CrossEntropyLoss(),
        noise_multiplier=1.0,
        max_grad_norm=1.0,
        poisson_sampling=False,
        grad_sample_mode="ghost",
    )
    with pytest.raises(NotImplementedError, match="Parameter tying is not supported with Ghost Clipping"):
        private(torch.zeros(2, 2, dtype=torch.long))


def test_frozen_ties_and_layers_with_two_names_are_no_ties_to_train():
    network = tied_network()
    network[0].weight.requires_grad_(False)
    refuse_tied_ghost(network)
    network = nn.Sequential(nn.Linear(2, 2))
    network.alias = network[0]
    assert tied_parameters(network)["0.weight"] == ["0.weight", "alias.weight"]
    refuse_tied_ghost(nn.ModuleList([network, nn.Linear(2, 2)]))


def test_tied_language_models_are_named():
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(vocab_size=20, n_positions=8, n_embd=8, n_layer=1, n_head=2)
    with pytest.raises(ValueError, match=r"transformer.wte.weight = lm_head.weight"):
        refuse_tied_ghost(transformers.GPT2LMHeadModel(config))
