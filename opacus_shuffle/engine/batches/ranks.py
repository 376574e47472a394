"""The processes that train one network together, and the settings on which they must agree.

Every rank holds the whole data set. It draws its own share of each batch, clips and sums it, and
adds the noise of its own reports. Then the sums of all ranks are added up. A single process runs
the same code, as rank 0 of 1.

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
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

REPLICAS = (DifferentiallyPrivateDistributedDataParallel, DistributedDataParallel)
"""Wrappers with which every rank has a whole copy of the network."""


@dataclasses.dataclass(frozen=True)
class Ranks:
    """The processes that train one network, and this one among them.

    Attributes:
        rank: This process, from 0.
        size: How many there are.
        distributed: Whether they are a process group of PyTorch, which may have a single process.
    """

    rank: int = 0
    size: int = 1
    distributed: bool = False

    @classmethod
    def of(cls, module: nn.Module) -> Ranks:
        """Returns the processes that train a network, according to its wrapper.

        Raises:
            ValueError: If the network is sharded, or there is no process group.
        """
        for name, part in (*module.named_modules(), *module.named_parameters()):
            if isinstance(part, FSDPModule | FullyShardedDataParallel | DTensor):
                raise ValueError(
                    f"module has sharded parameters ({name or 'module'} is a "
                    f"{type(part).__name__}), of which no rank sees a whole gradient: wrap it in "
                    "DistributedDataParallel or in Opacus's "
                    "DifferentiallyPrivateDistributedDataParallel, or train it by "
                    "opacus.PrivacyEngine with grad_sample_mode='ghost_fsdp'"
                )
        if not isinstance(module, REPLICAS):
            return cls()
        if not torch.distributed.is_initialized():
            raise ValueError(
                f"module is a {type(module).__name__}, but there is no process group: call "
                "torch.distributed.init_process_group first, in processes that torchrun starts, say"
            )
        return cls(torch.distributed.get_rank(), torch.distributed.get_world_size(), True)

    def share(self, count: int) -> list[int]:
        """Returns which of ``count`` records belong to this rank."""
        return list(range(self.rank, count, self.size))

    def named(self, use: str) -> str:
        """Returns a name for one use of a seed that differs on every rank."""
        return f"{use}, rank {self.rank} of {self.size}" if self.distributed else use

    def of_the_first(self, value: Any) -> Any:
        """Returns the value of rank 0, on all ranks."""
        values = [value]
        if self.distributed:
            torch.distributed.broadcast_object_list(values, 0)
        return values[0]

    def agree(self, facts: Mapping[str, Any]) -> None:
        """Refuses arguments that differ among the ranks, on all of them.

        Raises:
            ValueError: If a fact differs.
        """
        if not self.distributed:
            return
        gathered: list[Any] = [None] * self.size
        torch.distributed.all_gather_object(gathered, dict(facts))
        for name in facts:
            values = [facts_of_rank.get(name) for facts_of_rank in gathered]
            if any(value != values[0] for value in values):
                listed = ", ".join(f"{value!r} on rank {rank}" for rank, value in enumerate(values))
                raise ValueError(
                    f"{name} differs among the ranks: {listed}; pass the same to make_private on "
                    "every rank"
                )


ALONE = Ranks()
"""A single process."""


def add_up(numbers: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Adds up a tensor over all ranks, on the device that their process group works on."""
    here = numbers.to(device)
    torch.distributed.all_reduce(here)
    return here.to(numbers.device)
