"""Who takes part: every record by a coin of its own, or so many of all.

Where few take part, coins are not tossed one by one: how many show heads is binomial, and given
that number all subsets of its size are equally likely. So a batch of 1,000 out of ten million
records costs a thousand numbers.

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

_OFTEN = 1 / 16


def bernoulli_indices(count: int, rate: float, generator: torch.Generator | None) -> list[int]:
    """Tosses so many coins and returns which of them show heads, in order.

    Args:
        count: Number of coins.
        rate: Chance of each, in [0, 1]; exact to 2⁻⁵³.
        generator: None for a fresh secret. A user's own tosses as Opacus does with it, record by
            record, but for one coin in 16 million, so that both make the same batches.
    """
    if not (generator is None or isinstance(generator, SecretGenerator)):
        return _as_opacus_tosses(count, rate, generator)
    stream = stream_of(generator)
    if rate > _OFTEN:  # then to toss them all is faster
        limit = np.uint64(math.floor(rate * 2.0**53))  # exact, as all products with powers of two
        return np.flatnonzero((stream.words(count) >> np.uint64(11)) < limit).tolist()
    (shown,) = exact_binomials(count, rate, 1, stream)
    return _chosen(count, int(shown), stream).tolist()


def _as_opacus_tosses(count: int, rate: float, generator: torch.Generator) -> list[int]:
    """Compares 24 bits, which Opacus takes alone, and 29 more where these do not decide."""
    coarse = math.floor(rate * 2**24)
    fine = math.floor((rate * 2**24 - coarse) * 2**29) / 2**29
    drawn = torch.rand(count, generator=generator, dtype=torch.float32, device=generator.device)
    (shown,) = (drawn <= coarse / 2**24).nonzero(as_tuple=True)
    tied = drawn[shown] == coarse / 2**24
    rest = torch.rand(
        int(tied.sum()), generator=generator, dtype=torch.float64, device=generator.device
    )
    tied[tied.clone()] = rest >= fine
    return shown[~tied].tolist()


def subset(count: int, size: int, generator: torch.Generator | None) -> list[int]:
    """Draws so many of 0, …, ``count`` − 1, in random order.

    All choices and orders are equally likely: numbers of 64 bits are taken modulo ``count``, so
    none is likelier than another by more than ``count``/2⁶⁴, relatively.
    """
    stream = stream_of(generator)
    if 2 * size > count:
        return permutation(count, stream)[:size].tolist()
    return _chosen(count, size, stream)[permutation(size, stream)].tolist()


def allocate(count: int, parts: int, generator: torch.Generator | None) -> list[list[int]]:
    """Lets each of 0, …, ``count`` − 1 fall into one of several parts, by a draw of its own.

    The draws are independent, and uniform as those of :func:`subset`: a part may be empty.
    """
    part_of = stream_of(generator).words(count) % np.uint64(parts)
    order = np.argsort(part_of, kind="stable")
    ends = np.searchsorted(part_of[order], np.arange(1, parts, dtype=np.uint64))
    return [members.tolist() for members in np.split(order, ends)]


def permutation(count: int, generator: torch.Generator | None) -> npt.NDArray[np.int64]:
    """Draws a random order of 0, …, ``count`` − 1, exact but for ties of 64 bits: (count,)."""
    return np.argsort(stream_of(generator).words(count))


def _chosen(count: int, size: int, stream: SecretGenerator) -> npt.NDArray[np.int64]:
    """Draws numbers until so many different ones are there, and sorts them."""
    drawn = np.empty(0, np.int64)
    while missing := size - len(drawn):  # never more than are missing, so that none is thrown away
        more = (stream.words(missing) % np.uint64(count)).astype(np.int64)
        drawn = np.unique(np.concatenate([drawn, more]))
    return drawn
