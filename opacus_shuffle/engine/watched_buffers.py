"""Buffers that the data flow into: a running mean, say. Nothing clips or noises them, and whoever gets the network gets them.

So it is with tensors that are plain attributes, or lie in a list or a dictionary that is one. Where a later pass reads them,
records act on steps that they have no part in; :mod:`~opacus_shuffle.engine.carried_records` refuses what the next one reads.

>>> import torch
>>> class Mean(nn.Module):
...     def __init__(self):
...         super().__init__()
...         self.register_buffer("mean", torch.zeros(2))
...     def forward(self, x):
...         self.mean.lerp_(x.mean(0), 0.1)
...         return x
>>> network = nn.Sequential(Mean())
>>> watch_buffers(network)
>>> with warnings.catch_warnings(record=True) as told:
...     warnings.simplefilter("always")
...     _ = network(torch.ones(3, 2))
>>> str(told[0].message)[:58]
"buffer '0.mean' of the network changes in the forward pass"
"""

from __future__ import annotations

import warnings
from collections import deque
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from opacus_shuffle.core.guarantees import PrivacyAssumptionWarning
from opacus_shuffle.networks.running import ATTRIBUTES


class WatchedBuffers:
    """Warns, by name, of buffers and other kept tensors that forward passes in training mode change, and when these leave.

    Args:
        network: The network itself, not a wrapper.

    Attributes:
        changed: Their names.
    """

    def __init__(self, network: nn.Module) -> None:
        self.changed: list[str] = []
        self._places = list(_places(network))
        self._scanned = False
        self._before: list[list[tuple[int, int]]] = []
        self._handles: list[Any] = [
            network.register_forward_pre_hook(self._look),
            network.register_forward_hook(self._look_again),
            network.register_state_dict_post_hook(self),  # type: ignore[no-untyped-call]
        ]

    def end(self) -> None:
        """Removes all hooks."""
        for handle in self._handles:
            handle.remove()

    def _look(self, network: nn.Module, *_: Any) -> None:
        if network.training and not self._scanned:
            self._places = list(_places(network))
        self._before = self._now() if network.training else []

    def _look_again(self, network: nn.Module, *_: Any) -> None:
        if not network.training:
            return
        for watched, before, after in zip(self._places, self._before, self._now(), strict=False):
            if before != after:
                self._tell(watched[2])
        if not self._scanned:  # attributes that there were none of
            self._scanned, known = True, {name for _, _, name in self._places}
            for place in _places(network):
                if place[2] not in known:
                    self._places.append(place)
                    self._tell(place[2])
        # Attributes do not leave with the state dict, so once is enough.
        self._places = [each for each in self._places if each[2] not in self.changed or each[1] in each[0]._buffers]
        if not self._places:
            self.end()

    def __call__(self, *_: Any) -> None:
        """Warns again of buffers, as a hook of the state dict."""
        if leaving := [name for part, key, name in self._places if name in self.changed and key in part._buffers]:
            self._warn(leaving)

    def _now(self) -> list[list[tuple[int, int]]]:
        """Returns for each watched place which tensors are there and how often each was written to."""
        kept = [_tensors_of(part._buffers.get(key, vars(part).get(key))) for part, key, _ in self._places]
        return [[(id(each), 0 if each.is_inference() else each._version) for each in tensors] for tensors in kept]

    def _tell(self, name: str) -> None:
        """Warns of a tensor, by its name, the first time."""
        if name not in self.changed:
            self.changed.append(name)
            self._warn([name])

    @staticmethod
    def _warn(names: list[str]) -> None:
        which = ", ".join(map(repr, names))
        warnings.warn(
            f"buffer {which} of the network changes in the forward pass: if it depends on the records, as a mean of the batch "
            "does, it is neither clipped nor noised, and whoever gets the network, its state_dict or a checkpoint, or weights "
            "of later steps that read it, gets what no epsilon covers; compute it from public data, or take it out of the "
            "network",
            PrivacyAssumptionWarning,
            stacklevel=2,
        )


def _tensors_of(value: Any) -> list[torch.Tensor]:
    """Returns the tensors that an attribute is, or that lie in it if it is a container."""
    held = value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple | deque) else (value,)
    return [each for each in held if isinstance(each, torch.Tensor)]


def _places(network: nn.Module) -> Iterator[tuple[nn.Module, str, str]]:
    """Yields buffers and attributes that are or hold tensors: their module, their name there, and their whole name."""
    for name, part in network.named_modules():
        plain = [key for key, each in vars(part).items() if key not in ATTRIBUTES and _tensors_of(each)]
        yield from ((part, key, f"{name}.{key}" if name else key) for key in [*part._buffers, *plain])


def watch_buffers(network: nn.Module) -> None:
    """Warns from now on of buffers of a network that forward passes change; replaces an earlier watch."""
    for hook in list(network._forward_pre_hooks.values()):
        if isinstance(earlier := getattr(hook, "__self__", None), WatchedBuffers):
            earlier.end()
    WatchedBuffers(network)
