"""Every forward pass on a batch, and the step that it ends in, see the same weights.

Clipping bounds what one record adds to the sum at given weights. Weights that were moved in the middle of a batch by a gradient
of its records (a perturbation that looks for sharp minima, a look-ahead, an update by hand) hand one record's influence to the
gradients of all others, which nothing bounds: with sharpness-aware minimisation one record was seen to move the sum by three
clipping norms. Weights may change freely between a step and the next forward pass.

>>> weight = torch.nn.Parameter(torch.ones(3))
>>> weights = SameWeights()
>>> weights.look([weight])
>>> weight.data.add_(1e-3)
tensor([1.0010, 1.0010, 1.0010])
>>> weights.changed() == [weight]
True
"""

from __future__ import annotations

from collections.abc import Iterable

import torch

_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class SameWeights:
    """What the forward passes on one batch have seen of the trainable parameters: a sum of the bits of each."""

    def __init__(self) -> None:
        self.forget()

    def forget(self) -> None:
        """Begins with another batch."""
        self._first: dict[torch.Tensor, torch.Tensor] = {}
        self._later: list[dict[torch.Tensor, torch.Tensor]] = []

    def look(self, parameters: Iterable[torch.Tensor | None], *, again: bool = True) -> None:
        """Notes what a forward pass sees.

        Args:
            parameters: Those of what runs; which are trainable is asked now.
            again: Also of those that a pass on this batch has seen.
        """
        found = _bits(each for each in parameters if again or each not in self._first)
        if self._first and found:
            self._later.append(found)
        self._first = {**found, **self._first}

    def changed(self) -> list[torch.Tensor]:
        """The parameters that are not, or were not at a later look, what they were at the first one."""
        pairs = [
            (each, self._first[each], bits)
            for look in (*self._later, _bits(self._first))
            for each, bits in look.items()
            if each in self._first
        ]
        if not pairs:
            return []
        device = pairs[0][1].device
        differ = torch.stack([(before != bits).to(device) for _, before, bits in pairs]).tolist()  # one look at the device
        return list(dict.fromkeys(each for (each, *_), other in zip(pairs, differ, strict=True) if other))


def _bits(parameters: Iterable[torch.Tensor | None]) -> dict[torch.Tensor, torch.Tensor]:
    """The sum of each parameter's bits, which ``_version`` does not tell: writes to ``.data`` leave no trace there."""
    # In this type sums wrap around, and take as long as reading.
    return {
        each: each.detach().view(_BITS[each.element_size()]).sum(dtype=torch.int64 if each.element_size() == 8 else torch.int32)
        for each in parameters
        if type(each) is torch.nn.Parameter and each.requires_grad and not torch.is_complex(each)
    }
