"""Secret randomness: generators seeded by the operating system, so that ``torch.manual_seed`` never predicts the noise.

>>> secret_generator("cpu").initial_seed() == secret_generator("cpu").initial_seed()
False
"""

from __future__ import annotations

import secrets

import torch


def secret_generator(device: torch.device | str) -> torch.Generator:
    """A generator on ``device`` with 64 bits of the operating system's entropy for a seed."""
    generator = torch.Generator(device=device)
    generator.manual_seed(secrets.randbits(64) - 2**63)
    return generator
