"""Training with shuffled sums: which protocol goes with which run, every reason to refuse it, and one made for a budget.

>>> from opacus_shuffle.accountants import ShuffledSumsAccountant
>>> from opacus_shuffle.engine.sampling.sampling_plan import SamplingPlan
>>> plan = SamplingPlan("fixed_size", num_users=50_000, steps_per_epoch=100, batch_size=500, sample_rate=0.01)
>>> protocol = calibrate_aggregator(
...     ShuffledSumsAccountant(), plan, aggregator="tight", dimension=1000, max_grad_norm=1.0, target_epsilon=1.0,
...     target_delta=1e-6, steps=1000)
>>> round(protocol.variance**0.5, 2)
3.57
"""

from __future__ import annotations

import math
from typing import Any

import torch
from opacus.accountants import IAccountant

from opacus_shuffle.accountants import ShuffledSumsAccountant, bounds_of
from opacus_shuffle.accountants.mechanisms import ShuffledSums
from opacus_shuffle.accountants.shuffled_sums import noise_multiplier_of
from opacus_shuffle.core.validation import instance_of, one_of, positive
from opacus_shuffle.engine.sampling.sampling_plan import SamplingPlan
from opacus_shuffle.protocols.vector_sum import ShuffleVectorSum

GRAD_SAMPLE_MODES = ("hooks", "functorch", "ew")
_EXAMPLE = "ShuffleVectorSum(num_users=batch_size, dimension=number_of_trainable_parameters, max_norm=max_grad_norm, ...)"


def multiplier_for(accountant: IAccountant, aggregator: Any, noise_multiplier: Any, *, secure_mode: bool) -> Any:
    """What Opacus calls the noise multiplier: the one given, or that of the aggregator.

    Raises:
        ValueError: If accountant, aggregator and noise multiplier do not go together.
    """
    name = accountant.mechanism()
    ours = isinstance(accountant, ShuffledSumsAccountant)
    if aggregator is None:
        if ours:
            raise ValueError(
                f"shuffled_sums needs an aggregator, got None: pass aggregator={_EXAMPLE}, and no noise_multiplier"
            )
        if noise_multiplier is None:
            raise ValueError("noise_multiplier is missing: pass it, or an aggregator with accountant='shuffled_sums'")
        return noise_multiplier
    if not ours:
        raise ValueError(f"aggregator goes with accountant='shuffled_sums', got {name!r}: use that one, or leave it out")
    if aggregator in ("tight", "published"):
        raise ValueError(
            f"aggregator must be a ShuffleVectorSum here, got {aggregator!r}: make_private_with_epsilon builds one for a budget"
        )
    instance_of("aggregator", aggregator, (ShuffleVectorSum,))
    if noise_multiplier is not None:
        raise ValueError(
            f"noise_multiplier is the aggregator's own affair, got noise_multiplier={noise_multiplier!r}: leave it out"
        )
    if secure_mode:
        raise ValueError(
            "secure_mode=True draws from a generator that has no binomials: leave it out with an aggregator, whose noise is "
            "whole numbers from generators seeded by the operating system"
        )
    return noise_multiplier_of(aggregator)


def check_aggregator(
    aggregator: ShuffleVectorSum,
    sampling: SamplingPlan,
    *,
    dimension: int,
    max_grad_norm: Any,
    clipping: str,
    grad_sample_mode: str,
) -> None:
    """Refuse what this protocol cannot sum.

    Args:
        aggregator: The protocol.
        sampling: How batches are drawn.
        dimension: Entries of all trainable parameters.
        max_grad_norm: C.
        clipping: Flat alone: the protocol bounds the norm of a record's whole gradient.
        grad_sample_mode: One with a gradient per record: ghost clipping sums before anything could be put on a grid.

    Raises:
        ValueError: If something does not fit.
    """
    one_of("clipping (with an aggregator)", clipping, ("flat",))
    one_of("grad_sample_mode (with an aggregator, which needs each record's gradient)", grad_sample_mode, GRAD_SAMPLE_MODES)
    norm = positive("max_grad_norm", max_grad_norm)
    if aggregator.num_users != sampling.batch_size:
        raise ValueError(
            f"the aggregator sums num_users={aggregator.num_users} reports, a batch holds {sampling.batch_size} records: build "
            f"it with num_users={sampling.batch_size}"
        )
    if aggregator.honest_fraction < 1 and sampling.sample_rate < 1:
        raise ValueError(
            f"the aggregator's honest_fraction is {aggregator.honest_fraction:.3g}, but batches are samples of the data set: "
            "who of a sample is honest is random, and dishonest ones know who of them is in it; build it with "
            "honest_fraction=1, or take all records in every batch"
        )
    if aggregator.dimension != dimension:
        raise ValueError(
            f"the aggregator's dimension is {aggregator.dimension}, the optimizer trains {dimension} entries: build it with "
            f"dimension={dimension}"
        )
    if not math.isclose(aggregator.max_norm, norm, rel_tol=1e-9):
        raise ValueError(
            f"the aggregator's max_norm is {aggregator.max_norm}, max_grad_norm is {norm}: they are the same bound on one "
            "record's gradient"
        )


def trained_entries(optimizer: torch.optim.Optimizer) -> int:
    """How many numbers the optimizer trains, at least one."""
    instance_of("optimizer", optimizer, (torch.optim.Optimizer,))
    entries = sum(p.numel() for group in optimizer.param_groups for p in group["params"] if p.requires_grad)
    if not entries:
        raise ValueError("optimizer must hold trainable parameters, got none that requires_grad")
    return entries


def calibrate_aggregator(
    accountant: IAccountant,
    sampling: SamplingPlan,
    *,
    aggregator: Any,
    dimension: int,
    max_grad_norm: Any,
    target_epsilon: float,
    target_delta: float,
    steps: int,
    bound: str | None = None,
    adjacency: str | None = None,
) -> ShuffleVectorSum:
    """The protocol of each of ``steps`` rounds that together stay within a budget.

    Args:
        accountant: Must be ``shuffled_sums``.
        sampling: How batches are drawn.
        aggregator: ``"tight"``: the least noise by ``bound="certified"``, with what sampling gains. ``"published"``: SCO
            Algorithm 5, every round's share by Theorem A.6.
        dimension: Entries of all trainable parameters.
        max_grad_norm: C.
        target_epsilon: ε of the run, at most 15.
        target_delta: δ of the run, below ½.
        steps: T.
        bound: By default the one that the calibration is about.
        adjacency: Calibrated for replacement whatever it says, so that both hold.

    Raises:
        ValueError: If something is out of range, does not go together, or the budget cannot be met.
    """
    if not isinstance(accountant, ShuffledSumsAccountant):
        raise ValueError(
            f"aggregator goes with accountant='shuffled_sums', got {accountant.mechanism()!r}: use that one, or leave it out"
        )
    if isinstance(aggregator, ShuffleVectorSum):
        raise ValueError(
            "make_private_with_epsilon builds the aggregator itself: pass 'tight' or 'published', or call make_private"
        )
    if aggregator is None:
        raise ValueError(
            "shuffled_sums needs an aggregator, got None: pass aggregator='tight' (or 'published'), the protocol's calibration"
        )
    one_of("aggregator", aggregator, ("tight", "published"))
    bound = (
        ("published" if aggregator == "published" else "certified")
        if bound is None
        else one_of("bound", bound, bounds_of(ShuffledSums))
    )
    if (aggregator, bound) == ("tight", "published"):
        raise ValueError(
            "bound='published' does not go with aggregator='tight', which is calibrated by exact composition: leave bound out, "
            "or use aggregator='published'"
        )
    one_of("adjacency", "replace" if adjacency is None else adjacency, ("zero_out", "replace"))
    norm = positive("max_grad_norm", max_grad_norm)
    protocol = ShuffleVectorSum(
        sampling.batch_size,
        dimension,
        norm,
        target_epsilon,
        target_delta,
        rounds=steps,
        calibration=aggregator,
        sample_rate=sampling.sample_rate if aggregator == "tight" else 1.0,
    )
    probe = ShuffledSumsAccountant(num_users=sampling.num_users, aggregator=protocol)
    probe.history = [(probe.noise_multiplier, sampling.sample_rate, steps)]
    found = probe.bound(target_delta, bound=bound, adjacency="replace").epsilon
    if found > target_epsilon * (1 + 1e-9):
        raise ValueError(
            f"target_epsilon={target_epsilon} is not met by aggregator={aggregator!r} and bound={bound!r}, which says "
            f"{found:.6g}: use aggregator='tight', or fewer epochs"
        )
    return protocol
