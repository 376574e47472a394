"""Trains with sums of bits in place of Gaussian noise (Cheu, Joseph, Mao and Peng, Algorithm 2).

By default all users report in every round, and each user's secret coin decides whether the report
contains the gradient. The sum is then that of Poisson-subsampled DP-SGD. With
``sampling="random_allocation"`` each user draws in secret one round of an epoch. With
``poisson_sampling=False`` a secret sample of fixed size reports.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any, ClassVar

import torch
from torch.utils.data import DataLoader

from opacus_shuffle.accountants.bounds.registry import bounds_of
from opacus_shuffle.accountants.bounds.shuffled_sums import gaussian_epsilons
from opacus_shuffle.accountants.calibrate import smallest_noise
from opacus_shuffle.accountants.compute import compute_noise_multiplier
from opacus_shuffle.accountants.mechanisms import Mechanism, ShuffledSums
from opacus_shuffle.accountants.mechanisms.shuffled_sums import ROUND_DELTA, SAMPLINGS
from opacus_shuffle.analysis.binomial_sums import LOST_SHARE
from opacus_shuffle.analysis.sampled_sums import SampledSum
from opacus_shuffle.core.guarantees import Adjacency
from opacus_shuffle.core.validation import instance_of, moderate, one_of
from opacus_shuffle.engine.batches.samplers import INDEPENDENT, SamplingPlan
from opacus_shuffle.engine.schemes.base import Budget
from opacus_shuffle.engine.schemes.random_allocation import EpochScheme
from opacus_shuffle.engine.step.clipping import Clipping
from opacus_shuffle.engine.step.noise import Noise
from opacus_shuffle.engine.step.private_optimizer import PrivateOptimizer
from opacus_shuffle.engine.step.shuffled_sum import SumsNoise
from opacus_shuffle.protocols.calibration import SumBudget
from opacus_shuffle.protocols.vector_sum import ShuffleVectorSum


class ShuffledSumsScheme(EpochScheme):
    """Sends every record's clipped gradient as shuffled bits, which noise bits hide."""

    mechanisms: ClassVar[tuple[type[Mechanism], ...]] = (ShuffledSums,)
    options: ClassVar[tuple[str, ...]] = ("aggregator", "sampling")
    modes: ClassVar[tuple[str, ...]] = ("hooks", "functorch", "ghost")
    clippings: ClassVar[tuple[str, ...]] = ("flat",)
    protocol: ShuffleVectorSum | None = None
    """The protocol of each round: the user's aggregator, or one for the noise or the budget."""

    def check_options(self, *, aggregator: Any = None, **options: Any) -> None:
        """Refuses an aggregator that is no protocol."""
        super().check_options(aggregator=aggregator, **options)
        if aggregator is not None:
            self.protocol = instance_of("aggregator", aggregator, (ShuffleVectorSum,))

    def plan_sampling(
        self,
        data_loader: DataLoader,
        *,
        poisson_sampling: bool | None = None,
        sampling: str | None = None,
    ) -> SamplingPlan:
        """Plans how batches are drawn: by every record's own coin or draw, or of one size."""
        kind: Any = "fixed_size" if poisson_sampling is False else "poisson"
        if sampling is not None:
            if poisson_sampling is not None:
                raise ValueError(
                    f"sampling={sampling!r} and poisson_sampling={poisson_sampling} both say how "
                    "batches are drawn: leave out the latter"
                )
            kind = one_of("sampling", sampling, SAMPLINGS)
        return self.plan_batches(data_loader, kind)

    def noise_device(self, noise_generator: torch.Generator | None) -> torch.device:
        """Returns a GPU that the parameters are on, unless the user's generator is on the CPU."""
        device, cpu = self.trained[0].device, torch.device("cpu")
        on_cpu = noise_generator is not None and noise_generator.device == cpu
        return cpu if device.type != "cuda" or on_cpu else device

    @property
    def everyone_reports(self) -> bool:
        """Whether all records report in every round, and not only those of the batch."""
        return self.sampling.kind in INDEPENDENT

    @property
    def sizes(self) -> tuple[int, int, float]:
        """The reports of a round, the entries of each, and the norm of a report."""
        plan, norm = self.sampling, moderate("max_grad_norm", self.max_grad_norm)
        reports = plan.num_users if self.everyone_reports else plan.batch_size
        return reports, sum(parameter.numel() for parameter in self.trained), norm

    @property
    def rounding(self) -> dict[str, Any]:
        """The values for which a protocol's grid is chosen, as keywords of the protocol."""
        rate = self.sampling.sample_rate
        return {"zero_on_grid": True, "rate": rate} if self.everyone_reports else {}

    def plan_noise(self, noise_multiplier: float | None) -> float:
        """Returns the noise multiplier of the protocol, which is built if none was given."""
        if self.protocol is None:
            sigma = super().plan_noise(noise_multiplier)
            self.protocol = ShuffleVectorSum.with_noise_multiplier(
                *self.sizes, sigma, delta=ROUND_DELTA, **self.rounding
            )
        elif noise_multiplier is not None:
            raise ValueError(
                "noise_multiplier follows from the aggregator, got "
                f"noise_multiplier={noise_multiplier!r}: leave one of them out"
            )
        self.check_protocol(self.protocol)
        return self.protocol.noise_multiplier

    def check_protocol(self, protocol: ShuffleVectorSum) -> None:
        """Refuses a protocol that does not fit this run."""
        everyone, (reports, entries, norm) = self.everyone_reports, self.sizes
        if protocol.num_users != reports:
            who = (
                f"but all {reports} records report in every round, and those outside of the "
                f"batch report zero: build it with num_users={reports}, or pass "
                "poisson_sampling=False for batches of one size"
                if everyone
                else f"a batch holds {reports} records: build it with num_users={reports}"
            )
            raise ValueError(f"the aggregator sums num_users={protocol.num_users} reports, {who}")
        if protocol.honest_fraction < 1 and self.sampling.sample_rate < 1 and not everyone:
            raise ValueError(
                f"the aggregator's honest_fraction is {protocol.honest_fraction:.3g}, but batches "
                "are samples of the data set: the number of honest users in a sample is random, "
                "and dishonest users know their part of it; leave out poisson_sampling=False, so "
                "that everyone reports, or build it with honest_fraction=1"
            )
        if protocol.dimension != entries:
            raise ValueError(
                f"the aggregator's dimension is {protocol.dimension}, the optimizer trains "
                f"{entries} entries: build it with dimension={entries}"
            )
        if not math.isclose(protocol.max_norm, norm, rel_tol=1e-9):
            raise ValueError(
                f"the aggregator's max_norm is {protocol.max_norm}, max_grad_norm is {norm}: they "
                "are the same bound on one record's gradient"
            )

    def calibrate(self, budget: Budget) -> float:
        """Builds the protocol of each round for the budget, or checks the given one."""
        one_of("bound", budget.bound, bounds_of(ShuffledSums))
        steps = budget.epochs * self.sampling.steps_per_epoch
        if self.protocol is None:
            self.protocol = self.protocol_for(budget, steps)
        self.check_protocol(self.protocol)
        epsilon = budget.spent([(self.mechanism(0.0), steps)]).epsilon
        if epsilon > budget.target_epsilon * (1 + 1e-9):
            raise ValueError(
                f"target_epsilon={budget.target_epsilon} is not met by the aggregator: {steps} "
                f"steps spend {epsilon:.6g} by bound={budget.bound!r}; leave the aggregator out, "
                "so that one is built for the budget, or train fewer epochs"
            )
        return self.protocol.noise_multiplier

    def protocol_for(self, budget: Budget, steps: int) -> ShuffleVectorSum:
        """Returns the protocol of each of ``steps`` rounds that together stay within a budget.

        The noise is the least by the cheaper of the bounds that hold for the adjacency.
        """
        sizes, sampling = self.sizes, self.sampling
        epsilon, delta, rate = budget.target_epsilon, budget.target_delta, sampling.sample_rate
        if budget.adjacency == "replace" and sampling.kind == "fixed_size":
            return ShuffleVectorSum(*sizes, epsilon, delta, rounds=steps, sample_rate=rate)
        lost = LOST_SHARE * SumBudget(epsilon, delta).delta / steps
        if sampling.kind == "random_allocation":  # a trusted server's noise covers the bits' (11.9)
            sigma = compute_noise_multiplier(
                "random_allocation",
                target_epsilon=epsilon,
                target_delta=delta - steps * lost,
                steps=steps,
                adjacency=budget.adjacency,
                num_batches=sampling.steps_per_epoch,
            )
        else:
            like = SampledSum(mu=1.0, sample_rate=rate, lost=lost, sampling=sampling.kind)

            def spent(noise_multiplier: float) -> float:
                rounds = [(dataclasses.replace(like, mu=2 / noise_multiplier), steps)]
                adjacency = Adjacency(budget.adjacency)
                return min(gaussian_epsilons(rounds, delta=delta, adjacency=adjacency).values())

            sigma = smallest_noise(spent, target_epsilon=epsilon)
        return ShuffleVectorSum.with_noise_multiplier(
            *sizes, sigma, delta=delta, rounds=steps, **self.rounding
        )

    def mechanism(self, noise_multiplier: float, batches: int = 1) -> Mechanism:
        """Returns the mechanism of one round of the protocol, whose noise is fixed."""
        protocol, plan = self.protocol, self.sampling
        assert protocol is not None
        if plan.kind == "poisson":
            return ShuffledSums.of_protocol(protocol, sample_rate=plan.sample_rate)
        if plan.kind == "random_allocation":
            return ShuffledSums.of_protocol(protocol, num_batches=plan.steps_per_epoch)
        return ShuffledSums.of_protocol(protocol, num_users=plan.num_users)

    def round(self, optimizer: PrivateOptimizer) -> Mechanism:
        """Returns the mechanism of the round that was planned."""
        return self.accountant.planned  # type: ignore[no-any-return]

    def strategies(self, clipping: Clipping) -> tuple[Clipping, Noise]:
        """Returns the clipping, and the protocol's rounding and noise bits."""
        assert self.protocol is not None
        return clipping, SumsNoise(self.protocol, everyone_reports=self.everyone_reports)

    @property
    def allows_drop_outs(self) -> bool:
        """Whether fewer records than were drawn may report."""
        return self.sampling.sample_rate == 1
