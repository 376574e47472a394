"""Trains with sums of bits in place of Gaussian noise (Cheu, Joseph, Mao and Peng, Algorithm 2).

By default all users report in every round, and each tosses a secret coin for whether its gradient
is in its report: the sum is Poisson-subsampled DP-SGD's. With ``sampling="random_allocation"`` each
draws in secret in which one round of an epoch it is. With ``poisson_sampling=False`` a secret
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
from opacus_shuffle.accountants.compute import compute_noise_multiplier
from opacus_shuffle.accountants.mechanisms import Mechanism, ShuffledSums
from opacus_shuffle.accountants.mechanisms.shuffled_sums import ROUND_DELTA, SAMPLINGS
from opacus_shuffle.analysis.binomial_sums import LOST_SHARE
from opacus_shuffle.analysis.sampled_sums import SampledSum
from opacus_shuffle.core.guarantees import Adjacency
from opacus_shuffle.core.validation import instance_of, moderate, one_of, positive
from opacus_shuffle.engine.clipping import Clipping
from opacus_shuffle.engine.noise import Noise
from opacus_shuffle.engine.private_optimizer import PrivateOptimizer
from opacus_shuffle.engine.sampling.samplers import INDEPENDENT, SamplingPlan
from opacus_shuffle.engine.schemes.base import plan_on_ranks
from opacus_shuffle.engine.schemes.random_allocation import EpochScheme
from opacus_shuffle.engine.shuffled_sum import ShuffledSum, StreamedSum
from opacus_shuffle.engine.training_plan import Budget, Request, Run
from opacus_shuffle.protocols.calibration import SumBudget
from opacus_shuffle.protocols.vector_sum import ShuffleVectorSum


class VectorSums(EpochScheme):
    """Sends every record's clipped gradient as shuffled bits, which noise bits hide."""

    mechanisms: ClassVar[tuple[type[Mechanism], ...]] = (ShuffledSums,)
    noise_elsewhere: ClassVar[str] = "has its noise in the reports' own bits"

    def check(self, request: Request) -> Run:
        """Decides what will run, and builds a protocol if none was given."""
        run = super().check(request)
        protocol = request.aggregator
        if protocol is None:
            norm = moderate("max_grad_norm", request.max_grad_norm)
            sizes = (_reports(run.sampling), _entries(request), norm)
            protocol = ShuffleVectorSum.with_noise_multiplier(
                *sizes, run.noise_multiplier, delta=ROUND_DELTA, **_rounding(run.sampling)
            )
        self.check_protocol(protocol, request, run.sampling)
        sigma = protocol.noise_multiplier
        return dataclasses.replace(run, noise_multiplier=sigma, aggregator=protocol)

    def check_request(self, request: Request) -> None:
        """Refuses norms per layer, and gradients that nobody computes for each record."""
        super().check_request(request)
        one_of("clipping (with shuffled_sums)", request.clipping, ("flat",))
        modes = ("hooks", "functorch", "ew", "ghost")
        one_of("grad_sample_mode (with shuffled_sums)", request.grad_sample_mode, modes)

    def check_aggregator(self, request: Request) -> None:
        """Refuses an aggregator that is no protocol, or comes with a noise multiplier."""
        if request.aggregator is None:
            return
        instance_of("aggregator", request.aggregator, (ShuffleVectorSum,))
        if request.noise_multiplier is not None:
            raise ValueError(
                "noise_multiplier follows from the aggregator, got "
                f"noise_multiplier={request.noise_multiplier!r}: leave one of them out"
            )

    def check_noise(self, request: Request) -> float:
        """Returns the noise multiplier, or the protocol's own."""
        if request.aggregator is None:
            return super().check_noise(request)
        return request.aggregator.noise_multiplier

    def plan_sampling(self, request: Request) -> SamplingPlan:
        """Plans how batches are drawn: by every record's own coin or draw, or of one size."""
        kind: Any = "fixed_size" if request.poisson_sampling is False else "poisson"
        if request.sampling is not None:
            if request.poisson_sampling is not None:
                raise ValueError(
                    f"sampling={request.sampling!r} and poisson_sampling="
                    f"{request.poisson_sampling} both say how batches are drawn: leave out the "
                    "latter"
                )
            kind = one_of("sampling", request.sampling, SAMPLINGS)
        return plan_on_ranks(self.name, request, kind, secure_mode=self.engine.secure_mode)

    def noise_device(self, request: Request) -> torch.device:
        """Returns a GPU that the parameters are on, unless the user's generator is on the CPU."""
        given, cpu = request.noise_generator, torch.device("cpu")
        on_host = request.device.type != "cuda" or (given is not None and given.device == cpu)
        return cpu if on_host else request.device

    @staticmethod
    def check_protocol(
        protocol: ShuffleVectorSum, request: Request, sampling: SamplingPlan
    ) -> None:
        """Refuses a protocol that does not fit this run."""
        norm, entries = positive("max_grad_norm", request.max_grad_norm), _entries(request)
        everyone, reports = sampling.kind in INDEPENDENT, _reports(sampling)
        if protocol.num_users != reports:
            who = (
                f"but all {reports} records report in every round, those that are not in the "
                f"batch zero: build it with num_users={reports}, or pass poisson_sampling=False "
                "for batches of one size"
                if everyone
                else f"a batch holds {reports} records: build it with num_users={reports}"
            )
            raise ValueError(f"the aggregator sums num_users={protocol.num_users} reports, {who}")
        if protocol.honest_fraction < 1 and sampling.sample_rate < 1 and not everyone:
            raise ValueError(
                f"the aggregator's honest_fraction is {protocol.honest_fraction:.3g}, but batches "
                "are samples of the data set: who of a sample is honest is random, and dishonest "
                "ones know who of them is in it; leave out poisson_sampling=False, so that "
                "everyone reports, or build it with honest_fraction=1"
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

    def calibrate(self, request: Request, budget: Budget) -> dict[str, Any]:
        """Builds the protocol of each round for the budget, or checks the given one."""
        one_of("bound", budget.bound, bounds_of(ShuffledSums))
        self.check_request(request)
        sampling = self.plan_sampling(request)
        steps = budget.epochs * sampling.steps_per_epoch
        protocol = request.aggregator
        if protocol is None:
            protocol = _protocol_for(budget, steps, sampling, request)
        self.check_protocol(protocol, request, sampling)
        epsilon = budget.spent([(_mechanism(protocol, sampling), steps)]).epsilon
        if epsilon > budget.target_epsilon * (1 + 1e-9):
            raise ValueError(
                f"target_epsilon={budget.target_epsilon} is not met by the aggregator: {steps} "
                f"steps spend {epsilon:.6g} by bound={budget.bound!r}; leave the aggregator out, "
                "so that one is built for the budget, or train fewer epochs"
            )
        return {"aggregator": protocol}

    def mechanism(self, run: Run, noise_multiplier: float, batches: int = 1) -> Mechanism:
        """Returns the mechanism of one round of the protocol."""
        protocol = instance_of("aggregator", run.aggregator, (ShuffleVectorSum,))
        return _mechanism(protocol, run.sampling)

    def round(self, run: Run, optimizer: PrivateOptimizer) -> Mechanism:
        """Returns the mechanism of the round that was planned."""
        return self.accountant.planned  # type: ignore[no-any-return]

    def strategies(self, run: Run, clipping: Clipping) -> tuple[Clipping, Noise]:
        """Returns the protocol's strategy, which both clips and adds noise."""
        assert run.aggregator is not None
        everyone = run.sampling.kind in INDEPENDENT
        sigma = float(run.noise_multiplier)
        kind = StreamedSum if clipping.in_backward else ShuffledSum
        sums = kind(run.aggregator, noise_multiplier=sigma, everyone_reports=everyone)
        return sums, sums

    def covers_drop_outs(self, run: Run) -> bool:
        """Tells whether fewer records than were drawn may report."""
        return run.sampling.sample_rate == 1


def _entries(request: Request) -> int:
    """Returns how many numbers the optimizer trains."""
    return sum(parameter.numel() for parameter in request.trainable)


def _reports(sampling: SamplingPlan) -> int:
    """Returns how many users report in a round."""
    return sampling.num_users if sampling.kind in INDEPENDENT else sampling.batch_size


def _rounding(sampling: SamplingPlan) -> dict[str, Any]:
    """Returns by whose values a protocol's grid is chosen."""
    everyone = sampling.kind in INDEPENDENT
    return {"zero_on_grid": True, "rate": sampling.sample_rate} if everyone else {}


def _mechanism(protocol: ShuffleVectorSum, sampling: SamplingPlan) -> ShuffledSums:
    """Returns the mechanism of one round of a protocol."""
    if sampling.kind == "poisson":
        return ShuffledSums.of_protocol(protocol, sample_rate=sampling.sample_rate)
    if sampling.kind == "random_allocation":
        return ShuffledSums.of_protocol(protocol, num_batches=sampling.steps_per_epoch)
    return ShuffledSums.of_protocol(protocol, num_users=sampling.num_users)


def _protocol_for(
    budget: Budget, steps: int, sampling: SamplingPlan, request: Request
) -> ShuffleVectorSum:
    """Returns the protocol of each of ``steps`` rounds that together stay within a budget.

    The noise is the least by the cheaper of the bounds that hold for the adjacency.
    """
    norm = positive("max_grad_norm", request.max_grad_norm)
    sizes = (_reports(sampling), _entries(request), norm)
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
        *sizes, sigma, delta=delta, rounds=steps, **_rounding(sampling)
    )
