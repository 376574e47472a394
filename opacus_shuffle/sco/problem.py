"""``Problem``: a loss, its users' data and a convex set; what every optimiser of this package is given."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from opacus_shuffle.core.randomness import check_generator
from opacus_shuffle.core.validation import boolean, integer, positive
from opacus_shuffle.protocols.grid_sum import real_numbers
from opacus_shuffle.protocols.random_rounding import draws_of
from opacus_shuffle.sco.bounded_gradients import BoundedGradients
from opacus_shuffle.sco.constraints import Box, Constraint, L2Ball, as_constraint
from opacus_shuffle.sco.module_objective import ModuleObjective
from opacus_shuffle.sco.moreau import MoreauEnvelope
from opacus_shuffle.sco.objective import LinearObjective, Objective
from opacus_shuffle.sco.records import number_of_users

Envelope = Callable[[float], MoreauEnvelope]
"""The Moreau envelope of a loss at a given smoothness."""

_ROUGHEST, _FINEST = 0.02, 0.005


class Problem:
    """Users' mean loss over a convex set, to be minimised; checked when it is made.

    Args:
        loss: A function ``loss(theta, batch)`` of a vector and a batch that returns one loss per record (it is called on
            batches of one: a record's loss must not depend on others), an :class:`~opacus_shuffle.sco.objective.Objective` (a
            Moreau envelope, say), or a pair ``(module, criterion)``. A module is left as it is: to use the estimate, pass
            ``objective = ModuleObjective(module, criterion)`` and call ``objective.load(estimate.theta)``.
        data: A tensor, or a tuple, list or dict of tensors, whose first dimension is the users; for pan-private runs the
            records in the order of the stream.
        constraint: The convex set: :class:`~opacus_shuffle.sco.constraints.L2Ball`, ``Box``, an object with ``project`` and
            ``diameter``, or a projection theta -> theta (then ``diameter`` is needed).
        lipschitz: L: no user's gradient on the set is longer (before any smoothing).
        smoothness: β: every user's loss has a β-Lipschitz gradient on the set. None: a method that needs a smooth loss smooths
            it, by the β that its bound likes best; an ``Objective`` that is a Moreau envelope brings its own. Plain SGD
            reads neither this nor ``envelope``.
        envelope: With ``smoothness`` None: the Moreau envelope at a given β, where there is a better one than the generic
            solver's, as for linear models: ``lambda beta: MoreauEnvelope.generalized_linear("absolute", beta, dimension=d)``.
        initial: The start, shape (d,), projected onto the set; by default the module's parameters, or 0.
        dimension: d, where neither ``initial`` nor the loss or the constraint tells.
        diameter: At least the distance from the start to a minimiser; by default what the constraint tells. For a projection
            function: the set's diameter.
        clip: Cut longer gradients to ``lipschitz``, and report zero for a record whose gradient cannot be computed or is not
            finite (a wrong label, NaN in it, an envelope's loss steeper than ``lipschitz``). By default such records are
            refused, which is right for finding mistakes; in production pass True: whether an error was raised depends on the
            data, and can be observed. (An error that every record of a block of at least two has is raised even so: it is
            taken for a mistake in the call.)
        generator: Of all randomness (order of the users, rounding, noise), on the CPU; by default secret. Several runs on one
            problem use it one after the other.

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
        self.lipschitz, self.clip = positive("lipschitz", lipschitz), boolean("clip", clip)
        distance = None if diameter is None else positive("diameter", diameter)
        self.objective: Objective = as_objective(loss, dimension=_dimension(constraint, initial, dimension))
        self.dimension = self.objective.dimension
        constraint = sized(constraint, self.dimension)
        self.constraint: Constraint = as_constraint(constraint, None if hasattr(type(constraint), "project") else distance)
        if initial is None:
            initial = getattr(self.objective, "initial", None)
        start = torch.zeros(self.dimension) if initial is None else initial
        self.initial: Tensor = self.project(real_vector("initial", start, self.dimension))
        self.distance = farthest(self.constraint, self.initial) if distance is None else distance
        self.num_users = number_of_users(data)
        if not self.num_users:
            raise ValueError("data must hold at least one user's record, got none")
        self.smoothness = None if smoothness is None else positive("smoothness", smoothness)
        if self.smoothness is not None and envelope is not None:
            raise ValueError("envelope must be left out where smoothness is given: it is for losses that are not smooth")
        if self.smoothness is None and envelope is None and isinstance(self.objective, MoreauEnvelope):
            self.smoothness = self.objective.smoothness
        if envelope is not None:
            self._envelope(self.lipschitz / self.distance)

    @property
    def diameter(self) -> float:
        """The set's diameter."""
        return float(self.constraint.diameter)

    def project(self, theta: Tensor) -> Tensor:
        """Returns the set's nearest point."""
        return self.constraint.project(theta)

    def capped(self, bound: float) -> float:
        """Returns a bound on an excess loss, or L times the diameter, which bounds them all, where that is smaller."""
        return min(bound, self.lipschitz * self.diameter)

    def shuffled(self, users: Tensor) -> Tensor:
        """Returns these users in a random order."""
        return users[torch.randperm(len(users), generator=draws_of(self.generator))]

    def own_gradients(self) -> BoundedGradients:
        """Returns the gradients of the loss as it is, which may be a Moreau envelope already."""
        return self._bounded(self.objective)

    def smooth_gradients(self, smoothness: float) -> BoundedGradients:
        """Returns the gradients of the loss if its smoothness is known, else those of its envelope at this smoothness."""
        if self.smoothness is not None:
            return self.own_gradients()
        return self._bounded(self._envelope(smoothness))

    def _bounded(self, objective: Objective) -> BoundedGradients:
        """Returns an objective's gradients; of an envelope with their error and with what smoothing costs."""
        if not isinstance(objective, MoreauEnvelope):
            return BoundedGradients(objective, self.lipschitz, self.clip)
        cost = self.lipschitz**2 / (2 * objective.smoothness)
        return BoundedGradients(objective, self.lipschitz, self.clip, objective.gradient_error, cost)

    def _envelope(self, smoothness: float) -> MoreauEnvelope:
        """Returns the user's envelope, checked, or the default one."""
        if self.envelope is None:
            return self._default_envelope(smoothness)
        if not callable(self.envelope):
            raise ValueError(
                f"envelope must be a function from a smoothness to a MoreauEnvelope, got {self.envelope!r}; "
                "write it as lambda beta: ..."
            )
        made: Any = self.envelope(smoothness)
        if not isinstance(made, MoreauEnvelope) or made.dimension != self.dimension:
            found = f"one of dimension {made.dimension}" if isinstance(made, MoreauEnvelope) else type(made).__name__
            raise ValueError(f"envelope must return a MoreauEnvelope of dimension {self.dimension}, got {found}")
        return made

    def _default_envelope(self, smoothness: float) -> MoreauEnvelope:
        """Returns a linear model's exact envelope, or the generic solver's within the set.

        The exact one looks for proximal points everywhere. That takes nothing but convexity: with g the gradient at θ in the
        set, β‖θ − p‖² ≤ f(θ) − f(p) ≤ ⟨g, θ − p⟩ ≤ L‖θ − p‖ wherever p is.
        """
        if isinstance(self.objective, LinearObjective):
            return MoreauEnvelope(self.objective, smoothness, lipschitz=self.lipschitz)
        relative = max(_FINEST, min(_ROUGHEST, 0.5 / self.num_users**0.5))  # costs that times L·D of excess loss
        accuracy = relative * self.lipschitz / smoothness
        return MoreauEnvelope(
            self.objective, smoothness, lipschitz=self.lipschitz, constraint=self.constraint, accuracy=accuracy
        )


def as_objective(loss: Any, *, dimension: int | None) -> Objective:
    """Returns an ``Objective`` as it is, and a function or a pair of a module and a criterion as one."""
    if isinstance(loss, Objective):
        return loss
    if isinstance(loss, tuple | list) and len(loss) == 2 and isinstance(loss[0], nn.Module):
        return ModuleObjective(loss[0], loss[1])
    if isinstance(loss, nn.Module) or not callable(loss):
        raise ValueError(
            f"loss must be a function loss(theta, batch), an Objective or a pair (module, criterion), got {type(loss).__name__}"
        )
    if dimension is None:
        raise ValueError(
            "dimension must be given for a loss function without initial: pass initial, or the number of parameters"
        )
    return Objective.from_loss(loss, dimension=dimension)


def sized(constraint: Any, dimension: int) -> Any:
    """Returns the constraint; a ``Box`` between two numbers is told its dimension."""
    if isinstance(constraint, Box) and constraint.dimension is None:
        return dataclasses.replace(constraint, dimension=dimension)
    return constraint


def farthest(constraint: Constraint, point: Tensor) -> float:
    """Returns an upper bound on the distance from this point of the set to any other."""
    if not isinstance(constraint, L2Ball):
        return float(constraint.diameter)
    away = float((point if constraint.center is None else point - constraint.center).norm())
    return min(constraint.diameter, constraint.radius + away)


def real_vector(name: str, value: Any, size: int) -> Tensor:
    """Returns a copy of a finite vector of this size, float64, on the CPU, and refuses anything else."""
    vector = real_numbers(name, value)
    if vector.shape != (size,):
        raise ValueError(f"{name} must have shape ({size},), got {tuple(vector.shape)}")
    if not bool(vector.isfinite().all()):
        raise ValueError(f"{name} must hold {size} finite numbers, got NaN or infinity in it")
    return vector.to("cpu", torch.float64).clone()


def _dimension(constraint: Any, initial: Any, dimension: int | None) -> int | None:
    """Returns the number of parameters from whoever knows it; None if nobody does."""
    if dimension is not None:
        return integer("dimension", dimension)
    if isinstance(initial, Tensor):
        return initial.numel()
    known = getattr(constraint, "dimension", None)
    return known if isinstance(known, int) else None
