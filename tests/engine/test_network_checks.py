"""What goes wrong with a network says what it is, and where."""

from __future__ import annotations

import collections
import copy
import pickle

import pytest
import torch
from helpers.toy import make_toy, run_epoch
from opacus.validators.errors import UnsupportedModuleError
from torch import nn
from torch.utils.data import DataLoader, TensorDataset, default_collate

from opacus_shuffle import PrivacyEngine


def private(accountant="shuffled_checkin", **changes):
    toy = make_toy() | changes
    return PrivacyEngine(accountant=accountant).make_private(**toy, noise_multiplier=1.0)


@pytest.mark.parametrize("mode", ["hooks", "functorch"])
def test_evaluation_mode_while_training_is_named_also_of_one_layer(mode):
    toy = make_toy()
    model, optimizer, loader = private("subsampled_shuffle", **toy, grad_sample_mode=mode)
    for asleep in (model, toy["module"][2]):
        asleep.eval()
        with pytest.raises(ValueError, match=r"Linear ran in evaluation mode; call model.train\(\) before the forward pass"):
            run_epoch(model, optimizer, loader)
        model.train()
    run_epoch(*private("subsampled_shuffle", grad_sample_mode=mode))


def test_what_watches_a_network_is_copied_and_pickled_with_it():
    model = private("subsampled_shuffle")[0]
    for each in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert each.eval()(torch.randn(3, 5)).shape == (3, 3)


def test_unsupported_layers_are_named_with_their_remedy():
    network = nn.Sequential(nn.Linear(5, 4), nn.ModuleDict({"norm": nn.BatchNorm1d(4)})["norm"], nn.Linear(4, 3))
    with pytest.raises(UnsupportedModuleError, match=r"1 \(BatchNorm1d\).*get_compatible_module"):
        private(module=network, optimizer=torch.optim.SGD(network.parameters(), lr=0.1))


@pytest.mark.parametrize("accountant", ["shuffled_checkin", "rdp"])
@pytest.mark.parametrize("frozen", [True, False])
def test_embeddings_that_a_forward_pass_rescales_are_refused(accountant, frozen):
    """The rows that change would be the tokens of the batch."""
    network = nn.Sequential(nn.Embedding(9, 4, max_norm=0.1), nn.Flatten(), nn.Linear(12, 3))
    network[0].requires_grad_(not frozen)
    data = TensorDataset(torch.randint(0, 9, (24, 3)), torch.randint(0, 3, (24,)))
    optimizer, before = torch.optim.SGD(network.parameters(), lr=0.1), network[0].weight.detach().clone()
    with pytest.raises(ValueError, match="module has embeddings with max_norm at 0: every forward pass rescales"):
        private(accountant, module=network, optimizer=optimizer, data_loader=DataLoader(data, batch_size=6))
    assert torch.equal(network[0].weight, before)


Pair = collections.namedtuple("Pair", "x y")


def batches(kind):
    """What a loader yields: tensors, and beside them something plain."""

    def collate(rows):
        x, y = default_collate(rows)
        return {
            "dictionary": {"x": x, "y": y, "length": 5},
            "tuple": (x, y, 5),
            "nested": ({"x": x, "names": ["a"] * len(x)}, y),
            "named": Pair(x, y),
            "number": (x, y, torch.tensor(3.0)),
        }[kind]

    return collate


@pytest.mark.parametrize("kind", ["dictionary", "tuple", "nested", "named", "number"])
def test_batches_that_cannot_be_empty_are_refused_where_some_will_be(kind):
    toy = make_toy()
    data = toy["data_loader"].dataset
    with pytest.raises(ValueError, match=r"data_loader yields batches with a .* at a batch.* for a batch of no records"):
        private(data_loader=DataLoader(data, batch_size=2, collate_fn=batches(kind)))
    private("subsampled_shuffle", data_loader=DataLoader(data, batch_size=2, collate_fn=batches(kind)))  # none is empty


@pytest.mark.parametrize("accountant", ["shuffled_checkin", "rdp"])
def test_a_first_batch_without_records_has_the_form_of_the_others(accountant):
    rows = [{"x": torch.randn(5), "y": index % 3} for index in range(40)]
    model, optimizer, loader = private(accountant, data_loader=DataLoader(rows, batch_size=1))
    empty = loader.collate_fn([])
    assert {name: tuple(each.shape) for name, each in empty.items()} == {"x": (0, 5), "y": (0,)}
    for batch in loader:
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(batch["x"]), batch["y"]).backward()
        optimizer.step()


@pytest.mark.parametrize("mode", ["hooks", "functorch", "ew", "ghost"])
def test_embeddings_train_on_batches_of_no_records(mode):
    network = nn.Sequential(nn.Embedding(9, 4, padding_idx=0), nn.Flatten(), nn.Linear(12, 3))
    data = TensorDataset(torch.randint(0, 9, (40, 3)), torch.randint(0, 3, (40,)))
    toy = {"module": network, "optimizer": torch.optim.SGD(network.parameters(), lr=0.1), "max_grad_norm": 1.0}
    engine = PrivacyEngine(accountant="shuffled_checkin")
    loader = DataLoader(data, batch_size=1)
    made = engine.make_private(**toy, data_loader=loader, noise_multiplier=1.0, grad_sample_mode=mode)
    run_epoch(made[0], made[1], made[-1], made[2] if mode == "ghost" else None)
    assert sum(steps for *_, steps in engine.accountant.history) == 40
