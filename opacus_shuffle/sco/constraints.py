"""The convex sets that optimisers stay in, with their Euclidean projections and diameters."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from opacus_shuffle.core.validation import finite_number, integer, positive


@runtime_checkable
class Constraint(Protocol):
    """A closed convex set with its Euclidean projection.

    The optimisers trust both members: a ``project`` that is no Euclidean projection onto a convex set, or a ``diameter`` that
    is too small, costs the bounds on the loss (never privacy).
    """

    @property
    def diameter(self) -> float:
        """The largest distance between two points of the set."""
        ...

    def project(self, theta: Tensor) -> Tensor:
        """The point of the set that is nearest to ``theta`` (d,)."""
        ...


@dataclass(frozen=True, eq=False)
class L2Ball:
    """All points within ``radius`` of ``center``.

    Args:
        radius: Positive.
        center: Vector of shape (d,), by default the origin (of any dimension).

    Raises:
        ValueError: The radius is not positive, or the centre is no finite vector.
    """

    radius: float
    center: Tensor | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "radius", positive("radius", self.radius))
        if self.center is not None:
            object.__setattr__(self, "center", _vector("center", self.center))

    @property
    def dimension(self) -> int | None:
        """The centre's dimension; None if any will do."""
        return None if self.center is None else len(self.center)

    @property
    def diameter(self) -> float:
        """Twice the radius."""
        return 2 * self.radius

    def project(self, theta: Tensor) -> Tensor:
        """Returns the nearest point of the ball, or of each row (B, d); points of the ball stay as they are."""
        _check_point(theta, self.dimension, "L2Ball")
        center = torch.zeros_like(theta) if self.center is None else self.center.to(theta)
        offset = theta - center
        norms = torch.linalg.vector_norm(offset, dim=-1, keepdim=True)
        shrunk = center + offset * (self.radius / norms.clamp_min(self.radius))
        return torch.where(norms <= self.radius, theta, shrunk)


@dataclass(frozen=True, eq=False)
class Box:
    """All points with ``low`` ≤ θ ≤ ``high`` in each coordinate.

    Args:
        low: A number for all coordinates, or a vector (d,).
        high: A number or a vector; nowhere below ``low``, and above it somewhere.
        dimension: d, needed for the diameter if both bounds are numbers.

    Raises:
        ValueError: The bounds are not finite, are out of order, or do not fit each other.
    """

    low: float | Tensor
    high: float | Tensor
    dimension: int | None = None

    def __post_init__(self) -> None:
        sizes = {} if self.dimension is None else {"dimension": integer("dimension", self.dimension)}
        for name in ("low", "high"):
            bound = getattr(self, name)
            if isinstance(bound, Tensor):
                sizes[name] = len(_vector(name, bound))
            object.__setattr__(self, name, _vector(name, bound) if isinstance(bound, Tensor) else finite_number(name, bound))
        if len(set(sizes.values())) > 1:
            raise ValueError(f"low, high and dimension must agree, got {sizes}; give vectors of one length")
        object.__setattr__(self, "dimension", next(iter(sizes.values()), None))
        width = self._width()
        if bool((width < 0).any()) or not bool((width > 0).any()):
            raise ValueError(
                f"low must not exceed high, and be below it somewhere, got low={self.low!r}, high={self.high!r}; swap them?"
            )

    @property
    def diameter(self) -> float:
        """The length of the diagonal; not known of a box between two numbers without ``dimension``."""
        if self.dimension is None:
            raise ValueError("dimension must be given for the diameter of a Box whose bounds are numbers; pass dimension=d")
        return float(torch.linalg.vector_norm(self._width().expand(self.dimension)))

    def project(self, theta: Tensor) -> Tensor:
        """Returns the nearest point of the box, or of each row (B, d)."""
        _check_point(theta, self.dimension, "Box")
        low, high = (torch.as_tensor(bound, dtype=torch.float64).to(theta) for bound in (self.low, self.high))
        return torch.minimum(torch.maximum(theta, low), high)

    def _width(self) -> Tensor:
        """Returns ``high − low``, (d,) or ()."""
        return torch.as_tensor(self.high, dtype=torch.float64) - torch.as_tensor(self.low, dtype=torch.float64)


@dataclass(frozen=True, eq=False)
class Projection:
    """A set that is known by its projection function alone.

    Args:
        function: From a point (d,) to the nearest point of the set (d,).
        diameter: An upper bound on the largest distance between two points of the set.
    """

    function: Callable[[Tensor], Tensor]
    diameter: float

    def project(self, theta: Tensor) -> Tensor:
        """Returns the nearest point of the set, and refuses an answer that is no finite tensor of theta's shape."""
        _check_point(theta, None, "the projection")
        point: Any = self.function(theta.clone())  # it may work in place
        if not isinstance(point, Tensor) or point.shape != theta.shape or not bool(torch.isfinite(point).all()):
            found = f"a tensor of shape {tuple(point.shape)}" if isinstance(point, Tensor) else type(point).__name__
            if isinstance(point, Tensor) and point.shape == theta.shape:
                found = "NaN or infinite entries"
            raise ValueError(
                f"constraint must return a finite tensor of theta's shape {tuple(theta.shape)}, got {found}; "
                "return the point of the set that is nearest to theta"
            )
        return point.detach().to(theta)


def as_constraint(value: Any, diameter: float | None = None) -> Constraint:
    """Returns the constraint itself, or a projection function as a constraint.

    Args:
        value: A :class:`Constraint`, which is returned as it is, or a callable from θ (d,) to its projection (d,).
        diameter: The set's diameter (or an upper bound on it), for a callable, which does not tell. An object keeps its own.

    Raises:
        ValueError: It is neither, or has no diameter.
    """
    # Not isinstance(value, Constraint): a class has these members, too, and a Box's diameter may raise.
    if not isinstance(value, type) and hasattr(type(value), "project"):
        if not hasattr(type(value), "diameter") and "diameter" not in getattr(value, "__dict__", {}):
            raise ValueError(f"constraint must have a diameter besides project, got {value!r}; add the attribute")
        positive("constraint.diameter", value.diameter)
        known: Constraint = value
        return known
    if isinstance(value, type) or not callable(value):
        raise ValueError(
            f"constraint must be an L2Ball, a Box, an object with project(theta) and diameter, or a callable, got {value!r}"
        )
    if diameter is None:
        raise ValueError("diameter must be given when the constraint is a callable, which does not tell it; pass diameter=...")
    return Projection(value, positive("diameter", diameter))


def project_rows(constraint: Constraint, points: Tensor) -> Tensor:
    """Returns every row's projection, (B, d)."""
    if isinstance(constraint, L2Ball | Box):
        return constraint.project(points)
    return torch.stack([constraint.project(point) for point in points]) if len(points) else points


def _vector(name: str, value: Any) -> Tensor:
    """Returns a copy of a finite vector, in double precision."""
    if not isinstance(value, Tensor) or value.ndim != 1 or not len(value) or not bool(torch.isfinite(value).all()):
        found = f"shape {tuple(value.shape)}" if isinstance(value, Tensor) and value.ndim != 1 else repr(value)
        raise ValueError(f"{name} must be a finite tensor of shape (d,), got {found}")
    return value.detach().to("cpu", torch.float64, copy=True)


def _check_point(theta: Any, dimension: int | None, where: str) -> None:
    """Refuses points of another type or dimension than the set's, and points that are not finite."""
    if not isinstance(theta, Tensor) or not theta.is_floating_point() or theta.ndim not in (1, 2):
        found = f"{theta.dtype} of shape {tuple(theta.shape)}" if isinstance(theta, Tensor) else type(theta).__name__
        raise ValueError(f"theta must be a floating-point tensor of shape (d,), got {found}")
    if dimension is not None and theta.shape[-1] != dimension:
        raise ValueError(f"theta must have the dimension {dimension} of {where}, got {theta.shape[-1]}")
    if not bool(torch.isfinite(theta).all()):
        raise ValueError(f"theta must be finite to be projected onto {where}, got NaN or infinite entries; take smaller steps")
