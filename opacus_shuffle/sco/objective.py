"""``Objective``: losses and gradients of single records, which each user computes on its own device."""

from __future__ import annotations

import operator
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from opacus_shuffle.core.validation import instance_of, integer
from opacus_shuffle.sco.losses import LinearLoss, Link
from opacus_shuffle.sco.records import (
    as_double,
    batch_of_one,
    described,
    map_data,
    number_of_users,
    one_loss,
    vectorised,
)

Loss = Callable[[Tensor, Any], Tensor]


class Objective(ABC):
    """The losses of single records at a point θ, and their gradients.

    Subclasses write ``_evaluate``. Data are a tensor, or a tuple, list or dict of such (nested as
    you like), all with one leading dimension: the users. Floating-point data are converted to
    double precision, which θ and the gradients have.

    Attributes:
        dimension: d, of θ.
        chunk_size: How many records are worked on at once, which bounds the memory used beside the
            result; set it lower for losses that need much.
        rounding: The relative error of the arithmetic that losses are computed in.
    """

    dimension: int
    chunk_size: int = 1024
    rounding: float = 2.0**-52

    @staticmethod
    def from_loss(loss: Loss, *, dimension: int) -> Objective:
        """Returns the objective of a function of θ and a batch.

        Args:
            loss: From θ (d,) and a batch to the records' losses, of shape (B,), or for a batch of
                one a number. It is called on batches of one, so that it cannot mix records, all at
                once by ``torch.func.vmap``: write it with PyTorch operations, and no ``item()``.
                The losses of :mod:`opacus_shuffle.sco.losses` are recognised, and faster.
            dimension: d.

        Raises:
            ValueError: The loss cannot be called.
        """
        if isinstance(loss, type) or not callable(loss):
            raise ValueError(
                "loss must be a callable loss(theta, batch) that returns one loss per record, got "
                f"{loss!r}"
            )
        if isinstance(loss, LinearLoss):
            return LinearObjective(loss.link, dimension=dimension)
        return _LossObjective(loss, dimension=dimension)

    def gradients(self, theta: Tensor, batch: Any) -> Tensor:
        """Returns the gradients, one row per record: (B, d), double precision, on the CPU.

        Args:
            theta: A point (d,), or one for each record (B, d).
            batch: B records.

        Raises:
            ValueError: The shapes do not fit, or a gradient is not finite.
        """
        chunks = [self._gradients(point, part) for point, part in self._chunks(theta, batch)]
        return _finite("gradients", chunks, (0, self.dimension))

    def losses(self, theta: Tensor, batch: Any) -> Tensor:
        """Returns the losses (B,), one per record, for the same arguments; a loss that is not finite is a ValueError."""
        chunks = [self._evaluate(point, part)[0] for point, part in self._chunks(theta, batch)]
        return _finite("losses", chunks, (0,))

    def losses_and_gradients(self, theta: Tensor, batch: Any) -> tuple[Tensor, Tensor]:
        """Returns both :meth:`losses` and :meth:`gradients`, for the price of the latter."""
        chunks = [self._evaluate(point, part) for point, part in self._chunks(theta, batch)]
        losses = _finite("losses", [chunk[0] for chunk in chunks], (0,))
        return losses, _finite("gradients", [chunk[1] for chunk in chunks], (0, self.dimension))

    @abstractmethod
    def _evaluate(self, theta: Tensor, batch: Any) -> tuple[Tensor, Tensor]:
        """Returns losses (B,) and gradients (B, d) of one chunk; ``theta`` is (d,) or (B, d), and double."""

    def _gradients(self, theta: Tensor, batch: Any) -> Tensor:
        """Returns the gradients alone, where they come cheaper."""
        return self._evaluate(theta, batch)[1]

    def _chunks(self, theta: Any, batch: Any) -> Iterator[tuple[Tensor, Any]]:
        """Yields the point and the records, in parts of at most ``chunk_size`` records."""
        count = number_of_users(batch)
        shapes = [(self.dimension,), (count, self.dimension)]
        if (
            not isinstance(theta, Tensor)
            or tuple(theta.shape) not in shapes
            or not theta.is_floating_point()
        ):
            raise ValueError(
                f"theta must be a floating-point tensor of shape {shapes[0]} or {shapes[1]}, got "
                f"{described(theta)}"
            )
        if not bool(torch.isfinite(theta).all()):
            raise ValueError(
                "theta must be finite, got NaN or infinite entries; take smaller steps"
            )
        theta = theta.detach().to("cpu", torch.float64)
        batch = self._prepare(batch)
        for start in range(0, count, self.chunk_size):
            part = slice(start, start + self.chunk_size)
            yield (
                (theta if theta.ndim == 1 else theta[part]),
                map_data(operator.itemgetter(part), batch),
            )

    def _prepare(self, batch: Any) -> Any:
        """Returns the data in double precision."""
        return map_data(as_double, batch)


class LinearObjective(Objective):
    """A generalised linear loss h(⟨θ, x⟩, y): values and gradients h′·x with no automatic differentiation per record.

    A batch is ``(x, y)``: features (B, d) and targets (B, ...).

    Args:
        link: h, with its derivative.
        dimension: d.
    """

    def __init__(self, link: Link, *, dimension: int) -> None:
        self.link: Link = instance_of("link", link, (Link,))
        self.dimension = integer("dimension", dimension)

    def scores(self, theta: Tensor, batch: Any) -> tuple[Tensor, Tensor, Any]:
        """Returns ⟨θ, x⟩ (B,), the features and the targets of a batch, and refuses one that is no such pair."""
        if (
            not isinstance(batch, tuple | list)
            or len(batch) != 2
            or not isinstance(batch[0], Tensor)
        ):
            raise ValueError("batch must be a pair (x, y) for a generalised linear loss")
        features, targets = batch
        if (
            features.ndim != 2
            or features.shape[1] != self.dimension
            or not features.is_floating_point()
        ):
            raise ValueError(
                f"x must be a floating-point tensor of shape (B, {self.dimension}), got "
                f"{described(features)}; the "
                "second is the dimension of theta"
            )
        self.link.check(targets)
        return (
            (features @ theta if theta.ndim == 1 else (features * theta).sum(1)),
            features,
            targets,
        )

    def _evaluate(self, theta: Tensor, batch: Any) -> tuple[Tensor, Tensor]:
        scores, features, targets = self.scores(theta, batch)
        slopes = elementwise(self.link.derivative(scores, targets), scores)
        return elementwise(self.link.value(scores, targets), scores), slopes[:, None] * features


class RecordObjective(Objective):
    """Losses of single records, differentiated all at once by ``torch.func``."""

    what: str
    """What computes the loss, for messages."""
    remedy: str
    """What to try where ``torch.func`` cannot run it."""

    @abstractmethod
    def _one(self, theta: Tensor, record: Any) -> Tensor:
        """Returns one record's loss, a number, at θ (d,)."""

    def _evaluate(self, theta: Tensor, batch: Any) -> tuple[Tensor, Tensor]:
        both = torch.func.vmap(
            torch.func.grad_and_value(self._one), in_dims=(None if theta.ndim == 1 else 0, 0)
        )
        with vectorised(self.what, self.remedy):
            gradients, losses = both(theta, batch)
        return losses, gradients


class _LossObjective(RecordObjective):
    """A user's function of θ and a batch."""

    what = "loss"

    def __init__(self, loss: Loss, *, dimension: int) -> None:
        self._loss = loss
        self.dimension = integer("dimension", dimension)
        self.remedy = f"; theta has shape ({self.dimension},): is the dimension right?"

    def _one(self, theta: Tensor, record: Any) -> Tensor:
        return one_loss(self._loss(theta, batch_of_one(record)), "loss")


def elementwise(values: Tensor, scores: Tensor) -> Tensor:
    """Returns a link's values, and refuses all but one per record: targets of shape (B, 1) would give a table."""
    if values.shape != scores.shape:
        raise ValueError(
            f"link must give one value per record, {tuple(scores.shape)}, got "
            f"{tuple(values.shape)}; targets are of shape (B,)"
        )
    return values


def _finite(what: str, chunks: list[Tensor], empty: tuple[int, ...]) -> Tensor:
    """Returns the chunks as one tensor in double precision, and refuses what is not finite."""
    whole = torch.cat(chunks) if chunks else torch.zeros(empty)
    whole = whole.detach().to("cpu", torch.float64)
    if not bool(whole.isfinite().all()):  # not which, nor how many: a message may be published
        raise ValueError(
            f"{what} must be finite, got NaN or infinity among them: look for divisions by zero, "
            "logarithms of zero and "
            "overflow in the loss, or for such values in the data; clip=True lets such records "
            "report zero"
        )
    return whole
