"""Several processes that train one network together: which of them this one is, and what all of them must agree on.

Every rank holds the whole data set and draws its own part of each batch, clips and sums it, and
adds the noise of its own reports; then the ranks add up what they have. The code is the same on one
process, which is the first of one.

>>> Ranks(rank=1, size=3).share(8)
[1, 4, 7]
>>> Ranks().share(3)
[0, 1, 2]
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed
from opacus.distributed import DifferentiallyPrivateDistributedDataParallel
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel

REPLICAS = (DifferentiallyPrivateDistributedDataParallel, DistributedDataParallel)
"""Wrappers of a network of which every rank has a whole copy."""
PARALLEL = (*REPLICAS, FSDPModule)
"""Those, and networks of which every rank has a part."""


def is_distributed(module: nn.Module) -> bool:
    """Whether several ranks train copies of the network."""
    return isinstance(module, REPLICAS)


@dataclasses.dataclass(frozen=True)
class Ranks:
    """The processes that train one network, and this one among them.

    Attributes:
        rank: This process, from 0.
        size: How many there are.
        distributed: Whether they are a process group of PyTorch, be it of a single process.
    """

    rank: int = 0
    size: int = 1
    distributed: bool = False

    @classmethod
    def of(cls, module: nn.Module) -> Ranks:
        """Those that train a network, which its wrapper tells."""
        if not is_distributed(module):
            return cls()
        if not torch.distributed.is_initialized():
            raise ValueError(
                f"module is a {type(module).__name__}, but there is no process group: call "
                "torch.distributed.init_process_group first, in processes that torchrun starts, say"
            )
        return cls(torch.distributed.get_rank(), torch.distributed.get_world_size(), True)

    def share(self, count: int) -> list[int]:
        """Which of so many records are this rank's: every one is one rank's, always the same one's."""
        return list(range(self.rank, count, self.size))

    def named(self, use: str) -> str:
        """The name of a use of a seed, another one on every rank."""
        return f"{use}, rank {self.rank} of {self.size}" if self.distributed else use

    def of_the_first(self, value: Any) -> Any:
        """What rank 0 has of this value."""
        if not self.distributed:
            return value
        values = [value]
        torch.distributed.broadcast_object_list(values, 0)
        return values[0]

    def agree(self, facts: Mapping[str, Any]) -> None:
        """Refuses, on all ranks, what one of them was told otherwise.

        Raises:
            ValueError: If a fact differs.
        """
        if not self.distributed:
            return
        told: list[Any] = [None] * self.size
        torch.distributed.all_gather_object(told, dict(facts))
        for name in facts:
            values = [each.get(name) for each in told]
            if any(value != values[0] for value in values):
                listed = ", ".join(f"{value!r} on rank {rank}" for rank, value in enumerate(values))
                raise ValueError(
                    f"{name} differs among the ranks: {listed}; pass the same to make_private on "
                    "every rank"
                )


def add_up(numbers: torch.Tensor, device: torch.device) -> torch.Tensor:
    """The sum of all ranks' tensors, which the process group may only add up on this device."""
    here = numbers.to(device)
    torch.distributed.all_reduce(here)
    return here.to(numbers.device)
