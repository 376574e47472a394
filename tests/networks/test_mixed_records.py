"""A network whose records depend on each other is refused by name; looking leaves no trace, and nobody else is kept out."""

from __future__ import annotations

import copy
import pickle

import opacus
import pytest
import torch
from helpers.records_together import APART, MIXING, Inside
from helpers.toy import make_toy
from opacus.layers import DPLSTM, DPMultiheadAttention
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from opacus_shuffle import PrivacyEngine
from opacus_shuffle.engine.network_checks import FirstBatch
from opacus_shuffle.networks.check import per_sample_check


class Layer(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, x):
        return self.function(x)


def private(module, accountant="subsampled_shuffle", engine=None, **options):
    toy = make_toy()
    toy |= {"module": module, "optimizer": torch.optim.SGD(module.parameters(), lr=0.1), **options}
    return (engine or PrivacyEngine(accountant=accountant)).make_private(
        noise_multiplier=1.0, **toy
    )


def assert_trains(module, loss, **options):
    """An epoch is accounted step by step, and moves every parameter."""
    engine, before = (
        PrivacyEngine(accountant="subsampled_shuffle"),
        [each.detach().clone() for each in module.parameters()],
    )
    model, optimizer, loader = private(module, engine=engine, **options)
    for x, y in loader:
        optimizer.zero_grad()
        loss(model(x), y).backward()
        optimizer.step()
    assert len(engine.accountant) == 4
    assert not any(
        torch.equal(each, start) for each, start in zip(module.parameters(), before, strict=True)
    )


@pytest.mark.parametrize(
    ("function", "accountant"),
    [
        *((each, "subsampled_shuffle") for each in MIXING),
        ("centred", "rdp"),
        ("gradients alone", "rdp"),
    ],
)
def test_records_that_mix_are_refused(function, accountant):
    torch.manual_seed(0)
    network = Inside(MIXING[function])
    where = r"mixes records in the module itself \(Inside\): "
    with pytest.raises(
        ValueError,
        match="or scales one's gradient by others" if function == "gradients alone" else where,
    ):
        private(network, accountant)
    assert not hasattr(network, "autograd_grad_sample_hooks")


def test_the_innermost_module_is_named():
    network = nn.Sequential(
        nn.Linear(5, 4), nn.Sequential(nn.Tanh(), Layer(MIXING["centred"])), nn.Linear(4, 3)
    )
    with pytest.raises(ValueError, match=r"mixes records in 1\.1 \(Layer\): "):
        private(network)


def in_groups(x, size):
    groups = x.view(len(x) // size, size, -1)
    return (groups - groups.mean(1, keepdim=True)).view(x.shape)


@pytest.mark.parametrize("size", [2, 3, 6, 12])
def test_records_that_mix_in_groups_are_refused_though_most_numbers_of_them_do_not_run(size):
    toy = make_toy(batch_size=12)
    with pytest.raises(ValueError, match=r"module mixes records in the module itself \(Inside\): "):
        private(Inside(lambda x: in_groups(x, size)), data_loader=toy["data_loader"])


@pytest.mark.parametrize("function", APART)
def test_records_that_do_not_mix_are_trained(function):
    assert_trains(Inside(APART[function]), lambda output, y: nn.functional.cross_entropy(output, y))


def test_recurrent_states_with_as_many_layers_as_records_are_no_mixture():
    class Recurrent(nn.Module):
        def __init__(self, layers):
            super().__init__()
            self.cell = DPLSTM(5, 4, num_layers=layers, batch_first=True)

        def forward(self, x):
            return self.cell(x)

    for layers in (2, 4, 5):
        data = DataLoader(TensorDataset(torch.randn(24, 3, 5), torch.zeros(24)), batch_size=6)
        assert_trains(Recurrent(layers), lambda output, _: output[0].sum(), data_loader=data)


class Counted(nn.Module):
    """Has everything that could change: a buffer, an attribute, dropout."""

    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(5, 6), nn.Dropout(), nn.Linear(6, 3))
        self.register_buffer("seen", torch.zeros(()))
        self.last = None

    def forward(self, x):
        self.seen += len(x)
        self.last = x
        return self.body(x)


def test_looking_leaves_no_trace():
    network = Counted()
    network.body(torch.randn(2, 5)).sum().backward()
    before = (
        copy.deepcopy(network.state_dict()),
        [each.grad.clone() for each in network.parameters()],
    )
    state = torch.get_rng_state()
    assert not per_sample_check(network, lambda records: ((torch.ones(records, 5),), {})).problem
    assert torch.equal(torch.get_rng_state(), state)
    assert network.last is None
    assert all(torch.equal(value, before[0][name]) for name, value in network.state_dict().items())
    assert all(
        torch.equal(each.grad, other)
        for each, other in zip(network.parameters(), before[1], strict=True)
    )


def test_a_run_with_opacus_s_own_accountant_is_opacus_s_bit_for_bit():
    found = []
    for engine in (PrivacyEngine(accountant="rdp"), opacus.PrivacyEngine(accountant="rdp")):
        torch.manual_seed(0)
        network = Counted()
        model, optimizer, loader = private(
            network,
            engine=engine,
            noise_generator=torch.Generator().manual_seed(0),
            poisson_sampling=False,
        )
        for x, y in loader:
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()
        found.append(
            [*(each.detach() for each in network.parameters()), network.seen, torch.get_rng_state()]
        )
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))


class OneHot(nn.Module):
    """Takes indices, as the training loop makes them; the loader has something else."""

    def __init__(self, function):
        super().__init__()
        self.table, self.function = nn.Linear(5, 3), function

    def forward(self, x, scale):
        return self.table(self.function(x * scale))


@pytest.mark.parametrize("wrap", [True, False])
@pytest.mark.parametrize("accountant", ["subsampled_shuffle", "rdp"])
def test_a_network_that_the_loader_s_records_do_not_run_through_is_looked_at_in_training(
    accountant, wrap
):
    words = {"poisson_sampling": False} if accountant == "rdp" else {}
    data = DataLoader(TensorDataset(torch.randn(24, 5)), batch_size=6)
    network = OneHot(nn.Tanh())
    model, optimizer, loader = private(
        network, accountant, data_loader=data, wrap_model=wrap, **words
    )
    for (x,) in loader:
        (model if wrap else network)(x, torch.ones(())).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    assert not any(isinstance(hook, FirstBatch) for hook in network._forward_pre_hooks.values())
    if wrap:
        assert pickle.loads(pickle.dumps(network.table)) is not None
    mixing = OneHot(MIXING["centred"])
    model, optimizer, loader = private(
        mixing, accountant, data_loader=data, wrap_model=wrap, **words
    )
    (x,) = next(iter(loader))
    for _ in range(2):
        with pytest.raises(ValueError, match="module mixes records in"):
            (model if wrap else mixing)(x, torch.ones(()))


class Places(nn.Module):
    def __init__(self):
        super().__init__()
        self.words, self.places, self.head = nn.Embedding(9, 4), nn.Embedding(5, 4), nn.Linear(4, 2)

    def forward(self, x):
        return self.head((self.words(x) + self.places(torch.arange(x.shape[1])[None])).mean(1))


@pytest.mark.parametrize("mode", ["hooks", "ghost"])
@pytest.mark.parametrize("accountant", ["subsampled_shuffle", "rdp"])
def test_position_ids_of_one_row_are_refused_with_their_remedy_without_shuffled_weights(
    accountant, mode
):
    data = DataLoader(
        TensorDataset(torch.randint(9, (24, 5)), torch.randint(2, (24,))), batch_size=6
    )
    with pytest.raises(
        ValueError, match=r"a batch of one whatever the batch is, places, .*prepare_model\(model\)"
    ):
        private(Places(), accountant, data_loader=data, grad_sample_mode=mode)
    network = Places()
    network.places.requires_grad_(False)
    private(network, accountant, data_loader=data, grad_sample_mode=mode)
    network = Places()
    held = [each for name, each in network.named_parameters() if "places" not in name]
    if mode == "hooks":
        private(network, accountant, data_loader=data, optimizer=torch.optim.SGD(held, lr=0.1))


@pytest.mark.parametrize("accountant", ["subsampled_shuffle", "rdp"])
def test_attention_that_mixes_the_batch_is_refused_without_shuffled_weights(accountant):
    class Attention(nn.Module):
        def __init__(self):
            super().__init__()
            self.attention = DPMultiheadAttention(4, 2, batch_first=True)

        def forward(self, x):
            return self.attention(x, x, x)[0]

    data = DataLoader(TensorDataset(torch.randn(24, 3, 4), torch.zeros(24)), batch_size=6)
    with pytest.raises(ValueError, match="DPMultiheadAttention with batch_first=True at attention"):
        private(Attention(), accountant, data_loader=data)
