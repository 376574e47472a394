"""Telling noise from constants: a draw from a generator that a network seeds itself is the same in every run."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from opacus_shuffle.networks.running import seed_draws
from opacus_shuffle.permutation.higher_order import InsightMode
from opacus_shuffle.permutation.network import tensors_in
from opacus_shuffle.permutation.operators import operator_of

WATCHED_FROM = 723_480_237_123  # a random state that no network begins in


class Draws:
    """The states of generators before each draw of a run, and of those that are not PyTorch's own, to be restored."""

    def __init__(self) -> None:
        self._before: set[bytes] = set()
        self._own: dict[torch.Generator, torch.Tensor] = {}

    def state(self, args: Any, kwargs: Any) -> bytes:
        """Returns what the draw that an operation is about to make depends on."""
        generator = kwargs.get("generator")
        if generator is None:
            devices = {tensor.device for tensor in tensors_in((args, kwargs))}
            device = torch.device(kwargs.get("device") or next(iter(devices), "cpu"))
            state = torch.cuda.get_rng_state(device) if device.type == "cuda" else torch.get_rng_state()
        else:
            state = generator.get_state()
            self._own.setdefault(generator, state)
        return hashlib.blake2b(state.numpy().tobytes()).digest()

    def is_constant(self, state: bytes) -> bool:
        """Returns whether it draws the same in a run that was watched, from another random state."""
        return state in self._before

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Notes the draws of a run inside, from another random state than any that is traced."""
        seed_draws(WATCHED_FROM)
        with _Watch(self.note):
            yield

    def note(self, args: Any, kwargs: Any) -> None:
        """Notes a draw that is about to be made."""
        self._before.add(self.state(args, kwargs))

    def restore(self) -> None:
        """Restores the states that the network's own generators had before the first draw."""
        for generator, state in self._own.items():
            generator.set_state(state)


class _Watch(InsightMode):
    def __init__(self, note: Callable[[Any, Any], None]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._note = note

    def meet(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """Notes a draw, if it is one."""
        if operator_of(func).draws:
            self._note(args, kwargs)
        return self.go_on(func, args, kwargs)
