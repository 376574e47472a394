"""Secret randomness: generators seeded by the operating system, so that ``torch.manual_seed`` never predicts the noise.

PyTorch's CPU generator is a Mersenne Twister whose ``manual_seed`` keeps 32 bits, few enough to try them all; so its whole
state of 19,968 bits is filled. It is still no cryptographic generator: whoever learns enough of its raw output can predict the
rest (``secure_mode`` is the answer to that, see :mod:`opacus_shuffle.core.system_randomness`).

A process that forks copies its memory, and with it every generator; parent and child would draw the same noise, which is then
no secret of either. So all that was seeded by the operating system is seeded anew in the child. What was seeded by a user is
left as it is, to be repeatable. A copied or pickled secret is a fresh one, too.

>>> torch.equal(torch.randn(4, generator=secret_generator("cpu")), torch.randn(4, generator=secret_generator("cpu")))
False
>>> torch.equal(*(torch.randn(4, generator=seeded_generator("cpu", 0, "noise")) for _ in range(2)))
True
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import secrets
import warnings
import weakref
from typing import Any, Protocol

import numpy as np
import torch

from opacus_shuffle.core.validation import instance_of

# Where PyTorch keeps the Twister's 624 words, 64 bits each, behind its seed, counters and position.
_FIRST, _WORDS = 24, 624


class _Secret(Protocol):
    """What must not be the same in two processes."""

    def renew(self) -> None:
        """Draws a new secret from the operating system, so that a forked process has one of its own."""


_LIVE: weakref.WeakSet[_Secret] = weakref.WeakSet()
_WITHOUT: weakref.WeakKeyDictionary[Any, torch.device] = weakref.WeakKeyDictionary()
_seed_of_parent: int | None = None  # of PyTorch's own generator, in a forked process


def _renew_all() -> None:
    """In a process that was just forked: no secret of the parent's is used again."""
    global _seed_of_parent
    _seed_of_parent = torch.initial_seed()
    for secret in list(_LIVE):
        # A CUDA generator may refuse here; so does CUDA itself then, in all that it is asked for in a forked process.
        with contextlib.suppress(Exception):
            secret.renew()
    for owner, device in list(_WITHOUT.items()):
        with contextlib.suppress(Exception):
            secret_after_fork(owner, device)


def renew_after_fork(secret: _Secret) -> None:
    """Calls the secret's ``renew`` in every forked process, as long as the secret lives."""
    _LIVE.add(secret)


def secret_after_fork(owner: Any, device: torch.device) -> None:
    """Gives a generator to what draws from PyTorch's own, in every forked process, unless it has seeded that one anew."""
    if owner.generator is None:
        _WITHOUT[owner] = device
        if _seed_of_parent == torch.initial_seed():
            owner.generator = secret_generator(device)


if hasattr(os, "register_at_fork"):  # not on Windows, which does not fork
    os.register_at_fork(after_in_child=_renew_all)


class SecretGenerator(torch.Generator):
    """A generator seeded by the operating system, again after every fork; copies and pickles are seeded by themselves.

    Args:
        device: Where it lives.
    """

    def __init__(self, device: torch.device | str = "cpu") -> None:  # PyTorch reads the device before
        self.renew()
        renew_after_fork(self)

    def renew(self) -> None:
        """Take a whole state from the operating system."""
        if self.device.type == "cpu":
            _fill(self, os.urandom(4 * _WORDS))
        else:
            self.manual_seed(secrets.randbits(64) - 2**63)  # counter-based: all 64 bits are the key

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (str(self.device),)

    def __deepcopy__(self, memo: dict[int, Any]) -> SecretGenerator:
        return type(self)(self.device)


def secret_generator(device: torch.device | str) -> torch.Generator:
    """A generator on ``device`` whose state comes from the operating system."""
    return SecretGenerator(device)


def seeded_generator(device: torch.device | str, seed: int, use: str) -> torch.Generator:
    """A repeatable generator of its own for each use of one seed: no secret of anyone's."""
    generator = torch.Generator(device=device)
    entropy = hashlib.shake_256(f"{use} of seed {seed}".encode()).digest(4 * _WORDS)
    if generator.device.type == "cpu":
        return _fill(generator, entropy)
    return generator.manual_seed(int.from_bytes(entropy[:8], "little", signed=True))


def check_generator(name: str, generator: Any) -> None:
    """Refuses what no permutation can be drawn from; None is fine."""
    if generator is not None:
        instance_of(name, generator, (torch.Generator,))
        if generator.device.type != "cpu":
            raise ValueError(f"{name} must live on the CPU, got one on {generator.device}")


def _fill(generator: torch.Generator, entropy: bytes) -> torch.Generator:
    """A CPU generator's whole state from these bytes."""
    probe = 20_061_111
    state = generator.manual_seed(probe).get_state()
    words = state[_FIRST : _FIRST + 8 * _WORDS].view(torch.int64)
    if len(words) != _WORDS or int(words[0]) != probe:
        warnings.warn("this PyTorch keeps the state of its CPU generator elsewhere: only 32 bits are secret", stacklevel=3)
        return generator.manual_seed(int.from_bytes(entropy[:4], "little"))
    words.copy_(torch.from_numpy(np.frombuffer(entropy, np.uint32).astype(np.int64)))
    return generator.set_state(state)


class KeyChain:
    """A secret key that gives one CPU generator after another and cannot be run backwards.

    Each draw replaces the key by its hash, so a key in a checkpoint tells the permutations drawn from then on, never those
    before. After a fork the child has a key of its own, and so has a copy.

    Args:
        key: 32 bytes; by default from the operating system.
    """

    def __init__(self, key: bytes | None = None) -> None:
        self.key = os.urandom(32) if key is None else key
        renew_after_fork(self)

    def renew(self) -> None:
        """Take another key from the operating system."""
        self.key = os.urandom(32)

    def __reduce__(self) -> tuple[Any, ...]:
        return KeyChain, ()

    def next_generator(self) -> torch.Generator:
        """A generator of its own for the next draw."""
        entropy = hashlib.shake_256(b"draw" + self.key).digest(4 * _WORDS)
        self.key = hashlib.sha256(b"next" + self.key).digest()
        return _fill(torch.Generator(), entropy)
