"""Sums linear or step reports of records' gradients, as if each record's user had drawn its own.

All users report in every round. Those whose records are in the batch draw the part of their report
along their gradient with a density that is tilted, in proportion to its norm; all others send noise
alone (docs/proofs, pages 12 and 13). Physical batches add up, so splitting a batch
changes nothing but memory.

>>> from opacus import GradSampleModule
>>> from opacus_shuffle.engine.private_optimizer import PrivateOptimizer
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
from opacus_shuffle.engine.clipping import FlatClipping, add_to_sum, sum_dtype
from opacus_shuffle.engine.noise import GaussianNoise, draw_gaussian
from opacus_shuffle.protocols.linear_reports import summed_reports, tilted

_TOGETHER = 32
"""Reports that share their normal numbers: more would take longer to be made orthogonal."""


class TiltedReports(FlatClipping, GaussianNoise):
    """The clipping and the noise of linear or step reports, both strategies at once.

    Args:
        users: How many report on this process, whose records are in the batch or not.
        report: The shape of the reports, ``"linear"`` or ``"step"``.
    """

    on_every_rank = True

    def __init__(self, users: int, report: str = "linear") -> None:
        self.users, self.report = users, report
        self.forget_sum()

    def forget_sum(self) -> None:
        """Forgets who took part in a batch."""
        self.taking_part = 0
        self.noises: list[torch.Tensor] = []
        self.drawn_with: set[tuple[float, float]] = set()

    def clip(self, optimizer: Any) -> tuple[int, float]:
        """Adds the reports of a physical batch's users who take part to the sum."""
        optimizer.next_key()  # the last one has drawn the noise of the batch before
        clipped = super().clip(optimizer)
        for parameter, noise in zip(optimizer.params, self.noises, strict=True):
            add_to_sum(parameter, noise.view_as(parameter))
        return clipped

    def factors(self, optimizer: Any, norms: torch.Tensor, margin: float) -> list[torch.Tensor]:
        """Returns by what each record's gradient is multiplied in the sum of reports.

        The noise that belongs to it is kept for :meth:`clip`.
        """
        whole = norms.norm(2, dim=1)
        rate = (margin * whole / optimizer.max_grad_norm).nan_to_num(0.0, 0.0).clamp(max=1.0)
        drawn_with = float(optimizer.noise_multiplier), float(optimizer.max_grad_norm)
        unit = math.prod(drawn_with)
        (taking,) = (_uniforms(len(rate), optimizer.generator) < rate.cpu()).nonzero(as_tuple=True)
        signed = _signed_uniforms(len(taking), optimizer.generator)
        parts = tilted(signed, optimizer.noise_multiplier, self.report)
        factors = torch.zeros_like(whole)
        kinds = [sum_dtype(parameter) for parameter in optimizer.params]
        self.noises = [
            torch.zeros_like(parameter, dtype=kind).flatten()
            for parameter, kind in zip(optimizer.params, kinds, strict=True)
        ]
        # Also of parameters that are one number; in half precision no vector would have norm 1.
        samples = optimizer.grad_samples
        rows = [sample.reshape(len(sample), math.prod(sample.shape[1:])) for sample in samples]
        for start in range(0, len(taking), _TOGETHER):
            places = taking[start : start + _TOGETHER].to(whole.device)
            drawn = parts[start : start + _TOGETHER].to(whole.device)
            here = whole[places]
            units = [
                row[places.to(row.device)].to(kind) / here.to(row.device, kind)[:, None]
                for row, kind in zip(rows, kinds, strict=True)
            ]
            nothing = [torch.zeros_like(noise) for noise in self.noises]
            normals = [zeros + draw_gaussian(optimizer, 1.0, zeros) for zeros in nothing]
            factors[places] = (unit * summed_reports(units, drawn, normals) / here).to(factors)
            for noise, normal in zip(self.noises, normals, strict=True):
                noise += unit * math.sqrt(len(places)) * normal
        self.taking_part += len(taking)
        self.drawn_with.add(drawn_with)
        return [factors] * len(kinds)

    def check_release(self, optimizer: Any) -> None:
        """Refuses noise or a norm that has changed since any of the batch's reports was drawn.

        Reports of less noise than the others' would tell who takes part.
        """
        now = float(optimizer.noise_multiplier), float(optimizer.max_grad_norm)
        if changed := self.drawn_with - {now}:
            raise ValueError(
                f"(noise_multiplier, max_grad_norm) are {now}, reports of this batch were drawn "
                f"with {min(changed)}: change them between optimizer.step() and the next batch "
                "alone"
            )

    def multiplier(self, optimizer: Any) -> float:
        """Returns the noise of all who do not take part: √(n − k)·σ."""
        return math.sqrt(self.users - self.taking_part) * float(optimizer.noise_multiplier)

    def draw(self, optimizer: Any, total: torch.Tensor) -> torch.Tensor:
        """Draws the noise of all who do not take part.

        In secure mode the sum is rounded to the grid of all users' noise: that of those who do not
        take part would tell how many they are, and there is none if there is nobody.
        """
        generator = optimizer.generator
        secure = isinstance(generator, SecretGenerator) and generator.secure
        if not secure or generator.device.type != "cpu":
            return super().draw(optimizer, total)
        noise: Any = GridNoise(self.multiplier(optimizer) * optimizer.max_grad_norm, generator)
        everyone = math.sqrt(self.users) * float(optimizer.noise_multiplier)
        noise.step = GridNoise(everyone * optimizer.max_grad_norm, generator).step
        return noise


def _uniforms(count: int, generator: torch.Generator | None) -> torch.Tensor:
    """Draws uniform numbers in [0, 1), in double precision."""
    if isinstance(generator, SecretGenerator):
        return generator.uniforms(count)
    device = "cpu" if generator is None else generator.device
    return torch.rand(count, generator=generator, device=device, dtype=torch.float64).cpu()


def _signed_uniforms(count: int, generator: torch.Generator | None) -> torch.Tensor:
    """Draws uniform numbers in [−1, 1), in double precision; those of our stream near 0, too."""
    if isinstance(generator, SecretGenerator):
        return generator.signed_uniforms(count)
    return 2 * _uniforms(count, generator) - 1
