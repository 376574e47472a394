"""What a module runs on is given, guessed or read off a data loader; a run leaves no trace."""

from __future__ import annotations

import random
from collections import namedtuple

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

from opacus_shuffle.networks.sample_input import (
    first_records,
    from_batch,
    guess,
    normalise,
    run_quietly,
)


class TwoInputs(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(3, 2)

    def forward(self, left, right, scale=1.0):
        return self.linear(left) + scale * self.linear(right)


class Anything(TwoInputs):
    def forward(self, **entries):
        return self.linear(entries["left"])


def random_states():
    numpy_state = np.random.get_state()[1].tolist()  # noqa: NPY002
    return torch.get_rng_state().tolist(), random.getstate(), numpy_state


T = torch.zeros(2)
ARGUMENTS = [
    (T, ((T,), {})),
    ([T, 1], ((T, 1), {})),
    ((T,), ((T,), {})),
    ({"x": T}, ((), {"x": T})),
]


@pytest.mark.parametrize(("sample", "call"), ARGUMENTS)
def test_a_tensor_a_sequence_and_a_mapping_become_arguments(sample, call):
    assert normalise(sample) == call


FIRST_LAYERS = [
    (nn.Sequential(nn.Linear(5, 4), nn.ReLU(), nn.Linear(4, 2)), (2, 5)),
    (nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2)), (2, 1, 32, 32)),
    (nn.Sequential(nn.Conv1d(2, 3, 5), nn.Flatten()), (2, 2, 32)),
    (nn.Sequential(nn.Conv3d(1, 2, 3), nn.AdaptiveAvgPool3d(1)), (2, 1, 32, 32, 32)),
    *((nn.Embedding(2, 4, padding_idx=padding), (2, 8)) for padding in (0, 1)),
    (nn.LSTM(6, 4, batch_first=True), (2, 3, 6)),
    (nn.Linear(3, 2).double(), (2, 3)),
]


@pytest.mark.parametrize(("module", "shape"), FIRST_LAYERS)
def test_the_first_layer_tells_a_shape_on_which_the_module_runs_the_same_every_time(module, shape):
    before = random_states()
    (sample,), _ = guess(module)
    assert sample.shape == shape
    assert random_states() == before
    assert torch.equal(guess(module)[0][0], sample)
    if isinstance(module, nn.Embedding):
        assert (sample == 1 - module.padding_idx).all()
    module(sample)


class Noisy(Dataset):
    """Records with random transforms of all three kinds."""

    def __len__(self):
        return 5

    def __getitem__(self, index):
        noise = random.random() + np.random.rand() + torch.rand(1)  # noqa: NPY002
        return index + 0 * noise, index


def test_the_first_records_are_collated_and_no_random_state_moves():
    generator = torch.Generator().manual_seed(1)
    loader = DataLoader(Noisy(), batch_size=3, shuffle=True, generator=generator)
    before = random_states(), generator.get_state().tolist()
    x, y = first_records(loader)
    assert x.flatten().tolist() == y.tolist() == [0, 1]
    assert len(first_records(loader, 9)[0]) == 5
    assert (random_states(), generator.get_state().tolist()) == before
    ready_made = [torch.zeros(7, 3)]
    assert first_records(DataLoader(ready_made, batch_size=None)).shape == (7, 3)


X, Y = torch.randn(4, 3), torch.zeros(4)
Pair = namedtuple("Pair", "x y")
ENTRIES = {"left": X, "right": X, "label": Y}
BATCHES = [
    *((nn.Linear(3, 2), batch, (X,)) for batch in (X, (X,), (X, Y), [X, Y], Pair(X, Y))),
    *((nn.Linear(3, 2), batch, (X,)) for batch in (((X,), Y), ([X], Y), (X, X, Y))),
    *((TwoInputs(), batch, (X, X)) for batch in ((X, X, Y), ((X, X), Y))),
    *((TwoInputs(), batch, {"left": X, "right": X}) for batch in (ENTRIES, (ENTRIES, Y))),
    (Anything(), ENTRIES, ENTRIES),
]


@pytest.mark.parametrize(("module", "batch", "arguments"), BATCHES)
def test_a_batch_gives_the_arguments_that_forward_takes(module, batch, arguments):
    args, keywords = from_batch(module, batch)
    expected = ((), arguments) if isinstance(arguments, dict) else (arguments, {})
    assert (args, keywords) == expected


def test_the_batch_is_moved_to_the_modules_device():
    args, _ = from_batch(nn.Linear(3, 2, device="meta"), (X, Y))
    assert args[0].device.type == "meta"


class Stream(IterableDataset):
    def __iter__(self):
        yield torch.zeros(1)


UNFIT = "must yield tensors, .* for TwoInputs.forward, which takes left, right, scale, got a "
DATA = r"data_loader.dataset must have a length, an index, and a record, got"
REFUSED = [
    *(
        (lambda sample=sample: normalise(sample), "sample_input must be a tensor, a non-empty")
        for sample in (None, 3, "text", (), {}, {1: T})
    ),
    *(
        (lambda module=module: guess(module), "pass a tensor, a tuple of arguments or a mapping")
        for module in (nn.ReLU(), nn.BatchNorm2d(2), nn.LayerNorm(3))
    ),
    *(
        (lambda batch=batch: from_batch(TwoInputs(), batch), UNFIT + got)
        for batch, got in [
            ({"image": X}, "dict with image; pass shuffle_weights=find_permutations"),
            ((X,), "tuple"),
            ((), "tuple"),
            ("text", "str"),
            (["text", "more"], "list"),
        ]
    ),
    (lambda: first_records(DataLoader(Stream())), f"{DATA} Stream; pass shuffle_weights"),
    (lambda: first_records(DataLoader(TensorDataset(torch.zeros(0, 3)))), DATA),
]


@pytest.mark.parametrize(("ask", "why"), REFUSED)
def test_what_means_nothing_is_refused_with_what_to_pass_instead(ask, why):
    with pytest.raises(ValueError, match=why):
        ask()


class Counts(nn.Module):
    """Changes its buffers, its attributes and its mode, draws numbers, and fails."""

    def __init__(self):
        super().__init__()
        self.register_buffer("written", torch.zeros(1))
        self.register_buffer("assigned", torch.zeros(1))
        self.seen = []

    def forward(self, x):
        assert not self.training
        self.written += 1
        self.assigned = self.assigned + 1
        self.seen.append(x)
        self.eval()
        torch.rand(1) + random.random() + np.random.rand()  # noqa: NPY002
        raise RuntimeError("too late")


def test_a_quiet_run_takes_back_what_it_changes_even_if_it_fails():
    module, states = Counts(), random_states()
    written, assigned = module.written, module.assigned
    with pytest.raises(RuntimeError, match="too late"):
        run_quietly(module, (torch.zeros(1),), {})
    assert module.written is written
    assert module.assigned is assigned
    assert (float(module.written), float(module.assigned), module.seen) == (0.0, 0.0, [])
    assert module.training
    assert random_states() == states
