"""Telling noise from constants: a draw from a generator that a network seeds itself is the same in every run."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from opacus_shuffle.permutation.higher_order import InsightMode
from opacus_shuffle.permutation.network import seed_draws, tensors_in

WATCHED_FROM = 723_480_237_123  # a random state that no network begins in


class Draws:
    """The states of generators before each draw of a run, and of those that are not PyTorch's own, to be restored."""

    def __init__(self) -> None:
        self._before: set[bytes] = set()
        self._own: dict[torch.Generator, torch.Tensor] = {}

    def is_constant(self, func: Any, args: Any, kwargs: Any) -> bool:
        """Returns whether an operation is about to draw what it drew in the run that was watched, from another random state."""
        return torch.Tag.nondeterministic_seeded in func.tags and self._state(args, kwargs) in self._before

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Notes the draws of a run inside, from another random state than any that is traced."""
        seed_draws(WATCHED_FROM)
        with _Watch(self.note):
            yield

    @contextmanager
    def noticed(self) -> Iterator[list[bool]]:
        """Lists the draws of a run inside, which say nothing; the states of the network's own generators are kept."""
        met: list[bool] = []
        with _Watch(lambda args, kwargs: met.append(bool(self._state(args, kwargs)))):
            yield met

    def note(self, args: Any, kwargs: Any) -> None:
        """Notes a draw that is about to be made."""
        self._before.add(self._state(args, kwargs))

    def restore(self) -> None:
        """Puts the generators that are the network's own back to where they were before the first draw."""
        for generator, state in self._own.items():
            generator.set_state(state)

    def _state(self, args: Any, kwargs: Any) -> bytes:
        generator = kwargs.get("generator")
        if generator is None:
            devices = {tensor.device for tensor in tensors_in((args, kwargs))}
            device = torch.device(kwargs.get("device") or next(iter(devices), "cpu"))
            state = torch.cuda.get_rng_state(device) if device.type == "cuda" else torch.get_rng_state()
        else:
            state = generator.get_state()
            self._own.setdefault(generator, state)
        return hashlib.blake2b(state.numpy().tobytes()).digest()


class _Watch(InsightMode):
    def __init__(self, note: Callable[[Any, Any], None]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._note = note

    def meet(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """Notes a draw, if it is one."""
        if torch.Tag.nondeterministic_seeded in func.tags:
            self._note(args, kwargs)
        return func(*args, **kwargs)
