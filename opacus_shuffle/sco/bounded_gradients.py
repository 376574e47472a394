"""``BoundedGradients``: what users report in a round, one gradient each, none longer than the protocol allows."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import Tensor

from opacus_shuffle.sco.moreau import SLACK, MoreauEnvelope
from opacus_shuffle.sco.objective import Objective
from opacus_shuffle.sco.records import map_data, number_of_users, take


@dataclasses.dataclass(frozen=True)
class BoundedGradients:
    """Gradients of a loss, or of its Moreau envelope, within a ball.

    Attributes:
        objective: The loss or the envelope.
        limit: No reported gradient is longer.
        clip: Whether longer gradients are cut and unusable ones replaced by zero, rather than
            refused.
    """

    objective: Objective
    limit: float
    clip: bool

    @property
    def bias(self) -> float:
        """Gradients are wrong by at most this."""
        return self.objective.gradient_error if isinstance(self.objective, MoreauEnvelope) else 0.0

    @property
    def smoothing_cost(self) -> float:
        """By how much the loss's excess may exceed that of what is minimised: L²/(2β) for an envelope."""
        return (
            self.limit**2 / (2 * self.objective.smoothness)
            if isinstance(self.objective, MoreauEnvelope)
            else 0.0
        )

    def rows(self, theta: Tensor, batch: Any) -> Tensor:
        """Returns one gradient per record, shape (B, d), float64, none longer than ``limit``.

        Without ``clip`` a gradient that is too long is refused, and the objective's own errors come
        up. With it, whether an error is raised must not tell about single records: one without a
        finite gradient (a wrong label, say) reports zero, and the others what they would report
        beside a usable one. An error comes up only if records of zeros and of ones, of the same
        shapes, have it too (a wrong dimension, say): then it tells about the call, not about the
        records.
        """
        rows = self._usable(theta, batch) if self.clip else self.objective.gradients(theta, batch)
        norms = rows.norm(dim=1, keepdim=True)
        longest = float(norms.max()) if len(rows) else 0.0
        # The true gradient is in the ball, so the way to its nearest point leads no farther from
        # it.
        if not self.clip and not longest <= self.limit * (1 + SLACK) + self.bias:
            raise ValueError(
                f"lipschitz must bound every user's gradient, got {self.limit:.6g} and a longer "
                "gradient: pass a larger "
                "lipschitz, or clip=True to cut every gradient to it"
            )
        return rows * (self.limit / norms.clamp_min(self.limit))

    def _usable(self, theta: Tensor, batch: Any) -> Tensor:
        """Returns the gradients, with zeros for records that have none."""
        rows = self._attempt(theta, batch)
        if isinstance(rows, Tensor):
            return torch.where(rows.isfinite().all(dim=1, keepdim=True), rows, 0.0)
        count, good = number_of_users(batch), self._without_errors(theta, batch)
        if not good:
            if self._is_structural(rows, theta, batch):
                raise rows
            return torch.zeros(count, self.objective.dimension, dtype=torch.float64)
        # The block again, with a usable record in the place of each unusable one: in a batch of
        # another shape the usable ones might be rounded otherwise.
        stand_ins = torch.full((count,), good[0])
        stand_ins[good] = torch.tensor(good)
        found = self._attempt(theta, take(batch, stand_ins))
        if not isinstance(found, Tensor):
            raise RuntimeError(
                "objective must treat records one by one, got errors that depend on which ones are "
                "together"
            )
        usable = torch.zeros(count, 1, dtype=torch.bool)
        usable[good] = True
        return torch.where(usable & found.isfinite().all(dim=1, keepdim=True), found, 0.0)

    def _without_errors(self, theta: Tensor, batch: Any) -> list[int]:
        """Returns the records that raise no error, in order; found by halving the batch."""
        good: list[int] = []
        parts = [torch.arange(number_of_users(batch))]
        while parts:
            part = parts.pop()
            if isinstance(self._attempt(theta, take(batch, part)), Tensor):
                good += part.tolist()
            elif len(part) > 1:
                parts += part.tensor_split(2)
        return sorted(good)

    def _attempt(self, theta: Tensor, batch: Any) -> Tensor | Exception:
        """Returns the gradients, or the error that there is instead."""
        try:
            return self.objective.gradients(theta, batch)
        except (MemoryError, torch.OutOfMemoryError):
            raise
        except (
            Exception
        ) as error:  # whatever a user's loss may raise: that it did tells about the record
            return error

    def _is_structural(self, error: Exception, theta: Tensor, record: Any) -> bool:
        """Returns whether records of zeros and of ones, of the same shapes, raise the same error."""
        probes = [
            self._attempt(theta, map_data(make, record))
            for make in (torch.zeros_like, torch.ones_like)
        ]
        return all(type(found) is type(error) and str(found) == str(error) for found in probes)
