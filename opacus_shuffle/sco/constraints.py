"""The convex sets that optimisers stay in, with their Euclidean projections and diameters."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from opacus_shuffle.core.validation import finite_number, integer, positive
from opacus_shuffle.sco.records import described, real_vector, refuse_unless_finite


@runtime_checkable
class Constraint(Protocol):
    """A closed convex set with its Euclidean projection; if it is none, that costs the bounds on the loss, never privacy."""

    @property
    def diameter(self) -> float:
        """The largest distance between two points of the set."""
        ...

    def project(self, theta: Tensor) -> Tensor:
        """The point of the set that is nearest to ``theta`` (d,)."""
        ...


class _Region(ABC):
    """What the sets of this module share: they take finite points of their own dimension."""

    dimension: int | None

    def project(self, theta: Tensor) -> Tensor:
        """Returns the nearest point of the set; points of the set stay as they are.

        Args:
            theta: A floating-point tensor (d,); of a ball or a box also (B, d), whose rows are
                projected one by one.

        Raises:
            ValueError: If it is no such tensor, of another dimension than the set, or not finite;
                or if a given projection answers something else than a finite tensor of theta's
                shape.
        """
        name = type(self).__name__
        if (
            not isinstance(theta, Tensor)
            or not theta.is_floating_point()
            or theta.ndim not in (1, 2)
        ):
            raise ValueError(
                f"theta must be a floating-point tensor of shape (d,), got {described(theta)}"
            )
        if self.dimension is not None and theta.shape[-1] != self.dimension:
            raise ValueError(
                f"theta must have the dimension {self.dimension} of {name}, got {theta.shape[-1]}"
            )
        if not bool(torch.isfinite(theta).all()):
            raise ValueError(
                f"theta must be finite to be projected onto {name}, got NaN or infinity in it; "
                "take smaller steps"
            )
        return self._nearest(theta)

    @abstractmethod
    def _nearest(self, theta: Tensor) -> Tensor:
        """Returns the nearest point of the set."""


@dataclass(frozen=True, eq=False)
class L2Ball(_Region):
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
            object.__setattr__(self, "center", real_vector("center", self.center))

    @property
    def dimension(self) -> int | None:  # type: ignore[override]
        """The centre's dimension; None if any will do."""
        return None if self.center is None else len(self.center)

    @property
    def diameter(self) -> float:
        """Twice the radius."""
        return 2 * self.radius

    def _nearest(self, theta: Tensor) -> Tensor:
        center = torch.zeros_like(theta) if self.center is None else self.center.to(theta)
        offset = theta - center
        norms = torch.linalg.vector_norm(offset, dim=-1, keepdim=True)
        shrunk = center + offset * (self.radius / norms.clamp_min(self.radius))
        return torch.where(norms <= self.radius, theta, shrunk)


@dataclass(frozen=True, eq=False)
class Box(_Region):
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
        sizes = (
            {} if self.dimension is None else {"dimension": integer("dimension", self.dimension)}
        )
        for name in ("low", "high"):
            given = getattr(self, name)
            bound = (
                real_vector(name, given)
                if isinstance(given, Tensor)
                else finite_number(name, given)
            )
            if isinstance(bound, Tensor):
                sizes[name] = len(bound)
            object.__setattr__(self, name, bound)
        if len(set(sizes.values())) > 1:
            raise ValueError(
                f"low, high and dimension must agree, got {sizes}; give vectors of one length"
            )
        object.__setattr__(self, "dimension", next(iter(sizes.values()), None))
        low, high = self._corners()
        if bool((low > high).any()) or bool((low == high).all()):
            raise ValueError(
                f"low must not exceed high, and be below it somewhere, got low={self.low!r}, "
                f"high={self.high!r}; swap them?"
            )

    @property
    def diameter(self) -> float:
        """The length of the diagonal.

        Raises:
            ValueError: If the box lies between two numbers and has no ``dimension``.
        """
        if self.dimension is None:
            raise ValueError(
                "dimension must be given for the diameter of a Box whose bounds are numbers; pass "
                "dimension=d"
            )
        low, high = self._corners()
        return float(torch.linalg.vector_norm((high - low).expand(self.dimension)))

    def _nearest(self, theta: Tensor) -> Tensor:
        low, high = self._corners()
        return torch.minimum(torch.maximum(theta, low.to(theta)), high.to(theta))

    def _corners(self) -> tuple[Tensor, Tensor]:
        """Returns both bounds as tensors, (d,) or ()."""
        return torch.as_tensor(self.low, dtype=torch.float64), torch.as_tensor(
            self.high, dtype=torch.float64
        )


@dataclass(frozen=True, eq=False)
class Projection(_Region):
    """A set that is known by its projection function alone.

    Args:
        function: From a point (d,) to the nearest point of the set (d,).
        diameter: An upper bound on the largest distance between two points of the set.
    """

    dimension = None
    function: Callable[[Tensor], Tensor]
    diameter: float

    def __post_init__(self) -> None:
        if not callable(self.function):
            raise ValueError(
                f"function must be a callable from a point to its projection, got {self.function!r}"
            )
        object.__setattr__(self, "diameter", positive("diameter", self.diameter))

    def _nearest(self, theta: Tensor) -> Tensor:
        point = self.function(theta.clone())  # it may work in place
        refuse_unless_finite("constraint must return", point, theta.shape)
        return point.detach().to(theta)


def as_constraint(value: Any, diameter: float | None = None) -> Constraint:
    """Returns the constraint itself, or a projection function as a constraint.

    Args:
        value: A :class:`Constraint`, which is returned as it is, or a callable from θ (d,) to its
            projection (d,).
        diameter: The set's diameter (or an upper bound on it), for a callable, which does not tell.
            An object keeps its own.

    Raises:
        ValueError: It is neither, or has no diameter.
    """
    # Not isinstance(value, Constraint): a class has these members, too, and a Box's diameter may
    # raise.
    if not isinstance(value, type) and hasattr(type(value), "project"):
        if not hasattr(type(value), "diameter") and "diameter" not in getattr(
            value, "__dict__", {}
        ):
            raise ValueError(
                f"constraint must have a diameter besides project, got {value!r}; add the attribute"
            )
        positive("constraint.diameter", value.diameter)
        known: Constraint = value
        return known
    if isinstance(value, type) or not callable(value):
        raise ValueError(
            "constraint must be an L2Ball, a Box, an object with project(theta) and diameter, or "
            f"a callable, got {value!r}"
        )
    if diameter is None:
        raise ValueError(
            "diameter must be given when the constraint is a callable, which does not tell it; "
            "pass diameter=..."
        )
    return Projection(value, diameter)


def project_rows(constraint: Constraint, points: Tensor) -> Tensor:
    """Returns every row's projection, (B, d)."""
    if isinstance(constraint, L2Ball | Box):
        return constraint.project(points)
    return torch.stack([constraint.project(point) for point in points]) if len(points) else points
