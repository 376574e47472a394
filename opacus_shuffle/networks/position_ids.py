"""Repeats position ids for every record, so that Opacus can train BERT, GPT-2 and similar models.

Models of Hugging Face have one row of position ids, of shape ``[1, length]``, and broadcast its
embeddings over the batch. The outputs are those of one row per record. But the position embedding
runs on a batch of one, so Opacus computes only one per-sample gradient there, which its optimizer
cannot stack with the others. ``prepare_model`` expands the row before the lookup.

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
    """Repeats position ids for each record, so Opacus can compute one gradient per record.

    If an ``nn.Embedding`` of the model gets indices of shape ``[1, length]`` while the model runs
    on another number of records, the indices are repeated for each record, in contiguous memory,
    which ghost clipping needs. The outputs of the model stay the same, bit for bit, and so do its
    parameters and their names. Models without such embeddings do not change. (A dropout between the
    position embedding and the addition then draws for each record.) Call it before
    ``make_private``; repeated calls have no effect. Copies and pickles stay prepared.

    Args:
        model: The model, before or after it is wrapped by Opacus.

    Returns:
        The same model, with hooks.

    Raises:
        ValueError: The argument is not a module.
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
    """Returns whether a module is an embedding whose gradient is the same at every occurrence."""
    return (
        isinstance(module, nn.Embedding)
        and type(module).forward is nn.Embedding.forward
        and not module.scale_grad_by_freq
    )


class _Frame(NamedTuple):
    """A running call of a module: its number of records, and the size of their second axis."""

    module: nn.Module
    records: int
    length: int
    certain: bool
    """Whether the number is certain: the tensor has a name of inputs, or contains indices."""


_CALLS: ContextVar[tuple[_Frame, ...]] = ContextVar("_CALLS", default=())
"""The running calls of a thread, the outermost first."""


def _enter(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Notes a module's call and its number of records, as a hook before the call."""
    # A keyboard interrupt skips even hooks that are always called. Its call is removed here.
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
    """Removes a module's call and all calls within it, as a hook after the call."""
    frames = _CALLS.get()
    depths = [depth for depth, frame in enumerate(frames) if frame.module is module]
    _CALLS.set(frames[: min(depths, default=len(frames))])


def _expand(module: nn.Embedding, args: tuple[Any, ...]) -> tuple[Any, ...] | None:
    """Repeats one row of indices for each record, as a hook before an embedding."""
    frames = _CALLS.get()
    around = [frame for frame in reversed(frames) if frame.records != 1]
    if not around or not args or not isinstance(args[0], torch.Tensor) or args[0].dim() < 2:
        return None
    index, nearest, outermost = args[0], around[0], frames[0]
    # The row is added to the batch of the nearest module around. If this is not the batch of the
    # whole model (several choices per record, an image for each text), there is no row per record.
    if len(index) == 1 and nearest.records == outermost.records:
        # A table of relative positions [queries, keys] also has one row if there is one query.
        # Such tables are in attention layers, whose inputs are hidden states. Position embeddings
        # are in modules whose inputs are tokens, or have the length of their second axis.
        along = nearest is outermost or nearest.length == index.shape[1]
        if nearest.certain or (index.shape[1] > 1 and along):
            index = index.expand(nearest.records, *index.shape[1:])
    # Ghost clipping views the indices as one column, which needs contiguous memory.
    index = index.contiguous()
    return None if index is args[0] else (index, *args[1:])
