"""``Problem`` and ``PrivacyBudget``: the two arguments of every optimiser of this package."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from opacus_shuffle.core.randomness import check_generator
from opacus_shuffle.core.validation import boolean, instance_of, integer, moderate
from opacus_shuffle.protocols.calibration import SumBudget
from opacus_shuffle.sco.constraints import Box, Constraint, L2Ball, check_constraint
from opacus_shuffle.sco.moreau import MoreauEnvelope
from opacus_shuffle.sco.objective import Objective, as_numbers
from opacus_shuffle.sco.records import map_data, number_of_users, real_vector, take

Envelope = Callable[[float], MoreauEnvelope]
"""The Moreau envelope of a loss at a given smoothness."""

_LARGEST_DIMENSION = 10**9
_SLACK = 1e-5
"""A gradient may exceed the Lipschitz constant by this fraction: rounding in single precision."""


@dataclasses.dataclass(frozen=True)
class PrivacyBudget:
    """The privacy of one run of an optimiser.

    Attributes:
        epsilon: ε of the whole run, in (0, 15], under replacement of one user's value.
        delta: δ of the whole run, in (0, ½).
        honest_fraction: The share of every round's users that must follow the protocol, in [1/3,
            1].

    Raises:
        ValueError: If a value is out of range.
    """

    epsilon: float
    delta: float
    honest_fraction: float = 1.0

    def __post_init__(self) -> None:
        checked = SumBudget(self.epsilon, self.delta, self.honest_fraction)
        # The theorems about the loss are stated for this range.
        if checked.epsilon > 15:
            raise ValueError(
                f"epsilon must not exceed 15 (SCO Theorem 3.2), got {self.epsilon!r}: choose a "
                "smaller one"
            )
        for field in dataclasses.fields(self):
            object.__setattr__(self, field.name, getattr(checked, field.name))


class Problem:
    """The mean loss of users over a convex set, to be minimised.

    Args:
        loss: A function ``loss(theta, batch)`` of a vector and a batch that returns one loss per
            record (it is called on batches of one: a record's loss must not depend on others), or
            an :class:`~opacus_shuffle.sco.objective.Objective` (a Moreau envelope, for example).
        data: A tensor, or a tuple, list or dict of tensors, whose first dimension is the users.
        constraint: The convex set: :class:`~opacus_shuffle.sco.constraints.L2Ball`, ``Box``, or an
            object with ``project`` and ``diameter``.
        lipschitz: L: no user's gradient on the set is longer (before any smoothing).
        smoothness: β: every user's loss has a β-Lipschitz gradient on the set. None: a Moreau
            envelope has its own. The losses of :mod:`opacus_shuffle.sco.losses` are smoothed where
            the method needs it (SGD does not), by the β with the smallest proved bound.
        envelope: For ``smoothness=None`` and a loss with a closed proximal point: its Moreau
            envelope at a given β, ``lambda beta: MyEnvelope(objective, beta)``.
        initial: The start, shape (d,), projected onto the set; by default 0.
        dimension: d, if it follows neither from ``initial`` nor from the loss or the constraint.
        diameter: At least the distance from the start to a minimiser; by default a bound that
            follows from the constraint.
        clip: If True, longer gradients are cut to ``lipschitz``, and a record whose gradient cannot
            be computed or is not finite reports zero (a wrong label, for example, or NaN). By
            default an error is raised instead. That helps to find mistakes, but an error reveals
            something about the data: in production pass True. (Mistakes in the call, such as a
            wrong dimension, raise an error in either case. They are recognised by replacing all
            data by ones.)
        generator: Of all randomness (order of the users, rounding, noise), on the CPU; by default
            a secret one.

    Attributes:
        objective: The loss as an ``Objective``.
        num_users: n.
        dimension: d.
        constraint: The set.
        distance: At least the distance from the start to a minimiser, D.
        initial: The start, in the set, float64, shape (d,).
        smoothness: β as given, or a Moreau envelope's own.

    Raises:
        ValueError: If an argument is out of range, or does not fit another.
    """

    def __init__(
        self,
        loss: Any,
        data: Any,
        *,
        constraint: Any,
        lipschitz: float,
        smoothness: float | None = None,
        envelope: Envelope | None = None,
        initial: Tensor | None = None,
        dimension: int | None = None,
        diameter: float | None = None,
        clip: bool = False,
        generator: torch.Generator | None = None,
    ) -> None:
        check_generator("generator", generator)
        self.generator, self.data, self.envelope = generator, data, envelope
        self.lipschitz, self.clip = moderate("lipschitz", lipschitz), boolean("clip", clip)
        if dimension is not None:
            dimension = integer("dimension", dimension, maximum=_LARGEST_DIMENSION)
        elif isinstance(initial, Tensor):
            dimension = initial.numel()
        else:
            dimension = getattr(constraint, "dimension", None)
        if not isinstance(loss, Objective):
            loss = Objective.from_loss(loss, dimension=dimension)
        self.objective: Objective = loss
        self.dimension = self.objective.dimension
        if isinstance(constraint, Box) and constraint.dimension is None:
            constraint = dataclasses.replace(constraint, dimension=self.dimension)
        self.constraint = check_constraint(constraint)
        start = torch.zeros(self.dimension) if initial is None else initial
        start = real_vector("initial", start, self.dimension)
        self.initial: Tensor = self.constraint.project(start)
        if diameter is None:
            self.distance = _largest_distance(self.constraint, self.initial)
        else:
            self.distance = moderate("diameter", diameter)
        self.num_users = number_of_users(data)
        if not self.num_users:
            raise ValueError("data must hold at least one user's record, got none")
        self.smoothness = None if smoothness is None else moderate("smoothness", smoothness)
        if envelope is not None:
            if self.smoothness is not None:
                raise ValueError(
                    "envelope must be left out where smoothness is given: it is for losses that "
                    "are not smooth"
                )
            self.smoothed(self.lipschitz / self.distance)  # a mistake in it raises an error here
        elif self.smoothness is None and isinstance(self.objective, MoreauEnvelope):
            self.smoothness = self.objective.smoothness

    def cap(self, bound: float) -> float:
        """Returns a bound on an excess loss, or L times the diameter if that is smaller."""
        return min(bound, self.lipschitz * self.constraint.diameter)

    def smoothed(self, smoothness: float) -> Objective:
        """Returns the loss if its smoothness is known, else its Moreau envelope.

        The envelope is over the whole space, not over the set. Its gradients at θ in the set are
        still no longer than L: with g the gradient of f at θ, β‖θ − p‖² ≤ f(θ) − f(p) ≤ ⟨g, θ − p⟩
        ≤ L‖θ − p‖ for any p.

        Raises:
            ValueError: If the loss has no known proximal points.
        """
        if self.smoothness is not None:
            return self.objective
        if self.envelope is None:
            return MoreauEnvelope(self.objective, smoothness)
        if not callable(self.envelope):
            raise ValueError(
                f"envelope must be a function from a smoothness to a MoreauEnvelope, got "
                f"{self.envelope!r}; write it as lambda beta: ..."
            )
        made: MoreauEnvelope = instance_of(
            "what envelope returns", self.envelope(smoothness), (MoreauEnvelope,)
        )
        if made.dimension != self.dimension:
            raise ValueError(
                f"envelope must return one of dimension {self.dimension}, got {made.dimension}"
            )
        return made

    def sum_of_gradients(self, objective: Objective, theta: Tensor, batch: Any) -> Tensor:
        """Returns the sum (d,) of :meth:`bounded_gradients`, without the rows if it can.

        Rounding errors of the sum are not covered by the guarantee.
        """
        with contextlib.suppress(ValueError):  # about some record: the rows show which
            factors = objective.factors(theta, map_data(as_numbers, batch))
            if factors is not None:
                slopes, rows = factors
                norms = slopes.abs() * rows.norm(dim=1)
                bounded = self.clip or bool((norms <= self.lipschitz * (1 + _SLACK)).all())
                if bounded and bool(norms.isfinite().all()):
                    return (slopes * (self.lipschitz / norms.clamp_min(self.lipschitz))) @ rows
        return self.bounded_gradients(objective, theta, batch).sum(0)

    def bounded_gradients(self, objective: Objective, theta: Tensor, batch: Any) -> Tensor:
        """Returns the users' reports: one gradient per record, none longer than ``lipschitz``.

        Without ``clip``, a gradient that is too long raises an error, and so do the objective's own
        errors. With ``clip``, an error must not reveal anything about single records. A record
        without a finite gradient (a wrong label, for example) reports zero, and the others report
        what they would report beside a usable one. An error is raised only if data of ones, of the
        same shapes, have it too (a wrong dimension, for example): then it is about the call.

        Args:
            objective: :attr:`objective`, or an envelope of it.
            theta: A point (d,).
            batch: B records.

        Returns:
            Shape (B, d), float64.

        Raises:
            ValueError: See above.
        """
        rows = self._gradients(objective, theta, batch)
        norms = rows.norm(dim=1, keepdim=True)
        longest = float(norms.max()) if len(rows) else 0.0
        if not self.clip and not longest <= self.lipschitz * (1 + _SLACK):
            raise ValueError(
                f"lipschitz must bound every user's gradient, got {self.lipschitz:.6g} and a "
                "longer gradient: pass a larger lipschitz, or clip=True to cut every gradient to it"
            )
        # This also removes the slack.
        return rows * (self.lipschitz / norms.clamp_min(self.lipschitz))

    def _gradients(self, objective: Objective, theta: Tensor, batch: Any) -> Tensor:
        """Returns unclipped gradients; with ``clip``, zeros for records that have none."""

        def attempt(records: Any) -> Tensor | Exception:
            try:
                return objective.gradients(theta, records)
            except Exception as error:  # any error of a user's loss reveals something of the record
                if not self.clip or isinstance(error, MemoryError | torch.OutOfMemoryError):
                    raise
                return error

        result = attempt(batch)
        if isinstance(result, Tensor):
            return result
        probe = attempt(map_data(torch.ones_like, batch))
        if isinstance(probe, Exception) and str(probe) == str(result):
            raise result
        # Bisection finds the records without errors.
        count, usable = number_of_users(batch), []
        pending = [torch.arange(count)]
        while pending:
            indices = pending.pop()
            if isinstance(attempt(take(batch, indices)), Tensor):
                usable += indices.tolist()
            elif len(indices) > 1:
                pending += indices.tensor_split(2)
        rows = torch.zeros(count, objective.dimension, dtype=torch.float64)
        if usable:
            # Evaluate the batch again, with a usable record in place of each unusable one: in a
            # batch of another shape the gradients of the usable ones might be rounded differently.
            stand_ins = torch.full((count,), usable[0])
            stand_ins[usable] = torch.tensor(usable)
            rows[usable] = objective.gradients(theta, take(batch, stand_ins))[usable]
        return rows


def _largest_distance(constraint: Constraint, point: Tensor) -> float:
    """Returns an upper bound on the distance from a point of the set to any other."""
    if not isinstance(constraint, L2Ball):
        return float(constraint.diameter)
    offset = float((point if constraint.center is None else point - constraint.center).norm())
    return min(constraint.diameter, constraint.radius + offset)
