"""``Problem`` and ``PrivacyBudget``: what every optimiser of this package is given."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from opacus_shuffle.core.randomness import check_generator
from opacus_shuffle.core.validation import boolean, instance_of, integer, moderate
from opacus_shuffle.protocols.calibration import SumBudget
from opacus_shuffle.sco.constraints import Box, Constraint, L2Ball, check_constraint
from opacus_shuffle.sco.module_objective import ModuleObjective
from opacus_shuffle.sco.moreau import SLACK, MoreauEnvelope
from opacus_shuffle.sco.objective import LinearObjective, Objective
from opacus_shuffle.sco.records import map_data, number_of_users, real_vector, take

Envelope = Callable[[float], MoreauEnvelope]
"""The Moreau envelope of a loss at a given smoothness."""

_LARGEST_DIMENSION = 10**9
_ROUGHEST, _FINEST = 0.02, 0.005


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
        # What the methods promise of their loss is stated for the paper's range.
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
            record (it is called on batches of one: a record's loss must not depend on others), an
            :class:`~opacus_shuffle.sco.objective.Objective` (a Moreau envelope, say), or a pair
            ``(module, criterion)``. A module is left as it is: to use the estimate, pass
            ``objective = ModuleObjective(module, criterion)`` and call
            ``objective.load(estimate.theta)``.
        data: A tensor, or a tuple, list or dict of tensors, whose first dimension is the users, or
            the stream's records.
        constraint: The convex set: :class:`~opacus_shuffle.sco.constraints.L2Ball`, ``Box``, or an
            object with ``project`` and ``diameter``.
        lipschitz: L: no user's gradient on the set is longer (before any smoothing).
        smoothness: β: every user's loss has a β-Lipschitz gradient on the set. None: a Moreau
            envelope brings its own; any other loss is smoothed, by the β that the bound likes best,
            where the method needs it (plain SGD does not).
        envelope: With ``smoothness`` None: the Moreau envelope at a given β, where there is a
            better one than the library's own: ``lambda beta: MyEnvelope(objective, beta)``.
        initial: The start, shape (d,), projected onto the set; by default the module's parameters,
            or 0.
        dimension: d, where neither ``initial`` nor the loss or the constraint tells.
        diameter: At least the distance from the start to a minimiser; by default what the
            constraint tells.
        clip: Cut longer gradients to ``lipschitz``, and report zero for a record whose gradient
            cannot be computed or is not finite (a wrong label, NaN in it, an envelope's loss
            steeper than ``lipschitz``). By default such records are refused, which is right for
            finding mistakes; in production pass True: that an error was raised tells about the
            data. (One that records of ones would have too, as of a wrong dimension, is raised even
            so: it tells about the call alone.)
        generator: Of all randomness (order of the users, rounding, noise), on the CPU; by default
            secret.

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
        self.objective = _objective_of(loss, dimension)
        self.dimension = self.objective.dimension
        if isinstance(constraint, Box) and constraint.dimension is None:
            constraint = dataclasses.replace(constraint, dimension=self.dimension)
        self.constraint = check_constraint(constraint)
        if initial is None:
            initial = getattr(self.objective, "initial", torch.zeros(self.dimension))
        start = real_vector("initial", initial, self.dimension)
        self.initial: Tensor = self.constraint.project(start)
        if diameter is None:
            self.distance = _farthest(self.constraint, self.initial)
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
            self.smoothed(self.lipschitz / self.distance)  # so that mistakes in it show here
        elif self.smoothness is None and isinstance(self.objective, MoreauEnvelope):
            self.smoothness = self.objective.smoothness

    def capped(self, bound: float) -> float:
        """Returns a bound on an excess loss, or L times the diameter where that is smaller."""
        return min(bound, self.lipschitz * self.constraint.diameter)

    def smoothed(self, smoothness: float) -> Objective:
        """Returns the loss if it is smooth enough, else its Moreau envelope.

        That is the user's envelope; else a linear model's exact one, or the generic solver's within
        the set. The exact one looks for proximal points everywhere, which takes nothing but
        convexity: with g the gradient at θ in the set, β‖θ − p‖² ≤ f(θ) − f(p) ≤ ⟨g, θ − p⟩ ≤
        L‖θ − p‖ wherever p is.
        """
        if self.smoothness is not None:
            return self.objective
        if self.envelope is not None:
            return self._own_envelope(self.envelope, smoothness)
        if isinstance(self.objective, LinearObjective):
            return MoreauEnvelope(self.objective, smoothness, lipschitz=self.lipschitz)
        # Rough gradients cost that times L·D of excess loss, less than so many users find out.
        relative = max(_FINEST, min(_ROUGHEST, 0.5 / self.num_users**0.5))
        return MoreauEnvelope(
            self.objective,
            smoothness,
            lipschitz=self.lipschitz,
            constraint=self.constraint,
            accuracy=relative * self.lipschitz / smoothness,
        )

    def _own_envelope(self, envelope: Envelope, smoothness: float) -> MoreauEnvelope:
        """Returns the user's own envelope, or refuses it."""
        if not callable(envelope):
            raise ValueError(
                f"envelope must be a function from a smoothness to a MoreauEnvelope, got "
                f"{envelope!r}; write it as lambda beta: ..."
            )
        made: MoreauEnvelope = instance_of(
            "what envelope returns", envelope(smoothness), (MoreauEnvelope,)
        )
        if made.dimension != self.dimension:
            raise ValueError(
                f"envelope must return one of dimension {self.dimension}, got {made.dimension}"
            )
        return made

    def bounded_gradients(self, objective: Objective, theta: Tensor, batch: Any) -> Tensor:
        """Returns what users report: one gradient per record, none longer than ``lipschitz``.

        Without ``clip`` a gradient that is too long is refused, and the objective's own errors come
        up. With it, whether an error is raised must not tell about single records: one without a
        finite gradient (a wrong label, say) reports zero, and the others what they would report
        beside a usable one. An error comes up only if records of ones, of the same shapes, have
        it too (a wrong dimension, say): then it tells about the call, not about the records.

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
        allowed = self.lipschitz * (1 + SLACK) + objective.gradient_error
        if not self.clip and not longest <= allowed:
            raise ValueError(
                f"lipschitz must bound every user's gradient, got {self.lipschitz:.6g} and a "
                "longer gradient: pass a larger lipschitz, or clip=True to cut every gradient to it"
            )
        # The true gradient is in the ball, so the way to its nearest point leads no farther from
        # it.
        return rows * (self.lipschitz / norms.clamp_min(self.lipschitz))

    def _gradients(self, objective: Objective, theta: Tensor, batch: Any) -> Tensor:
        """Returns the gradients as they are; with ``clip``, zeros for records that have none."""

        def attempt(records: Any) -> Tensor | Exception:
            try:
                return objective.gradients(theta, records)
            except Exception as error:  # whatever a user's loss may raise tells about the record
                if not self.clip or isinstance(error, MemoryError | torch.OutOfMemoryError):
                    raise
                return error

        answer = attempt(batch)
        if isinstance(answer, Tensor):
            return answer
        probe = attempt(map_data(torch.ones_like, batch))
        if isinstance(probe, Exception) and str(probe) == str(answer):
            raise answer
        # The records without errors, found by halving.
        count, usable = number_of_users(batch), []
        parts = [torch.arange(count)]
        while parts:
            part = parts.pop()
            if isinstance(attempt(take(batch, part)), Tensor):
                usable += part.tolist()
            elif len(part) > 1:
                parts += part.tensor_split(2)
        rows = torch.zeros(count, objective.dimension, dtype=torch.float64)
        if usable:
            # The block again, with a usable record in the place of each unusable one: in a batch
            # of another shape the usable ones might be rounded otherwise.
            stand_ins = torch.full((count,), usable[0])
            stand_ins[usable] = torch.tensor(usable)
            rows[usable] = objective.gradients(theta, take(batch, stand_ins))[usable]
        return rows


def _objective_of(loss: Any, dimension: int | None) -> Objective:
    """Makes an ``Objective`` of a function or of a pair (module, criterion)."""
    if isinstance(loss, Objective):
        return loss
    if isinstance(loss, tuple | list) and len(loss) == 2 and isinstance(loss[0], nn.Module):
        return ModuleObjective(loss[0], loss[1])
    return Objective.from_loss(loss, dimension=dimension)


def _farthest(constraint: Constraint, point: Tensor) -> float:
    """Returns an upper bound on the distance from a point of the set to any other."""
    if not isinstance(constraint, L2Ball):
        return float(constraint.diameter)
    away = float((point if constraint.center is None else point - constraint.center).norm())
    return min(constraint.diameter, constraint.radius + away)
