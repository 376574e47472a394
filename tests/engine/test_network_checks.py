"""What goes wrong with a network says what it is, and where."""

from __future__ import annotations

import collections
import copy
import pickle

import pytest
import torch
from helpers.toy import make_toy, run_epoch
from opacus.grad_sample import GradSampleModuleExpandedWeights
from opacus.validators.errors import UnsupportedModuleError
from torch import nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, TensorDataset, default_collate

from opacus_shuffle import PrivacyEngine
from opacus_shuffle.engine.sampling.empty_batches import let_layers_be_empty


def private(accountant="shuffled_checkin", **changes):
    toy = make_toy() | changes
    return PrivacyEngine(accountant=accountant).make_private(**toy, noise_multiplier=1.0)


@pytest.mark.parametrize("mode", ["hooks", "functorch"])
def test_evaluation_mode_while_training_is_named_also_of_one_layer(mode):
    toy = make_toy()
    model, optimizer, loader = private("subsampled_shuffle", **toy, grad_sample_mode=mode)
    for asleep in (model, toy["module"][2]):
        asleep.eval()
        with pytest.raises(
            ValueError,
            match=r"Linear ran in evaluation mode; call model.train\(\) before the forward pass",
        ):
            run_epoch(model, optimizer, loader)
        model.train()
    run_epoch(*private("subsampled_shuffle", grad_sample_mode=mode))


def test_what_watches_a_network_is_copied_and_pickled_with_it():
    model = private("subsampled_shuffle")[0]
    for each in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert each.eval()(torch.randn(3, 5)).shape == (3, 3)


def test_unsupported_layers_are_named_with_their_remedy():
    network = nn.Sequential(
        nn.Linear(5, 4), nn.ModuleDict({"norm": nn.BatchNorm1d(4)})["norm"], nn.Linear(4, 3)
    )
    with pytest.raises(UnsupportedModuleError, match=r"1 \(BatchNorm1d\).*get_compatible_module"):
        private(module=network, optimizer=torch.optim.SGD(network.parameters(), lr=0.1))


@pytest.mark.parametrize("accountant", ["shuffled_checkin", "rdp"])
@pytest.mark.parametrize("frozen", [True, False])
def test_embeddings_that_a_forward_pass_rescales_are_refused(accountant, frozen):
    """The rows that change would be the tokens of the batch."""
    network = nn.Sequential(nn.Embedding(9, 4, max_norm=0.1), nn.Flatten(), nn.Linear(12, 3))
    network[0].requires_grad_(not frozen)
    data = TensorDataset(torch.randint(0, 9, (24, 3)), torch.randint(0, 3, (24,)))
    optimizer, before = (
        torch.optim.SGD(network.parameters(), lr=0.1),
        network[0].weight.detach().clone(),
    )
    with pytest.raises(
        ValueError, match="module has embeddings with max_norm at 0: every forward pass rescales"
    ):
        private(
            accountant,
            module=network,
            optimizer=optimizer,
            data_loader=DataLoader(data, batch_size=6),
        )
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
    with pytest.raises(
        ValueError,
        match=r"data_loader yields batches with a .* at a batch.* for a batch of no records",
    ):
        private(data_loader=DataLoader(data, batch_size=2, collate_fn=batches(kind)))
    private(
        "subsampled_shuffle", data_loader=DataLoader(data, batch_size=2, collate_fn=batches(kind))
    )  # none is empty


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
    toy = {
        "module": network,
        "optimizer": torch.optim.SGD(network.parameters(), lr=0.1),
        "max_grad_norm": 1.0,
    }
    engine = PrivacyEngine(accountant="shuffled_checkin")
    loader = DataLoader(data, batch_size=1)
    made = engine.make_private(
        **toy, data_loader=loader, noise_multiplier=1.0, grad_sample_mode=mode
    )
    run_epoch(made[0], made[1], made[-1], made[2] if mode == "ghost" else None)
    assert sum(steps for *_, steps in engine.accountant.history) == 40


def test_expanded_weights_take_empty_batches_when_they_are_let():
    layer = nn.Linear(3, 1)
    model = GradSampleModuleExpandedWeights(layer)
    let_layers_be_empty(model, layer)
    model(torch.zeros(0, 3)).sum().backward()
    assert [tuple(parameter.grad_sample.shape) for parameter in model.parameters()] == [
        (0, 1, 3),
        (0, 1),
    ]
    let_layers_be_empty(layer, layer)  # nothing to do


def test_expanded_weights_say_that_records_are_not_passed_by_keyword():
    model, _, loader = private("subsampled_shuffle", grad_sample_mode="ew")
    with pytest.raises(
        ValueError,
        match=r"grad_sample_mode='ew' needs the records as first positional argument .*got input by",
    ):
        model(input=next(iter(loader))[0])


class Checkpointed(nn.Module):
    """Keeps no activations of its layers, and runs them once more in the backward pass."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(5, 4), nn.Linear(4, 3)

    def forward(self, x):
        return checkpoint(
            lambda each: self.last(torch.tanh(self.first(each))), x, use_reentrant=False
        )


def stepping(mode, between, **changes):
    """A step, with something between its forward and its backward pass."""
    toy = make_toy() | changes
    made = PrivacyEngine(accountant="subsampled_shuffle").make_private(
        **toy, noise_multiplier=1.0, grad_sample_mode=mode
    )
    model, optimizer, criterion = (
        made[0],
        made[1],
        made[2] if mode == "ghost" else nn.CrossEntropyLoss(),
    )
    x, y = next(iter(made[-1]))
    loss = criterion(model(x), y)
    loss = between(model, x, loss) or loss
    loss.backward()
    optimizer.step()


UNFIT = {
    "another pass": (
        lambda model, x, loss: model(x).sum() and None,
        "ran forward more often than backward",
    ),
    "another pass on fewer": (
        lambda model, x, loss: model(x[:1]).sum() and None,
        "ran last on 1 records, and the loss is of",
    ),
    "gradients of gradients": (
        lambda model, x, loss: (
            loss + torch.autograd.grad(loss, list(model.parameters()), create_graph=True)[0].norm()
        ),
        "comes to a Linear more often than it ran on this batch",
    ),
}


@pytest.mark.parametrize("what", UNFIT)
@pytest.mark.parametrize("mode", ["hooks", "functorch"])
def test_passes_that_do_not_go_together_say_why(mode, what):
    between, why = UNFIT[what]
    with pytest.raises(ValueError, match=why):
        stepping(mode, between)


def test_a_second_pass_is_named_with_ghost_clipping():
    with pytest.raises(
        ValueError,
        match=r"0 \(Linear\) runs twice before a backward pass.*use grad_sample_mode='hooks'",
    ):
        stepping("ghost", UNFIT["another pass"][0])


@pytest.mark.parametrize(
    ("mode", "why"), [("hooks", "more often than backward.*checkpoint"), ("ghost", "checkpoint")]
)
def test_checkpointed_layers_are_refused_by_name(mode, why):
    module = Checkpointed()
    with pytest.raises(ValueError, match=why):
        stepping(
            mode,
            lambda *_: None,
            module=module,
            optimizer=torch.optim.SGD(module.parameters(), lr=0.1),
        )


@pytest.mark.parametrize("mode", ["hooks", "functorch", "ew", "ghost"])
def test_a_step_after_the_backward_pass_of_a_copy_is_refused(mode):
    made = private("subsampled_shuffle", grad_sample_mode=mode)
    twin, optimizer = copy.deepcopy(made[0]), made[1]
    x, y = next(iter(made[-1]))
    with torch.no_grad():
        assert twin(x).shape == (len(x), 3)

    def step():
        nn.functional.cross_entropy(twin(x), y).backward()
        optimizer.step()

    with pytest.raises(
        ValueError, match="no copy of it" if mode == "ew" else "is a copy of a private network"
    ):
        step()


@pytest.mark.parametrize("accountant", ["subsampled_shuffle", "rdp"])
def test_an_optimizer_that_needs_a_closure_is_refused(accountant):
    network = nn.Linear(5, 3)
    with pytest.raises(ValueError, match="optimizer is LBFGS"):
        private(accountant, module=network, optimizer=torch.optim.LBFGS(network.parameters()))


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
    module = Cut(1)
    toy = make_toy() | {"module": module, "optimizer": torch.optim.SGD(module.parameters(), lr=0.1)}
    toy["max_grad_norm"] = 1.0 if clipping == "flat" else [1.0] * 4
    made = PrivacyEngine(accountant="rdp").make_private(
        **toy, noise_multiplier=1.0, poisson_sampling=False, clipping=clipping
    )
    module.pieces = 2
    with pytest.raises(ValueError, match="let no layer turn one record into several"):
        run_epoch(*made)


def test_indices_that_are_spread_in_memory_train_with_ghost_clipping():
    class Places(nn.Module):
        def __init__(self):
            super().__init__()
            self.places, self.last = nn.Embedding(5, 4), nn.Linear(4, 3)

        def forward(self, x):
            return self.last(
                (x[..., None] * self.places(torch.arange(5).expand(len(x), 5))).mean(1)
            )

    module = Places()
    before = [each.detach().clone() for each in module.parameters()]
    stepping(
        "ghost",
        lambda *_: None,
        module=module,
        optimizer=torch.optim.SGD(module.parameters(), lr=0.1),
    )
    assert not any(map(torch.equal, before, module.parameters()))


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
        {"criterion": loss("mean"), "grad_sample_mode": "ew"},
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


def test_a_network_that_is_private_already_is_refused_with_the_earlier_run_untouched():
    toy = make_toy()
    model, optimizer, loader = private("subsampled_shuffle", **toy)
    with pytest.raises(
        ValueError,
        match=r"module is a Sequential that an earlier make_private has made private.*to_standard",
    ):
        private("subsampled_shuffle", **toy)
    run_epoch(model, optimizer, loader)


@pytest.mark.parametrize("mode", ["hooks", "ghost"])
def test_parameters_that_were_thawed_since_are_named_by_make_private(mode):
    toy = make_toy()
    network = toy["module"]
    first, rest = network[0], [each for layer in network[1:] for each in layer.parameters()]
    first.requires_grad_(False)
    model = private(module=network, optimizer=torch.optim.SGD(rest, lr=0.1), grad_sample_mode=mode)[
        0
    ]
    first.requires_grad_(True)
    thawed = r"parameters 0.weight, 0.bias were frozen when module was made private.*to_standard_module\(\)"
    with pytest.raises(ValueError, match=thawed):
        private(
            module=model,
            optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
            grad_sample_mode=mode,
        )
    plain = model.to_standard_module()
    again = private(
        "subsampled_shuffle", module=plain, optimizer=torch.optim.SGD(plain.parameters(), lr=0.1)
    )
    run_epoch(*again)


def test_a_critic_of_a_generator_gives_gradients_without_its_hooks():
    """So does a network whose inputs' gradients are looked at."""
    model, optimizer, loader = private("subsampled_shuffle")
    generator = nn.Linear(2, 5)
    second = torch.optim.SGD(generator.parameters(), lr=0.1)
    run_epoch(model, optimizer, loader)
    model.requires_grad_(False)
    with pytest.raises(ValueError, match=r"or was frozen meanwhile.*model.disable_hooks\(\)"):
        model(generator(torch.randn(4, 2))).sum().backward()
    model.requires_grad_(True)
    model.disable_hooks()
    model(generator(torch.randn(4, 2))).sum().backward()
    second.step()
    optimizer.zero_grad()
    model.enable_hooks()
    run_epoch(model, optimizer, loader)


@pytest.mark.parametrize("used", [True, False])
def test_gradients_of_inputs_in_evaluation_mode_name_the_remedy_with_ghost_clipping_too(used):
    model, _, criterion, loader = private("subsampled_shuffle", grad_sample_mode="ghost")
    if used:
        x, y = next(iter(loader))
        criterion(model(x), y).backward()
    model.eval()
    x = torch.randn(3, 5, requires_grad=True)
    with pytest.raises(ValueError, match=r"Linear ran in evaluation mode.*model.disable_hooks\(\)"):
        model(x).sum().backward()
    model.disable_hooks()
    model(x).sum().backward()
    assert x.grad is not None
