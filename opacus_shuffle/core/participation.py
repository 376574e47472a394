"""Draws who takes part: every record with a given probability, or a given number of them.

If few records take part, no coin is tossed for each of them: the number of heads is binomial, and
given that number all subsets of its size are equally likely. So a batch of 1,000 out of ten million
records costs a thousand random numbers.

>>> bernoulli_indices(5, 1.0, None), bernoulli_indices(5, 0.0, None), sorted(subset(5, 5, None))
([0, 1, 2, 3, 4], [], [0, 1, 2, 3, 4])
"""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt
import torch

from opacus_shuffle.core.exact_binomials import exact_binomials
from opacus_shuffle.core.randomness import SecretGenerator, stream_of

_FREQUENT = 1 / 16


def bernoulli_indices(count: int, rate: float, generator: torch.Generator | None) -> list[int]:
    """Tosses independent coins and returns the indices of those that show heads, in order.

    Args:
        count: The number of coins.
        rate: The probability of heads, in [0, 1], exact to 2⁻⁵³.
        generator: None for a fresh secret. With a user's own generator, the heads are those that
            Opacus draws with it, except for one coin in 16 million.
    """
    if not (generator is None or isinstance(generator, SecretGenerator)):
        return _bernoulli_indices_as_opacus(count, rate, generator)
    stream = stream_of(generator)
    if rate > _FREQUENT:  # then it is faster to toss all of them
        limit = np.uint64(math.floor(rate * 2.0**53))  # exact, because 2⁵³ is a power of two
        return np.flatnonzero((stream.words(count) >> np.uint64(11)) < limit).tolist()
    (heads,) = exact_binomials(count, rate, 1, stream)
    return _distinct_numbers(count, int(heads), stream).tolist()


def _bernoulli_indices_as_opacus(count: int, rate: float, generator: torch.Generator) -> list[int]:
    """Compares 24 bits as Opacus does, and 29 more bits of the coins that these do not decide."""
    coarse = math.floor(rate * 2**24)
    fine = math.floor((rate * 2**24 - coarse) * 2**29) / 2**29
    drawn = torch.rand(count, generator=generator, dtype=torch.float32, device=generator.device)
    (heads,) = (drawn <= coarse / 2**24).nonzero(as_tuple=True)
    tied = drawn[heads] == coarse / 2**24
    rest = torch.rand(
        int(tied.sum()), generator=generator, dtype=torch.float64, device=generator.device
    )
    tied[tied.clone()] = rest >= fine
    return heads[~tied].tolist()


def subset(count: int, size: int, generator: torch.Generator | None) -> list[int]:
    """Draws ``size`` of 0, …, ``count`` − 1, in random order.

    All choices and orders are equally likely: numbers of 64 bits are taken modulo ``count``, so the
    probabilities differ by a factor of at most 1 + ``count``/2⁶⁴.
    """
    stream = stream_of(generator)
    if 2 * size > count:
        return permutation(count, stream)[:size].tolist()
    return _distinct_numbers(count, size, stream)[permutation(size, stream)].tolist()


def allocate(count: int, groups: int, generator: torch.Generator | None) -> list[list[int]]:
    """Assigns each of 0, …, ``count`` − 1 to a random group, independently of the others.

    The draws are uniform, as those of :func:`subset`. A group may be empty.
    """
    group_of = stream_of(generator).words(count) % np.uint64(groups)
    order = np.argsort(group_of, kind="stable")
    ends = np.searchsorted(group_of[order], np.arange(1, groups, dtype=np.uint64))
    return [members.tolist() for members in np.split(order, ends)]


def permutation(count: int, generator: torch.Generator | None) -> npt.NDArray[np.int64]:
    """Draws a random order of 0, …, ``count`` − 1, exact except for ties of 64 bits: (count,)."""
    return np.argsort(stream_of(generator).words(count))


def _distinct_numbers(count: int, size: int, stream: SecretGenerator) -> npt.NDArray[np.int64]:
    """Draws numbers below ``count`` until ``size`` of them are distinct; returns these sorted."""
    drawn = np.empty(0, np.int64)
    while missing := size - len(drawn):
        # Never draw more than are missing: the surplus would have to be removed at random.
        more = (stream.words(missing) % np.uint64(count)).astype(np.int64)
        drawn = np.unique(np.concatenate([drawn, more]))
    return drawn
