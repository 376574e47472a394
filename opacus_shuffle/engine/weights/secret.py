"""What permutations are drawn from: ``Secret``."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed

from opacus_shuffle.core.randomness import KeyChain


class Secret:
    """A chain of keys from the operating system, which cannot be run backwards, or a generator of the user's.

    Args:
        generator: The user's, on the CPU; None for a chain of keys.
    """

    def __init__(self, generator: torch.Generator | None) -> None:
        self.generator = generator
        self.keys = KeyChain()

    def next_generator(self) -> torch.Generator:
        """Returns what to draw the next permutation from."""
        return self.keys.next_generator() if self.generator is None else self.generator

    def state(self) -> dict[str, Any]:
        """Returns what :meth:`load` needs to draw the same permutations again."""
        return {"key": self.keys.key, "generator": None if self.generator is None else self.generator.get_state()}

    def check(self, state: dict[str, Any]) -> None:
        """Refuses what :meth:`load` could not load."""
        if (state["generator"] is None) != (self.generator is None):
            raise ValueError("state was saved with a generator of your own and loaded without, or the reverse: use the same")
        if not isinstance(state["key"], bytes) or len(state["key"]) != len(self.keys.key):  # which no message shows
            raise ValueError(f"key in state must be {len(self.keys.key)} bytes, got something else: the state was damaged")
        if state["generator"] is not None:
            try:
                torch.Generator().set_state(state["generator"])
            except (TypeError, RuntimeError) as error:
                raise ValueError(f"generator in state must be a generator's state ({error}): it was damaged") from None

    def load(self, state: dict[str, Any]) -> None:
        """Goes on from :meth:`state`."""
        self.keys = KeyChain(state["key"])
        if self.generator is not None:
            self.generator.set_state(state["generator"])

    def share(self) -> None:
        """Gives all ranks of the default process group rank 0's."""
        state = [self.state()]
        torch.distributed.broadcast_object_list(state, 0)
        self.load(state[0])
