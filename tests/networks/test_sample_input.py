"""What a module can be run on: given, guessed, or read off a data loader."""

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


def small_cnn(side: int) -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 2, 3, padding=1),
        nn.BatchNorm2d(2),
        nn.Flatten(),
        nn.Linear(2 * side * side, 3),
    )


def test_a_tensor_a_sequence_and_a_mapping_become_arguments():
    t = torch.zeros(2)
    assert normalise(t) == ((t,), {})
    assert normalise([t, 1]) == ((t, 1), {})
    assert normalise((t,)) == ((t,), {})
    assert normalise({"x": t}) == ((), {"x": t})


@pytest.mark.parametrize("value", [None, 3, "text", (), {}, {1: torch.zeros(2)}])
def test_anything_else_is_refused_with_what_is_accepted(value):
    with pytest.raises(ValueError, match="sample_input must be a tensor, a non-empty tuple"):
        normalise(value)


@pytest.mark.parametrize(
    ("module", "shape"),
    [
        (nn.Sequential(nn.Linear(5, 4), nn.ReLU(), nn.Linear(4, 2)), (2, 5)),
        (nn.Sequential(nn.Linear(5, 4), nn.Flatten(), nn.Linear(12, 2)), (2, 3, 5)),
        (small_cnn(28), (2, 1, 28, 28)),
        (small_cnn(32), (2, 1, 32, 32)),
        (nn.Sequential(nn.Conv1d(2, 3, 5), nn.Flatten(), nn.Linear(3 * 124, 2)), (2, 2, 128)),
        (nn.Sequential(nn.Conv3d(1, 2, 3), nn.AdaptiveAvgPool3d(1)), (2, 1, 32, 32, 32)),
        (nn.Sequential(nn.Embedding(9, 4, padding_idx=0), nn.Linear(4, 2)), (2, 8)),
        (nn.LSTM(6, 4, batch_first=True), (2, 3, 6)),
        (nn.Sequential(nn.LayerNorm(6), nn.Linear(6, 4)), (2, 6)),
        (
            nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), 1),
            (2, 3, 8),
        ),
        (nn.Linear(3, 2).double(), (2, 3)),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, nn.Module) else str(value),
)
@pytest.mark.filterwarnings("ignore:enable_nested_tensor")
def test_the_first_layer_tells_the_shape(module, shape):
    args, kwargs = guess(module)
    assert not kwargs
    assert tuple(args[0].shape) == shape
    if args[0].is_floating_point():
        assert args[0].dtype == next(module.parameters()).dtype
    else:
        assert 0 not in args[0]
    assert torch.equal(guess(module)[0][0], args[0])


def test_guessing_leaves_no_trace():
    module = small_cnn(28)
    module[1].eval()
    before = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    flags = [m.training for m in module.modules()]
    state = torch.get_rng_state(), random.getstate(), np.random.get_state()  # noqa: NPY002
    guess(module)
    assert torch.equal(torch.get_rng_state(), state[0])
    assert random.getstate() == state[1]
    assert np.array_equal(np.random.get_state()[1], state[2][1])  # noqa: NPY002
    assert [m.training for m in module.modules()] == flags
    assert all(torch.equal(before[name], tensor) for name, tensor in module.state_dict().items())


def test_a_quiet_run_takes_back_buffers_even_if_it_fails():
    class Counts(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("written", torch.zeros(1))
            self.register_buffer("assigned", torch.zeros(1))

        def forward(self, x):
            self.written += 1
            self.assigned = self.assigned + 1
            torch.rand(1)
            raise RuntimeError("too late")

    module = Counts()
    written = module.written
    state = torch.get_rng_state()
    with pytest.raises(RuntimeError, match="too late"):
        run_quietly(module, (torch.zeros(1),), {})
    assert module.written is written
    assert (float(module.written), float(module.assigned)) == (0.0, 0.0)
    assert module.training
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize(
    "module",
    [TwoInputs(), nn.ReLU(), nn.Sequential(nn.BatchNorm2d(2)), nn.MultiheadAttention(4, 2)],
)
def test_no_guess_asks_for_a_sample_input(module):
    with pytest.raises(
        ValueError,
        match=r"sample_input must be given: .*pass a tensor, a tuple of arguments or a mapping",
    ):
        guess(module)


def hugging_face_models():
    transformers = pytest.importorskip("transformers")
    small = {
        "hidden_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "intermediate_size": 32,
        "vocab_size": 50,
    }
    bart = {
        f"{side}_{key}": n
        for side in ("encoder", "decoder")
        for key, n in (("layers", 1), ("attention_heads", 2))
    }
    bart |= {"encoder_ffn_dim": 32, "decoder_ffn_dim": 32, "d_model": 16, "vocab_size": 50}
    t5 = {"d_model": 16, "d_kv": 8, "d_ff": 32, "num_layers": 1, "num_heads": 2, "vocab_size": 50}
    gpt2 = {
        "n_embd": 16,
        "n_layer": 1,
        "n_head": 2,
        "vocab_size": 50,
        "bos_token_id": 49,
        "eos_token_id": 49,
    }
    return [
        transformers.BertForSequenceClassification(transformers.BertConfig(**small)),
        transformers.RobertaForSequenceClassification(
            transformers.RobertaConfig(**small, max_position_embeddings=20)
        ),
        transformers.GPT2LMHeadModel(transformers.GPT2Config(**gpt2)),
        transformers.T5ForConditionalGeneration(
            transformers.T5Config(**t5, decoder_start_token_id=0)
        ),
        transformers.BartForSequenceClassification(transformers.BartConfig(**bart)),
    ]


def test_hugging_face_models_are_run_on_two_texts_without_special_tokens():
    for model in hugging_face_models():
        args, kwargs = guess(model)
        assert not args
        assert kwargs["input_ids"].shape == (2, 8)
        assert kwargs["attention_mask"].all()
        assert ("decoder_input_ids" in kwargs) == model.config.is_encoder_decoder
        special = [model.config.to_dict().get(f"{name}_token_id") for name in ("pad", "bos", "eos")]
        # Sequence classification by BART reads the state at the end token, so its texts end in one.
        tokens = (
            kwargs["input_ids"][:, :-1]
            if type(model).__name__.startswith("Bart")
            else kwargs["input_ids"]
        )
        assert not any((tokens == token).any() for token in special if token is not None)


def test_hugging_face_image_models_are_run_on_two_images():
    transformers = pytest.importorskip("transformers")
    config = transformers.ViTConfig(
        hidden_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=32,
        image_size=24,
        patch_size=8,
        num_channels=1,
    )
    model = transformers.ViTModel(config)
    assert guess(model)[1]["pixel_values"].shape == (2, 1, 24, 24)


def test_the_input_of_an_ordinary_batch_is_its_first_entry():
    module, x, y = nn.Linear(3, 2), torch.randn(4, 3), torch.zeros(4)
    pair = namedtuple("pair", "x y")
    for batch in (x, (x,), (x, y), [x, y], pair(x, y), ((x,), y), ([x], y)):
        args, kwargs = from_batch(module, batch)
        assert len(args) == 1
        assert args[0] is x
        assert not kwargs


def test_as_many_entries_are_taken_as_forward_requires():
    x, y = torch.randn(4, 3), torch.zeros(4)
    assert [t is x for t in from_batch(TwoInputs(), (x, x, y))[0]] == [True, True]
    assert len(from_batch(nn.Linear(3, 2), (x, x, y))[0]) == 1
    assert len(from_batch(TwoInputs(), ((x, x), y))[0]) == 2


def test_of_a_mapping_only_what_forward_accepts_is_kept():
    x = torch.randn(4, 3)
    batch = {"left": x, "right": x, "label": torch.zeros(4)}
    assert set(from_batch(TwoInputs(), batch)[1]) == {"left", "right"}
    assert set(from_batch(TwoInputs(), (batch, torch.zeros(4)))[1]) == {"left", "right"}

    class Anything(TwoInputs):
        def forward(self, **entries):
            return self.linear(entries["left"])

    assert set(from_batch(Anything(), batch)[1]) == set(batch)


@pytest.mark.parametrize(
    ("batch", "message"),
    [
        (
            {"image": torch.zeros(2, 3)},
            r"mappings with image, none of which TwoInputs.forward accepts \(it takes left, right, "
            r"scale",
        ),
        ((torch.zeros(2, 3),), "batches of 1 entries, TwoInputs.forward requires 2"),
        ((), "got an empty tuple"),
        ("text", "got str"),
        (["text", "more"], "without a tensor"),
    ],
)
def test_a_batch_that_means_nothing_says_what_to_pass_instead(batch, message):
    with pytest.raises(ValueError, match=message) as refusal:
        from_batch(TwoInputs(), batch)
    assert "pass shuffle_weights=find_permutations(module, sample_input)" in str(refusal.value)


def test_the_batch_is_moved_to_the_modules_device():
    args, _ = from_batch(nn.Linear(3, 2, device="meta"), (torch.zeros(2, 3), torch.zeros(2)))
    assert args[0].device.type == "meta"


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
    state = torch.get_rng_state(), random.getstate(), np.random.get_state(), generator.get_state()  # noqa: NPY002
    x, y = first_records(loader)
    assert x.flatten().tolist() == [0, 1]
    assert y.tolist() == [0, 1]
    assert len(first_records(loader, 9)[0]) == 5
    assert torch.equal(torch.get_rng_state(), state[0])
    assert random.getstate() == state[1]
    assert np.array_equal(np.random.get_state()[1], state[2][1])  # noqa: NPY002
    assert torch.equal(generator.get_state(), state[3])


def test_a_loader_without_batches_passes_an_entry_on_alone():
    ready_made = [torch.zeros(7, 3)]
    assert first_records(DataLoader(ready_made, batch_size=None)).shape == (7, 3)


def test_a_data_set_without_records_or_index_is_refused():
    class Stream(IterableDataset):
        def __iter__(self):
            yield torch.zeros(1)

    with pytest.raises(
        ValueError, match=r"data_loader.dataset must have a length and an index, got Stream"
    ):
        first_records(DataLoader(Stream()))
    with pytest.raises(ValueError, match=r"data_loader.dataset must not be empty"):
        first_records(DataLoader(TensorDataset(torch.zeros(0, 3))))
