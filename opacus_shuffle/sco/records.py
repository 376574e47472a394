"""Users' records, and functions that are called on one of them at a time.

Records are a tensor, or a tuple, list or dict of such, all with one leading dimension, the users.
What users write for batches is vectorised by ``torch.func.vmap``, so that nothing in it can mix
records; what vmap cannot run (branches on values, random numbers) is refused.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from opacus_shuffle.protocols.grid_sum import real_numbers


def number_of_users(data: Any) -> int:
    """Returns the number of records, and refuses data without a tensor or with leading dimensions that differ."""
    shapes: list[torch.Size] = []
    map_data(lambda x: shapes.append(x.shape), data)
    if () in shapes:
        raise ValueError("data must have the users as first dimension, got a tensor of shape ()")
    sizes = [shape[0] for shape in shapes]
    if not sizes or len(set(sizes)) > 1:
        raise ValueError(
            "data must hold tensors with one leading dimension, the users, got "
            f"{sizes or 'no tensor'}"
        )
    return sizes[0]


def take(data: Any, users: Any) -> Any:
    """Returns the records of these users, whose numbers are in range, in the structure of the data."""
    rows = torch.as_tensor(users, dtype=torch.long)
    return map_data(lambda x: x[rows.to(x.device)], data)


def map_data(function: Callable[[Tensor], Any], data: Any) -> Any:
    """Applies a function to each tensor and returns the results in the structure of the data."""
    if isinstance(data, Tensor):
        return function(data)
    if isinstance(data, dict):
        return {key: map_data(function, value) for key, value in data.items()}
    if isinstance(data, tuple | list):
        parts = [map_data(function, value) for value in data]
        return parts if isinstance(data, list) else tuple(parts)
    raise ValueError(
        f"data must be a tensor, or a tuple, list or dict of tensors, got {type(data).__name__}; "
        "torch.as_tensor converts arrays, and a TensorDataset has .tensors"
    )


def described(value: Any) -> str:
    """Returns what a value is, for messages: a tensor's type and shape, or the type of anything else."""
    return (
        f"{value.dtype} of shape {tuple(value.shape)}"
        if isinstance(value, Tensor)
        else type(value).__name__
    )


def as_double(x: Tensor) -> Tensor:
    """Returns floating-point tensors in double precision, others as they are; all on the CPU."""
    return x.detach().to("cpu", torch.float64) if x.is_floating_point() else x.detach().to("cpu")


def real_vector(name: str, value: Any, size: int | None = None) -> Tensor:
    """Returns a copy of a finite vector (of this size), float64, on the CPU, and refuses anything else."""
    vector = real_numbers(name, value)
    if vector.ndim != 1 or not len(vector) or size not in (None, len(vector)):
        raise ValueError(f"{name} must have shape ({size or 'd'},), got {tuple(vector.shape)}")
    if not bool(vector.isfinite().all()):
        raise ValueError(
            f"{name} must hold {len(vector)} finite numbers, got NaN or infinity in it"
        )
    return vector.to("cpu", torch.float64).clone()


def refuse_unless_finite(subject: str, value: Any, shape: tuple[int, ...]) -> None:
    """Refuses all but finite tensors of this shape; ``subject`` says who "must be" or "must return" one."""
    if not isinstance(value, Tensor) or value.shape != shape or not bool(value.isfinite().all()):
        seen = (
            described(value) if getattr(value, "shape", None) != shape else "NaN or infinity in it"
        )
        raise ValueError(f"{subject} a finite tensor of shape {tuple(shape)}, got {seen}")


def each_record(
    function: Callable[..., Tensor], name: str, remedy: str = ""
) -> Callable[..., Tensor]:
    """Returns a function of batches that calls the given one on batches of one record.

    Args:
        function: Answers a tensor of the shape of its first argument.
        name: What messages call it.
        remedy: What the message that it cannot be vectorised says besides.
    """

    def one(*record: Any) -> Tensor:
        """Returns one record's value, without the first dimension."""
        batch = [batch_of_one(part) for part in record]
        value: Any = function(*batch)
        if not isinstance(value, Tensor) or value.shape != batch[0].shape:
            raise ValueError(
                f"{name} must return a tensor of shape {tuple(batch[0].shape)} for a batch of one "
                "record, got "
                f"{described(value)}"
            )
        return value[0]

    def every(first: Tensor, *others: Any) -> Tensor:
        """Returns the function's values (B, ...), each of one record."""
        if not len(first):  # which vmap refuses
            return torch.empty_like(first)
        with vectorised(name, remedy):
            return torch.func.vmap(one)(first, *others)

    return every


@contextlib.contextmanager
def vectorised(name: str, remedy: str = "") -> Iterator[None]:
    """Says by name what is wrong with a function that ``torch.func`` cannot run on every record."""
    try:
        yield
    except torch.OutOfMemoryError:
        raise  # no record's fault
    except RuntimeError as error:
        said = str(error).splitlines()[0]
        if "randomness" in said:
            raise ValueError(
                f"{name} must not draw random numbers, got one that does; take them out (dropout: "
                "p=0, or eval())"
            ) from error
        raise ValueError(
            f"{name} must run under torch.func.vmap on one record at a time, but PyTorch says: "
            f"{said[:200]}; write it with "
            f"PyTorch operations and no branches on values{remedy}"
        ) from error


def batch_of_one(record: Any) -> Any:
    """Returns a record, whose tensors lack the users' dimension, as a batch."""
    return map_data(lambda x: x.unsqueeze(0), record)


def one_loss(value: Any, name: str) -> Tensor:
    """Returns the loss of a batch of one as a number, and refuses anything else."""
    if not isinstance(value, Tensor) or value.numel() != 1:
        raise ValueError(
            f"{name} must return one loss per record (it is called with one record at a time), got "
            f"{described(value)}: sum or "
            "average over everything but the records, with reduction='sum' or 'mean' say"
        )
    return value.reshape(())
