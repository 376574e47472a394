"""Cheu, Joseph, Mao and Peng's shuffled sums (SCO Algorithm 2) in place of Gaussian noise, on secret samples.

By default all users report in every round, and each tosses a secret coin for whether its gradient
is in its report: the sum is Poisson-subsampled DP-SGD's. With ``poisson_sampling=False`` a secret
sample of fixed size reports.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any, ClassVar

import torch

from opacus_shuffle.accountants.bounds.registry import bounds_of
from opacus_shuffle.accountants.bounds.shuffled_sums import gaussian_epsilons
from opacus_shuffle.accountants.calibrate import smallest_noise
from opacus_shuffle.accountants.mechanisms import Mechanism, ShuffledSums
from opacus_shuffle.accountants.mechanisms.shuffled_sums import ROUND_DELTA
from opacus_shuffle.analysis.binomial_sums import LOST_SHARE
from opacus_shuffle.analysis.sampled_sums import SampledSum
from opacus_shuffle.core.guarantees import Adjacency
from opacus_shuffle.core.validation import instance_of, moderate, one_of, positive
from opacus_shuffle.engine.clipping import Clipping
from opacus_shuffle.engine.noise import Noise
from opacus_shuffle.engine.private_optimizer import PrivateOptimizer
from opacus_shuffle.engine.sampling.sampling_plan import Kind, SamplingPlan
from opacus_shuffle.engine.schemes.base import Scheme, plan_on_ranks
from opacus_shuffle.engine.shuffled_sum import ShuffledSum
from opacus_shuffle.engine.training_plan import Budget, Request, Run
from opacus_shuffle.protocols.calibration import Promise
from opacus_shuffle.protocols.vector_sum import ShuffleVectorSum


class VectorSums(Scheme):
    """Every record's clipped gradient in shuffled bits, whose noise bits hide it."""

    mechanisms: ClassVar[tuple[type[Mechanism], ...]] = (ShuffledSums,)
    noise_elsewhere: ClassVar[str] = "has its noise in the reports' own bits"

    def check(self, request: Request) -> Run:
        """Decides what will run, with the protocol that was given or one that is built for the noise multiplier."""
        run = super().check(request)
        protocol = request.aggregator
        if protocol is None:
            norm = moderate("max_grad_norm", request.max_grad_norm)
            sizes = (_reports(run.sampling), _entries(request), norm)
            protocol = ShuffleVectorSum.with_noise_multiplier(
                *sizes, run.noise_multiplier, delta=ROUND_DELTA, **_rounding(run.sampling)
            )
        self.check_aggregator(protocol, request, run.sampling)
        return dataclasses.replace(
            run, noise_multiplier=protocol.noise_multiplier, aggregator=protocol
        )

    def refuse(self, request: Request) -> None:
        """Refuses what takes a gradient per record, or binomials, that are not there."""
        super().refuse(request)
        one_of("clipping (with shuffled_sums)", request.clipping, ("flat",))
        what = "grad_sample_mode (with shuffled_sums, which needs each record's gradient)"
        one_of(what, request.grad_sample_mode, ("hooks", "functorch", "ew"))
        if request.rand_on_empty and request.poisson_sampling is not False:
            raise ValueError(
                "rand_on_empty=True puts a random record into an empty batch, which tells that no "
                "coin put a record in: leave "
                "it out (everyone reports zero then), or pass poisson_sampling=False"
            )

    def refuse_aggregator(self, request: Request) -> None:
        """Refuses what is no protocol, or a noise multiplier beside one."""
        if request.aggregator is None:
            return
        instance_of("aggregator", request.aggregator, (ShuffleVectorSum,))
        if request.noise_multiplier is not None:
            raise ValueError(
                "noise_multiplier follows from the aggregator, got "
                f"noise_multiplier={request.noise_multiplier!r}: leave "
                "one of them out"
            )

    def check_noise(self, request: Request) -> float:
        """The noise multiplier, or that of the protocol."""
        return (
            super().check_noise(request)
            if request.aggregator is None
            else request.aggregator.noise_multiplier
        )

    def plan_sampling(self, request: Request) -> SamplingPlan:
        """How batches will be drawn: by every record's own coin, or of one size where Poisson batches are not wanted."""
        kind: Kind = "fixed_size" if request.poisson_sampling is False else "poisson"
        return plan_on_ranks(self.name, request, kind, secure_mode=self.engine.secure_mode)

    def noise_device(self, request: Request) -> torch.device:
        """Binomials are drawn on the CPU."""
        return torch.device("cpu")

    @staticmethod
    def check_aggregator(
        protocol: ShuffleVectorSum, request: Request, sampling: SamplingPlan
    ) -> None:
        """Refuses a protocol that is not made for this run."""
        norm, coins = positive("max_grad_norm", request.max_grad_norm), sampling.kind == "poisson"
        if coins and protocol.num_users != sampling.num_users:
            raise ValueError(
                f"the aggregator sums num_users={protocol.num_users} reports, but all "
                f"{sampling.num_users} records report in "
                "every round, those that are not in the batch zero: build it with "
                f"num_users={sampling.num_users}, or pass "
                "poisson_sampling=False for batches of one size"
            )
        if not coins and protocol.num_users != sampling.batch_size:
            raise ValueError(
                f"the aggregator sums num_users={protocol.num_users} reports, a batch holds "
                f"{sampling.batch_size} records: "
                f"build it with num_users={sampling.batch_size}"
            )
        if protocol.honest_fraction < 1 and sampling.sample_rate < 1 and not coins:
            raise ValueError(
                f"the aggregator's honest_fraction is {protocol.honest_fraction:.3g}, but batches "
                "are samples of the data set: "
                "who of a sample is honest is random, and dishonest ones know who of them is in "
                "it; leave out "
                "poisson_sampling=False, so that everyone reports, or build it with "
                "honest_fraction=1"
            )
        if protocol.dimension != _entries(request):
            raise ValueError(
                f"the aggregator's dimension is {protocol.dimension}, the optimizer trains "
                f"{_entries(request)} entries: build "
                f"it with dimension={_entries(request)}"
            )
        if not math.isclose(protocol.max_norm, norm, rel_tol=1e-9):
            raise ValueError(
                f"the aggregator's max_norm is {protocol.max_norm}, max_grad_norm is {norm}: they "
                "are the same bound on one "
                "record's gradient"
            )

    def calibrate(self, request: Request, budget: Budget) -> dict[str, Any]:
        """Builds the protocol of each round, by the calibration that its bound is about; your own is held to the budget."""
        one_of("bound", budget.bound, bounds_of(ShuffledSums))
        self.refuse(request)
        sampling = self.plan_sampling(request)
        steps = budget.epochs * sampling.steps_per_epoch
        protocol = request.aggregator
        if protocol is None:
            protocol = _protocol_for(budget, steps, sampling, request)
        self.check_aggregator(protocol, request, sampling)
        epsilon = budget.spent([(_mechanism(protocol, sampling), steps)]).epsilon
        if epsilon > budget.target_epsilon * (1 + 1e-9):
            raise ValueError(
                f"target_epsilon={budget.target_epsilon} is not met by the aggregator: {steps} "
                f"steps spend {epsilon:.6g} by "
                f"bound={budget.bound!r}; leave the aggregator out, so that one is built for the "
                "budget, or train fewer epochs"
            )
        return {"aggregator": protocol}

    def mechanism(self, run: Run, noise_multiplier: float, batches: int = 1) -> Mechanism:
        """One round of the protocol, whose noise is its own."""
        return _mechanism(
            instance_of("aggregator", run.aggregator, (ShuffleVectorSum,)), run.sampling
        )

    def round(self, run: Run, optimizer: PrivateOptimizer) -> Mechanism:
        """The round that was planned; the optimizer has looked after that while it counted."""
        planned: Mechanism = self.accountant.planned
        return planned

    def strategies(self, run: Run, clipping: Clipping) -> tuple[Clipping, Noise]:
        """The protocol, which does both."""
        assert run.aggregator is not None
        sums = ShuffledSum(
            run.aggregator,
            noise_multiplier=float(run.noise_multiplier),
            everyone_reports=run.sampling.kind == "poisson",
        )
        return sums, sums

    def covers_drop_outs(self, run: Run) -> bool:
        """Where everyone is in every round the protocol covers them; a sample is all there."""
        return run.sampling.sample_rate == 1


def _entries(request: Request) -> int:
    """How many numbers the optimizer trains."""
    return sum(parameter.numel() for parameter in request.trainable)


def _reports(sampling: SamplingPlan) -> int:
    """How many users report in a round."""
    return sampling.num_users if sampling.kind == "poisson" else sampling.batch_size


def _rounding(sampling: SamplingPlan) -> dict[str, Any]:
    """Whose values are rounded: with coins those of the users who take part."""
    if sampling.kind != "poisson":
        return {}
    return {"zero_on_grid": True, "rate": sampling.sample_rate}


def _mechanism(protocol: ShuffleVectorSum, sampling: SamplingPlan) -> ShuffledSums:
    """The round that a protocol is with such batches."""
    if sampling.kind == "poisson":
        return ShuffledSums.of_protocol(protocol, sample_rate=sampling.sample_rate)
    return ShuffledSums.of_protocol(protocol, num_users=sampling.num_users)


def _protocol_for(
    budget: Budget, steps: int, sampling: SamplingPlan, request: Request
) -> ShuffleVectorSum:
    """The protocol of each of ``steps`` rounds that together stay within a budget.

    ``bound="published"`` is about SCO Algorithm 5, every round's share by Theorem A.6, and gains
    nothing from sampling. By ``"certified"`` it is the least noise by the cheaper of the rows that
    hold for the adjacency.
    """
    sizes = (
        _reports(sampling),
        _entries(request),
        positive("max_grad_norm", request.max_grad_norm),
    )
    epsilon, delta = budget.target_epsilon, budget.target_delta
    if budget.bound == "published":
        return ShuffleVectorSum(*sizes, epsilon, delta, "published", rounds=steps)
    if budget.adjacency == "replace" and sampling.kind == "fixed_size":
        return ShuffleVectorSum(
            *sizes, epsilon, delta, rounds=steps, sample_rate=sampling.sample_rate
        )
    lost = LOST_SHARE * Promise(epsilon, delta).delta / steps
    like = SampledSum(
        mu=1.0,
        sample_rate=sampling.sample_rate,
        lost=lost,
        sampling="poisson" if sampling.kind == "poisson" else "fixed_size",
    )

    def spent(noise_multiplier: float) -> float:
        rounds = [(dataclasses.replace(like, mu=2 / noise_multiplier), steps)]
        return min(
            gaussian_epsilons(rounds, delta=delta, adjacency=Adjacency(budget.adjacency)).values()
        )

    sigma = smallest_noise(spent, target_epsilon=epsilon)
    return ShuffleVectorSum.with_noise_multiplier(
        *sizes, sigma, delta=delta, rounds=steps, **_rounding(sampling)
    )
