"""Layers that see records in another order, or not all of their gradients, are refused by name; the others train."""

from __future__ import annotations

import pytest
import torch
from helpers.records_together import IN_PLACE, MISPLACED, Between
from helpers.toy import make_toy, run_epoch
from opacus.layers import DPGRU, DPLSTM
from torch import nn
from torch.nn import functional as F
from torch.nn.utils.rnn import pack_padded_sequence
from torch.utils.data import DataLoader, TensorDataset

from opacus_shuffle import PrivacyEngine
from opacus_shuffle.networks.check import per_sample_check


def private(module, accountant="subsampled_shuffle", mode="hooks", **changes):
    toy = (
        make_toy()
        | {"module": module, "optimizer": torch.optim.SGD(module.parameters(), lr=0.1)}
        | changes
    )
    engine = PrivacyEngine(accountant=accountant)
    made = engine.make_private(**toy, noise_multiplier=1.0, grad_sample_mode=mode)
    return engine, (made[0], made[1], made[-1], made[2] if mode == "ghost" else None)


@pytest.mark.parametrize("way", MISPLACED)
@pytest.mark.parametrize(
    ("accountant", "mode"),
    [("subsampled_shuffle", "hooks"), ("rdp", "functorch"), ("rdp", "ghost")],
)
def test_a_layer_that_sees_records_in_another_order_is_refused(way, accountant, mode):
    torch.manual_seed(0)
    network = Between(MISPLACED[way])
    with pytest.raises(
        ValueError,
        match=r"records in another order than the batch's to .*middle \(Linear\), .* collate_fn",
    ):
        private(network, accountant, mode)
    assert not hasattr(network, "autograd_grad_sample_hooks")


@pytest.mark.parametrize("way", IN_PLACE)
def test_layers_that_see_every_record_at_its_place_are_trained(way):
    torch.manual_seed(0)
    network = Between(IN_PLACE[way])
    before = [each.detach().clone() for each in network.parameters()]
    engine, made = private(network)
    run_epoch(*made)
    assert len(engine.accountant) == 4
    assert not any(map(torch.equal, before, network.parameters()))


@pytest.mark.parametrize("way", ["gradients cut off", "gradients of length one"])
def test_gradients_that_do_not_shrink_with_the_loss_are_refused_with_ghost_clipping(way):
    with pytest.raises(
        ValueError,
        match=r"changes gradients on their way to .*middle \(Linear\).*'ghost' clips by: use 'hooks'",
    ):
        private(Between(IN_PLACE[way]), "subsampled_shuffle", "ghost")


class Sentences(nn.Module):
    """Packs sequences, of different lengths from so many records on."""

    def __init__(self, kind, *, differ_from=0, is_sorted=False):
        super().__init__()
        self.cell, self.head = kind(2, 4, batch_first=True), nn.Linear(4, 3)
        self.differ_from, self.is_sorted = differ_from, is_sorted

    def forward(self, x):
        lengths = (
            1 + torch.arange(len(x)) % 3 if len(x) >= self.differ_from else torch.full((len(x),), 3)
        )
        if self.is_sorted:
            lengths = lengths.sort(descending=True).values
        packed = pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=self.is_sorted)
        state = self.cell(packed)[1]
        return self.head((state[0] if isinstance(state, tuple) else state)[-1])


@pytest.mark.parametrize("kind", [DPLSTM, DPGRU])
def test_sequences_that_are_sorted_within_the_network_are_refused_and_sorted_ones_trained(kind):
    data = DataLoader(TensorDataset(torch.randn(24, 3, 2), torch.randint(3, (24,))), batch_size=8)
    with pytest.raises(ValueError, match=r"in another order than the batch's to cell \("):
        private(Sentences(kind), data_loader=data)
    engine, made = private(Sentences(kind, differ_from=8), data_loader=data)
    with pytest.raises(ValueError, match=r"enforce_sorted=False.*enforce_sorted=True"):
        run_epoch(*made)
    assert len(engine.accountant) == 0
    engine, made = private(Sentences(kind, is_sorted=True), data_loader=data)
    run_epoch(*made)
    assert len(engine.accountant) == 3


class Tied(nn.Module):
    def __init__(self, tie):
        super().__init__()
        self.first, self.last, self.tie = nn.Linear(5, 5), nn.Linear(5, 3), tie

    def forward(self, x):
        hidden = torch.tanh(self.first(x))
        return self.last(F.linear(hidden, self.first.weight) if self.tie else hidden)


def assert_trains(module, mode, **changes):
    """An epoch is accounted step by step, and moves every parameter that is to be trained, and no other."""
    engine, made = private(module, mode=mode, **changes)
    before = [each.detach().clone() for each in module.parameters()]
    run_epoch(*made)
    assert len(engine.accountant) == 4
    for each, start in zip(module.parameters(), before, strict=True):
        assert torch.equal(each, start) != each.requires_grad
        assert each.isfinite().all()


def test_a_weight_used_beside_its_layer_is_refused_with_ghost_clipping_alone():
    with pytest.raises(ValueError, match=r"module uses first.weight beside the layer"):
        private(Tied(tie=True), mode="ghost")
    assert_trains(Tied(tie=True), "hooks")
    network = Tied(tie=True)
    network.first.weight.requires_grad_(False)
    assert_trains(network, "ghost")


def test_layers_that_see_all_are_trained():
    assert_trains(Tied(tie=False), "ghost")


class Text(nn.Module):
    def __init__(self):
        super().__init__()
        self.words, self.cell, self.head = (
            nn.Embedding(9, 4, padding_idx=0),
            DPLSTM(4, 6, batch_first=True),
            nn.Linear(6, 3),
        )
        self.norm, self.drop = nn.LayerNorm(6), nn.Dropout()

    def forward(self, x):
        return self.head(self.drop(self.norm(self.cell(self.words(x))[0]))).softmax(-1).mean(1)


def test_padded_texts_are_trained():
    data = DataLoader(
        TensorDataset(torch.randint(0, 3, (24, 6)), torch.randint(3, (24,))), batch_size=6
    )
    assert_trains(Text(), "ghost", data_loader=data)


@pytest.mark.parametrize("mixes", [True, False])
def test_outputs_are_compared_where_opacus_s_hooks_fail(mixes):
    """They take no layer whose output is written to, and then nobody sees rows."""

    class WrittenTo(Between):
        def forward(self, x):
            hidden = self.first(x)
            hidden += 1
            return self.last(hidden - hidden.mean(0) if mixes else hidden)

    seen = per_sample_check(WrittenTo(None), lambda records: ((torch.randn(records, 5),), {}))
    assert not seen.seen
    assert "inplace" in str(seen.failure)
    assert (
        seen.problem.startswith("module mixes records in the module itself (WrittenTo): ") == mixes
    )
