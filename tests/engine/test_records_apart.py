"""What keeps records apart is proved to do so without many passes; what does not is never said to."""

from __future__ import annotations

import copy
import ctypes
import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from helpers.records_together import APART, MISPLACED, MIXING, Between, Inside, hooked
from opacus.layers import DPLSTM, DPMultiheadAttention
from torch import nn

from opacus_shuffle.engine import records_apart
from opacus_shuffle.engine.record_flow import RecordFlow, UnfollowedError
from opacus_shuffle.engine.records_apart import are_apart


def proved(network, *args, **keywords):
    """Whether it is proved on the first rows of these arguments."""

    def call_of(records):
        def cut(value):
            return value[:records] if isinstance(value, torch.Tensor) else value

        return records, (tuple(map(cut, args)), {name: cut(value) for name, value in keywords.items()})

    return are_apart(network.train(), call_of)


class Reading(nn.Module):
    """A network in which something is read from all records, and does something to each."""

    def __init__(self, function):
        super().__init__()
        self.first, self.last, self.function = nn.Linear(5, 6), nn.Linear(6, 3), function

    def forward(self, x, mask):
        return self.last(self.function(torch.tanh(self.first(x)), mask))


def convolutional():
    return nn.Sequential(
        *(nn.Conv2d(1, 8, 3), nn.GroupNorm(2, 8), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(8, 4, 3, stride=2)),
        *(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Dropout(0.3), nn.Linear(4, 3)),
    )


class Attending(nn.Module):
    def __init__(self):
        super().__init__()
        self.inside, self.outside = DPMultiheadAttention(8, 2, batch_first=True), nn.Linear(8, 3)

    def forward(self, x):
        return self.outside(self.inside(x, x, x)[0].mean(1))


class Remembering(nn.Module):
    def __init__(self):
        super().__init__()
        self.cell, self.last = DPLSTM(5, 4, batch_first=True), nn.Linear(4, 2)

    def forward(self, x):
        return self.last(self.cell(x)[0][:, -1])


PLAIN = {
    "a convolutional network": (convolutional, lambda: torch.randn(6, 1, 12, 12)),
    "attention": (Attending, lambda: torch.randn(6, 5, 8)),
    "a recurrent network": (Remembering, lambda: torch.randn(6, 5, 5)),
    **{name: (lambda function=function: Inside(function), lambda: torch.randn(6, 5)) for name, function in APART.items()},
}


@pytest.fixture(autouse=True)
def _seeded():
    torch.manual_seed(0)


@pytest.mark.parametrize("name", PLAIN)
def test_plain_networks_are_proved(name):
    build, data = PLAIN[name]
    assert proved(build(), data())


@pytest.mark.parametrize("name", ["bert", "gpt2", "vit", "llama"])
def test_transformers_are_proved(name):
    transformers = pytest.importorskip("transformers")
    sizes = {"num_hidden_layers": 1, "num_attention_heads": 2, "hidden_size": 8, "intermediate_size": 12, "num_labels": 2}
    ids, mask = torch.randint(1, 30, (6, 7)), (torch.arange(7) < torch.tensor([[7], [4], [7], [5], [7], [3]])).long()
    if name == "vit":
        network = transformers.ViTForImageClassification(transformers.ViTConfig(**sizes, image_size=8, patch_size=4))
        assert proved(network, pixel_values=torch.randn(6, 3, 8, 8))
        return
    from opacus_shuffle import prepare_model

    if name == "bert":
        network = transformers.BertForSequenceClassification(transformers.BertConfig(**sizes, vocab_size=30))
    elif name == "gpt2":
        network = transformers.GPT2LMHeadModel(transformers.GPT2Config(vocab_size=30, n_embd=8, n_layer=1, n_head=2))
    else:
        config = transformers.LlamaConfig(**sizes, vocab_size=30, num_key_value_heads=1)
        network = transformers.LlamaForCausalLM(config)
    assert proved(prepare_model(network), input_ids=ids, attention_mask=mask)


@pytest.mark.parametrize("name", MIXING)
def test_records_that_mix_are_never_proved_apart(name):
    assert not proved(Inside(MIXING[name]), torch.randn(6, 5))


@pytest.mark.parametrize("name", MISPLACED)
def test_layers_that_see_records_elsewhere_are_never_proved(name):
    assert not proved(Between(MISPLACED[name]), torch.randn(6, 5))


class HookedFirst(nn.Module):
    """The gradients of its first layer, before which there is none, are scaled by the batch's."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(5, 6), nn.Linear(6, 3)

    def forward(self, x):
        hidden = self.first(x)
        if hidden.requires_grad:
            hidden.register_hook(lambda each: each / each.abs().max())
        return self.last(hidden.tanh())


def test_gradients_that_are_mixed_behind_the_first_layer_are_not_proved_apart():
    assert not proved(HookedFirst(), torch.randn(6, 5))


class MixedBackwards(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        return gradient - gradient.mean(0)


READ = {
    "a number": lambda h, mask: h / h.abs().max().item(),
    "NumPy": lambda h, mask: h + torch.from_numpy(h.detach().numpy().mean(0)),
    "a list": lambda h, mask: h * max(map(max, h.detach().tolist())),
    "a deep copy": lambda h, mask: h + copy.deepcopy(h.detach()).mean(0),
    "a length": lambda h, mask: h * len(h[h[:, 0] > 0]),
    "a yes or no about masks": lambda h, mask: h if bool(mask.all()) else 2 * h,
    "a yes or no about masks, in gradients alone": lambda h, mask: (
        h.detach() + 0.1 * h - 0.1 * h.detach() if bool(mask.all()) else h
    ),
    "mixed backwards": lambda h, mask: MixedBackwards.apply(h),
    "a matrix of all": lambda h, mask: h @ (h.T @ h),
    "a sum that is exactly zero": lambda h, mask: h + 0 * h.sum(),
}


def hooked_by(function):
    return lambda h, mask: hooked(h * 1, function)


class MixedByNumPy(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        read = gradient.numpy()
        return torch.from_numpy(read - read.mean(0))


def in_a_thread(function):
    def of(gradient):
        with ThreadPoolExecutor(1) as pool:
            return pool.submit(lambda: function(gradient)).result()

    return of


def updated(gradient):
    mean, variance = torch.zeros(gradient.shape[1]), torch.ones(gradient.shape[1])
    torch.batch_norm_update_stats(gradient, mean, variance, 1.0)
    return gradient - mean


BACKWARDS = {
    "NumPy in a backward method": lambda h, mask: MixedByNumPy.apply(h),
    "NumPy in a hook": hooked_by(lambda g: g - torch.from_numpy(g.detach().numpy().mean(0))),
    "a norm by NumPy in a hook": hooked_by(lambda g: g / float((g.detach().numpy() ** 2).sum() ** 0.5)),
    "a list in a hook": hooked_by(lambda g: g / max(map(max, g.detach().abs().tolist()))),
    "a capsule in a hook": hooked_by(lambda g: g - torch.from_dlpack(torch.utils.dlpack.to_dlpack(g.detach())).mean(0)),
    "a thread in a hook": hooked_by(in_a_thread(lambda g: g - g.mean(0))),
    "a norm by a thread in a hook": hooked_by(in_a_thread(lambda g: g / g.norm())),
    "statistics that no schema mentions": hooked_by(updated),
}


@pytest.mark.parametrize("name", BACKWARDS)
def test_gradients_that_are_read_out_of_sight_are_never_proved_apart(name):
    assert not proved(Reading(BACKWARDS[name]), torch.randn(6, 5), torch.ones(6, 2))


@pytest.mark.parametrize("name", READ)
def test_what_is_read_from_all_records_and_returned_is_never_proved_apart(name):
    masks = torch.tensor([[1, 1], [1, 1], [1, 0], [1, 0], [1, 1], [1, 0]]).bool()
    assert not proved(Reading(READ[name]), torch.randn(6, 5), masks)


def elsewhere(function):
    """Has another thread compute something, where no mode of this one sees it."""
    results = []
    thread = threading.Thread(target=lambda: results.append(function().detach()))
    thread.start()
    thread.join()
    return results[0]


def shared_with_numpy(hidden):
    memory = torch.zeros(hidden.shape)
    seen_by_numpy = memory.numpy()
    memory.copy_(hidden.detach())
    return torch.from_numpy(seen_by_numpy.copy())


def by_size(hidden):
    size = 1 + hidden.detach().abs().sum().long() % 5
    return torch.ones_like(hidden) * len(hidden.new_ones(6).tensor_split(size.reshape(1))[0])


class Own(torch.Tensor):
    """A tensor with operations of its own."""

    @staticmethod
    def __new__(cls, held):
        return torch.Tensor._make_wrapper_subclass(cls, held.shape, dtype=held.dtype)

    def __init__(self, held):
        self.held = held

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        return cls(func(*(each.held if isinstance(each, cls) else each for each in args), **(kwargs or {})))


class Adapted(nn.Module):
    """A network with a layer that gives zero as yet, whose gradients are of what it gets."""

    def __init__(self, function):
        super().__init__()
        self.first, self.adapter, self.last = nn.Linear(5, 6), nn.Linear(6, 6), nn.Linear(6, 3)
        self.function = function
        nn.init.zeros_(self.adapter.weight)

    def forward(self, x):
        hidden = torch.tanh(self.first(x))
        return self.last(hidden + self.adapter(self.function(hidden)))


UNSEEN = {
    "another thread": lambda h: elsewhere(lambda: h.mean(0)).expand_as(h) + 0,
    "memory that NumPy has": lambda h: shared_with_numpy(h).flip(0),
    "sizes": by_size,
    "tensors with operations of their own": lambda h: Own(h.detach()).flip(0).held,
}


@pytest.mark.parametrize("name", UNSEEN)
def test_what_cannot_be_followed_does_not_reach_layers_that_give_zero_unseen(name):
    assert not proved(Adapted(UNSEEN[name]), torch.randn(6, 5))


@pytest.mark.parametrize(
    "function",
    [
        by_size,
        lambda h: h * len(torch.tensor_split(h, tensor_indices_or_sections=h[0, :1].detach().long())),
        lambda h: h * len([h.detach().clone().apply_(abs)]),
        lambda h: h * len(str(h.detach().sum())),
        lambda h: h + torch.zeros(h.shape).map_(h.detach(), max),
    ],
)
def test_what_reads_values_out_of_sight_is_noticed_at_once(function, monkeypatch):
    monkeypatch.setattr(records_apart, "_others_do_not_matter", lambda *_, **__: True)
    assert not proved(Adapted(function), torch.randn(6, 5))


def written_by_ctypes(hidden):
    moved = torch.zeros(hidden.shape)
    rows = hidden.detach().contiguous()
    size = rows[0].numel() * rows.element_size()
    for place in range(len(rows)):
        ctypes.memmove(moved.data_ptr() + place * size, rows.data_ptr() + (len(rows) - 1 - place) * size, size)
    return moved


def written_by_numpy(hidden):
    array = np.zeros(hidden.shape, dtype=np.float32)
    torch.from_numpy(array).copy_(hidden.detach())
    return torch.tensor(array[::-1].copy())


@pytest.mark.parametrize(
    "function",
    [
        lambda h: elsewhere(lambda: h.mean(0)).expand_as(h) + 0,
        lambda h: h + elsewhere(lambda: h.flip(0)),
        lambda h: h + torch.frombuffer(bytearray(24), dtype=torch.float32),
        shared_with_numpy,
        written_by_numpy,
        written_by_ctypes,
    ],
)
def test_memory_that_nobody_saw_made_is_noticed_at_once(function, monkeypatch):
    monkeypatch.setattr(records_apart, "_others_do_not_matter", lambda *_, **__: True)
    assert not proved(Adapted(function), torch.randn(6, 5))


class WithConstants(nn.Module):
    """A network that uses constants of all kinds, which were there before or are made in passing."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(5, 6), nn.Linear(6, 3)
        self.register_buffer("buffer", torch.rand(6))
        self.attribute, self.several = torch.rand(6), {"one": [torch.rand(6)]}

    def forward(self, x, table):
        hidden = self.first(x) * self.buffer + self.attribute * self.several["one"][0]
        hidden = hidden + torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0, 6.0]) * torch.as_tensor(2.0) + torch.arange(6.0)
        hidden = torch.where(hidden > 0, hidden, 0.1) + torch.randn(6) + torch.eye(6)[0] + torch.full((6,), 2)
        return self.last(hidden + table[0, torch.LongTensor([0, 1, 2, 3, 4, 5])] + hidden.new_tensor([0.5]))


def test_constants_of_all_kinds_are_no_obstacle():
    x, table = torch.randn(6, 5), torch.rand(1, 6)
    assert are_apart(WithConstants().train(), lambda records: (records, ((x[:records], table), {})))


def test_splitting_at_constants_is_no_obstacle():
    split = lambda h: torch.cat(h.tensor_split(torch.tensor([2]), dim=1)[::-1], 1)  # noqa: E731
    assert proved(Adapted(split), torch.randn(6, 5))


def test_operations_of_tensors_of_their_own_end_the_run():
    with pytest.raises(UnfollowedError), RecordFlow(2):
        Own(torch.ones(2)).flip(0)


def test_what_a_layer_got_and_is_written_to_before_the_backward_pass_is_no_proof():
    def written(layer, hidden):
        taken = hidden.detach().clone()
        result = layer(taken)
        taken.data.copy_(taken.flip(0))  # of which PyTorch takes no notice
        return result

    assert not proved(Between(written), torch.randn(6, 5))


def test_what_gradients_decide_is_no_proof():
    """It is decided otherwise where they are larger."""
    shortened = lambda each: each / each.norm() if each.norm() > 100 else each  # noqa: E731
    assert not proved(Between(lambda layer, hidden: hooked(layer(hidden), shortened)), torch.randn(6, 5))


def test_others_are_tried_beside_every_record_until_a_yes_or_no_changes():
    """The first three are padded, so that one of them is, whatever is beside the first two."""
    masks = torch.tensor([[1, 0], [1, 0], [1, 0], [1, 1], [1, 1], [1, 1]])
    assert not proved(Reading(lambda h, mask: h if bool((mask == 0).any()) else 2 * h), torch.randn(6, 5), masks)


def test_a_yes_or_no_that_changes_nothing_is_no_obstacle():
    masks = torch.tensor([[1, 1], [1, 1], [1, 0], [1, 0], [1, 1], [1, 0]]).bool()
    network = Reading(lambda h, mask: h if bool(mask.all()) else h * torch.ones_like(mask[:, :1]))
    assert proved(network, torch.randn(6, 5), masks)


def test_outputs_without_rows_prove_nothing():
    class Summed(Inside):
        def forward(self, x):
            return super().forward(x).sum()

    assert not proved(Summed(torch.tanh), torch.randn(6, 5))


def test_looking_leaves_no_trace():
    network = convolutional().train()
    network.register_buffer("seen", torch.zeros(2))
    network.register_forward_pre_hook(lambda module, inputs: (*inputs, module.seen.add_(1))[:-1])
    before, draws = copy.deepcopy(network.state_dict()), torch.get_rng_state()
    assert proved(network, torch.randn(6, 1, 12, 12, generator=torch.Generator().manual_seed(0)))
    assert all(torch.equal(each, before[name]) for name, each in network.state_dict().items())
    assert torch.equal(draws, torch.get_rng_state())
    assert all(each.grad is None for each in network.parameters())
    assert not any(each._backward_hooks or each._forward_hooks for each in network.modules())  # the pre-hook is the test's


def test_products_are_computed_where_their_values_are_read(monkeypatch):
    """The mean of products decides, but only of one record's: nothing is proved of zeros."""
    runs = []
    follow = records_apart._Following.__init__

    def noted(self, network, call, records, axis, products):
        runs.append(products is None)
        follow(self, network, call, records, axis, products)

    monkeypatch.setattr(records_apart._Following, "__init__", noted)
    network = Reading(lambda h, mask: h if bool((h.mean() > -5).all()) else h - h.mean(0))
    assert proved(network, torch.randn(6, 5), torch.ones(6, 2))
    assert runs == [False, True]


class ReadsTwice(nn.Module):
    """Reads a value at its beginning and another one later."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(3, 2)

    def forward(self, x):
        negative = bool((x < 0).any())
        out = self.layer(x)
        if not negative and bool((x > 5).any()):
            out = 2 * out
        return out + 1


def test_every_way_is_found_and_none_is_gone_to_its_end_twice():
    ends = []
    network = ReadsTwice()
    network.register_forward_hook(lambda *_: ends.append(1))
    values = [-1.0, -2.0, 1.0, 9.0, 2.0, -3.0, 8.0]
    calls = [((torch.full((2, 3), value),), {}) for value in values]
    ways = records_apart._by_answers(network, calls)
    assert [float(way.call[0][0][0, 0]) for way in ways.values()] == [-1.0, 1.0, 9.0]
    assert len(ends) == 3
