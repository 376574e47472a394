"""``Objective``: losses and gradients of single records, which each user computes by itself."""

from __future__ import annotations

import operator
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from opacus_shuffle.core.validation import integer
from opacus_shuffle.sco.losses import LinearLoss, Link
from opacus_shuffle.sco.records import check_point, describe, map_data, number_of_users

Loss = Callable[[Tensor, Any], Tensor]


class Objective(ABC):
    """The losses of single records at a point θ, and their gradients.

    Subclasses write ``_evaluate``. Data are a tensor, or a tuple, list or dict of such (with any
    nesting). The first dimension of every tensor is the users. Floating-point data are converted to
    double precision, the precision of θ and the gradients.

    Attributes:
        dimension: d, of θ.
        chunk_size: How many records are evaluated at once. This limits the memory used beside the
            result; set it lower for losses that need much.
    """

    dimension: int
    chunk_size: int = 1024

    @staticmethod
    def from_loss(loss: Loss, *, dimension: int | None) -> Objective:
        """Returns the objective of a function of θ and a batch.

        Args:
            loss: From θ (d,) and a batch to the records' losses, of shape (B,), or for a batch of
                one a number. It is called on batches of one, so it cannot mix records.
                ``torch.func.vmap`` runs it on many records at once: write it with PyTorch
                operations, without ``item()``. The losses of :mod:`opacus_shuffle.sco.losses` are
                recognised, and faster.
            dimension: d.

        Raises:
            ValueError: If the loss cannot be called or is a module, or the dimension is missing.
        """
        module = next(iter(loss), None) if isinstance(loss, tuple | list) else loss
        if isinstance(module, nn.Module):
            raise ValueError(
                "loss must be a function loss(theta, batch), got the module "
                f"{type(module).__name__}: write its loss as a function of a flat theta with "
                "torch.func.functional_call, or train the network with "
                "opacus_shuffle.PrivacyEngine(accountant='shuffled_sums')"
            )
        if isinstance(loss, type) or not callable(loss):
            raise ValueError(
                "loss must be a function loss(theta, batch) that returns one loss per record, or "
                f"an Objective, got {describe(loss)}"
            )
        if dimension is None:
            raise ValueError(
                "dimension must be given for a loss function without initial: pass initial, or the "
                "number of parameters"
            )
        if isinstance(loss, LinearLoss):
            return LinearObjective(loss.link, dimension=dimension)
        return RecordObjective(loss, dimension=dimension)

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
            ValueError: If the shapes do not fit, or a loss or gradient is not finite.
        """
        count = number_of_users(batch)
        check_point(theta, self.dimension, count)
        theta, batch = theta.detach().to("cpu", torch.float64), map_data(as_numbers, batch)
        losses = torch.zeros(count, dtype=torch.float64)
        gradients = torch.zeros(count, self.dimension, dtype=torch.float64)
        for start in range(0, count, self.chunk_size):
            chunk = slice(start, start + self.chunk_size)
            points = theta if theta.ndim == 1 else theta[chunk]
            records = map_data(operator.itemgetter(chunk), batch)
            losses[chunk], gradients[chunk] = self._evaluate(points, records)
        for name, values in (("losses", losses), ("gradients", gradients)):
            # The message does not say which record it is, nor how many: it may be published.
            # aminmax returns NaN for both ends if a value is NaN.
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

    def factors(self, theta: Tensor, batch: Any) -> tuple[Tensor, Tensor] | None:
        """Returns slopes (B,) and rows (B, d) whose products are the gradients, or None.

        None means that the gradients have no such form. Sums of them then take longer.

        Args:
            theta: A point (d,), in double precision.
            batch: B records.
        """
        return None

    def smoothing_cost(self, lipschitz: float) -> float:
        """Returns the most by which the original loss exceeds this one; 0 without smoothing.

        Args:
            lipschitz: L, of the original loss.
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
            ValueError: If the batch is not such a pair, or the link does not take a label.
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
                f"{describe(features)}; the second is the dimension of theta"
            )
        if not isinstance(targets, Tensor) or targets.ndim != 1:
            raise ValueError(f"y must be a tensor of shape (B,), got {describe(targets)}")
        # With labels of 0 and 1 the hinge and logistic losses would be wrong without an error.
        if self.link.signed and not bool((targets.abs() == 1).all()):
            raise ValueError(
                f"y must hold -1 and +1 only, in shape (B,), for the {self.link.name} loss; use "
                "2 * y - 1 for 0 and 1"
            )
        scores = features @ theta if theta.ndim == 1 else (features * theta).sum(1)
        return scores, features, targets

    def factors(self, theta: Tensor, batch: Any) -> tuple[Tensor, Tensor]:
        """Returns h′ and the features."""
        scores, features, targets = self.scores(theta, batch)
        return self.link.derivative(scores, targets), features

    def _evaluate(self, theta: Tensor, batch: Any) -> tuple[Tensor, Tensor]:
        scores, features, targets = self.scores(theta, batch)
        gradients = self.link.derivative(scores, targets)[:, None] * features
        return self.link.value(scores, targets), gradients


class RecordObjective(Objective):
    """The losses of a function that ``torch.func`` differentiates on all records at once.

    The function is called on one record at a time, so it cannot mix records. What vmap cannot run
    (branches on values, random numbers) is refused.

    Args:
        loss: From θ (d,) and a batch of one record to its loss, a tensor of one entry.
        dimension: d.
    """

    def __init__(self, loss: Loss, *, dimension: int) -> None:
        self._loss, self.dimension = loss, integer("dimension", dimension)

    def _evaluate(self, theta: Tensor, batch: Any) -> tuple[Tensor, Tensor]:
        in_dims = (None if theta.ndim == 1 else 0, 0)
        per_record = torch.func.vmap(torch.func.grad_and_value(self._loss_of_one), in_dims=in_dims)
        try:
            gradients, losses = per_record(theta, batch)
        except torch.OutOfMemoryError:
            raise  # not the fault of a record
        except RuntimeError as error:
            reason = str(error).splitlines()[0]
            if "randomness" in reason:
                raise ValueError(
                    "loss must not draw random numbers, got one that does; remove them"
                ) from error
            raise ValueError(
                "loss must run under torch.func.vmap on one record at a time, but PyTorch says: "
                f"{reason[:200]}; write it with PyTorch operations and without branches on values; "
                f"theta has shape ({self.dimension},): is the dimension right?"
            ) from error
        return losses.detach(), gradients.detach()

    def _loss_of_one(self, theta: Tensor, record: Any) -> Tensor:
        """Returns the loss of one record, a number; its tensors lack the users' dimension."""
        loss = self._loss(theta, map_data(lambda tensor: tensor.unsqueeze(0), record))
        if not isinstance(loss, Tensor) or loss.numel() != 1:
            raise ValueError(
                "loss must return one loss per record (it is called with one record at a time), "
                f"got {describe(loss)}: sum or average over all dimensions except the records, for "
                "example with reduction='sum' or 'mean'"
            )
        return loss.reshape(())


def as_numbers(tensor: Tensor) -> Tensor:
    """Returns a tensor on the CPU, in double precision if it has a floating-point type."""
    dtype = torch.float64 if tensor.is_floating_point() else tensor.dtype
    return tensor.detach().to("cpu", dtype)
