"""How many full-gradient rounds to make with a budget, and how long the steps: what the proved bound likes best.

>>> from opacus_shuffle.sco.rounds import Budget
>>> budget = Budget(epsilon=1.0, delta=1e-6, calibration="tight", honest_fraction=1.0)
>>> setting = Setting(
...     dimension=3, num_users=2000, reported=1.0, lipschitz=1.0, distance=1.0, diameter=2.0, bias=0.0, budget=budget)
>>> plan = plan_descent(setting, rounds=None, smoothness=1.0)
>>> plan.bound.rounds, round(plan.bound.value(plan.step_size, smoothness=1.0), 3)
(2000, 0.039)
"""

from __future__ import annotations

import dataclasses
import math

from scipy.optimize import minimize_scalar

from opacus_shuffle.protocols.vector_sum import ShuffleVectorSum
from opacus_shuffle.sco.printed import clamp
from opacus_shuffle.sco.rounds import Budget
from opacus_shuffle.sco.schedules import Oracle, sgd_bound


def descent_candidates(oracle: Oracle, *, num_users: int) -> list[int]:
    """Numbers of rounds to try: T = min(n, (n/s₁)²) as in Lemma B.6, s₁ of one round with the whole budget, and powers of two.

    Beyond that T the noise is the larger part; below it the rounding may be (:class:`DescentBound`), which wants fewer rounds.
    """
    most = clamp(min(num_users, (num_users / max(oracle.ratio, 1e-150)) ** 2), num_users)
    return [*(2**power for power in range(most.bit_length()) if 2**power < most), most]


@dataclasses.dataclass(frozen=True, kw_only=True)
class DescentBound:
    r"""Excess population loss of the average of T full-gradient steps, at most.

    Attributes:
        rounds: T.
        num_users: n, all of them in every round.
        oracle: Of one of the T rounds.
        granularity: Steps of the protocol's grid on [−L, L], g.
        distance: D with E‖θ_0 − θ*‖² ≤ D².
        diameter: Of the set, for the bias.

    Formal Guarantees:
        Proved for β-smooth losses and η ≤ 2/β: D²/(2ηT) + ηL_G²/2 on the sample (Lemma B.4), and beyond it L times how far two
        runs drift apart whose data differ in one user. Couple them: same noise, and the same uniform numbers for the random
        rounding of everyone but that user. A step is non-expansive but for c = 2ηL/n, which alone gives Lemma B.5's L²ηT/n. The
        lemma passes over the rounding, whose distribution depends on the gradients, and these differ for all users once runs
        are apart. Rounding x and x′ to a grid of width h = 2L/g with one uniform number makes errors that differ with variance
        h|x − x′| at most, so with δ_t the distance E[δ²_{t+1}] ≤ (δ_t + c)² + η²(h√d·βδ_t/n + dh²/(2n²)), which is at most
        (δ_t + c + q)² + v for q = η²h√dβ/(2n), v = η²dh²/(2n²); hence √E δ_t² ≤ (c + q)t + √(vt), and L times its mean over the
        iterates is at most L(c + q)T/2 + (2/3)L√(vT). Gradients that are wrong by e add 2ηe to c and 2η²h√d·e/n to v.
    """

    rounds: int
    num_users: int
    oracle: Oracle
    granularity: int
    distance: float
    diameter: float

    def _drift(self, step_size: float, smoothness: float) -> float:
        """The generalisation error, at most."""
        oracle, users = self.oracle, self.num_users
        width = 2 * oracle.lipschitz / self.granularity
        root = width * math.sqrt(oracle.dimension)
        pace = 2 * step_size * (oracle.lipschitz / users + oracle.bias) + step_size**2 * root * smoothness / (2 * users)
        spread = step_size**2 * (root**2 / (2 * users**2) + 2 * root * oracle.bias / users)
        return oracle.lipschitz * (pace * self.rounds / 2 + 2 / 3 * math.sqrt(spread * self.rounds))

    def value(self, step_size: float, *, smoothness: float) -> float | None:
        """The bound at this step size; None if it exceeds 2/β."""
        if step_size > 2 / smoothness * (1 + 1e-12):
            return None
        fit = sgd_bound(
            rounds=self.rounds,
            step_size=step_size,
            second_moment=self.oracle.second_moment(self.num_users),
            distance=self.distance,
            diameter=self.diameter,
            bias=self.oracle.bias,
        )
        return fit + self._drift(step_size, smoothness)

    def best_step(self, *, smoothness: float | None, lipschitz: float = 0.0) -> float:
        """The η that minimises the bound; with ``smoothness`` None, smoothing an L-Lipschitz loss by β = 2/η counts (ηL²/4)."""
        start = self.distance**2 / (2 * self.rounds)

        def slope(step: float) -> float:
            beta = 2 / step if smoothness is None else smoothness
            rough = lipschitz**2 / 4 if smoothness is None else 0.0
            return self.oracle.second_moment(self.num_users) / 2 + self._drift(step, beta) / step + rough

        if smoothness is None:  # the drift is then proportional to η
            return math.sqrt(start / slope(1.0))
        step = 2 / smoothness
        first = math.sqrt(start / slope(1e-12 * step))  # the slope grows with η: the best step is no longer than this
        found = minimize_scalar(
            lambda log_step: start / math.exp(log_step) + math.exp(log_step) * slope(math.exp(log_step)),
            bounds=(math.log(min(first, step)) - 12, math.log(min(first, step))),
            method="bounded",
            options={"xatol": 1e-6},
        )
        return min(math.exp(found.x), step)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Setting:
    """What a plan is made for.

    Attributes:
        dimension: d.
        num_users: n.
        reported: No report is longer.
        lipschitz: L of the loss, before smoothing.
        distance: D.
        diameter: Of the set.
        bias: Of the reports.
        budget: ε and δ of all rounds together.
    """

    dimension: int
    num_users: int
    reported: float
    lipschitz: float
    distance: float
    diameter: float
    bias: float
    budget: Budget

    def protocol(self, rounds: int) -> ShuffleVectorSum:
        """Of each of so many rounds."""
        return ShuffleVectorSum(
            self.num_users,
            self.dimension,
            self.reported,
            self.budget.epsilon,
            self.budget.delta,
            rounds=rounds,
            calibration=self.budget.calibration,
            honest_fraction=self.budget.honest_fraction,
        )

    def bound(self, rounds: int, *, variance: float, granularity: int) -> DescentBound:
        """What is proved for rounds with this noise."""
        return DescentBound(
            rounds=rounds,
            num_users=self.num_users,
            oracle=Oracle(lipschitz=self.reported, dimension=self.dimension, variance=variance, bias=self.bias),
            granularity=granularity,
            distance=self.distance,
            diameter=self.diameter,
        )


@dataclasses.dataclass(frozen=True)
class DescentPlan:
    """Rounds, their protocol, the best step, and what is proved."""

    protocol: ShuffleVectorSum
    bound: DescentBound
    step_size: float


def plan_descent(setting: Setting, *, rounds: int | None, smoothness: float | None) -> DescentPlan:
    """The best number of rounds, unless it is given, and the best step.

    Args:
        setting: See there.
        rounds: T, or None.
        smoothness: β, or None if the loss is to be smoothed by β = 2/η.

    Raises:
        ValueError: If no protocol meets the budget.
    """
    count = _best_rounds(setting, smoothness) if rounds is None else rounds
    protocol = setting.protocol(count)
    bound = setting.bound(count, variance=protocol.variance, granularity=protocol.granularity)
    return DescentPlan(protocol, bound, bound.best_step(smoothness=smoothness, lipschitz=setting.lipschitz))


def _best_rounds(setting: Setting, smoothness: float | None) -> int:
    """Of the candidates the one with the least bound, as far as that is known without building every protocol."""
    single = setting.protocol(1)
    candidates = descent_candidates(
        setting.bound(1, variance=single.variance, granularity=single.granularity).oracle, num_users=setting.num_users
    )

    def value(rounds: int) -> float:
        if setting.budget.calibration == "tight":  # as T grows the noise does in proportion, and the grid gets coarser
            bound = setting.bound(
                rounds,
                variance=rounds * single.variance,
                granularity=max(1, math.floor(single.granularity / math.sqrt(rounds))),
            )
        else:
            try:
                protocol = setting.protocol(rounds)
            except ValueError:  # more noise bits than anyone would send
                return math.inf
            bound = setting.bound(rounds, variance=protocol.variance, granularity=protocol.granularity)
        step = bound.best_step(smoothness=smoothness, lipschitz=setting.lipschitz)
        beta = 2 / step if smoothness is None else smoothness
        proved = bound.value(step, smoothness=beta)
        cost = setting.lipschitz**2 / (2 * beta) if smoothness is None else 0.0
        return math.inf if proved is None else proved + cost

    return min(candidates, key=value)
