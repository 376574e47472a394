"""What does not go with several processes, and how batches are drawn on them."""

from __future__ import annotations

import dataclasses

import torch
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.utils.data import DistributedSampler

from opacus_shuffle.core.randomness import SecretGenerator
from opacus_shuffle.engine.run import Request
from opacus_shuffle.engine.sampling.sampling_plan import Kind, SamplingPlan, plan_sampling


def refuse_ranks(accountant: str, request: Request) -> None:
    """Refuses sharded networks, and on several processes what would let them draw, or round, what is not accounted.

    Raises:
        ValueError: If there is any of it.
    """
    sharded = [each for each in request.module.modules() if isinstance(each, FSDPModule | FullyShardedDataParallel)]
    if sharded:
        raise ValueError(
            f"{accountant} does not train sharded networks, got a {type(sharded[0]).__name__}: wrap the network in "
            "DistributedDataParallel or in Opacus's DifferentiallyPrivateDistributedDataParallel, or use one of Opacus's own "
            "accountants with grad_sample_mode='ghost_fsdp'"
        )
    if not request.ranks.distributed:
        return
    for name, generator in (("noise_generator", request.noise_generator), ("the data_loader's", request.data_loader.generator)):
        if not (generator is None or isinstance(generator, SecretGenerator)):
            raise ValueError(
                f"{name} generator may be in the same state on all ranks, whose noise and coins would then be copies: leave it "
                "out; PrivacyEngine(seed=...) makes a repeatable one for each rank"
            )
    if request.rand_on_empty:
        raise ValueError(
            "rand_on_empty=True puts a random record where a rank has none, which another rank may have, too: leave it out"
        )
    if half := [each.dtype for each in request.trainable if each.dtype in (torch.bfloat16, torch.float16)]:
        raise ValueError(
            f"parameters of {half[0]} are added up among ranks in that precision, which moves sums by more than is accounted: "
            "keep them in float32 (torch.autocast computes in half precision all the same), or train on one process"
        )


def plan_on_ranks(accountant: str, request: Request, kind: Kind, *, secure_mode: bool = False) -> SamplingPlan:
    """Plans the batches of all processes together; ``batch_size`` and rate are those of the sum.

    As in Opacus, a loader's batch size is that of all ranks together, and with a ``DistributedSampler`` one rank's share.

    Raises:
        ValueError: If kind and loader do not match, or ranks would have no share of a batch.
    """
    ranks = request.ranks
    plan = plan_sampling(accountant, request.data_loader, kind, distributed=ranks.distributed)
    if not ranks.distributed:
        return plan
    if plan.kind == "own":
        raise ValueError(
            "poisson_sampling=False keeps the data loader's own batches, of which nobody sees whether two ranks hold one "
            "record: leave it out"
        )
    if isinstance(request.data_loader.sampler, DistributedSampler) and plan.kind == "fixed_size":
        batch = min(plan.num_users, plan.batch_size * ranks.size)  # what the loader calls its batch is one rank's share
        plan = dataclasses.replace(plan, batch_size=batch, sample_rate=batch / plan.num_users)
    if plan.kind == "fixed_size" and plan.batch_size < ranks.size:
        raise ValueError(
            f"data_loader's batch_size, of all {ranks.size} ranks together, is {plan.batch_size}: take one record for each at "
            "least"
        )
    if plan.kind == "fixed_size" and secure_mode:
        raise ValueError(
            f"secure_mode=True draws on each rank by itself, but samples of fixed size ({accountant}) are drawn by all ranks "
            "alike: use an accountant of Poisson batches, such as 'shuffled_checkin', or train on one process"
        )
    return plan
