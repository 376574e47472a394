"""Processes that train together: each does the same work, and tells what it found."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed


def found_on_ranks(work: Callable[[str], Any], *, size: int, folder: Path) -> list[Any]:
    """What each of so many processes returns from ``work``, which gets the folder's name."""
    start = (
        "spawn" if torch.cuda.is_available() else "fork"
    )  # which imports nothing anew, and which CUDA forbids
    torch.multiprocessing.start_processes(
        _one, (size, str(folder), work), nprocs=size, start_method=start
    )
    return [torch.load(folder / f"{rank}.pt", weights_only=False) for rank in range(size)]


def _one(rank: int, size: int, folder: str, work: Callable[[str], Any]) -> None:
    torch.set_num_threads(1)
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=size
    )
    torch.save(work(folder), f"{folder}/{rank}.pt")
    torch.distributed.destroy_process_group()
