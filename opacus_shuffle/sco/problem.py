"""What the optimisers have in common: a loss, its data, a set, and reports of a bounded norm.

>>> import torch
>>> from opacus_shuffle.sco.constraints import L2Ball
>>> def loss(theta, batch):
...     return (batch - theta).abs().sum(dim=1)
>>> problem = prepare(loss, torch.randn(100, 3), constraint=L2Ball(2.0), lipschitz=3.0, dimension=3)
>>> problem.num_users, problem.dimension, problem.distance  # the start is the centre
(100, 3, 2.0)
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from opacus_shuffle.core.randomness import check_generator, secret_generator
from opacus_shuffle.core.validation import boolean, integer, positive
from opacus_shuffle.protocols.vector_sum import ShuffleVectorSum
from opacus_shuffle.sco.constraints import Box, Constraint, L2Ball, as_constraint
from opacus_shuffle.sco.moreau import MoreauEnvelope
from opacus_shuffle.sco.objective import LinearObjective, Objective, map_data, number_of_users, take
from opacus_shuffle.sco.users import split

TOLERANCE = 1e-5
"""A gradient may exceed the Lipschitz constant by this fraction (rounding); it is then scaled back."""

_ROUGHEST, _FINEST = 0.02, 0.005

_BLOCK = 2**23
"""Entries of per-user gradients held at a time."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Problem:
    """A checked problem.

    Attributes:
        objective: Gives every user's gradient.
        data: One record per user.
        num_users: n.
        dimension: d.
        constraint: The set.
        lipschitz: L of every user's loss.
        initial: The start, in the set, float64, shape (d,).
        distance: At least the distance from the start to a minimiser, D.
        clip: Whether longer gradients are cut rather than refused, and unusable ones replaced by zero (:meth:`Reports.rows`).
        generator: All randomness.
    """

    objective: Objective
    data: Any
    num_users: int
    dimension: int
    constraint: Constraint
    lipschitz: float
    initial: Tensor
    distance: float
    clip: bool
    generator: torch.Generator

    @property
    def diameter(self) -> float:
        """Of the set."""
        return float(self.constraint.diameter)

    def capped(self, bound: float) -> float:
        """An excess loss, if it says more than that the loss is Lipschitz on the set."""
        return min(bound, self.lipschitz * self.diameter)

    def project(self, theta: Tensor) -> Tensor:
        """The set's nearest point."""
        return self.constraint.project(theta)

    def mean_gradient(self, protocol: ShuffleVectorSum, reports: Reports, theta: Tensor, users: Tensor) -> Tensor:
        """A round: every user of the batch reports its gradient, the protocol estimates the mean; shape (d,)."""
        blocks = split(users, max(1, _BLOCK // self.dimension))
        rows: Iterator[Tensor] | Tensor = (reports.rows(theta, take(self.data, block)) for block in blocks)
        if len(blocks) == 1:
            rows = next(iter(rows))
        return protocol.simulate(rows, self.generator) / len(users)


@dataclasses.dataclass(frozen=True)
class Reports:
    """What users report: gradients of the loss or of its Moreau envelope.

    Attributes:
        objective: Whose gradients.
        limit: No report is longer.
        clip: As :attr:`Problem.clip`.
        bias: Gradients are wrong by at most this.
        smoothing_cost: How much larger the excess of the loss may be than that of what is minimised, L²/(2β).
    """

    objective: Objective
    limit: float
    clip: bool
    bias: float = 0.0
    smoothing_cost: float = 0.0

    @classmethod
    def of(cls, problem: Problem) -> Reports:
        """Of the problem's own objective, which may be a Moreau envelope already."""
        if isinstance(problem.objective, MoreauEnvelope):
            return cls.smoothed(problem, problem.objective)
        return cls(problem.objective, problem.lipschitz, problem.clip)

    @classmethod
    def smoothed(cls, problem: Problem, envelope: MoreauEnvelope) -> Reports:
        """Of this envelope of an L-Lipschitz loss."""
        lipschitz = problem.lipschitz
        return cls(
            envelope,
            envelope.gradient_factor * lipschitz,
            problem.clip,
            float(envelope.gradient_error),
            lipschitz**2 / (2 * float(envelope.smoothness)),
        )

    def rows(self, theta: Tensor, batch: Any) -> Tensor:
        """One gradient per record, shape (B, d), float64, none longer than ``limit``.

        With ``clip``, whether an error is raised must not tell about single records. A record whose gradient cannot be computed
        (the objective raises an error for it: it is not finite, its label is none, its loss not as Lipschitz as an envelope was
        told) or is not finite reports zero, which is one of the reports that the protocol allows for; the other records report
        what they would have reported beside a usable one.

        Raises:
            ValueError: If ``clip`` is False and a gradient is too long; or the objective's own, which with ``clip`` comes up
                only if it has one for every record of a block of at least two, or for a single record that it would equally
                have for one of zeros and for one of ones (a wrong dimension, say).
        """
        rows = self._usable(theta, batch) if self.clip else self._gradients(theta, batch)
        norms = rows.norm(dim=1, keepdim=True)
        longest = float(norms.max()) if len(rows) else 0.0
        # The true gradient is in the ball, so the way to its nearest point leads no farther from it.
        if not self.clip and not longest <= self.limit * (1 + TOLERANCE) + self.bias:
            raise ValueError(
                f"lipschitz must bound every user's gradient, got {self.limit:.6g} and a gradient of norm {longest:.6g}: pass "
                "a larger lipschitz, or clip=True to cut every gradient to it"
            )
        return rows * (self.limit / norms.clamp_min(self.limit))

    def _gradients(self, theta: Tensor, batch: Any) -> Tensor:
        """The objective's, in double precision."""
        return self.objective.gradients(theta, batch).detach().to(torch.float64)

    def _usable(self, theta: Tensor, batch: Any) -> Tensor:
        """The same, with zeros for records that have none."""
        rows = self._attempt(theta, batch)
        if isinstance(rows, Tensor):
            return torch.where(rows.isfinite().all(dim=1, keepdim=True), rows, 0.0)
        error = rows
        count = number_of_users(batch)
        good = self._without_errors(theta, batch)
        if not good:
            if count > 1 or self._is_structural(error, theta, batch):
                raise error
            return torch.zeros(count, self.objective.dimension, dtype=torch.float64)
        # The block again, with a usable record in the place of each unusable one: in a batch of another shape the usable ones
        # might be rounded otherwise.
        stand_ins = torch.full((count,), good[0])
        stand_ins[good] = torch.tensor(good)
        found = self._attempt(theta, take(batch, stand_ins))
        if not isinstance(found, Tensor):
            raise RuntimeError("objective must treat records one by one, got errors that depend on which ones are together")
        usable = torch.zeros(count, 1, dtype=torch.bool)
        usable[good] = True
        return torch.where(usable & found.isfinite().all(dim=1, keepdim=True), found, 0.0)

    def _without_errors(self, theta: Tensor, batch: Any) -> list[int]:
        """The records that raise no error, in order; found by halving the batch."""
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
        """The gradients, or why there are none."""
        try:
            return self._gradients(theta, batch)
        except (MemoryError, torch.OutOfMemoryError):
            raise
        except Exception as error:  # whatever a user's loss may raise: that it did tells about the record
            return error

    def _is_structural(self, error: Exception, theta: Tensor, record: Any) -> bool:
        """Whether the error is one of shapes: records of the same shapes but with no one's values in them meet it, too."""
        probes = [self._attempt(theta, map_data(make, record)) for make in (torch.zeros_like, torch.ones_like)]
        return all(type(found) is type(error) and str(found) == str(error) for found in probes)


def prepare(
    loss: Any,
    data: Any,
    *,
    constraint: Any,
    lipschitz: float,
    initial: Tensor | None = None,
    dimension: int | None = None,
    diameter: float | None = None,
    clip: bool = False,
    generator: torch.Generator | None = None,
) -> Problem:
    """Checks what all optimisers are given; see :func:`opacus_shuffle.sco.sgd.shuffle_sgd` for the arguments."""
    check_generator("generator", generator)
    lipschitz = positive("lipschitz", lipschitz)
    distance = None if diameter is None else positive("diameter", diameter)
    if isinstance(constraint, Box) and constraint.dimension is None:
        constraint = sized(constraint, as_objective(loss, dimension=_dimension(constraint, initial, dimension)).dimension)
    region = as_constraint(constraint, None if hasattr(type(constraint), "project") else distance)
    objective = as_objective(loss, dimension=_dimension(region, initial, dimension))
    size = objective.dimension
    if initial is None:
        initial = getattr(objective, "initial", None)
    start = torch.zeros(size, dtype=torch.float64) if initial is None else real_vector("initial", initial, size)
    start = region.project(start)
    count = number_of_users(data)
    if not count:
        raise ValueError("data must hold at least one user's record, got none")
    return Problem(
        objective=objective,
        data=data,
        num_users=count,
        dimension=size,
        constraint=region,
        lipschitz=lipschitz,
        initial=start,
        distance=farthest(region, start) if distance is None else distance,
        clip=boolean("clip", clip),
        generator=secret_generator("cpu") if generator is None else generator,
    )


def as_objective(loss: Any, *, dimension: int | None) -> Objective:
    """An ``Objective`` as it is; a pair of a module and a criterion, or a function of parameters and batch, as one."""
    if isinstance(loss, Objective):
        return loss
    if isinstance(loss, tuple | list) and len(loss) == 2 and isinstance(loss[0], nn.Module):
        return Objective.from_module(loss[0], loss[1])
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
    """The constraint; a Box between two numbers gets its dimension."""
    if isinstance(constraint, Box) and constraint.dimension is None:
        return dataclasses.replace(constraint, dimension=dimension)
    return constraint


def farthest(constraint: Constraint, point: Tensor) -> float:
    """At least the distance from this point of the set to any other."""
    diameter = float(constraint.diameter)
    if isinstance(constraint, L2Ball):
        center = constraint.center
        away = float(point.norm() if center is None else (point - torch.as_tensor(center, dtype=point.dtype)).norm())
        return min(diameter, float(constraint.radius) + away)
    return diameter


Envelope = Callable[[float], MoreauEnvelope]
"""The Moreau envelope of the loss at a given smoothness."""


def make_envelope(problem: Problem, envelope: Envelope | None, smoothness: float) -> MoreauEnvelope:
    """The user's envelope at this smoothness, checked, or the default one."""
    if envelope is None:
        return default_envelope(problem)(smoothness)
    if not callable(envelope):
        raise ValueError(
            f"envelope must be a function from a smoothness to a MoreauEnvelope, got {envelope!r}; write it as lambda beta: ..."
        )
    made: Any = envelope(smoothness)
    if not isinstance(made, MoreauEnvelope) or made.dimension != problem.dimension:
        found = f"one of dimension {made.dimension}" if isinstance(made, MoreauEnvelope) else type(made).__name__
        raise ValueError(f"envelope must return a MoreauEnvelope of dimension {problem.dimension}, got {found}")
    return made


def default_envelope(problem: Problem) -> Envelope:
    """Of a linear model the exact one; else every user's proximal points within the set by the generic solver.

    The exact one looks for proximal points everywhere. That takes nothing but convexity: with g the gradient at θ in the set,
    β‖θ − p‖² ≤ f(θ) − f(p) ≤ ⟨g, θ − p⟩ ≤ L‖θ − p‖ wherever p is.
    """
    if isinstance(problem.objective, LinearObjective):
        return lambda smoothness: MoreauEnvelope(problem.objective, smoothness, lipschitz=problem.lipschitz)
    relative = max(_FINEST, min(_ROUGHEST, 0.5 / problem.num_users**0.5))  # the error adds that times L·D to the excess loss
    return lambda smoothness: MoreauEnvelope(
        problem.objective,
        smoothness,
        lipschitz=problem.lipschitz,
        constraint=problem.constraint,
        accuracy=relative * problem.lipschitz / smoothness,
    )


def _dimension(constraint: Any, initial: Any, dimension: int | None) -> int | None:
    """The number of parameters, from whoever knows it; None if nobody does."""
    if dimension is not None:
        return integer("dimension", dimension)
    if isinstance(initial, Tensor):
        return initial.numel()
    known = getattr(constraint, "dimension", None)
    return known if isinstance(known, int) else None


def real_vector(name: str, value: Any, size: int) -> Tensor:
    """A finite float64 vector of this size on the CPU, a copy."""
    try:
        vector = torch.as_tensor(value).detach()
    except (TypeError, ValueError, RuntimeError):
        raise ValueError(f"{name} must be a tensor of {size} real numbers, got {type(value).__name__}") from None
    if vector.is_complex() or vector.dtype == torch.bool:
        raise ValueError(f"{name} must hold {size} real numbers, got type {vector.dtype}; take the real part, or float()")
    if vector.shape != (size,):
        raise ValueError(f"{name} must have shape ({size},), got {tuple(vector.shape)}")
    if not bool(vector.isfinite().all()):
        raise ValueError(f"{name} must hold {size} finite numbers, got NaN or infinity in it")
    return vector.to("cpu", torch.float64).clone()
