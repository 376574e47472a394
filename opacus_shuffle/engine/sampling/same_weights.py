"""Checks that all forward passes on a batch, and its step, see the same weights.

Clipping bounds what one record adds to the sum at given weights. Weights that were moved in the
middle of a batch by a gradient of its records (a perturbation that looks for sharp minima, a
look-ahead, an update by hand) hand one record's influence to the gradients of all others, which
nothing bounds: with sharpness-aware minimisation one record was seen to move the sum by three
clipping norms. Weights may change freely between a step and the next forward pass.

>>> layer = nn.Linear(3, 1, bias=False)
>>> weights = SameWeights()
>>> weights.look(layer)
>>> _ = layer.weight.data.add_(1e-3)
>>> [parameter is layer.weight for parameter in weights.changed()]
[True]
"""

from __future__ import annotations

import torch
from torch import nn
from torch.nn.parameter import is_lazy

_WORDS = {1: torch.int8, 2: torch.int16}  # by the size of an entry; larger ones are whole words


class SameWeights:
    """Remembers what the forward passes on one batch have seen of the trainable parameters."""

    def __init__(self) -> None:
        self._views: dict[nn.Parameter, tuple[int | None, torch.Tensor, torch.Tensor]] = {}
        self.forget()

    def forget(self) -> None:
        """Starts again, for another batch."""
        self._seen: list[nn.Parameter] = []
        self.looks: list[torch.Tensor] = []

    def look(self, network: nn.Module) -> None:
        """Notes the weights that a forward pass sees."""
        if not self.looks:
            # In a pass, expanded weights stand for parameters.
            weights = [vars(weight).get("orig_weight", weight) for weight in network.parameters()]
            self._seen = [weight for weight in weights if _can_be_read(weight)]
            self._seen = [weight for weight in self._seen if weight.device == self._seen[0].device]
        if self._seen:
            self.looks.append(self._digests())

    def changed(self) -> list[nn.Parameter]:
        """Returns the parameters that have changed since the first forward pass."""
        if not self.looks:
            return []
        first, *later = [*self.looks, self._digests()]
        differ = (
            (torch.stack(later) != first).any(dim=0).any(dim=0).tolist()
        )  # waits for a GPU once
        return [weight for weight, differs in zip(self._seen, differ, strict=True) if differs]

    def _digests(self) -> torch.Tensor:
        """Returns a checksum and the first entry of each parameter: shape [2, parameters].

        ``_version`` would miss writes to ``.data``. The sum sees any single change; it wraps
        around, so that signs, or powers of two, of all entries may cancel in it, which the first
        entry's shows.
        """
        sums, heads = [], []
        for weight in self._seen:
            # Memory may be exchanged; and of what is not contiguous a view is a copy.
            place = weight.data_ptr() if weight.is_contiguous() else None
            known = self._views.get(weight)
            if known is None or place is None or known[0] != place:
                numbers = torch.view_as_real(weight) if weight.is_complex() else weight
                size = numbers.element_size()
                words = numbers.detach().reshape(-1).view(_WORDS.get(size, torch.int32))
                sign = words[max(1, size // 4) - 1]  # the first entry's, with its exponent
                known = self._views[weight] = (place, words, sign)
            sums.append(known[1].sum(dtype=torch.int32))
            heads.append(known[2])
        return torch.stack((torch.stack(sums), torch.stack(heads).int()))


def _can_be_read(weight: torch.Tensor) -> bool:
    """Tells whether a parameter is trained and its numbers are in memory here."""
    if not isinstance(weight, nn.Parameter) or is_lazy(weight) or weight.is_meta:
        return False
    size = weight.numel() * weight.element_size()
    return weight.requires_grad and 0 < size <= weight.untyped_storage().nbytes()
