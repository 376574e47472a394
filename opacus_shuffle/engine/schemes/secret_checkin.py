"""Secret check-in: all users report in every round, those who do not take part noise alone.

A batch is a sample by coins of rate q, the loader's batch size over the number of records. Its sum
carries the noise of all n records, and is divided by the constant q·n.
"""

from __future__ import annotations

import dataclasses
from typing import ClassVar

from torch.utils.data import DistributedSampler

from opacus_shuffle.accountants.mechanisms import Mechanism, SecretCheckIn
from opacus_shuffle.analysis.report_shapes import SHAPES
from opacus_shuffle.core.validation import one_of
from opacus_shuffle.engine.clipping import Clipping
from opacus_shuffle.engine.linear_reports import TiltedReports
from opacus_shuffle.engine.noise import LocalGaussianNoise, Noise
from opacus_shuffle.engine.sampling.samplers import SamplingPlan
from opacus_shuffle.engine.schemes.base import Scheme
from opacus_shuffle.engine.training_plan import Request, Run


class ReportsOfEveryone(Scheme):
    """One round of shuffled reports of all records per step."""

    mechanisms: ClassVar[tuple[type[Mechanism], ...]] = (SecretCheckIn,)

    def check_request(self, request: Request) -> None:
        """Refuses what does not go with reports of this shape."""
        super().check_request(request)
        modes = ("hooks", "functorch", "ew", "ghost")
        if (shape := self.shape(request)) == "gaussian":
            one_of("grad_sample_mode", request.grad_sample_mode, modes)
            return
        if not request.local_noise:
            raise ValueError(
                f"report={request.report!r} is drawn by each record's user: pass "
                "local_noise=True, or report='gaussian', whose noise may be added once to the sum"
            )
        one_of(f"clipping (with report={shape!r})", request.clipping, ("flat",))
        what = f"grad_sample_mode (with report={shape!r}, which needs each record's gradient)"
        one_of(what, request.grad_sample_mode, modes[:3])

    def check_report(self, request: Request) -> None:
        """Refuses unknown shapes of reports."""
        if request.report is not None:
            one_of("report", request.report, tuple(SHAPES))

    @staticmethod
    def shape(request: Request) -> str:
        """Returns the shape of reports: by default the one that asks for the least noise."""
        return request.report or ("linear" if request.local_noise else "gaussian")

    def plan_sampling(self, request: Request) -> SamplingPlan:
        """Plans samples at the rate of the loader's batch size over the number of records.

        Other accountants take 1 over the number of batches, which would round 0.8 to 0.5.
        """
        plan, loader = super().plan_sampling(request), request.data_loader
        if loader.batch_size is None:  # a Poisson sampler, of ours or of Opacus
            rate = loader.batch_sampler.sample_rate  # type: ignore[union-attr]
            batch = max(1, round(rate * plan.num_users))
            return dataclasses.replace(plan, batch_size=batch, sample_rate=rate)
        shares = request.ranks.size if isinstance(loader.sampler, DistributedSampler) else 1
        batch = min(loader.batch_size * shares, plan.num_users)
        return dataclasses.replace(plan, batch_size=batch, sample_rate=batch / plan.num_users)

    def mechanism(self, run: Run, noise_multiplier: float, batches: int = 1) -> Mechanism:
        """Returns the mechanism of one round."""
        return SecretCheckIn.of_batch(
            noise_multiplier=noise_multiplier,
            num_users=run.sampling.num_users,
            sample_rate=run.sampling.sample_rate,
            emulated=self.emulated(run.request),
            report=self.shape(run.request),
        )

    def strategies(self, run: Run, clipping: Clipping) -> tuple[Clipping, Noise]:
        """Returns how the optimizer sums reports, and that all users' noise is on them."""
        asked = run.request
        users = len(asked.ranks.share(run.sampling.num_users))
        if (shape := self.shape(asked)) != "gaussian":
            reports = TiltedReports(users, shape)
            return reports, reports
        if asked.local_noise:
            return clipping, LocalGaussianNoise(users)
        return super().strategies(run, clipping)
