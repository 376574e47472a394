"""Secret check-in: all users report in every round, and those who do not take part send noise.

A batch is a sample by coins of rate q, the loader's batch size over the number of records. Its sum
carries the noise of all n records, and is divided by the constant q·n.
"""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

from torch.utils.data import DataLoader, DistributedSampler

from opacus_shuffle.accountants.mechanisms import Mechanism, SecretCheckIn
from opacus_shuffle.analysis.report_shapes import SHAPES
from opacus_shuffle.core.validation import one_of
from opacus_shuffle.engine.batches.samplers import SamplingPlan
from opacus_shuffle.engine.schemes.base import Scheme
from opacus_shuffle.engine.step.clipping import Clipping
from opacus_shuffle.engine.step.linear_reports import TiltedReports
from opacus_shuffle.engine.step.noise import LocalGaussianNoise, Noise


class ReportsOfEveryone(Scheme):
    """One round of shuffled reports of all records per step.

    Attributes:
        report: The shape of the reports.
    """

    mechanisms: ClassVar[tuple[type[Mechanism], ...]] = (SecretCheckIn,)
    options: ClassVar[tuple[str, ...]] = ("report",)
    modes: ClassVar[tuple[str, ...]] = ("hooks", "functorch", "ghost")
    report: str

    def check_options(self, *, report: str | None = None, **options: Any) -> None:
        """Refuses what does not go with reports of this shape."""
        super().check_options(**options)
        # By default the shape that needs the least noise.
        self.report = report or ("linear" if self.local_noise else "gaussian")
        if one_of("report", self.report, tuple(SHAPES)) == "gaussian":
            return
        if not self.local_noise:
            raise ValueError(
                f"report={report!r} is drawn by each record's user: pass "
                "local_noise=True, or report='gaussian', whose noise may be added once to the sum"
            )
        shape = f"with report={self.report!r}"
        one_of(f"clipping ({shape})", self.clipping, ("flat",))
        name = f"grad_sample_mode ({shape}, which needs each record's gradient)"
        one_of(name, self.grad_sample_mode, ("hooks", "functorch"))

    def plan_sampling(
        self,
        data_loader: DataLoader,
        *,
        poisson_sampling: bool | None = None,
        sampling: str | None = None,
    ) -> SamplingPlan:
        """Plans samples at the rate of the loader's batch size over the number of records.

        Other accountants take 1 over the number of batches, which would round 0.8 to 0.5.
        """
        plan = super().plan_sampling(data_loader, poisson_sampling=poisson_sampling)
        # A Poisson sampler, of this package or of Opacus, has a rate of its own.
        rate = getattr(data_loader.batch_sampler, "sample_rate", None)
        if rate is None:
            shares = self.ranks.size if isinstance(data_loader.sampler, DistributedSampler) else 1
            batch = min(data_loader.batch_size * shares, plan.num_users)  # type: ignore[operator]
            rate = batch / plan.num_users
        expected = max(1, round(rate * plan.num_users))
        return dataclasses.replace(plan, batch_size=expected, sample_rate=rate)

    def mechanism(self, noise_multiplier: float, batches: int = 1) -> Mechanism:
        """Returns the mechanism of one round."""
        return SecretCheckIn.of_batch(
            noise_multiplier=noise_multiplier,
            num_users=self.sampling.num_users,
            sample_rate=self.sampling.sample_rate,
            emulated=self.emulated,
            report=self.report,
        )

    def strategies(self, clipping: Clipping) -> tuple[Clipping, Noise]:
        """Returns how the optimizer sums reports, with the noise of all users."""
        users = len(self.ranks.share(self.sampling.num_users))
        if self.report != "gaussian":
            reports = TiltedReports(users, self.report)
            return reports, reports
        if self.local_noise:
            return clipping, LocalGaussianNoise(users)
        return super().strategies(clipping)
