"""What goes wrong with a network says what it is, and where."""

from __future__ import annotations

import copy
import itertools
import re
import warnings
from collections import UserDict
from types import SimpleNamespace
from typing import NamedTuple

import pytest
import torch
from helpers.private_runs import Run
from helpers.toy import here, make_toy
from torch import nn
from torch.nn.utils import prune
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, TensorDataset, default_collate

from opacus_shuffle import PrivacyEngine


def private(accountant="shuffled_checkin", **changes):
    toy = make_toy() | changes
    return PrivacyEngine(accountant=accountant).make_private(**toy, noise_multiplier=1.0)


@pytest.mark.parametrize("mode", ["hooks", "functorch"])
def test_evaluation_mode_while_training_is_named_also_of_one_layer(mode):
    run = Run(mode=mode)
    said = r"reached a Linear .*ran in evaluation mode.*model.train\(\) before the forward pass"
    for asleep in (run.model, run.network[2]):
        asleep.eval()
        with pytest.raises(ValueError, match=said):
            run.step()
        run.model.train()
    assert run.train().accounted == 4


@pytest.mark.parametrize("accountant", ["shuffled_checkin", "rdp"])
@pytest.mark.parametrize("frozen", [True, False])
def test_embeddings_that_a_forward_pass_rescales_are_refused(accountant, frozen):
    """The rows that change would be the tokens of the batch."""
    network = here(nn.Sequential(nn.Embedding(9, 4, max_norm=0.1), nn.Flatten(), nn.Linear(12, 3)))
    network[0].requires_grad_(not frozen)
    data = TensorDataset(torch.randint(0, 9, (24, 3)), torch.randint(0, 3, (24,)))
    before = network[0].weight.detach().clone()
    toy = {"module": network, "data_loader": DataLoader(data, batch_size=6)}
    said = "module has embeddings with max_norm at 0: every forward pass rescales"
    with pytest.raises(ValueError, match=said):
        Run(accountant, toy=toy)
    assert torch.equal(network[0].weight, before)
    network[0].max_norm, network[0].sparse = None, True
    with pytest.raises(ValueError, match=r"with sparse at 0: .*set sparse to False"):
        Run(accountant, "ghost", toy=toy)


WITHOUT_EMPTY_ONES = {  # batches with something that is neither a tensor nor text
    "dictionary": lambda x, y: {"x": x, "y": y, "length": 5},
    "nested": lambda x, y: ({"x": x, "lengths": [5] * len(x)}, y),
    "number": lambda x, y: (x, y, torch.tensor(3.0)),
}


@pytest.mark.parametrize("kind", WITHOUT_EMPTY_ONES)
def test_batches_that_cannot_be_empty_are_refused_where_some_will_be(kind):
    def collate(rows):
        return WITHOUT_EMPTY_ONES[kind](*default_collate(rows))

    loader = DataLoader(make_toy()["data_loader"].dataset, batch_size=2, collate_fn=collate)
    said = r"data_loader yields batches with a .* at a batch.* for a batch of no records"
    with pytest.raises(ValueError, match=said):
        private(data_loader=loader)
    private("subsampled_shuffle", data_loader=loader)  # none is empty


def test_records_of_a_class_of_one_s_own_train_with_their_own_collate_function():
    """Opacus's loader would read each record as a sequence."""
    records = [SimpleNamespace(pair=pair) for pair in make_toy()["data_loader"].dataset]
    loader = DataLoader(
        records, batch_size=6, collate_fn=lambda rows: default_collate([row.pair for row in rows])
    )
    assert Run("shuffled_checkin", toy={"data_loader": loader}).train().accounted == 4


class Named(NamedTuple):
    x: torch.Tensor
    text: list[str]
    y: torch.Tensor


@pytest.mark.parametrize("kind", [dict, Named, UserDict])
@pytest.mark.parametrize("accountant", ["shuffled_checkin", "rdp"])
def test_a_first_batch_without_records_has_the_form_of_the_others(accountant, kind):
    """Also where batches hold text, or are what tokenizers of Hugging Face return, a mapping."""
    rows = [{"x": torch.randn(5), "text": "a", "y": index % 3} for index in range(40)]

    model, optimizer, loader = private(
        accountant,
        data_loader=DataLoader(
            rows, batch_size=1, collate_fn=lambda rows: kind(**default_collate(rows))
        ),
    )
    empty = loader.collate_fn([])
    assert type(empty) is (Named if kind is Named else dict)
    for batch in loader:  # of which every third has no records
        fields = here(batch._asdict() if kind is Named else dict(batch))
        assert fields["x"].shape == (len(fields["text"]), 5)
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(fields["x"]), fields["y"]).backward()
        optimizer.step()


@pytest.mark.parametrize("mode", ["hooks", "functorch", "ew", "ghost"])
def test_embeddings_train_on_batches_of_no_records(mode):
    network = nn.Sequential(nn.Embedding(9, 4, padding_idx=0), nn.Flatten(), nn.Linear(12, 3))
    data = TensorDataset(torch.randint(0, 9, (40, 3)), torch.randint(0, 3, (40,)))
    toy = {"module": network, "data_loader": DataLoader(data, batch_size=1)}
    assert Run(mode=mode, toy=toy).train().accounted == 40


def test_expanded_weights_say_that_records_are_not_passed_by_keyword():
    model, _, loader = private("rdp", grad_sample_mode="ew")
    with pytest.raises(
        ValueError,
        match=r"grad_sample_mode='ew' needs the records as first positional .*got input by",
    ):
        model(input=next(iter(loader))[0])


class Stepped(nn.Module):
    """Is trained by a method of its own, and never called itself."""

    def __init__(self):
        super().__init__()
        self.body = make_toy()["module"]

    def forward(self, pairs):
        return self.training_step(*pairs)

    def training_step(self, x, y):
        return nn.functional.cross_entropy(self.body(x), y)


@pytest.mark.parametrize("accountant", ["subsampled_shuffle", "rdp"])
@pytest.mark.parametrize("called", [True, False])
def test_a_network_that_nobody_calls_is_trained_with_one_warning(accountant, called):
    """PyTorch runs no hook of it, so that nothing can look at its first batch."""
    run = Run(accountant, "no wrapper", toy={"module": Stepped()})
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        run.network.eval()(run.batch())
        run.network.train()
        for batch in run.loader:
            run.optimizer.zero_grad()
            loss = run.network(batch) if called else run.network.training_step(*batch)
            loss.backward()
            run.optimizer.step()
    said = r"layers were not checked .*\(the network itself was not called\): no ε holds unless"
    messages = [str(warning.message) for warning in caught]
    assert sum(bool(re.search(said, message)) for message in messages) == (not called)
    assert run.updates > 0


class Checkpointed(nn.Module):
    """Keeps no activations of its layers, and runs them once more in the backward pass."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(5, 4), nn.Linear(4, 3)

    def forward(self, x):
        return checkpoint(lambda x: self.last(torch.tanh(self.first(x))), x, use_reentrant=False)


def stepping(mode, between):
    """A step, with something between its forward and its backward pass."""
    run = Run(mode=mode)
    x, y = run.batch()
    loss = run.criterion(run.model(x), y)
    loss = between(run.model, x, loss) or loss
    loss.backward()
    run.optimizer.step()


UNFIT = {
    "another pass": (
        lambda model, x, loss: model(x).sum() and None,
        "ran forward more often than backward",
    ),
    "gradients of gradients": (
        lambda model, x, loss: (
            loss + torch.autograd.grad(loss, list(model.parameters()), create_graph=True)[0].norm()
        ),
        "reached a Linear without a forward pass.*gradients of gradients",
    ),
}


@pytest.mark.parametrize("what", UNFIT)
@pytest.mark.parametrize("mode", ["hooks", "functorch"])
def test_passes_that_do_not_go_together_say_why(mode, what):
    between, why = UNFIT[what]
    with pytest.raises(ValueError, match=why):
        stepping(mode, between)


@pytest.mark.parametrize("mode", ["hooks", "ghost"])
def test_checkpointed_layers_are_refused_by_name(mode):
    with pytest.raises(ValueError, match=r"first.*torch\.utils\.checkpoint"):
        Run(mode=mode, toy={"module": Checkpointed()}).step()


@pytest.mark.parametrize("mode", ["hooks", "functorch", "ew", "ghost"])
def test_a_step_after_the_backward_pass_of_a_copy_is_refused(mode):
    run = Run(mode=mode)
    x, y = run.batch()
    run.model = copy.deepcopy(run.model)
    with torch.no_grad():
        assert run.model(x).shape == (len(x), 3)
    said = "no copy of it" if mode == "ew" else "is a copy of a private network"
    with pytest.raises(ValueError, match=said):
        run.step((x, y))


class Cut(nn.Module):
    """Has as many rows of each record in its first layer as it has pieces, and one in its last."""

    def __init__(self, pieces):
        super().__init__()
        self.first, self.last, self.pieces = nn.Linear(5, 4), nn.Linear(4, 3), pieces

    def forward(self, x):
        pieces = torch.tanh(self.first(x.repeat_interleave(self.pieces, 0)))
        return self.last(pieces.reshape(len(x), self.pieces, 4).mean(1))


@pytest.mark.parametrize("clipping", ["flat", "per_layer"])
def test_rows_that_are_no_records_later_are_refused_with_a_loader_of_one_s_own_too(clipping):
    toy = {"module": Cut(1), "max_grad_norm": 1.0 if clipping == "flat" else [1.0] * 4}
    run = Run("rdp", toy=toy, poisson_sampling=False, clipping=clipping)
    run.network.pieces = 2
    with pytest.raises(ValueError, match="let no layer turn one record into several"):
        run.train()


SHARED = {
    "weight": lambda reduction: nn.CrossEntropyLoss(
        weight=torch.tensor([1.0, 50.0, 1.0]), reduction=reduction
    ),
    "ignored": lambda reduction: nn.NLLLoss(ignore_index=2, reduction=reduction),
}


@pytest.mark.parametrize("accountant", ["subsampled_shuffle", "rdp"])
@pytest.mark.parametrize("loss", SHARED.values(), ids=SHARED.keys())
def test_losses_that_are_divided_by_other_records_labels_are_refused_where_they_are_seen(
    accountant, loss
):
    within = make_toy()
    within["module"].add_module("loss", nn.ModuleList([loss("mean")]))
    for changes in (
        {"criterion": loss("mean")},
        {"criterion": loss("mean"), "grad_sample_mode": "functorch"},
        within,
    ):
        with pytest.raises(
            ValueError, match=r"(criterion|loss.0) is .*reduction='mean'\), which divides by"
        ):
            private(accountant, **changes)
    for changes in (
        {"criterion": loss("none")},
        {"criterion": nn.CrossEntropyLoss()},
        {"criterion": loss("mean"), "grad_sample_mode": "ghost"},
    ):
        assert private(accountant, **changes)


CHANGED = {
    "pruned": (
        lambda layer: prune.l1_unstructured(layer, "weight", amount=0.3),
        r"renamed after make_private.*: 0\.weight_orig;",
    ),
    "adapter": (
        lambda layer: setattr(layer, "lora", nn.Parameter(layer.weight)),
        r"added to the network or renamed after make_private.*: 0\.lora;",
    ),
    "thawed": (
        lambda layer: layer.bias.requires_grad_(True),
        r"for 0\.bias: .*or thawed .*to_standard_module",
    ),
}


@pytest.mark.parametrize(
    ("mode", "change"),
    [*itertools.product(["hooks", "ghost"], CHANGED), ("ew", "pruned"), ("ew", "adapter")],
)
def test_parameters_that_were_added_renamed_or_thawed_since_are_named(mode, change):
    (work, said), network = CHANGED[change], make_toy()["module"]
    network[0].bias.requires_grad_(False)
    run = Run(mode=mode, toy={"module": network})
    work(network[0])
    with pytest.raises(ValueError, match=said):
        run.step()


@pytest.mark.parametrize("mode", ["hooks", "ghost"])
@pytest.mark.parametrize("used", [True, False])
def test_gradients_of_inputs_in_evaluation_mode_name_the_remedy(used, mode):
    run = Run(mode=mode)
    if used:
        run.backward()
    run.model.eval()
    x = here(torch.randn(3, 5)).requires_grad_(True)
    with pytest.raises(ValueError, match=r"ran in evaluation mode.*model.disable_hooks\(\)"):
        run.model(x).sum().backward()
    run.model.disable_hooks()
    run.model(x).sum().backward()
    assert x.grad is not None
