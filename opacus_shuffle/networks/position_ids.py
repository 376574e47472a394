"""Position ids for every record: the line that lets Opacus train BERT, GPT-2 and their kin.

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
from contextvars import ContextVar
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

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
    for module in model.modules():
        prepared = {_enter, _expand}.intersection(module._forward_pre_hooks.values())
        if prepared or not any(map(_looks_up, module.modules())):
            continue
        if _looks_up(module):
            module.register_forward_pre_hook(_expand)
        else:
            module.register_forward_pre_hook(_enter, with_kwargs=True)
            module.register_forward_hook(_leave, always_call=True)
    return model


def _looks_up(module: nn.Module) -> bool:
    """Whether it is an embedding whose gradient does not depend on how often an index occurs."""
    return (
        isinstance(module, nn.Embedding)
        and type(module).forward is nn.Embedding.forward
        and not module.scale_grad_by_freq
    )


class _Frame(NamedTuple):
    """A call under way of a module, on so many records, and the extent of their second axis."""

    module: nn.Module
    records: int
    length: int
    certain: bool
    """Whether that is certain, as the tensor has the name of one that holds records, or indices."""


_CALLS: ContextVar[tuple[_Frame, ...]] = ContextVar("_CALLS", default=())
"""The calls under way in a thread, outermost first."""


def _enter(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Notes, as a hook before it, that a module begins to run on so many records."""
    # An interrupt from the keyboard skips even the hooks that are always called, and its call
    # would stay behind.
    _leave(module)
    names = inspect.signature(module.forward).parameters
    named = {**dict(zip(names, args, strict=False)), **kwargs}
    known = [named[name] for name in _RECORDS if isinstance(named.get(name), torch.Tensor)]
    leaves = [*known, *tree_leaves((args, kwargs))]
    tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor) and leaf.dim()]
    records, length, *_ = (*tensors[0].shape, 1) if tensors else (1, 1)
    certain = bool(tensors) and (bool(known) or not tensors[0].is_floating_point())
    _CALLS.set((*_CALLS.get(), _Frame(module, records, length, certain)))


def _leave(module: nn.Module, args: Any = None, output: Any = None) -> None:
    """Notes, as a hook after it, that a module's call and all within it are over or have failed."""
    frames = _CALLS.get()
    depths = [depth for depth, frame in enumerate(frames) if frame.module is module]
    _CALLS.set(frames[: min(depths, default=len(frames))])


def _expand(module: nn.Embedding, args: tuple[Any, ...]) -> tuple[Any, ...] | None:
    """Repeats, as a hook before an embedding, one row of indices for each record."""
    frames = _CALLS.get()
    around = [frame for frame in reversed(frames) if frame.records != 1]
    if not around or not args or not isinstance(args[0], torch.Tensor) or args[0].dim() < 2:
        return None
    index, nearest, outermost = args[0], around[0], frames[0]
    # The nearest module around that runs on a batch says what the row will be added to. Where that
    # is not the batch of the whole model (several choices per record, an image for each text) there
    # is no row per record to be had.
    if len(index) == 1 and nearest.records == outermost.records:
        # A table of relative positions [queries, keys] also has one row when there is one query.
        # Tables live in attention, which reads hidden states; positions live where the tokens come
        # in, or run along the second axis of what does.
        along = nearest is outermost or nearest.length == index.shape[1]
        if nearest.certain or (index.shape[1] > 1 and along):
            index = index.expand(nearest.records, *index.shape[1:])
    # Ghost clipping views the indices as one column, which it cannot if they are spread in memory.
    index = index.contiguous()
    return None if index is args[0] else (index, *args[1:])
