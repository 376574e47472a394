"""Recovers the state of PyTorch's CPU generator from Gaussian noise; ours resists the attack.

Where a gradient is known to be zero, as in unused rows of an embedding, a released sum shows only
noise. PyTorch draws the noise from a Mersenne Twister by Box-Muller: eight words of every sixteen
become angles, and an angle's top two bits are two bits of its word. Every bit of every word is a
linear function of the first 624 words over the field of two elements. Hence 25,600 numbers give
25,600 linear equations of rank 19,937, the number of bits of the state. Their solution reveals all
other noise. The redundant equations are all satisfied if the noise came from a Mersenne Twister. If
it came from another source, each of them fails with probability one half.

Run ``python reproduction/generator_attack.py`` (two minutes) to attack both generators.
"""

from __future__ import annotations

import numpy as np
import torch

from opacus_shuffle.core.randomness import SecretGenerator

NUM_WORDS, OFFSET = 624, 397  # of MT19937; a word is 32 bits
LIMBS = NUM_WORDS * 32 // 64  # 64-bit integers that hold one coefficient for each bit of the state
TOP = 23  # PyTorch makes a float of a word's lowest 24 bits


def contradictions(noise: torch.Tensor) -> tuple[int, int, int]:
    """Solves for the state of a Mersenne Twister that would have drawn this noise.

    Args:
        noise: Standard normal numbers, of shape [a multiple of 16], in the order drawn.

    Returns:
        The rank of the equations, and how many of the redundant ones fail and are satisfied.
    """
    blocks = noise.reshape(-1, 16).double()
    # Box-Muller puts cosines into the first half of a block, and sines into the second one.
    turns = torch.atan2(blocks[:, 8:], blocks[:, :8]) / (2 * np.pi) % 1.0
    quarters = (4 * turns).long().reshape(-1).numpy()
    left, right = [], []
    for index, word in zip(_angle_words(len(blocks)), quarters, strict=True):
        left += [index[TOP], index[TOP - 1]]
        right += [word >> 1 & 1, word & 1]
    return _eliminate(np.array(left), np.array(right, np.uint64))


def _angle_words(num_blocks: int):
    """Yields the words of angles as arrays [32 bits, LIMBS] of the state bits each bit sums."""
    state = np.zeros((NUM_WORDS * 32, LIMBS), np.uint64)
    bits = np.arange(NUM_WORDS * 32)
    state[bits, bits // 64] = np.uint64(1) << (bits % 64).astype(np.uint64)
    state = state.reshape(NUM_WORDS, 32, LIMBS)
    for position in range(16 * num_blocks):
        if position % NUM_WORDS == 0:
            _twist(state)
        if position % 16 >= 8:
            yield _temper(state[position % NUM_WORDS])


def _twist(state: np.ndarray) -> None:
    """Advances the state by 624 words, in place."""
    for index in range(NUM_WORDS):
        joined = state[(index + 1) % NUM_WORDS].copy()
        joined[31] = state[index, 31]
        shifted = np.concatenate([joined[1:], np.zeros_like(joined[:1])])
        shifted[_ones(0x9908B0DF)] ^= joined[0]
        state[index] = state[(index + OFFSET) % NUM_WORDS] ^ shifted


def _temper(word: np.ndarray) -> np.ndarray:
    """Returns the output for a word of the state."""
    word = word.copy()
    word[:21] ^= word[11:].copy()
    for shift, mask in ((7, 0x9D2C5680), (15, 0xEFC60000)):
        kept = _ones(mask)
        word[kept] ^= word[kept - shift].copy()
    word[:14] ^= word[18:].copy()
    return word


def _ones(mask: int) -> np.ndarray:
    """Returns the positions of the ones in a mask."""
    return np.flatnonzero(mask >> np.arange(32) & 1)


def _eliminate(left: np.ndarray, right: np.ndarray) -> tuple[int, int, int]:
    """Runs Gaussian elimination over the field of two elements.

    Returns the rank, and the numbers of rows that become 0 = 1 and 0 = 0.
    """
    rows, rank = np.concatenate([left, right[:, None]], axis=1), 0
    for column in range(64 * LIMBS):
        limb, bit = column // 64, np.uint64(column % 64)
        having = rank + np.flatnonzero(rows[rank:, limb] >> bit & np.uint64(1))
        if len(having):
            rows[[rank, having[0]]] = rows[[having[0], rank]]
            rows[having[1:], limb:] ^= rows[rank, limb:]
            rank += 1
    failing = int(rows[rank:, -1].sum())
    return rank, failing, len(rows) - rank - failing


def main() -> None:
    """Attacks the noise of PyTorch's generator and of this package's generator."""
    for name, noise in (
        ("torch.normal", torch.normal(0.0, 1.0, (25_600,), generator=torch.Generator())),
        ("opacus_shuffle", SecretGenerator().normals(25_600)),
    ):
        rank, failing, holding = contradictions(noise)
        print(f"{name:15} rank {rank}, of the other equations {holding} hold and {failing} fail")


if __name__ == "__main__":
    main()
