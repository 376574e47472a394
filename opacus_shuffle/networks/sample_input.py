"""Finding something to run a module on: what the user gave, what its data loader yields, or a guess from its layers."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.data import DataLoader, IterableDataset

from opacus_shuffle.core.validation import integer
from opacus_shuffle.networks.rollback import random_states_kept, rolled_back
from opacus_shuffle.networks.running import without_graph

Call = tuple[tuple[Any, ...], dict[str, Any]]

# Names under which a configuration keeps token numbers that mean something: padding stops
# attention, "end" cuts a text short.
_SPECIAL_TOKENS = (
    "pad",
    "bos",
    "eos",
    "cls",
    "sep",
    "mask",
    "unk",
    "decoder_start",
    "image",
    "video",
    "audio",
)
_SIDES = (32, 28, 64, 96, 224)
_SIDES_OF = {
    1: (*_SIDES, 128, 256, 512, 1024),
    2: _SIDES,
    3: _SIDES[:3],
}  # larger cubes would fill the memory
_CONVOLUTIONS = (
    nn.Conv1d | nn.Conv2d | nn.Conv3d | nn.ConvTranspose1d | nn.ConvTranspose2d | nn.ConvTranspose3d
)
_REMEDY = "pass shuffle_weights=find_permutations(module, sample_input) with an input that module(...) accepts"


def normalise(sample_input: Any, name: str = "sample_input") -> Call:
    """Returns the arguments that a tensor (the only one), a tuple or list (positional) or a mapping (by keyword) stands for."""
    if isinstance(sample_input, torch.Tensor):
        return (sample_input,), {}
    if isinstance(sample_input, tuple | list) and sample_input:
        return tuple(sample_input), {}
    if (
        isinstance(sample_input, Mapping)
        and sample_input
        and all(isinstance(name, str) for name in sample_input)
    ):
        return (), dict(sample_input)
    raise ValueError(
        f"{name} must be a tensor, a non-empty tuple or list of positional arguments, or a "
        "non-empty mapping from "
        f"names to keyword arguments, got {_describe(sample_input)}"
    )


def call_of(module: nn.Module, sample_input: Any) -> Call:
    """Returns the arguments that a sample input stands for; guessed where it is None."""
    return guess(module) if sample_input is None else normalise(sample_input)


def guess(module: nn.Module) -> Call:
    """Guesses arguments of two records on which one forward pass runs, from the module alone; the same ones every time.

    Hugging Face models are recognised by their ``config`` and ``main_input_name``; of any other
    module the first layer with parameters, in the order of registration, tells the shape. What is
    returned has been tried; the module is as before.
    """
    failure: Exception | None = None
    generator = torch.Generator().manual_seed(0)
    hugging_face = getattr(module, "config", None) is not None and isinstance(
        getattr(module, "main_input_name", None), str
    )
    candidates = _hugging_face_inputs if hugging_face else _inputs_of_first_layer
    for guessed in candidates(module, generator):
        call = _on_device_of(module, guessed)
        try:
            run_quietly(module, *call)
        except Exception as error:
            failure = failure or error  # the first guess is the likeliest, and so is what it says
        else:
            return call
    why = f"no guess for {type(module).__name__} ran"
    why += (
        f" (the first ended in {type(failure).__name__}: {failure})"
        if failure
        else ": its first layer tells no input shape"
    )
    raise ValueError(
        f"sample_input must be given: {why}; pass a tensor, a tuple of arguments or a mapping of "
        "keyword arguments"
    )


def from_batch(module: nn.Module, batch: Any) -> Call:
    """Returns the arguments that one batch of a data loader means for ``module.forward``.

    Args:
        module: To be called; its signature decides which entries it is meant to see. A batch that
            does not fit it is refused.
        batch: A tensor is the only argument. A mapping gives the keyword arguments that ``forward``
            accepts. Of a tuple or list ``(inputs..., targets)`` the first entry is the input, or as
            many as ``forward`` requires; where that first entry is itself a tuple, a list or a
            mapping, it holds the arguments.
    """
    call = _arguments(module, batch)
    if not any(isinstance(leaf, torch.Tensor) for leaf in tree_leaves(call)):
        raise ValueError(
            f"data_loader yields batches without a tensor for {_forward(module)}, "
            f"{_describe(batch)}; {_REMEDY}"
        )
    return _on_device_of(module, call)


def first_records(
    data_loader: DataLoader,
    count: int = 2,
    *,
    everywhere: bool = False,
    places: Sequence[int] | None = None,
) -> Any:
    """Returns the first records of a data loader's data set (all if there are fewer), as one batch made by its ``collate_fn``.

    Or as many from ``everywhere``, evenly spread, the last one first; and of those only the ones at
    some ``places``. Nothing is drawn from its sampler or any random state. A data set that is empty
    or can only be iterated over is refused.
    """
    count = integer("count", count)
    dataset = data_loader.dataset
    if isinstance(dataset, IterableDataset) or not hasattr(dataset, "__len__"):
        raise ValueError(
            f"data_loader.dataset must have a length and an index, got {type(dataset).__name__}; "
            f"{_REMEDY}"
        )
    if not len(dataset):
        raise ValueError(
            f"data_loader.dataset must not be empty, got a {type(dataset).__name__} of length 0"
        )
    # Worker processes would have their own random states; here the transforms share ours.
    with random_states_kept():
        if (
            data_loader.batch_sampler is None
        ):  # no automatic batching: each entry of the data set is passed on alone
            return data_loader.collate_fn(dataset[0])
        indices = list(range(min(count, len(dataset))))
        if everywhere:
            indices = [len(dataset) - 1 - i * len(dataset) // len(indices) for i in indices]
        indices = indices if places is None else [indices[place] for place in places]
        fetch: Callable[[list[int]], list[Any]] | None = getattr(dataset, "__getitems__", None)
        return data_loader.collate_fn(fetch(indices) if fetch else [dataset[i] for i in indices])


def _arguments(module: nn.Module, batch: Any) -> Call:
    """Returns the arguments within a batch, wherever they lie."""
    if isinstance(batch, torch.Tensor):
        return (batch,), {}
    if isinstance(batch, Mapping) and batch:
        return (), _accepted(module, batch)
    if isinstance(batch, tuple | list) and batch:
        first = batch[0]
        if isinstance(first, Mapping) and first:
            return (), _accepted(module, first)
        # A list of strings (untokenised texts) is a tuple's entry, not a list of arguments.
        if isinstance(first, tuple | list) and any(
            isinstance(entry, torch.Tensor) for entry in first
        ):
            return tuple(first), {}
        parameters = inspect.signature(module.forward).parameters.values()
        positional = [
            p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)
        ]
        needed = max(1, sum(p.default is p.empty for p in positional))
        if len(batch) < needed:
            raise ValueError(
                f"data_loader yields batches of {len(batch)} entries, {_forward(module)} requires "
                f"{needed} arguments; {_REMEDY}"
            )
        return tuple(batch[:needed]), {}
    raise ValueError(
        "data_loader must yield tensors, mappings or tuples (inputs..., targets) for "
        f"{_forward(module)}, "
        f"got {_describe(batch)}; {_REMEDY}"
    )


def _accepted(module: nn.Module, batch: Mapping[str, Any]) -> dict[str, Any]:
    parameters = inspect.signature(module.forward).parameters.values()
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        return dict(batch)
    names = {p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}
    accepted = {name: value for name, value in batch.items() if name in names}
    if not accepted:
        raise ValueError(
            f"data_loader yields mappings with {', '.join(map(str, batch))}, none of which "
            f"{_forward(module)} accepts "
            f"(it takes {', '.join(sorted(names))}); {_REMEDY}"
        )
    return accepted


def _hugging_face_inputs(module: nn.Module, generator: torch.Generator) -> Iterator[Call]:
    """Yields keyword arguments by the model's configuration, the plainest first."""
    config: Any = module.config
    main = str(module.main_input_name)
    parameters = inspect.signature(module.forward).parameters
    takes_any = any(each.kind is each.VAR_KEYWORD for each in parameters.values())
    takes = {
        each
        for each in ("attention_mask", "decoder_input_ids", "pixel_values")
        if takes_any or each in parameters
    }
    kwargs: dict[str, Any] = {}
    if main == "pixel_values" or ("pixel_values" in takes and hasattr(config, "vision_config")):
        vision = getattr(config, "vision_config", config)
        size = getattr(vision, "image_size", 224)
        height, width = (size, size) if isinstance(size, int) else tuple(size)[-2:]
        shape = (2, getattr(vision, "num_channels", 3), height, width)
        kwargs["pixel_values"] = torch.randn(shape, generator=generator).to(_dtype(module))
    if main == "input_ids":
        tokens = _ordinary_tokens(module, generator)
        kwargs["input_ids"] = tokens
        if "attention_mask" in takes:
            kwargs["attention_mask"] = torch.ones_like(tokens)
        if getattr(config, "is_encoder_decoder", False) and "decoder_input_ids" in takes:
            kwargs["decoder_input_ids"] = _ordinary_tokens(module, generator)
    if not kwargs:
        return
    yield (), kwargs
    end = getattr(config, "eos_token_id", None)
    if "input_ids" in kwargs and isinstance(
        end, int
    ):  # some heads read the state at the end token, so there must be one
        tokens = kwargs["input_ids"].clone()
        tokens[:, -1] = end
        yield (), {**kwargs, "input_ids": tokens}


def _ordinary_tokens(module: nn.Module, generator: torch.Generator) -> torch.Tensor:
    """Returns two random texts of eight tokens, none of which is special."""
    config: Any = module.config
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    vocabulary = getattr(text, "vocab_size", None) or getattr(config, "vocab_size", None)
    if not isinstance(vocabulary, int):
        vocabulary = module.get_input_embeddings().num_embeddings  # type: ignore[operator, union-attr]
    special: set[int] = set()
    for source in (config, text):
        for name in _SPECIAL_TOKENS:
            number = getattr(source, f"{name}_token_id", None)
            special.update(
                number
                if isinstance(number, tuple | list)
                else [number]
                if isinstance(number, int)
                else []
            )
    ordinary = torch.tensor(
        [token for token in range(vocabulary) if token not in special] or list(range(vocabulary))
    )
    return ordinary[torch.randint(len(ordinary), (2, 8), generator=generator)]


def _inputs_of_first_layer(module: nn.Module, generator: torch.Generator) -> Iterator[Call]:
    """Yields one argument in the shapes that the first layer with parameters can take."""
    first = next(
        (
            m
            for m in module.modules()
            if not any(m.children()) and any(True for _ in m.parameters())
        ),
        None,
    )
    if isinstance(first, nn.Embedding | nn.EmbeddingBag):
        allowed = torch.tensor([i for i in range(first.num_embeddings) if i != first.padding_idx])
        for indices in ((2, 8), (2, 4), (2, 1), (2,)):
            yield (allowed[torch.randint(len(allowed), indices, generator=generator)],), {}
        return
    for shape in _shapes(module, first):
        yield (torch.randn(shape, generator=generator).to(_dtype(module)),), {}


def _shapes(module: nn.Module, first: nn.Module | None) -> list[tuple[int, ...]]:
    """Returns the shapes to try on a first layer that reads numbers."""
    if isinstance(first, nn.Linear):
        flat = [(2, first.in_features), (2, 3, first.in_features)]
        # Attention takes a matrix for one unbatched sequence, which is not what anybody trains on.
        attends = any(hasattr(m, "num_heads") and hasattr(m, "embed_dim") for m in module.modules())
        return flat[::-1] if attends else flat
    if isinstance(first, _CONVOLUTIONS):
        places = len(first.kernel_size)
        return [(2, first.in_channels, *[side] * places) for side in _SIDES_OF[places]]
    if isinstance(first, nn.RNNBase):
        return [(2, 3, first.input_size)]
    if isinstance(first, nn.LayerNorm):
        return [(2, *first.normalized_shape), (2, 3, *first.normalized_shape)]
    return []


def run_quietly(module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """Runs one forward pass without gradients, in evaluation mode, that leaves no trace."""
    with rolled_back(module):
        module.eval()
        return without_graph(lambda: module(*args, **kwargs))


def _dtype(module: nn.Module) -> torch.dtype:
    return next(
        (p.dtype for p in module.parameters() if p.is_floating_point()), torch.get_default_dtype()
    )


def _on_device_of(module: nn.Module, call: Call) -> Call:
    """Returns the arguments with their tensors on the device of the module's first parameter or buffer."""
    first = next(
        (each for tensors in (module.parameters(), module.buffers()) for each in tensors),
        torch.empty(0),
    )
    return tree_map_only(torch.Tensor, lambda tensor: tensor.to(first.device), call)


def _forward(module: nn.Module) -> str:
    return f"{type(module).__name__}.forward"


def _describe(value: Any) -> str:
    empty = isinstance(value, tuple | list | Mapping) and not value
    return f"an empty {type(value).__name__}" if empty else type(value).__name__
