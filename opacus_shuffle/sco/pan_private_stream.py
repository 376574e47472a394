"""``PanPrivateAcceleratedSGD``: an algorithm that reads a stream, and may be looked at once.

Algorithm 6 of Cheu, Joseph, Mao and Peng's shuffle-private convex optimisation (SCO).

No shuffler: one party reads record after record. Gaussian noise enters the gradient sum before the first record of a batch and
again after the last: what an intruder finds and what is published tell about a record what one Gaussian mechanism tells.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from opacus_shuffle.analysis import gaussian
from opacus_shuffle.core.randomness import check_generator
from opacus_shuffle.core.solve import bracket, safe_root
from opacus_shuffle.core.validation import boolean, instance_of, integer, not_negative, one_of, open_unit_interval, positive
from opacus_shuffle.protocols.calibration import CALIBRATIONS
from opacus_shuffle.protocols.random_rounding import draws_of
from opacus_shuffle.sco.acceleration import AcceleratedIterates
from opacus_shuffle.sco.bounded_gradients import BoundedGradients
from opacus_shuffle.sco.constraints import Constraint, as_constraint
from opacus_shuffle.sco.objective import Objective
from opacus_shuffle.sco.problem import real_vector, sized
from opacus_shuffle.sco.records import number_of_users
from opacus_shuffle.sco.solver import positive_numbers

_TOLERANCE = 2.5e-8


def pan_private_noise(*, lipschitz: float, batch_size: int, epsilon: float, delta: float, calibration: str = "tight") -> float:
    """Returns ζ, the standard deviation per coordinate of each of a batch's two noises, for the mean of its gradients.

    Replacing a record moves that mean by at most 2L/b. ``"tight"`` takes the smallest ζ whose Gaussian mechanism is (ε, δ)-DP,
    ``"published"`` ζ² = 8L²ln(2/δ)/(b²ε²) (SCO Algorithm 6), for ε below 1. Both are rounded up.
    """
    epsilon, delta = positive("epsilon", epsilon), open_unit_interval("delta", delta)
    shift = 2 * positive("lipschitz", lipschitz) / integer("batch_size", batch_size)
    if one_of("calibration", calibration, CALIBRATIONS) == "published":
        if epsilon >= 1:
            raise ValueError(
                f"epsilon must be below 1 for calibration='published' (SCO Lemma C.5), got {epsilon!r}; use 'tight'"
            )
        return math.nextafter(shift * math.sqrt(2 * math.log(2 / delta)) / epsilon, math.inf)
    return math.nextafter(shift * _gaussian_multiplier(epsilon, delta), math.inf)


def _gaussian_multiplier(epsilon: float, delta: float) -> float:
    """Returns the smallest noise multiplier with which a Gaussian mechanism is (ε, δ)-DP, rounded up."""

    def excess(log_multiplier: float) -> float:
        found = gaussian.compute_epsilon(mu=1 / math.exp(log_multiplier), delta=delta)
        difference = math.log(max(found, 1e-300)) - math.log(epsilon)
        return max(difference, 1e-16) if found > epsilon else difference  # logarithms may agree where the numbers do not

    walk = [times * math.log(4) for times in range(1, 40)]
    unsafe, safe = bracket(excess, 0.0, towards_safe=walk, towards_unsafe=[-point for point in walk])
    if unsafe is None or safe is None:
        raise ValueError(
            f"epsilon must be met by some Gaussian noise, got {epsilon!r} at delta={delta!r}; take one in (1e-9, 1e9)"
        )
    return math.exp(safe_root(excess, unsafe=unsafe, safe=safe, tolerance=_TOLERANCE, step=_TOLERANCE))


@dataclasses.dataclass(frozen=True)
class PanState:
    """All that the algorithm remembers between two records, and an intruder sees.

    These are the number of records read, the iterates θ_t, θ_t^ag and θ_t^md (where gradients are taken), and the running sum
    of the batch, with noise from before its first record; vectors of shape (d,).
    """

    records: int
    theta: Tensor
    aggregate: Tensor
    middle: Tensor
    gradient: Tensor


class PanPrivateAcceleratedSGD:
    """Accelerated SGD on a stream, one record after the other (SCO Algorithm 6).

    ``constraint``, ``lipschitz``, ``initial`` and ``clip`` are :class:`~opacus_shuffle.sco.problem.Problem`'s.

    Args:
        objective: Gives a record's gradient.
        noise: ζ (:func:`pan_private_noise`).
        batch_size: b.
        inverse_step_sizes: L_1, …, L_T; the algorithm ends after T·b records.
        diameter: Of a constraint that does not tell its own.
        generator: Of the noise, on the CPU; for tests. By default every noise has a fresh secret generator that is forgotten:
            one that is kept would be part of the inner state, and tell past and future noise.

    Raises:
        ValueError: If an argument is out of range.

    Formal Guarantees:
        Given ζ by :func:`pan_private_noise`, (state at any one time between two calls, everything that :meth:`consume`
        returned, output) is (ε, δ)-DP under replacement of one record of the stream. Let the record be in batch t. Seen before
        the record: the state does not depend on it, and everything else does through the batch's sum, to which the second noise
        is yet to come. Seen after the record within batch t: the state shows its sum with the first noise, and all else follows
        from that. Seen later: all follows from the sum with both noises. Each time one Gaussian mechanism of sensitivity 2L/b
        and standard deviation ζ at least; that batches' gradients depend on one another through θ is post-processing.
        While a record is worked on (its gradient, a projection) there is more in memory; that is outside the model.
    """

    def __init__(
        self,
        objective: Objective,
        *,
        constraint: Any,
        lipschitz: float,
        noise: float,
        batch_size: int,
        inverse_step_sizes: Sequence[float],
        initial: Tensor | None = None,
        clip: bool = False,
        diameter: float | None = None,
        generator: torch.Generator | None = None,
    ) -> None:
        check_generator("generator", generator)
        self._noise = not_negative("noise", noise)
        self._generator = generator
        instance_of("objective", objective, (Objective,))
        self._reported = BoundedGradients(objective, positive("lipschitz", lipschitz), boolean("clip", clip))
        self.batch_size = integer("batch_size", batch_size)
        self._steps = positive_numbers("inverse_step_sizes", inverse_step_sizes)
        integer("len(inverse_step_sizes)", len(self._steps))
        region: Constraint = as_constraint(sized(constraint, objective.dimension), diameter)
        start = real_vector("initial", torch.zeros(objective.dimension) if initial is None else initial, objective.dimension)
        self._iterates = AcceleratedIterates(region.project, region.project(start), self._steps)
        self._records = 0
        self._gradient = self._draw()

    @property
    def finished(self) -> bool:
        """Whether T·b records were read."""
        return self._records == self.batch_size * len(self._steps)

    @property
    def room(self) -> int:
        """How many records the batch still takes."""
        return 0 if self.finished else self.batch_size - self._records % self.batch_size

    def consume(self, records: Any) -> Tensor | None:
        """Reads one record, or several of the same batch at once (an intruder then comes before or after them).

        Args:
            records: A batch of the objective's, of at most :attr:`room` records.

        Returns:
            If this ended a batch, its mean gradient with both noises, shape (d,), which is not remembered; else None.

        Raises:
            ValueError: If there is no room, or a gradient is too long (without ``clip``); nothing is then read.
        """
        count = number_of_users(records)
        if not 1 <= count <= self.room:
            raise ValueError(f"records must number from 1 to {self.room}, which is what this batch still takes, got {count}")
        rows = self._reported.rows(self._iterates.middle, records)
        self._gradient = self._gradient + rows.sum(0) / self.batch_size
        self._records += count
        if self._records % self.batch_size:
            return None
        whole = self._gradient + self._draw()
        self._iterates.advance(whole)
        self._gradient = torch.zeros_like(whole) if self.finished else self._draw()
        return whole

    def state(self) -> PanState:
        """Returns what an intruder sees now."""
        found = self._iterates
        return PanState(
            self._records, found.theta.clone(), found.aggregate.clone(), found.middle.clone(), self._gradient.clone()
        )

    def output(self) -> Tensor:
        """Returns the estimate, shape (d,).

        Raises:
            ValueError: If the stream has not ended.
        """
        if not self.finished:
            raise ValueError(f"the output comes after {self.batch_size * len(self._steps)} records, got {self._records} so far")
        return self._iterates.aggregate.clone()

    def _draw(self) -> Tensor:
        """Returns a noise vector."""
        dimension = self._reported.objective.dimension
        return self._noise * torch.randn(dimension, generator=draws_of(self._generator), dtype=torch.float64)
