"""Every forward pass on a batch, and the step that it ends in, see the same weights.

Clipping bounds what one record adds to the sum at given weights. Weights that were moved in the
middle of a batch by a gradient of its records (a perturbation that looks for sharp minima, a
look-ahead, an update by hand) hand one record's influence to the gradients of all others, which
nothing bounds: with sharpness-aware minimisation one record was seen to move the sum by three
clipping norms. Weights may change freely between a step and the next forward pass.

>>> layer = nn.Linear(3, 1, bias=False)
>>> weights = SameWeights()
>>> weights.look(layer, whole=True)
>>> _ = layer.weight.data.add_(1e-3)
>>> [each is layer.weight for each in weights.changed()]
[True]
"""

from __future__ import annotations

import functools
from collections.abc import Iterable

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from opacus_shuffle.core.randomness import SecretGenerator

_BITS = {1: torch.int8, 2: torch.int16}  # by the size of an entry; larger ones are whole words
_LEFT_OUT = (DTensor, nn.parameter.UninitializedParameter)


class SameWeights:
    """What passes on one batch have seen of the trainable parameters: a digest of each."""

    def __init__(self) -> None:
        self.forget()

    def forget(self) -> None:
        """Begins with another batch."""
        self._first: dict[torch.Tensor, torch.Tensor] = {}
        self._later: list[dict[torch.Tensor, torch.Tensor]] = []
        self._whole = False

    def look(self, part: nn.Module, *, whole: bool) -> None:
        """Notes what a forward pass sees.

        Args:
            part: The network, or a layer that is called without it, whose parameters are looked at
            once for each batch.
            whole: Whether it is the network.
        """
        if whole:
            found = _bits(part.parameters())
            self._later.append(found)
            self._first, self._whole = {**found, **self._first}, True
        elif not self._whole:
            self._first = {**_bits(part._parameters.values()), **self._first}

    def changed(self) -> list[torch.Tensor]:
        """The parameters that are not, or were not at a later look, what they were at first."""
        looks = [*self._later[1:], _bits(self._first)]
        seen = [(parameter, digest) for look in looks for parameter, digest in look.items()]
        if not seen:
            return []
        first = _stacked(self._first[parameter] for parameter, _ in seen)
        differs = (first != _stacked(digest for _, digest in seen)).tolist()  # waits for a GPU once
        pairs = zip(seen, differs, strict=True)
        return list(dict.fromkeys(parameter for (parameter, _), differ in pairs if differ))


def _stacked(digests: Iterable[torch.Tensor]) -> torch.Tensor:
    """Digests of parameters, which may be on several devices, as one vector."""
    first, *others = digests
    return torch.stack([first, *(digest.to(first.device) for digest in others)])


def _bits(parameters: Iterable[torch.Tensor | None]) -> dict[torch.Tensor, torch.Tensor]:
    """A digest of each parameter's bits; ``_version`` would miss writes to ``.data``."""
    found: dict[torch.Tensor, torch.Tensor] = {}
    for each in parameters:
        if each is not None:  # in a pass, expanded weights stand for parameters
            each = vars(each).get("orig_weight", each)
        if isinstance(each, nn.Parameter) and _can_be_read(each):
            found[each] = _digest(torch.view_as_real(each) if each.is_complex() else each)
    return found


def _can_be_read(parameter: nn.Parameter) -> bool:
    """Whether a parameter is trained and its numbers are here; what is gathered for a pass is given back after it."""
    if isinstance(parameter, _LEFT_OUT) or not parameter.requires_grad or parameter.is_meta:
        return False
    return parameter.untyped_storage().nbytes() >= parameter.numel() * parameter.element_size()


def _digest(parameter: torch.Tensor) -> torch.Tensor:
    """Sums the products of entries with secret numbers; of a large tensor those of some, and the bits of all.

    A sum of bits takes as long as reading, and sees any single change. What changes all signs,
    exponents or places alike it may not see; the products do, if it reaches the entries that they
    are of, which are as many as a few microseconds allow and begin where no script knows.
    """
    flat = parameter.detach().reshape(-1)
    size, (secret, first) = flat.numel(), _secret(flat.device, flat.numel())
    most = secret.numel()
    if size <= most:
        # Not torch.dot, whose last bits depend on the number of threads. Bits compare NaN, too.
        return (flat.float() * secret).sum().view(torch.int32)
    begin = first % (size - most)
    some = (flat[begin : begin + most].float() * secret).sum().view(torch.int32)
    words = flat.view(_BITS.get(flat.element_size(), torch.int32))
    bits = words.sum(dtype=torch.int32)  # wraps around
    return bits ^ some


@functools.cache
def _secret_numbers(device: torch.device) -> tuple[torch.Tensor, int]:
    """Numbers that no script knows, and one more, which says where they begin in a large tensor."""
    stream = SecretGenerator()
    return stream.normals(2**13).to(device), int(stream.words(1)[0] >> 1)


@functools.lru_cache(maxsize=1024)
def _secret(device: torch.device, size: int) -> tuple[torch.Tensor, int]:
    """The numbers for a tensor of this size; kept, as a slice takes as long as the product."""
    numbers, first = _secret_numbers(device)
    return numbers[:size], first
