"""Position ids for every record: the one line that lets Opacus train BERT, DistilBERT, GPT-2 and their kin.

Hugging Face keeps one row of position ids, of shape ``[1, length]``, and lets the addition spread
it over the batch. The network computes the same as with one row per record, but the position
embedding sees a batch of one, and so do the per-sample gradients that Opacus records there; the
optimizer then cannot stack them. ``prepare_model`` spreads the row before the lookup.

>>> import torch
>>> from torch import nn
>>> class Text(nn.Module):
...     def __init__(self):
...         super().__init__()
...         self.words, self.positions = nn.Embedding(9, 4), nn.Embedding(5, 4)
...     def forward(self, input_ids):
...         return self.words(input_ids) + self.positions(torch.arange(input_ids.shape[1])[None])
>>> model, tokens = Text(), torch.zeros(2, 5, dtype=torch.long)
>>> _ = model.positions.register_forward_hook(lambda layer, indices, output: print(len(indices[0])))
>>> _ = model(tokens), prepare_model(model)(tokens)
1
2
"""

from __future__ import annotations

import inspect
import threading
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import nn

from opacus_shuffle.core.validation import instance_of

# What models call the tensor that holds their records, first dimension first.
_RECORDS = (
    "input_ids",
    "inputs_embeds",
    "input_embeds",
    "pixel_values",
    "input_values",
    "input_features",
)


def prepare_model(model: nn.Module) -> nn.Module:
    """Lets every embedding see the batch, so that Opacus can record one gradient per record.

    Wherever an ``nn.Embedding`` inside the model is given indices of shape ``[1, length]`` while
    the model runs on another number of records, the indices are repeated for each record, and
    written out in memory, as ghost clipping needs them. The model's outputs stay the same, to the
    last bit, and so do its parameters and their names; a model without such embeddings runs as
    before. (Only a dropout between the position embedding and the addition would notice: it then
    draws for each record.) Call it before ``make_private``, once or often; it survives copying and
    pickling.

    Args:
        model: The model, before or after it is wrapped by Opacus.

    Returns:
        The same model, with hooks.

    Raises:
        ValueError: It is no module.
    """
    instance_of("model", model, (nn.Module,))
    # A part of a prepared model keeps counting the records of the whole.
    calls = next(filter(None, map(_calls_of, model._forward_pre_hooks.values())), _Calls())
    embeddings = {id(module) for module in model.modules() if _looks_up(module)}
    enclosing = {
        id(module)
        for module in model.modules()
        if not embeddings.isdisjoint(map(id, module.modules()))
    } - embeddings
    for module in model.modules():
        _remove_hooks(module)
        if id(module) in embeddings:
            module.register_forward_pre_hook(calls.expand)
        elif id(module) in enclosing:
            module.register_forward_pre_hook(calls.enter, with_kwargs=True)
            module.register_forward_hook(calls.leave, always_call=True)
    return model


class _Frame(NamedTuple):
    """One call under way: the module, its number of records, the extent along the second axis, whether that is certain."""

    module: nn.Module
    records: int
    length: int
    certain: bool


class _Calls(threading.local):
    """The calls under way in this thread, outermost first, and the hooks that keep the list.

    Copies are empty, so a layer copied on its own expands nothing.
    """

    def __init__(self) -> None:
        self.frames: list[_Frame] = []

    def __reduce__(self) -> tuple[type[_Calls], tuple[()]]:
        return _Calls, ()

    def enter(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Forward pre-hook: a module begins to run on so many records."""
        # An interrupt from the keyboard skips even the hooks that are always called, and its call
        # would stay behind.
        self.leave(module)
        self.frames.append(_measure(module, args, kwargs))

    def leave(self, module: nn.Module, args: Any = None, output: Any = None) -> None:
        """Forward hook: this module's call and all within it are over, or have failed."""
        for depth, frame in enumerate(self.frames):
            if frame.module is module:
                del self.frames[depth:]
                return

    def expand(self, module: nn.Embedding, args: tuple[Any, ...]) -> tuple[Any, ...] | None:
        """Forward pre-hook of an embedding: one row of indices becomes one row per record."""
        if (
            not self.frames
            or not args
            or not isinstance(args[0], torch.Tensor)
            or args[0].dim() < 2
        ):
            return None
        # Ghost clipping views the indices as one column; a row spread by PyTorch or by the model
        # cannot be viewed like that.
        index = self.spread(args[0]).contiguous()
        return None if index is args[0] else (index, *args[1:])

    def spread(self, index: torch.Tensor) -> torch.Tensor:
        """The indices for every record, where they were one row for all."""
        outermost = self.frames[0]
        if index.shape[0] != 1 or outermost.records == 1:
            return index
        # The nearest module around that runs on a batch says what the row will be added to. Where
        # that is not the batch of the whole model (several choices per record, an image for each
        # text) there is no row per record to be had.
        nearest = next(frame for frame in reversed(self.frames) if frame.records != 1)
        if nearest.records != outermost.records:
            return index
        # A table of relative positions [queries, keys] also has one row when there is one query.
        # Tables live in attention, which reads hidden states; positions live where the tokens come
        # in, or run along the second axis of what does.
        along = nearest is outermost or nearest.length == index.shape[1]
        if nearest.certain or (index.shape[1] > 1 and along):
            return index.expand(outermost.records, *index.shape[1:])
        return index


def _looks_up(module: nn.Module) -> bool:
    """Whether this is an embedding whose first argument is the index, and whose gradient does not depend on repetitions."""
    return (
        isinstance(module, nn.Embedding)
        and type(module).forward is nn.Embedding.forward
        and not module.scale_grad_by_freq
    )


def _calls_of(hook: Any) -> _Calls | None:
    """The list of calls that a hook of ``prepare_model`` keeps; None for the hooks of others."""
    owner = getattr(hook, "__self__", None)
    return owner if isinstance(owner, _Calls) else None


def _remove_hooks(module: nn.Module) -> None:
    """Take back what an earlier ``prepare_model`` has registered here."""
    for hooks in (module._forward_pre_hooks, module._forward_hooks):
        for key in [key for key, hook in hooks.items() if _calls_of(hook) is not None]:
            del hooks[key]
            for flags in (
                module._forward_pre_hooks_with_kwargs,
                module._forward_hooks_always_called,
            ):
                flags.pop(key, None)


def _measure(module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> _Frame:
    """The number of records in a call: of the tensor whose name says so, or else of the first one."""
    parameters = inspect.signature(module.forward).parameters.values()
    names = [p.name for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    named = {**dict(zip(names, args, strict=False)), **kwargs}
    known = next(
        (named[name] for name in _RECORDS if isinstance(named.get(name), torch.Tensor)), None
    )
    tensor = next(_tensors((*args, *kwargs.values())), None) if known is None else known
    if tensor is None:
        return _Frame(module, 1, 1, False)
    length = tensor.shape[1] if tensor.dim() > 1 else 1
    return _Frame(
        module, tensor.shape[0], length, known is not None or not tensor.is_floating_point()
    )


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    """The tensors with a first dimension in nested arguments."""
    if isinstance(value, torch.Tensor) and value.dim():
        yield value
    elif isinstance(value, tuple | list | Mapping):
        for entry in value.values() if isinstance(value, Mapping) else value:
            yield from _tensors(entry)
