"""Cheu, Joseph, Mao and Peng's shuffled sums (SCO Algorithm 2) in place of Gaussian noise, on samples of fixed size."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any, ClassVar

import torch
from opacus.optimizers import DPOptimizer

from opacus_shuffle.accountants.bounds.registry import bounds_of
from opacus_shuffle.accountants.bounds.shuffled_sums import gaussian_epsilons
from opacus_shuffle.accountants.calibrate import smallest_noise_for
from opacus_shuffle.accountants.mechanisms import Mechanism, ShuffledSums
from opacus_shuffle.analysis.binomial_sums import LOST_SHARE
from opacus_shuffle.analysis.sampled_sums import SampledSum
from opacus_shuffle.core.guarantees import Adjacency
from opacus_shuffle.core.validation import instance_of, one_of, positive
from opacus_shuffle.engine.optimizers import VectorSumOptimizer
from opacus_shuffle.engine.run import Budget, Request, Run
from opacus_shuffle.engine.sampling.sampling_plan import SamplingPlan
from opacus_shuffle.engine.schemes.base import Scheme
from opacus_shuffle.protocols.calibration import Promise
from opacus_shuffle.protocols.vector_sum import ShuffleVectorSum

GRAD_SAMPLE_MODES = ("hooks", "functorch", "ew")
UNCOVERED = 1e-9
"""A millionth of it is what the tails of a round may take of δ, where make_private builds a protocol and knows no δ."""


class VectorSums(Scheme):
    """Every record's clipped gradient in shuffled bits, whose noise bits hide it."""

    mechanisms: ClassVar[tuple[type[Mechanism], ...]] = (ShuffledSums,)
    noise_elsewhere: ClassVar[str] = "has its noise in the reports' own bits"

    def check(self, request: Request) -> Run:
        """Decides what will run, with the protocol that was given or one that is built for the noise multiplier."""
        run = super().check(request)
        protocol = request.aggregator
        if protocol is None:
            protocol = ShuffleVectorSum.with_noise_multiplier(
                run.sampling.batch_size,
                _entries(request),
                positive("max_grad_norm", request.max_grad_norm),
                run.noise_multiplier,
                delta=UNCOVERED,
            )
        self.check_aggregator(protocol, request, run.sampling)
        return dataclasses.replace(run, noise_multiplier=protocol.noise_multiplier, aggregator=protocol)

    def refuse(self, request: Request) -> None:
        """Refuses what takes a gradient per record, or binomials, that are not there."""
        super().refuse(request)
        one_of("clipping (with shuffled_sums)", request.clipping, ("flat",))
        what = "grad_sample_mode (with shuffled_sums, which needs each record's gradient)"
        one_of(what, request.grad_sample_mode, GRAD_SAMPLE_MODES)
        if self.engine.secure_mode:
            raise ValueError(
                "secure_mode=True draws from a generator that has no binomials: leave it out with shuffled_sums, whose noise "
                "is whole numbers from generators seeded by the operating system"
            )

    def refuse_aggregator(self, request: Request) -> None:
        """Refuses what is no protocol, or a noise multiplier beside one."""
        if request.aggregator is None:
            return
        instance_of("aggregator", request.aggregator, (ShuffleVectorSum,))
        if request.noise_multiplier is not None:
            raise ValueError(
                f"noise_multiplier is the aggregator's own affair, got noise_multiplier={request.noise_multiplier!r}: leave "
                "one of them out"
            )

    def check_noise(self, request: Request) -> float:
        """The noise multiplier, or that of the protocol."""
        return super().check_noise(request) if request.aggregator is None else request.aggregator.noise_multiplier

    def noise_device(self, request: Request) -> torch.device:
        """Binomials are drawn on the CPU."""
        return torch.device("cpu")

    @staticmethod
    def check_aggregator(protocol: ShuffleVectorSum, request: Request, sampling: SamplingPlan) -> None:
        """Refuses a protocol that is not made for this run."""
        norm = positive("max_grad_norm", request.max_grad_norm)
        if protocol.num_users != sampling.batch_size:
            raise ValueError(
                f"the aggregator sums num_users={protocol.num_users} reports, a batch holds {sampling.batch_size} records: "
                f"build it with num_users={sampling.batch_size}"
            )
        if protocol.honest_fraction < 1 and sampling.sample_rate < 1:
            raise ValueError(
                f"the aggregator's honest_fraction is {protocol.honest_fraction:.3g}, but batches are samples of the data set: "
                "who of a sample is honest is random, and dishonest ones know who of them is in it; build it with "
                "honest_fraction=1, or take all records in every batch"
            )
        if protocol.dimension != _entries(request):
            raise ValueError(
                f"the aggregator's dimension is {protocol.dimension}, the optimizer trains {_entries(request)} entries: build "
                f"it with dimension={_entries(request)}"
            )
        if not math.isclose(protocol.max_norm, norm, rel_tol=1e-9):
            raise ValueError(
                f"the aggregator's max_norm is {protocol.max_norm}, max_grad_norm is {norm}: they are the same bound on one "
                "record's gradient"
            )

    def calibrate(self, request: Request, budget: Budget) -> dict[str, Any]:
        """Builds the protocol of each round, by the calibration that its bound is about; one of your own is held to the budget.

        Raises:
            ValueError: If something does not go together, or the budget is not met.
        """
        one_of("bound", budget.bound, bounds_of(ShuffledSums))
        self.refuse(request)
        sampling = self.plan_sampling(request)
        steps = budget.epochs * sampling.steps_per_epoch
        protocol = request.aggregator
        if protocol is None:
            protocol = _protocol_for(
                budget, steps, sampling, _entries(request), positive("max_grad_norm", request.max_grad_norm)
            )
        self.check_aggregator(protocol, request, sampling)
        run = Run(request, sampling, protocol.noise_multiplier, aggregator=protocol)
        found = self.epsilon([(self.mechanism(run, protocol.noise_multiplier), steps)], budget)
        if found > budget.target_epsilon * (1 + 1e-9):
            raise ValueError(
                f"target_epsilon={budget.target_epsilon} is not met by the aggregator: {steps} steps spend {found:.6g} by "
                f"bound={budget.bound!r}; leave the aggregator out, so that one is built for the budget, or train fewer epochs"
            )
        return {"aggregator": protocol}

    def mechanism(self, run: Run, noise_multiplier: float) -> Mechanism:
        """One round of the protocol."""
        protocol = instance_of("aggregator", run.aggregator, (ShuffleVectorSum,))
        return ShuffledSums.of_protocol(protocol, num_users=run.sampling.num_users)

    def record(self, run: Run, optimizer: DPOptimizer) -> None:
        """Accounts for a step by the protocol; refuses another noise, or another protocol."""
        planned = self.mechanism(run, run.noise_multiplier)
        planned.check_optimizer(optimizer)
        if not math.isclose(optimizer.noise_multiplier, planned.noise_multiplier, rel_tol=1e-9):
            raise ValueError(
                f"noise_multiplier of the optimizer is {optimizer.noise_multiplier}, the protocol's is "
                f"{planned.noise_multiplier}: its noise is fixed, no schedule changes it; leave noise_multiplier alone"
            )
        protocol: Any = getattr(optimizer, "aggregator", None)
        found = ShuffledSums.of_protocol(protocol, num_users=run.sampling.num_users)
        if (found, protocol.max_norm) != (planned, run.aggregator and run.aggregator.max_norm):
            raise ValueError(
                "optimizer.aggregator was changed after make_private: shuffled_sums accounts for the protocol that "
                "make_private got; call it on a new engine"
            )
        self.accountant.record(planned)

    def optimizer_class(self, base: type[DPOptimizer], run: Run) -> Callable[..., DPOptimizer]:
        """The optimizer that sums by the protocol."""
        return functools.partial(VectorSumOptimizer, aggregator=instance_of("aggregator", run.aggregator, (ShuffleVectorSum,)))

    def records_per_round(self, run: Run) -> int | None:
        """All of a sample; where everyone is in every round, drop-outs are covered by the protocol."""
        return run.sampling.batch_size if run.sampling.sample_rate < 1 else None


def _entries(request: Request) -> int:
    """How many numbers the optimizer trains."""
    return sum(parameter.numel() for parameter in request.trainable)


def _protocol_for(budget: Budget, steps: int, sampling: SamplingPlan, dimension: int, norm: float) -> ShuffleVectorSum:
    """The protocol of each of ``steps`` rounds that together stay within a budget.

    ``bound="published"`` is about SCO Algorithm 5, every round's share by Theorem A.6, and gains nothing from sampling. By
    ``"certified"`` it is the least noise by the cheaper of the rows that hold for the adjacency.
    """
    users, epsilon, delta = sampling.batch_size, budget.target_epsilon, budget.target_delta
    if budget.bound == "published":
        return ShuffleVectorSum(users, dimension, norm, epsilon, delta, "published", rounds=steps)
    if budget.adjacency == "replace":
        return ShuffleVectorSum(users, dimension, norm, epsilon, delta, rounds=steps, sample_rate=sampling.sample_rate)
    lost = LOST_SHARE * Promise(epsilon, delta).delta / steps

    def spent(noise_multiplier: float) -> float:
        rounds = [(SampledSum(mu=2 / noise_multiplier, sample_rate=sampling.sample_rate, lost=lost), steps)]
        return min(gaussian_epsilons(rounds, delta=delta, adjacency=Adjacency(budget.adjacency)).values())

    sigma = smallest_noise_for(spent, target_epsilon=epsilon)
    return ShuffleVectorSum.with_noise_multiplier(users, dimension, norm, sigma, delta=delta, rounds=steps)
