"""``Objective``: losses and gradients of single records, which each user computes by itself."""

from __future__ import annotations

import operator
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from opacus_shuffle.core.validation import integer
from opacus_shuffle.sco.losses import LinearLoss, Link
from opacus_shuffle.sco.records import check_point, described, map_data, number_of_users

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
        gradient_error: No gradient's error is longer than this; above 0 for some envelopes only.
    """

    dimension: int
    chunk_size: int = 1024
    rounding: float = 2.0**-52
    gradient_error: float = 0.0

    @staticmethod
    def from_loss(loss: Loss, *, dimension: int | None) -> Objective:
        """Returns the objective of a function of θ and a batch.

        Args:
            loss: From θ (d,) and a batch to the records' losses, of shape (B,), or for a batch of
                one a number. It is called on batches of one, so that it cannot mix records, all at
                once by ``torch.func.vmap``: write it with PyTorch operations, and no ``item()``.
                The losses of :mod:`opacus_shuffle.sco.losses` are recognised, and faster.
            dimension: d.

        Raises:
            ValueError: The loss cannot be called, or the dimension is missing.
        """
        if isinstance(loss, type | torch.nn.Module) or not callable(loss):
            raise ValueError(
                "loss must be a function loss(theta, batch) that returns one loss per record, an "
                f"Objective or a pair (module, criterion), got {described(loss)}"
            )
        if dimension is None:
            raise ValueError(
                "dimension must be given for a loss function without initial: pass initial, or the "
                "number of parameters"
            )
        if isinstance(loss, LinearLoss):
            return LinearObjective(loss.link, dimension=dimension)
        size = integer("dimension", dimension)
        remedy = f"; theta has shape ({size},): is the dimension right?"
        return RecordObjective(loss, size, what="loss", remedy=remedy)

    def losses(self, theta: Tensor, batch: Any) -> Tensor:
        """Returns the losses (B,), for the arguments of :meth:`losses_and_gradients`."""
        return self.losses_and_gradients(theta, batch)[0]

    def gradients(self, theta: Tensor, batch: Any) -> Tensor:
        """Returns the gradients (B, d), for the arguments of :meth:`losses_and_gradients`."""
        return self.losses_and_gradients(theta, batch)[1]

    def losses_and_gradients(self, theta: Tensor, batch: Any) -> tuple[Tensor, Tensor]:
        """Returns losses (B,) and gradients (B, d), in double precision, on the CPU.

        Args:
            theta: A point (d,), or one for each record (B, d).
            batch: B records.

        Raises:
            ValueError: The shapes do not fit, or a loss or gradient is not finite.
        """
        count = number_of_users(batch)
        check_point(theta, self.dimension, count)
        theta, batch = theta.detach().to("cpu", torch.float64), self._prepare(batch)
        losses = torch.zeros(count, dtype=torch.float64)
        gradients = torch.zeros(count, self.dimension, dtype=torch.float64)
        for start in range(0, count, self.chunk_size):
            part = slice(start, start + self.chunk_size)
            points = theta if theta.ndim == 1 else theta[part]
            records = map_data(operator.itemgetter(part), batch)
            losses[part], gradients[part] = self._evaluate(points, records)
        for name, values in (("losses", losses), ("gradients", gradients)):
            # Not which one, nor how many: a message may be published. NaN is both its ends.
            if values.numel() and not bool(torch.stack(values.aminmax()).isfinite().all()):
                raise ValueError(
                    f"{name} must be finite, got NaN or infinity among them: look for divisions "
                    "by zero, logarithms of zero and overflow in the loss, or for such values in "
                    "the data; clip=True lets such records report zero"
                )
        return losses, gradients

    @abstractmethod
    def _evaluate(self, theta: Tensor, batch: Any) -> tuple[Tensor, Tensor]:
        """Returns losses (B,) and gradients (B, d) of a chunk; θ is (d,) or (B, d), in double."""

    def _prepare(self, batch: Any) -> Any:
        """Returns the data on the CPU, floating-point ones in double precision."""
        return map_data(
            lambda tensor: tensor.detach().to(
                "cpu", torch.float64 if tensor.is_floating_point() else tensor.dtype
            ),
            batch,
        )

    def smoothing_cost(self, lipschitz: float) -> float:
        """Returns by how much the excess of the loss behind an envelope may exceed the envelope's.

        Args:
            lipschitz: L, of the loss.
        """
        return 0.0


class LinearObjective(Objective):
    """A generalised linear loss h(⟨θ, x⟩, y), with gradients h′·x in closed form.

    A batch is ``(x, y)``: features (B, d) and targets (B,).

    Args:
        link: h, with its derivative.
        dimension: d.
    """

    def __init__(self, link: Link, *, dimension: int) -> None:
        self.link, self.dimension = link, integer("dimension", dimension)

    def scores(self, theta: Tensor, batch: Any) -> tuple[Tensor, Tensor, Tensor]:
        """Returns ⟨θ, x⟩ (B,), the features and the targets of a batch.

        Raises:
            ValueError: If the batch is no such pair, or a label is not among those of the link.
        """
        if not isinstance(batch, tuple | list) or len(batch) != 2:
            raise ValueError("batch must be a pair (x, y) for a generalised linear loss")
        features, targets = batch
        if (
            not isinstance(features, Tensor)
            or features.shape[1:] != (self.dimension,)
            or not features.is_floating_point()
        ):
            raise ValueError(
                f"x must be a floating-point tensor of shape (B, {self.dimension}), got "
                f"{described(features)}; the second is the dimension of theta"
            )
        if not isinstance(targets, Tensor) or targets.ndim != 1:
            raise ValueError(f"y must be a tensor of shape (B,), got {described(targets)}")
        # With labels of 0 and 1 the hinge and logistic losses would be silently wrong.
        if self.link.signed and not bool((targets.abs() == 1).all()):
            raise ValueError(
                f"y must hold -1 and +1 only, in shape (B,), for the {self.link.name} loss; use "
                "2 * y - 1 for 0 and 1"
            )
        scores = features @ theta if theta.ndim == 1 else (features * theta).sum(1)
        return scores, features, targets

    def _evaluate(self, theta: Tensor, batch: Any) -> tuple[Tensor, Tensor]:
        scores, features, targets = self.scores(theta, batch)
        slopes = self.link.derivative(scores, targets)
        return self.link.value(scores, targets), slopes[:, None] * features


class RecordObjective(Objective):
    """The losses of a function that ``torch.func`` differentiates on all records at once.

    It is called on one record at a time, so nothing in it can mix records; what vmap cannot run
    (branches on values, random numbers) is refused.

    Args:
        loss: From θ (d,) and a batch of one record to its loss, a tensor of one entry.
        dimension: d.
        what: What messages call the function.
        remedy: What they say besides where vmap cannot run it.
    """

    def __init__(self, loss: Loss, dimension: int, *, what: str, remedy: str) -> None:
        self._loss, self.dimension, self._what, self._remedy = loss, dimension, what, remedy

    def _evaluate(self, theta: Tensor, batch: Any) -> tuple[Tensor, Tensor]:
        in_dims = (None if theta.ndim == 1 else 0, 0)
        both = torch.func.vmap(torch.func.grad_and_value(self._one), in_dims=in_dims)
        try:
            gradients, losses = both(theta, batch)
        except torch.OutOfMemoryError:
            raise  # no record's fault
        except RuntimeError as error:
            said = str(error).splitlines()[0]
            if "randomness" in said:
                raise ValueError(
                    f"{self._what} must not draw random numbers, got one that does; take them out "
                    "(dropout: p=0, or eval())"
                ) from error
            raise ValueError(
                f"{self._what} must run under torch.func.vmap on one record at a time, but PyTorch "
                f"says: {said[:200]}; write it with PyTorch operations and no branches on values"
                f"{self._remedy}"
            ) from error
        return losses.detach(), gradients.detach()

    def _one(self, theta: Tensor, record: Any) -> Tensor:
        """Returns the loss of a record, whose tensors lack the users' dimension, as a number."""
        loss = self._loss(theta, map_data(lambda tensor: tensor.unsqueeze(0), record))
        if not isinstance(loss, Tensor) or loss.numel() != 1:
            raise ValueError(
                f"{self._what} must return one loss per record (it is called with one record at a "
                f"time), got {described(loss)}: sum or average over everything but the records, "
                "with reduction='sum' or 'mean' say"
            )
        return loss.reshape(())
