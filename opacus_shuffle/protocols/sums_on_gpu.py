"""Adds up rows whose entries are rounded at random, on the GPU that they lie on.

It is what :mod:`~opacus_shuffle.protocols.sums_of_roundings` does on a CPU, without a copy of the
rows to the host and without waiting for the GPU. The random bits are those of PyTorch's generator
there, Philox, or of Triton's by a key that is drawn for every sum.

In the kernel an entry is cut off, towards zero, to a multiple of 2⁻³² grid steps and then rounded
exactly: a row's norm does not grow, and a sum of n rows is off by less than n·2⁻³² steps.

>>> rows, steps = torch.full((1000, 3), 0.25), torch.ones(1000, dtype=torch.float64)
>>> generator = torch.Generator().manual_seed(1)
>>> counts = sum_on_gpu([rows], steps, granularity=8, generator=generator, executor="torch")
>>> (counts - 4000).tolist()
[263, 245, 251]
"""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence

import torch

from opacus_shuffle.core.randomness import SecretGenerator, for_pytorch

_ENTRIES = 2**26
"""Numbers in double precision that PyTorch's operations hold at a time."""


def sum_on_gpu(
    pieces: Sequence[torch.Tensor],
    steps: torch.Tensor,
    *,
    granularity: int,
    generator: torch.Generator,
    executor: str = "auto",
) -> torch.Tensor:
    """Returns the counts of the pieces' columns, one piece after the other: int64, shape (d,).

    Args:
        pieces: Shapes (n, columns), finite, on the generator's device.
        steps: Shape (n,), float64, there too: how many grid steps a row's unit is. ``|row·steps|``
            must not exceed g/2; rounding errors beyond it are taken back.
        granularity: g; less than 2³¹ for Triton.
        generator: Of the random bits.
        executor: ``"torch"``, ``"triton"``, or ``"auto"``, Triton where it is installed.
    """
    widths = [piece.shape[1] for piece in pieces]
    counts = torch.zeros(sum(widths), dtype=torch.int64, device=generator.device)
    if executor == "auto":
        fits = granularity < 2**31  # into the kernel's whole numbers
        executor = "triton" if fits and importlib.util.find_spec("triton") else "torch"
    parts = torch.split(counts, widths)
    if executor == "triton":
        # needs an optional package
        import opacus_shuffle.protocols.triton_roundings as triton_roundings

        key = draw_key(generator)
        triton_roundings.add_roundings(pieces, steps, parts, granularity=granularity, key=key)
        return counts
    for piece, part in zip(pieces, parts, strict=True):
        if piece.numel():
            _add_roundings(piece, steps, part, granularity, for_pytorch(generator))
    return counts


def draw_key(generator: torch.Generator) -> int:
    """Draws a secret key, 63 random bits, with which one counter-based generator is used once."""
    if isinstance(generator, SecretGenerator):  # out of the cipher, without waiting for a GPU
        return int(generator.words(1)[0] >> 1)
    return int(torch.randint(2**63 - 1, (1,), generator=generator, device=generator.device))


def _add_roundings(
    rows: torch.Tensor,
    steps: torch.Tensor,
    counts: torch.Tensor,
    granularity: int,
    generator: torch.Generator,
) -> None:
    """Adds the counts of one tensor's rows by PyTorch's operations, in double precision."""
    together = max(1, _ENTRIES // rows.shape[1])
    for some, scale in zip(torch.split(rows, together), torch.split(steps, together), strict=True):
        places = (some.double() * scale[:, None] + granularity / 2).clamp_(0, granularity)
        whole = places.floor()
        drawn = torch.rand(
            places.shape, dtype=places.dtype, device=places.device, generator=generator
        )
        counts += (whole + (drawn < places - whole)).sum(0).long()
