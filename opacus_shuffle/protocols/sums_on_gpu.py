"""Rounds rows to a grid at random and adds them up, on a GPU.

It computes what :mod:`~opacus_shuffle.protocols.sums_of_roundings` computes on a CPU, without
copying rows to the host and without synchronising. The random bits come from Philox: PyTorch's
generator, or Triton's with a key that is drawn for every sum.

The kernel truncates an entry towards zero to a multiple of 2⁻³² grid steps, and then rounds it
exactly. So the norm of a row does not grow, and a sum of n rows has an error below n·2⁻³² steps.

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
"""The number of values that PyTorch's operations convert to double precision at a time."""


def sum_on_gpu(
    pieces: Sequence[torch.Tensor],
    steps: torch.Tensor,
    *,
    granularity: int,
    generator: torch.Generator,
    executor: str = "auto",
) -> torch.Tensor:
    """Returns the column counts of the randomly rounded pieces: int64, shape (d,).

    Args:
        pieces: Shapes (n, columns), finite, on the generator's device.
        steps: Shape (n,), float64, on the same device: the number of grid steps per unit of each
            row. ``|row·steps|`` must not exceed g/2; larger values are clipped.
        granularity: g; less than 2³¹ for Triton.
        generator: The generator of the random bits.
        executor: ``"torch"``, ``"triton"``, or ``"auto"``: Triton if it is installed.
    """
    widths = [piece.shape[1] for piece in pieces]
    counts = torch.zeros(sum(widths), dtype=torch.int64, device=generator.device)
    if executor == "auto":
        fits = granularity < 2**31  # into the kernel's integers
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
    """Draws a secret key of 63 random bits, for one use of a counter-based generator."""
    if isinstance(generator, SecretGenerator):  # from the cipher on the CPU, without synchronising
        return int(generator.words(1)[0] >> 1)
    return int(torch.randint(2**63 - 1, (1,), generator=generator, device=generator.device))


def _add_roundings(
    rows: torch.Tensor,
    steps: torch.Tensor,
    counts: torch.Tensor,
    granularity: int,
    generator: torch.Generator,
) -> None:
    """Adds the counts of one tensor's rows with PyTorch's operations, in double precision."""
    together = max(1, _ENTRIES // rows.shape[1])
    for some, scale in zip(torch.split(rows, together), torch.split(steps, together), strict=True):
        places = (some.double() * scale[:, None] + granularity / 2).clamp_(0, granularity)
        whole = places.floor()
        drawn = torch.rand(
            places.shape, dtype=places.dtype, device=places.device, generator=generator
        )
        counts += (whole + (drawn < places - whole)).sum(0).long()
