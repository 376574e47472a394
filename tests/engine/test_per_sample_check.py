"""A network whose layers see records in another order than the batch's is refused by name; the others train."""

from __future__ import annotations

import contextlib

import pytest
import torch
from helpers.records_together import IN_PLACE, MISPLACED, Between
from helpers.toy import make_toy, run_epoch
from opacus.layers import DPGRU, DPLSTM
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence
from torch.utils.data import DataLoader, TensorDataset

from opacus_shuffle import PrivacyEngine
from opacus_shuffle.engine import per_sample_check


def private(module, accountant="subsampled_shuffle", mode="hooks", **changes):
    toy = make_toy() | {"module": module, "optimizer": torch.optim.SGD(module.parameters(), lr=0.1)} | changes
    engine = PrivacyEngine(accountant=accountant)
    made = engine.make_private(**toy, noise_multiplier=1.0, grad_sample_mode=mode)
    return engine, (made[0], made[1], made[-1], made[2] if mode == "ghost" else None)


@pytest.mark.parametrize("way", MISPLACED)
@pytest.mark.parametrize(("accountant", "mode"), [("subsampled_shuffle", "hooks"), ("rdp", "functorch"), ("rdp", "ghost")])
def test_a_layer_that_sees_records_in_another_order_is_refused(way, accountant, mode):
    torch.manual_seed(0)
    network = Between(MISPLACED[way])
    with pytest.raises(ValueError, match=r"records in another order than the batch's to .*middle \(Linear\), .* collate_fn"):
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
        ValueError, match=r"changes gradients on their way to .*middle \(Linear\).*'ghost' clips by: use 'hooks'"
    ):
        private(Between(IN_PLACE[way]), "subsampled_shuffle", "ghost")


@pytest.mark.parametrize("way", IN_PLACE)
def test_few_records_tell_how_gradients_grow_where_records_are_known_to_stay_in_order(way):
    torch.manual_seed(0)
    asked = []

    def call_of(records):
        asked.append(records)
        return records, ((torch.randn(records, 5, generator=torch.Generator().manual_seed(0)),), {})

    bent = way.startswith("gradients")
    with pytest.raises(ValueError, match="changes gradients") if bent else contextlib.nullcontext():
        per_sample_check.check_per_sample_gradients(Between(IN_PLACE[way]), call_of, ghost=True, apart=True)
    # Three is the number of outputs, and half of four records are two.
    assert asked == ([2, 4, 7] if way == "the first ones once more" else [2, 4])


class Sentences(nn.Module):
    """Packs sequences, of different lengths from so many records on."""

    def __init__(self, kind, *, differ_from=0, is_sorted=False):
        super().__init__()
        self.cell, self.head = kind(2, 4, batch_first=True), nn.Linear(4, 3)
        self.differ_from, self.is_sorted = differ_from, is_sorted

    def forward(self, x):
        lengths = 1 + torch.arange(len(x)) % 3 if len(x) >= self.differ_from else torch.full((len(x),), 3)
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


def test_wide_layers_are_told_apart_by_few_numbers_of_each_record():
    """Six records' gradients of each look at once would be eighteen times the weights, where ghost clipping keeps none."""
    kept = []

    class Flipped(nn.Sequential):
        def forward(self, x):
            return super().forward(x.flip(0)).flip(0)

    def look(kind):
        network = nn.Sequential(nn.Linear(5, 150), nn.Tanh(), kind(nn.Linear(150, 150)), nn.Tanh(), nn.Linear(150, 3))
        names = {id(each): name for name, each in network.named_parameters()}
        call = (torch.randn(6, 5),), {}
        kept.append(per_sample_check._rows_of_layers(network, names, 0, True, call, torch.ones(6)).few)
        per_sample_check.check_per_sample_gradients(network, lambda n: (n, ((torch.randn(n, 5),), {})))

    look(nn.Sequential)
    with pytest.raises(ValueError, match=r"to 2.0 \(Linear\)"):
        look(Flipped)
    assert all(each.shape[1] < 2 * 4096 for told in kept for each in told.values())


def test_looking_for_them_keeps_the_gradients_of_one_layer_at_a_time(monkeypatch):
    """Those of all layers and all records would be the largest part of the memory that make_private takes."""
    network = nn.Sequential(*[nn.Linear(8, 8) for _ in range(5)], nn.Softplus(), nn.ReLU(inplace=True), nn.Linear(8, 8))
    alive = []

    def few(rows):
        held = [vars(each).get("grad_sample") for each in network.parameters()]
        alive.append(sum(each is not None for each in held))
        return rows.clone()

    monkeypatch.setattr(per_sample_check, "_few_numbers", few)
    per_sample_check.check_per_sample_gradients(network, lambda n: (n, ((torch.randn(n, 8),), {})))
    assert len(alive) == 3 * 2 * 12  # rows and their sum in each look
    assert max(alive) == 2
