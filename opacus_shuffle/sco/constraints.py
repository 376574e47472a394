"""The convex sets that constrain optimisers, with their projections and diameters."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from opacus_shuffle.core.validation import finite_number, integer, positive
from opacus_shuffle.sco.records import check_point, real_vector


@runtime_checkable
class Constraint(Protocol):
    """A closed convex set with its Euclidean projection.

    Any object with these two members is one. If its set is not convex, or its projection is not
    the Euclidean one, the bounds on the loss do not hold. Privacy is not affected.
    """

    @property
    def diameter(self) -> float:
        """An upper bound on the distance between two points of the set."""
        ...

    def project(self, theta: Tensor) -> Tensor:
        """Returns the point of the set that is nearest to ``theta`` (d,)."""
        ...


@dataclass(frozen=True, eq=False)
class L2Ball:
    """All points within ``radius`` of ``center``.

    Args:
        radius: Positive.
        center: Vector of shape (d,), by default the origin (of any dimension).

    Raises:
        ValueError: If the radius is not positive, or the centre is not a finite vector.
    """

    radius: float
    center: Tensor | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "radius", positive("radius", self.radius))
        if self.center is not None:
            object.__setattr__(self, "center", real_vector("center", self.center))

    @property
    def dimension(self) -> int | None:
        """The centre's dimension; None for any."""
        return None if self.center is None else len(self.center)

    @property
    def diameter(self) -> float:
        """Twice the radius."""
        return 2 * self.radius

    def project(self, theta: Tensor) -> Tensor:
        """Returns the nearest point of the set; points of the set are returned unchanged.

        Args:
            theta: A floating-point tensor (d,), or (B, d), whose rows are projected one by one.

        Raises:
            ValueError: If it is not such a tensor, or not finite.
        """
        check_point(theta, self.dimension)
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
        dimension: d. A :class:`~opacus_shuffle.sco.problem.Problem` sets it for a box between two
            numbers.

    Raises:
        ValueError: If the bounds are not finite, are out of order, or do not fit each other.
    """

    low: float | Tensor
    high: float | Tensor
    dimension: int | None = None

    def __post_init__(self) -> None:
        sizes = set() if self.dimension is None else {integer("dimension", self.dimension)}
        for name in ("low", "high"):
            bound = getattr(self, name)
            if isinstance(bound, Tensor):
                sizes.add(len(real_vector(name, bound)))
            else:
                object.__setattr__(self, name, finite_number(name, bound))
        if len(sizes) > 1:
            raise ValueError(
                f"low, high and dimension must agree, got sizes {sorted(sizes)}; give vectors of "
                "one length"
            )
        object.__setattr__(self, "dimension", next(iter(sizes), None))
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

    def project(self, theta: Tensor) -> Tensor:
        """Returns the nearest point of the set, for the arguments of :meth:`L2Ball.project`."""
        check_point(theta, self.dimension)
        low, high = self._corners()
        return torch.minimum(torch.maximum(theta, low.to(theta)), high.to(theta))

    def _corners(self) -> tuple[Tensor, Tensor]:
        """Returns both bounds as tensors, (d,) or (), in double precision."""
        low = torch.as_tensor(self.low, dtype=torch.float64, device="cpu")
        return low, torch.as_tensor(self.high, dtype=torch.float64, device="cpu")


def check_constraint(value: Any) -> Constraint:
    """Returns a constraint after checking that it is one.

    Raises:
        ValueError: If the value has no method ``project`` or no positive ``diameter``.
    """
    # A class has these members as well.
    if isinstance(value, type) or not isinstance(value, Constraint):
        raise ValueError(
            "constraint must be an L2Ball, a Box, or an object with project(theta) and diameter, "
            f"got {value!r}"
        )
    positive("constraint.diameter", value.diameter)
    return value
