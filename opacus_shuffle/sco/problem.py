"""What every optimiser of this package is given: a ``Problem`` and a ``PrivacyBudget``."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from opacus_shuffle.core.randomness import check_generator
from opacus_shuffle.core.validation import boolean, instance_of, integer, moderate
from opacus_shuffle.protocols.calibration import Promise
from opacus_shuffle.sco.bounded_gradients import BoundedGradients
from opacus_shuffle.sco.constraints import Box, Constraint, L2Ball, as_constraint
from opacus_shuffle.sco.module_objective import ModuleObjective
from opacus_shuffle.sco.moreau import MoreauEnvelope
from opacus_shuffle.sco.objective import LinearObjective, Objective
from opacus_shuffle.sco.records import number_of_users, real_vector

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
        calibration: ``"tight"``: the least noise that is proved to be enough. ``"published"``: the
            paper's formulas.
        honest_fraction: The share of every round's users that must follow the protocol, in [1/3,
            1]; 1 for pan-private runs.

    Raises:
        ValueError: If a value is out of range.
    """

    epsilon: float
    delta: float
    calibration: str = "tight"
    honest_fraction: float = 1.0

    def __post_init__(self) -> None:
        checked = Promise(self.epsilon, self.delta, self.calibration, self.honest_fraction)
        if (
            checked.epsilon > 15
        ):  # what the methods promise of their loss is stated for the paper's range
            raise ValueError(
                f"epsilon must not exceed 15 (SCO Theorem 3.2), got {self.epsilon!r}: choose a "
                "smaller one"
            )
        for field in dataclasses.fields(self):
            object.__setattr__(self, field.name, getattr(checked, field.name))


class Problem:
    """Users' mean loss over a convex set, to be minimised; checked when it is made.

    Args:
        loss: A function ``loss(theta, batch)`` of a vector and a batch that returns one loss per
            record (it is called on batches of one: a record's loss must not depend on others), an
            :class:`~opacus_shuffle.sco.objective.Objective` (a Moreau envelope, say), or a pair
            ``(module, criterion)``. A module is left as it is: to use the estimate, pass
            ``objective = ModuleObjective(module, criterion)`` and call
            ``objective.load(estimate.theta)``.
        data: A tensor, or a tuple, list or dict of tensors, whose first dimension is the users, or
            the stream's records.
        constraint: The convex set: :class:`~opacus_shuffle.sco.constraints.L2Ball`, ``Box``, an
            object with ``project`` and ``diameter``, or a projection theta -> theta (then
            ``diameter`` is needed).
        lipschitz: L: no user's gradient on the set is longer (before any smoothing).
        smoothness: β: every user's loss has a β-Lipschitz gradient on the set. None: a Moreau
            envelope brings its own; any other loss is smoothed, by the β that the bound likes best,
            where the method needs it (plain SGD does not).
        envelope: With ``smoothness`` None: the Moreau envelope at a given β, where there is a
            better one than the generic solver's, as for linear models: ``lambda beta:
            MoreauEnvelope.generalized_linear("absolute", beta, dimension=d)``.
        initial: The start, shape (d,), projected onto the set; by default the module's parameters,
            or 0.
        dimension: d, where neither ``initial`` nor the loss or the constraint tells.
        diameter: At least the distance from the start to a minimiser; by default what the
            constraint tells. For a projection function: the set's diameter.
        clip: Cut longer gradients to ``lipschitz``, and report zero for a record whose gradient
            cannot be computed or is not finite (a wrong label, NaN in it, an envelope's loss
            steeper than ``lipschitz``). By default such records are refused, which is right for
            finding mistakes; in production pass True: that an error was raised tells about the
            data. (One that records of zeros and of ones would have too, as of a wrong dimension, is
            raised even so: it tells about the call alone.)
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
        distance = None if diameter is None else moderate("diameter", diameter)
        if dimension is not None:
            dimension = integer("dimension", dimension, maximum=_LARGEST_DIMENSION)
        elif isinstance(initial, Tensor):
            dimension = initial.numel()
        else:
            dimension = getattr(constraint, "dimension", None)
        self.objective: Objective = as_objective(loss, dimension=dimension)
        self.dimension = self.objective.dimension
        if isinstance(constraint, Box) and constraint.dimension is None:
            constraint = dataclasses.replace(constraint, dimension=self.dimension)
        self.constraint: Constraint = as_constraint(constraint, distance)
        if initial is None:
            initial = getattr(self.objective, "initial", None)
        start = torch.zeros(self.dimension) if initial is None else initial
        self.initial: Tensor = self.project(real_vector("initial", start, self.dimension))
        self.distance = farthest(self.constraint, self.initial) if distance is None else distance
        self.num_users = number_of_users(data)
        if not self.num_users:
            raise ValueError("data must hold at least one user's record, got none")
        self.smoothness = None if smoothness is None else moderate("smoothness", smoothness)
        if self.smoothness is not None and envelope is not None:
            raise ValueError(
                "envelope must be left out where smoothness is given: it is for losses that are "
                "not smooth"
            )
        if (
            self.smoothness is None
            and envelope is None
            and isinstance(self.objective, MoreauEnvelope)
        ):
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

    def own_gradients(self) -> BoundedGradients:
        """Returns the gradients of the loss as it is, which may be a Moreau envelope already."""
        return BoundedGradients(self.objective, self.lipschitz, self.clip)

    def smooth_gradients(self, smoothness: float) -> BoundedGradients:
        """Returns the gradients of the loss if its smoothness is known, else those of its envelope at this smoothness."""
        if self.smoothness is not None:
            return self.own_gradients()
        return BoundedGradients(self._envelope(smoothness), self.lipschitz, self.clip)

    def _envelope(self, smoothness: float) -> MoreauEnvelope:
        """Returns the user's envelope, checked; else a linear model's exact one, or the generic solver's within the set.

        The exact one looks for proximal points everywhere. That takes nothing but convexity: with g
        the gradient at θ in the set, β‖θ − p‖² ≤ f(θ) − f(p) ≤ ⟨g, θ − p⟩ ≤ L‖θ − p‖ wherever p is.
        """
        if self.envelope is None:
            known: dict[str, Any] = {"lipschitz": self.lipschitz}
            if not isinstance(self.objective, LinearObjective):
                relative = max(
                    _FINEST, min(_ROUGHEST, 0.5 / self.num_users**0.5)
                )  # costs that times L·D of excess loss
                known.update(
                    constraint=self.constraint, accuracy=relative * self.lipschitz / smoothness
                )
            return MoreauEnvelope(self.objective, smoothness, **known)
        if not callable(self.envelope):
            raise ValueError(
                "envelope must be a function from a smoothness to a MoreauEnvelope, got "
                f"{self.envelope!r}; "
                "write it as lambda beta: ..."
            )
        made: MoreauEnvelope = instance_of(
            "what envelope returns", self.envelope(smoothness), (MoreauEnvelope,)
        )
        if made.dimension != self.dimension:
            raise ValueError(
                f"envelope must return one of dimension {self.dimension}, got {made.dimension}"
            )
        return made


def as_objective(loss: Any, *, dimension: int | None) -> Objective:
    """Returns an ``Objective`` as it is, and a function or a pair of a module and a criterion as one."""
    if isinstance(loss, Objective):
        return loss
    if isinstance(loss, tuple | list) and len(loss) == 2 and isinstance(loss[0], nn.Module):
        return ModuleObjective(loss[0], loss[1])
    if isinstance(loss, nn.Module) or not callable(loss):
        raise ValueError(
            "loss must be a function loss(theta, batch), an Objective or a pair (module, "
            f"criterion), got {type(loss).__name__}"
        )
    if dimension is None:
        raise ValueError(
            "dimension must be given for a loss function without initial: pass initial, or the "
            "number of parameters"
        )
    return Objective.from_loss(loss, dimension=dimension)


def farthest(constraint: Constraint, point: Tensor) -> float:
    """Returns an upper bound on the distance from this point of the set to any other."""
    if not isinstance(constraint, L2Ball):
        return float(constraint.diameter)
    away = float((point if constraint.center is None else point - constraint.center).norm())
    return min(constraint.diameter, constraint.radius + away)
