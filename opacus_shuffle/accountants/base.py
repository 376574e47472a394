"""The Opacus side of every shuffle accountant: a history of Opacus's 3-tuples, n and B beside it, and bounds with a meaning.

>>> from opacus_shuffle.accountants import ShuffledCheckInAccountant
>>> accountant = ShuffledCheckInAccountant(num_users=60_000, local_noise=True)
>>> for _ in range(100):
...     accountant.step(noise_multiplier=5.0, sample_rate=0.1)
>>> accountant.history
[(5.0, 0.1, 100)]
>>> round(accountant.bound(1e-5, bound="tight").epsilon, 5)
0.00954
"""

from __future__ import annotations

import math
import warnings
from collections import OrderedDict
from collections.abc import Callable, Iterable
from typing import Any, ClassVar

from opacus.accountants import IAccountant
from opacus.optimizers import DPOptimizer

from opacus_shuffle.accountants.bounds import (
    Guarantee,
    PrivacyAssumptionWarning,
    PrivacyBound,
    bounds_of,
    compute_bound,
)
from opacus_shuffle.mechanisms import Mechanism
from opacus_shuffle.rounding import round_up
from opacus_shuffle.validation import (
    finite_number,
    open_unit_interval,
    positive,
    reject_unknown,
    sampling_rate,
    whole_number,
)


class ShuffleAccountant(IAccountant):
    """Accounts rounds of one mechanism; subclasses name it and say how a batch becomes one of its rounds.

    Args:
        num_users: n, the size of the data set. ``opacus_shuffle.PrivacyEngine`` sets it; a stock engine's step hook
            learns ``expected_batch_size / sample_rate``, which is n rounded down to whole batches.
        batch_size: B, reports per round; only used while n is unknown.
        local_noise: What the multipliers in ``history`` mean. ``False`` (Opacus): the noise of the sum, √B·σ.
            ``True``: each report's own σ.

    Attributes:
        history: ``[(noise_multiplier, sample_rate, steps), …]`` as Opacus writes and reads it.

    Formal Guarantees:
        See :mod:`opacus_shuffle.accountants.shuffle_gaussian_bounds`: ``bound="certified"`` alone covers every data set.
        With ``local_noise=False`` the noise was added once to the sum, so ε describes the shuffle protocol that this
        run emulates.
    """

    mechanism_class: ClassVar[type[Mechanism]]
    history: list[tuple[float, float, int]]

    def __init__(self, *, num_users: int | None = None, batch_size: int | None = None, local_noise: bool = False) -> None:
        super().__init__()
        self.num_users = None if num_users is None else whole_number("num_users", num_users)
        self.batch_size = None if batch_size is None else whole_number("batch_size", batch_size)
        self.local_noise = local_noise
        self._warned = False

    @classmethod
    def mechanism(cls) -> str:
        """The name under which Opacus knows this accountant."""
        return cls.mechanism_class.name

    def step(self, *, noise_multiplier: float, sample_rate: float) -> None:
        """Record one round; equal neighbours in the history are merged.

        Args:
            noise_multiplier: The optimizer's multiplier (local or summed, see ``local_noise``), above 0.
            sample_rate: Expected share of the users in the round, in (0, 1].
        """
        entry = (positive("noise_multiplier", noise_multiplier), sampling_rate("sample_rate", sample_rate))
        if self.history and tuple(self.history[-1][:2]) == entry:
            self.history[-1] = (*entry, self.history[-1][2] + 1)
        else:
            self.history.append((*entry, 1))

    def __len__(self) -> int:
        """Rounds so far."""
        return sum(steps for _, _, steps in self.history)

    def get_epsilon(
        self,
        delta: float,
        *,
        bound: str = "paper",
        adjacency: str = "zero_out",
        orders: Iterable[float] | None = None,
        num_users: int | None = None,
        batch_size: int | None = None,
        **unknown: Any,
    ) -> float:
        """ε spent so far at δ; the first one that does not cover every data set warns and names the value that does.

        Args:
            delta: δ in (0, 1).
            bound: ``"paper"``, ``"tight"`` or ``"certified"``.
            adjacency: ``"zero_out"``, or ``"replace"`` for ``bound="certified"``.
            orders: Rényi orders in place of the adaptive grid.
            num_users: n, if the accountant does not know it (Opacus's own calibration passes it here).
            batch_size: B, likewise.
            **unknown: Refused.

        Returns:
            ε, rounded up; 0 if nothing ran.

        Raises:
            ValueError: If n is unknown, an argument is out of range, or a keyword is unknown.
        """
        reject_unknown("get_epsilon", unknown, ["bound", "adjacency", "orders", "num_users", "batch_size"])
        open_unit_interval("delta", delta)
        if not self.history:
            return 0.0
        answer = self.bound(delta, bound=bound, adjacency=adjacency, orders=orders, num_users=num_users, batch_size=batch_size)
        if answer.guarantee is not Guarantee.PROVED and not self._warned:
            self._warned = True
            certified = self.bound(delta, bound="certified", adjacency=adjacency, num_users=num_users, batch_size=batch_size)
            warnings.warn(assumption(answer, certified, emulated=not self.local_noise), PrivacyAssumptionWarning, stacklevel=2)
        return answer.epsilon

    def bound(
        self,
        delta: float,
        *,
        bound: str = "paper",
        adjacency: str = "zero_out",
        orders: Iterable[float] | None = None,
        num_users: int | None = None,
        batch_size: int | None = None,
    ) -> PrivacyBound:
        """As :meth:`get_epsilon`, with the meaning attached and no warning; needs a history."""
        return compute_bound(
            self.rounds(num_users=num_users, batch_size=batch_size),
            delta=delta,
            bound=bound,
            adjacency=adjacency,
            orders=orders,
        )

    def all_bounds(self, delta: float) -> list[PrivacyBound]:
        """Every bound this accountant has, in order of registration."""
        return [self.bound(delta, bound=name) for name in bounds_of(self.mechanism_class)]

    def rounds(self, *, num_users: int | None = None, batch_size: int | None = None) -> list[tuple[Mechanism, int]]:
        """What ran: the history as mechanisms with the local σ."""
        users = self.num_users if num_users is None else whole_number("num_users", num_users)
        batch = self.batch_size if batch_size is None else whole_number("batch_size", batch_size)
        if users is None and batch is None:
            raise ValueError(
                f"{self.mechanism()} does not know num_users, the size of the data set: set engine.accountant.num_users = "
                "len(dataset), pass num_users=len(dataset) to make_private_with_epsilon or get_epsilon, or use "
                "opacus_shuffle.PrivacyEngine, which sets it"
            )
        rounds = []
        for noise_multiplier, sample_rate, steps in self.history:
            rate = sampling_rate("sample_rate", sample_rate)
            n = users if users is not None else max(1, round((batch or 1) / rate))
            reports = max(1.0, n * rate)  # whenever a batch is not empty it holds a report
            sigma = positive("noise_multiplier", noise_multiplier) / (1.0 if self.local_noise else math.sqrt(reports))
            count = whole_number("steps", steps)
            rounds.append((self._round(sigma, n, rate), count))
        return rounds

    def _round(self, sigma: float, num_users: int, sample_rate: float) -> Mechanism:
        """One round of this mechanism at local ``sigma``."""
        return self.mechanism_class(noise_multiplier=sigma, num_users=num_users, sample_rate=sample_rate)

    def get_optimizer_hook_fn(self, sample_rate: float) -> Callable[[DPOptimizer], None]:
        """The step hook of Opacus, which also learns n and B from an engine that does not know this accountant."""

        def record(optimizer: DPOptimizer) -> None:
            if self.num_users is None:
                batch = finite_number(
                    "expected_batch_size", (optimizer.expected_batch_size or 0) * getattr(optimizer, "world_size", 1)
                )
                if batch < 1:
                    raise ValueError(
                        f"expected_batch_size is {batch}, so num_users cannot be learned from it: set "
                        "engine.accountant.num_users = len(dataset) and use a larger batch, or use "
                        "opacus_shuffle.PrivacyEngine"
                    )
                self.batch_size = round(batch)
                self.num_users = round(batch / sample_rate)
            self.step(
                noise_multiplier=optimizer.noise_multiplier,
                sample_rate=min(1.0, sample_rate * optimizer.accumulated_iterations),
            )

        return record

    def state_dict(self, destination: Any = None) -> Any:
        """History, mechanism, n, B and the meaning of the multipliers."""
        destination = super().state_dict(OrderedDict() if destination is None else destination)
        destination.update(num_users=self.num_users, batch_size=self.batch_size, local_noise=self.local_noise)
        return destination

    def load_state_dict(self, state_dict: Any) -> None:
        """Restore a :meth:`state_dict`; refused whole if it is not one or speaks of another data set.

        Raises:
            ValueError: If a key is missing, the mechanism or n differs, or the history is not Opacus's 3-tuples.
        """
        before = self.history
        super().load_state_dict(state_dict)
        history, self.history = self.history, before
        try:
            entries = [
                (positive("noise_multiplier", sigma), sampling_rate("sample_rate", rate), whole_number("steps", steps))
                for sigma, rate, steps in history
            ]
        except TypeError:
            raise ValueError(f"history must hold (noise_multiplier, sample_rate, steps) triples, got {history!r}") from None
        users = state_dict.get("num_users")
        if self.num_users is not None and users is not None and users != self.num_users:
            raise ValueError(
                f"state_dict speaks of num_users={users}, this accountant of num_users={self.num_users}: load it into an "
                "engine made private with the same data set"
            )
        self.history = entries
        self.num_users = self.num_users if users is None else users
        self.batch_size = state_dict.get("batch_size", self.batch_size)
        self.local_noise = state_dict.get("local_noise", self.local_noise)


def assumption(answer: PrivacyBound, certified: PrivacyBound, *, emulated: bool = False) -> str:
    """The one sentence that goes with an ε that is not proved for every data set."""
    return (
        f"epsilon={round_up(answer.epsilon)} (bound={answer.bound!r}, delta={answer.delta:.3g}) covers {answer.covers}"
        f"{' (and the noise was added once to the sum, emulating local reports)' if emulated else ''}, which is no guarantee "
        f"for every data set; proved for every data set is epsilon={round_up(certified.epsilon)} (bound={certified.bound!r})"
    )
