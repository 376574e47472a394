"""Sums linear or step reports of records' gradients, as if every user had drawn its own report.

All users report in every round. Users whose records are in the batch draw the component of their
report along their gradient from a tilted density, with the probability of the gradient's norm over
the clipping norm. All other users send noise alone (docs/proofs, pages 12 and 13). The reports
of physical batches add up, so splitting a batch only saves memory.

>>> from opacus import GradSampleModule
>>> from opacus_shuffle.engine.step.private_optimizer import PrivateOptimizer
>>> model = GradSampleModule(torch.nn.Linear(10_000, 1, bias=False))
>>> reports = TiltedReports(users=25)
>>> optimizer = PrivateOptimizer(
...     torch.optim.SGD(model.parameters(), lr=1.0), clipping=reports, noise=reports,
...     noise_multiplier=2.0, max_grad_norm=1.0, expected_batch_size=None, loss_reduction="sum",
...     generator=torch.Generator().manual_seed(0))
>>> model(torch.ones(16, 10_000)).sum().backward()
>>> optimizer.step()
>>> round(float(next(model.parameters()).grad.std()))  # sqrt(25) reports · 2.0
10
"""

from __future__ import annotations

import math
from typing import Any

import torch

from opacus_shuffle.core.gaussian_noise import GridNoise
from opacus_shuffle.core.randomness import SecretGenerator
from opacus_shuffle.engine.step.clipping import FlatClipping, add_to_sum, sum_dtype
from opacus_shuffle.engine.step.noise import GaussianNoise, draw_gaussian
from opacus_shuffle.protocols.linear_reports import summed_reports, tilted

_GROUP = 32
"""How many reports share their normal numbers: larger groups take longer to orthogonalise."""


class TiltedReports(FlatClipping, GaussianNoise):
    """The clipping and the noise of linear or step reports, both strategies at once.

    Args:
        users: The number of users who report on this process, including those whose records are not
            in the batch.
        report: The shape of the reports, ``"linear"`` or ``"step"``.
    """

    on_every_rank = True

    def __init__(self, users: int, report: str = "linear") -> None:
        self.users, self.report = users, report
        self.forget_sum()

    def forget_sum(self) -> None:
        """Forgets the participants of a batch."""
        self.num_participants = 0
        self.noises: list[torch.Tensor] = []
        self.drawn_with: set[tuple[float, float]] = set()

    def clip(self, optimizer: Any) -> tuple[int, float]:
        """Adds the reports of a physical batch's participants to the sum."""
        optimizer.next_key()  # the last one has drawn the noise of the batch before
        clipped = super().clip(optimizer)
        for parameter, noise in zip(optimizer.params, self.noises, strict=True):
            add_to_sum(parameter, noise.view_as(parameter))
        return clipped

    def factors(self, optimizer: Any, norms: torch.Tensor, margin: float) -> list[torch.Tensor]:
        """Returns the factor of each record's gradient in the sum of reports.

        The noise of these reports is kept for :meth:`clip`.
        """
        whole = norms.norm(2, dim=1)
        rate = (margin * whole / optimizer.max_grad_norm).nan_to_num(0.0, 0.0).clamp(max=1.0)
        drawn_with = float(optimizer.noise_multiplier), float(optimizer.max_grad_norm)
        unit = math.prod(drawn_with)
        coins = _signed_uniforms(len(rate), optimizer.generator).abs()
        (participants,) = (coins < rate.cpu()).nonzero(as_tuple=True)
        signed = _signed_uniforms(len(participants), optimizer.generator)
        parts = tilted(signed, optimizer.noise_multiplier, self.report)
        factors = torch.zeros_like(whole)
        dtypes = [sum_dtype(parameter) for parameter in optimizer.params]
        self.noises = [
            torch.zeros_like(parameter, dtype=dtype).flatten()
            for parameter, dtype in zip(optimizer.params, dtypes, strict=True)
        ]
        # Reshaping also works for parameters with one number. In half precision directions would
        # not have norm 1.
        rows = [
            sample.reshape(len(sample), math.prod(sample.shape[1:])).to(dtype)
            for sample, dtype in zip(optimizer.grad_samples, dtypes, strict=True)
        ]
        for group in torch.split(participants, _GROUP):
            indices = group.to(whole.device)
            # Without a copy if all records of a small batch participate.
            some = [row if len(group) == len(row) else row[indices.to(row.device)] for row in rows]
            nothing = [torch.zeros_like(noise) for noise in self.noises]
            normals = [zeros + draw_gaussian(optimizer, 1.0, zeros) for zeros in nothing]
            drawn, parts = parts[: len(group)].to(whole.device), parts[len(group) :]
            factors[indices] = (unit * summed_reports(some, whole[indices], drawn, normals)).to(
                factors
            )
            for noise, normal in zip(self.noises, normals, strict=True):
                noise.add_(normal, alpha=unit * math.sqrt(len(group)))
        self.num_participants += len(participants)
        self.drawn_with.add(drawn_with)
        return [factors] * norms.shape[1]

    def check_release(self, optimizer: Any) -> None:
        """Refuses noise or a norm that has changed since a report of the batch was drawn.

        Reports with less noise than the others' would reveal the participants.
        """
        now = float(optimizer.noise_multiplier), float(optimizer.max_grad_norm)
        if changed := self.drawn_with - {now}:
            raise ValueError(
                f"(noise_multiplier, max_grad_norm) are {now}, reports of this batch were drawn "
                f"with {min(changed)}: change them only between optimizer.step() and the "
                "next batch"
            )

    def multiplier(self, optimizer: Any) -> float:
        """Returns the noise of all other users: √(n − k)·σ."""
        return math.sqrt(self.users - self.num_participants) * float(optimizer.noise_multiplier)

    def draw(self, optimizer: Any, total: torch.Tensor) -> torch.Tensor:
        """Draws the noise of all users who do not participate.

        In secure mode the sum is rounded to the grid of all users' noise. The grid of the other
        users' noise would reveal their number, and would not exist if all users participate.
        """
        generator = optimizer.generator
        secure = isinstance(generator, SecretGenerator) and generator.secure
        if not secure or generator.device.type != "cpu":
            return super().draw(optimizer, total)
        noise: Any = GridNoise(self.multiplier(optimizer) * optimizer.max_grad_norm, generator)
        everyone = math.sqrt(self.users) * float(optimizer.noise_multiplier)
        noise.step = GridNoise(everyone * optimizer.max_grad_norm, generator).step
        return noise


def _signed_uniforms(count: int, generator: torch.Generator | None) -> torch.Tensor:
    """Draws uniform numbers in (−1, 1), in double precision; secret ones are precise near 0."""
    if isinstance(generator, SecretGenerator):
        return generator.signed_uniforms(count)
    device = "cpu" if generator is None else generator.device
    drawn = torch.rand(count, generator=generator, device=device, dtype=torch.float64)
    return 2 * drawn.cpu() - 1
