r"""Random numbers for audits that run a mechanism millions of times, and the largest of very many normal ones.

The largest of m independent standard normals is Φ⁻¹(U^{1/m}): one random number, however large m is. With E = −log U, which is
exponential, that is the quantile whose logarithm is −E/m. Inverting log Φ loses nothing where Φ itself rounds to 1.

>>> import torch
>>> rng = numpy_generator("generator", torch.Generator().manual_seed(0))
>>> round(float(np.median(largest_normal(1e12, 10_001, rng))), 1)
7.1
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt
import torch
from scipy.special import ndtri_exp

from opacus_shuffle.core.randomness import check_generator, secret_generator

Vector = npt.NDArray[np.float64]

CHUNK = 2**20
"""Random numbers held at once, 8 MB."""


def numpy_generator(name: str, generator: torch.Generator | None) -> np.random.Generator:
    """Returns NumPy's faster generator, keyed by 256 bits drawn from the torch one (from a secret one if it is None)."""
    check_generator(name, generator)
    source = secret_generator("cpu") if generator is None else generator
    return np.random.default_rng(torch.randint(0, 2**32, (8,), dtype=torch.int64, generator=source).tolist())


def chunks(total: int, width: int = 1) -> Iterator[slice]:
    """Yields slices that cut ``total`` runs of ``width`` numbers each into pieces of about ``CHUNK`` numbers."""
    step = max(1, CHUNK // width)
    for start in range(0, total, step):
        yield slice(start, min(start + step, total))


def largest_normal(count: npt.ArrayLike, size: int, rng: np.random.Generator) -> Vector:
    """Draws ``size`` times the largest of ``count`` independent standard normals; −∞ of none at all.

    Args:
        count: How many, one number or one per draw, shape (size,).
        size: Draws.
        rng: Source of randomness.
    """
    exponential = rng.standard_exponential(size)
    with np.errstate(divide="ignore"):
        return ndtri_exp(-exponential / np.asarray(count, dtype=np.float64))
