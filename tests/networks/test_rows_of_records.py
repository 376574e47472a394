"""A layer that has other rows than one for each record is refused by name, however long sequences are; the others train."""

from __future__ import annotations

import contextlib
import copy
import re
import warnings

import pytest
import torch
from helpers.toy import run_epoch
from opacus.grad_sample import GradSampleModule
from opacus.layers import DPGRU, DPLSTM, DPMultiheadAttention
from torch import nn
from torch.nn.utils.rnn import pack_sequence, pad_sequence
from torch.utils.data import DataLoader, TensorDataset

from opacus_shuffle import PrivacyEngine
from opacus_shuffle.networks.check import per_sample_check

TIME, BATCH, RECORDS = 4, 4, 8
UNSEEN = "layers were not looked at with several numbers of records"


class Net(nn.Module):
    """A network of named parts, and how they are called."""

    def __init__(self, run, **parts):
        super().__init__()
        self.run = run
        for name, part in parts.items():
            self.add_module(name, part)

    def forward(self, x):
        return self.run(self, x)


def time_first(layer, head):
    return Net(lambda net, x: net.head(net.layer(x.transpose(0, 1)).sum(0)), layer=layer, head=head)


def with_zeros(head):
    nn.init.zeros_(head.weight)
    return head


class Scale(nn.Module):
    """A layer whose gradients per record Opacus gets from a function of one's own."""

    def __init__(self):
        super().__init__()
        self.factor = nn.Parameter(torch.ones(2))

    def forward(self, x):
        return x * self.factor


class WrongScale(Scale):
    pass


@pytest.fixture
def _samplers(monkeypatch):
    """Of records, and, wrongly, of time steps."""
    per_record = {
        Scale: lambda layer, inputs, gradients: {layer.factor: (inputs[0] * gradients).sum(1)},
        WrongScale: lambda layer, inputs, gradients: {layer.factor: (inputs[0] * gradients).sum(0)},
    }
    for kind, sampler in per_record.items():
        monkeypatch.setitem(GradSampleModule.GRAD_SAMPLERS, kind, sampler)


OTHERS = {
    "time first": (
        lambda: time_first(nn.Linear(2, 3), nn.Linear(3, 3)),
        r"4 rows for 6 records to layer \(Linear\)",
    ),
    "nested": (
        lambda: time_first(
            nn.Sequential(nn.Tanh(), nn.Sequential(nn.Linear(2, 3))), nn.Linear(3, 3)
        ),
        r"4 rows for 6 records to layer.1.0 \(Linear\)",
    ),
    "before weights of zero": (
        lambda: time_first(nn.Linear(2, 3), with_zeros(nn.Linear(3, 3))),
        r"4 rows for 6 records to layer \(Linear\)",
    ),
    "end to end": (
        lambda: Net(
            lambda net, x: net.a(x.flatten(0, 1)).view(len(x), TIME, 3).mean(1), a=nn.Linear(2, 3)
        ),
        r"24 rows for 6 records to a \(Linear\)",
    ),
    "convolution over records": (
        lambda: Net(lambda net, x: net.a(x.permute(1, 2, 0)).mean(0).T, a=nn.Conv1d(2, 3, 1)),
        r"4 rows for 6 records to a \(Conv1d\)",
    ),
    "head of a recurrent layer": (
        lambda: Net(
            lambda net, x: net.b(net.a(x.transpose(0, 1))[0]).mean(0),
            a=DPLSTM(2, 3),
            b=nn.Linear(3, 3),
        ),
        r"4 rows for 6 records to b \(Linear\)",
    ),
    "attention": (
        lambda: Net(
            lambda net, x: net.a(*[x.transpose(0, 1)] * 3)[0].mean(0), a=DPMultiheadAttention(2, 1)
        ),
        r"4 rows for 6 records to a.qlinear \(Linear\), a.klinear \(Linear\), a.vlinear "
        r"\(Linear\), a.out_proj",
    ),
    "norm": (
        lambda: time_first(nn.LayerNorm(2), nn.Linear(2, 3)),
        r"4 rows for 6 records to layer \(LayerNorm\)",
    ),
    "beside the outputs": (
        lambda: Net(
            lambda net, x: (net.a(x).mean(1), net.b(x.transpose(0, 1)).mean()),
            a=nn.Linear(2, 3),
            b=nn.Linear(2, 1),
        ),
        r"4 rows for 6 records to b \(Linear\)",
    ),
    "in a loss": (
        lambda: Net(lambda net, x: net.a(x.transpose(0, 1)).square().mean(), a=nn.Linear(2, 3)),
        r"4 rows for 6 records to a \(Linear\)",
    ),
    "both ways": (
        lambda: Net(
            lambda net, x: net.a(x).mean(1) + net.a(x.transpose(0, 1)).mean(0), a=nn.Linear(2, 3)
        ),
        r"records in another order than the batch's to a \(Linear\)",
    ),
    "both ways in a loss": (
        lambda: Net(
            lambda net, x: (net.a(x).mean(1) + net.a(x.transpose(0, 1)).mean(0)).square().mean(),
            a=nn.Linear(2, 3),
        ),
        r"not a sum or mean of one number per record.*let every layer see \[batch",
    ),
    "for four records alone": (
        lambda: Net(
            lambda net, x: net.a(x.view(4, TIME, 2).transpose(0, 1)).mean(0), a=nn.Linear(2, 3)
        ),
        r"records in another order than the batch's to a \(Linear\)",
    ),
    "function of one's own": (
        lambda: time_first(Scale(), nn.Linear(2, 3)),
        r"4 rows for 6 records to layer \(Scale\)",
    ),
    "wrong function of one's own": (
        lambda: Net(lambda net, x: net.b(net.a(x)).mean(1), a=WrongScale(), b=nn.Linear(2, 3)),
        r"to a \(WrongScale\), or scales",
    ),
}


def frozen(network, part):
    network.get_submodule(part).requires_grad_(False)
    return network


OWN = {
    "batch first": lambda: Net(lambda net, x: net.a(x).mean(1), a=nn.Linear(2, 3)),
    "time first, frozen": lambda: frozen(time_first(nn.Linear(2, 3), nn.Linear(3, 3)), "layer"),
    "recurrent": lambda: Net(lambda net, x: net.a(x)[0].mean(1), a=DPGRU(2, 3, batch_first=True)),
    "recurrent, time first": lambda: Net(
        lambda net, x: net.a(x.transpose(0, 1))[0].mean(0), a=DPGRU(2, 3)
    ),
    "attention": lambda: Net(
        lambda net, x: net.a(x, x, x)[0].mean(1), a=DPMultiheadAttention(2, 1, batch_first=True)
    ),
    "convolution": lambda: Net(
        lambda net, x: net.a(x.transpose(1, 2)).mean(2), a=nn.Conv1d(2, 3, 2)
    ),
    "positions": lambda: Net(
        lambda net, x: net.a(x + net.at(torch.arange(TIME).expand(len(x), -1))).mean(1),
        a=nn.Linear(2, 3),
        at=nn.Embedding(TIME, 2),
    ),
    "for four records alone": lambda: Net(
        lambda net, x: net.a(x.view(4, TIME, 2)).mean(1), a=nn.Linear(2, 3)
    ),
    "a loss beside it": lambda: Net(
        lambda net, x: (net.a(x).mean(1), net.b(x).mean()), a=nn.Linear(2, 3), b=nn.Linear(2, 1)
    ),
    "a loss": lambda: Net(lambda net, x: net.a(x).square().mean(), a=nn.Linear(2, 3)),
    "function of one's own": lambda: Net(
        lambda net, x: net.b(net.a(x)).mean(1), a=Scale(), b=nn.Linear(2, 3)
    ),
}


def private(
    network, data=None, accountant="subsampled_shuffle", mode="hooks", batch=BATCH, collate=None
):
    torch.manual_seed(0)
    data = (
        TensorDataset(torch.randn(RECORDS, TIME, 2), torch.randint(3, (RECORDS,)))
        if data is None
        else data
    )
    engine = PrivacyEngine(accountant=accountant)
    made = engine.make_private(
        module=network,
        optimizer=torch.optim.SGD(
            [each for each in network.parameters() if each.requires_grad], lr=0.1
        ),
        data_loader=DataLoader(data, batch_size=batch, collate_fn=collate),
        noise_multiplier=1.0,
        max_grad_norm=1.0,
        grad_sample_mode=mode,
    )
    return engine, made


@pytest.mark.parametrize("way", OTHERS)
@pytest.mark.usefixtures("_samplers")
def test_layers_with_other_rows_than_records_are_refused_where_a_batch_is_as_large_as_sequences_are_long(
    way,
):
    make, why = OTHERS[way]
    network = make()
    with pytest.raises(ValueError, match=why):
        private(network)
    assert not hasattr(network, "autograd_grad_sample_hooks")


@pytest.mark.parametrize("way", OWN)
@pytest.mark.usefixtures("_samplers")
def test_layers_with_a_row_for_each_record_are_trained_without_a_word(way):
    network = OWN[way]()
    before = [each.detach().clone() for each in network.parameters()]
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=f".*{UNSEEN}")
        engine, (model, optimizer, loader) = private(network)
        for x, _ in loader:
            optimizer.zero_grad()
            outputs = model(x)
            sum(
                each.sin().sum() for each in (outputs if isinstance(outputs, tuple) else [outputs])
            ).backward()
            optimizer.step()
    assert len(engine.accountant) == 2
    for each, start in zip(network.parameters(), before, strict=True):
        assert torch.equal(each, start) != each.requires_grad


@pytest.mark.parametrize(
    ("accountant", "mode"),
    [
        *(
            (accountant, "hooks")
            for accountant in ("shuffle_gauss", "subsampled_shuffle", "shuffled_sums", "rdp")
        ),
        *(("subsampled_shuffle", mode) for mode in ("functorch", "ew", "ghost")),
    ],
)
def test_a_layer_that_sees_time_first_is_refused_by_every_mechanism_with_the_remedy(
    accountant, mode
):
    """Of two records of two time steps each, one moved the sum by 1.5 times the clipping norm."""
    data = TensorDataset(torch.randn(RECORDS, 2, 1), torch.randint(2, (RECORDS,)))
    with pytest.raises(
        ValueError,
        match=r"2 rows for 6 records to layer \(Linear\).*\[batch, ...\] \(by batch_first=True",
    ):
        private(time_first(nn.Linear(1, 1), nn.Linear(1, 2)), data, accountant, mode, batch=2)


class Functional(nn.Module):
    """Uses a parameter in a function, which sees rows in this order."""

    def __init__(self, seen, back):
        super().__init__()
        self.weight, self.seen, self.back = nn.Parameter(torch.randn(2, 5)), seen, back

    def forward(self, x):
        return self.back(nn.functional.linear(self.seen(x), self.weight)).flatten(1)


@pytest.mark.parametrize(
    ("seen", "shape", "allowed"),
    [
        (lambda x: x, (5,), True),
        (lambda x: x.flip(0), (5,), False),
        (lambda x: x.transpose(0, 1), (RECORDS, 5), False),
    ],
    ids=["as they are", "flipped", "time first"],
)
def test_expanded_weights_take_the_rows_that_a_function_sees(seen, shape, allowed):
    """Hooks find each record's own gradient there; with expanded weights one record moved the sum by 20 clipping norms."""
    network = Functional(seen, seen)
    data = TensorDataset(torch.randn(RECORDS, *shape), torch.randint(2, (RECORDS,)))
    with (
        contextlib.nullcontext()
        if allowed
        else pytest.raises(ValueError, match=r"grad_sample_mode='ew'.*use 'hooks'")
    ):
        private(network, data, mode="ew")


@pytest.mark.parametrize("mixes", [True, False])
def test_outputs_that_have_time_first_are_of_records_all_the_same(mixes):
    """As the loss of connectionist temporal classification wants them."""
    network = Net(
        lambda net, x: (net.layer(x) - mixes * net.layer(x).mean(0).detach()).transpose(0, 1),
        layer=nn.Linear(2, 2),
    )
    problem = per_sample_check(network, lambda n: ((torch.randn(n, TIME, 2),), {})).problem
    assert ("mixes records" in problem) == mixes


@pytest.mark.parametrize("time", range(1, 13))
def test_a_layer_that_sees_time_first_is_refused_however_long_sequences_are(time):
    network = time_first(nn.Linear(1, 1), nn.Linear(1, 2))
    problem = per_sample_check(network, lambda n: ((torch.randn(n, time, 1),), {})).problem
    assert re.search(rf"shows {time} rows? for \d+ records to layer \(Linear\)", problem)


def padded(rows):
    return pad_sequence([x for x, _ in rows], batch_first=True), torch.tensor([y for _, y in rows])


@pytest.mark.parametrize("first", ["time", "batch"])
def test_sequences_as_long_as_their_number_in_the_data_tell_time_from_records(first):
    """The longest of the first n has n steps."""
    data = [(torch.randn(length, 1), length % 2) for length in range(1, 13)]
    network = time_first(nn.Linear(1, 1), nn.Linear(1, 2))
    if first == "batch":
        network = Net(
            lambda net, x: net.head(net.layer(x).sum(1)),
            layer=nn.Linear(1, 1),
            head=nn.Linear(1, 2),
        )
    with (
        pytest.raises(ValueError, match="6 rows for 3 records")
        if first == "time"
        else contextlib.nullcontext()
    ):
        _, made = private(network, data, collate=padded)
        run_epoch(*made)


@pytest.mark.parametrize(
    ("first", "mode"),
    [("time", "hooks"), ("time", "functorch"), ("time", "ghost"), ("batch", "hooks")],
)
def test_the_first_batch_is_looked_at_where_the_loader_s_records_do_not_fit(first, mode):
    """Its gradients are Opacus's afterwards."""
    network = OTHERS["in a loss"][0]() if first == "time" else OWN["a loss"]()
    plain = copy.deepcopy(network)
    _, (model, optimizer, *_, loader) = private(
        network, TensorDataset(torch.randn(RECORDS, 2 * TIME)), mode=mode
    )
    x = next(iter(loader))[0].view(-1, TIME, 2)
    if first == "time":
        with pytest.raises(ValueError, match=r"4 rows for 6 records to a \(Linear\)"):
            model(x)
        return
    model(x).backward()
    rows = [torch.autograd.grad(plain(each[None]), plain.a.weight)[0] for each in x]
    torch.testing.assert_close(network.a.weight.grad_sample, torch.stack(rows))
    optimizer.step()


def test_packed_sequences_are_trained_with_a_warning_that_nobody_has_seen_their_rows():
    network = Net(lambda net, x: net.a(x)[1][-1], a=DPGRU(2, 3, batch_first=True))
    engine, (model, optimizer, loader) = private(
        network, collate=lambda rows: pack_sequence([x for x, _ in rows])
    )
    with pytest.warns(UserWarning, match=UNSEEN):
        outputs = model(next(iter(loader)))
    outputs.square().sum().backward()
    optimizer.step()
    assert len(engine.accountant) == 1
