"""Secret randomness: generators seeded by the operating system, so that ``torch.manual_seed`` never predicts the noise.

PyTorch's CPU generator is a Mersenne Twister whose ``manual_seed`` keeps 32 bits, few enough to try them all; so its whole
state of 19,968 bits is filled. It is still no cryptographic generator: whoever learns enough of its raw output can predict the
rest (``secure_mode`` is Opacus's answer to that).

>>> torch.equal(torch.randn(4, generator=secret_generator("cpu")), torch.randn(4, generator=secret_generator("cpu")))
False
"""

from __future__ import annotations

import hashlib
import os
import secrets
import warnings
from typing import Any

import numpy as np
import torch

from opacus_shuffle.core.validation import instance_of

# Where PyTorch keeps the Twister's 624 words, 64 bits each, behind its seed, counters and position.
_FIRST, _WORDS = 24, 624


def secret_generator(device: torch.device | str) -> torch.Generator:
    """A generator on ``device`` whose state comes from the operating system."""
    generator = torch.Generator(device=device)
    if generator.device.type != "cpu":
        return generator.manual_seed(secrets.randbits(64) - 2**63)  # counter-based: all 64 bits are the key
    return _fill(generator, os.urandom(4 * _WORDS))


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
    before.

    Args:
        key: 32 bytes; by default from the operating system.
    """

    def __init__(self, key: bytes | None = None) -> None:
        self.key = os.urandom(32) if key is None else key

    def next_generator(self) -> torch.Generator:
        """A generator of its own for the next draw."""
        entropy = hashlib.shake_256(b"draw" + self.key).digest(4 * _WORDS)
        self.key = hashlib.sha256(b"next" + self.key).digest()
        return _fill(torch.Generator(), entropy)
