"""The Opacus side of every shuffle accountant: a history of Opacus's 3-tuples, n and B beside it, and bounds with a meaning.

>>> from opacus_shuffle.accountants import ShuffledCheckInAccountant
>>> accountant = ShuffledCheckInAccountant(num_users=60_000, local_noise=True)
>>> for _ in range(100):
...     accountant.step(noise_multiplier=5.0, sample_rate=0.1)
>>> accountant.history
[(5.0, 0.1, 100)]
>>> round(accountant.bound(1e-5, bound="pair").epsilon, 4)
0.006
"""

from __future__ import annotations

import math
import warnings
from collections import OrderedDict
from collections.abc import Callable, Iterable
from typing import Any, ClassVar

from opacus.accountants import IAccountant
from opacus.optimizers import DPOptimizer

from opacus_shuffle.accountants.bounds.registry import (
    Guarantee,
    PrivacyAssumptionWarning,
    PrivacyBound,
    bounds_of,
    compute_bound,
)
from opacus_shuffle.accountants.mechanisms import Mechanism
from opacus_shuffle.accountants.report import PrivacyReport
from opacus_shuffle.analysis.mean_ratio import MAX_ORDER
from opacus_shuffle.core.guarantees import Adjacency
from opacus_shuffle.core.opacus_compat import POISSON_SAMPLERS, stock_engine_loader
from opacus_shuffle.core.rounding import round_up
from opacus_shuffle.core.validation import (
    boolean,
    finite_number,
    integer,
    noise_level,
    one_of,
    open_unit_interval,
    reject_unknown,
    renyi_orders,
    sampling_rate,
)
from opacus_shuffle.engine.sampling.fixed_size_sampler import FixedSizeSampler


class ShuffleAccountant(IAccountant):
    """Accounts rounds of one mechanism; subclasses name it and say how a batch becomes one of its rounds.

    Args:
        num_users: n, the size of the data set. ``opacus_shuffle.PrivacyEngine`` sets it; on a stock engine the step hook
            learns it.
        batch_size: B, reports per round. Used for n while n is unknown; where it exceeds n·γ, the noise of the sum is
            divided by its root.
        local_noise: What the multipliers in ``history`` mean. ``False`` (Opacus): the noise of the sum, √B·σ.
            ``True``: each report's own σ.

    Attributes:
        history: ``[(noise_multiplier, sample_rate, steps), …]`` as Opacus writes and reads it.

    Formal Guarantees:
        See :mod:`opacus_shuffle.accountants.bounds.shuffle_gaussian`: ``bound="certified"`` and ``"certified_sharp"`` alone
        cover every data set.
        With ``local_noise=False`` the noise was added once to the sum, so ε describes the shuffle protocol that this
        run emulates.
    """

    mechanism_class: ClassVar[type[Mechanism]]
    divides_noise: ClassVar[bool] = True
    """Whether noise added once to the sum stands for noise in each report."""
    history: list[tuple[float, float, int]]

    def __init__(self, *, num_users: int | None = None, batch_size: int | None = None, local_noise: bool = False) -> None:
        super().__init__()
        self.num_users = _optional_count("num_users", num_users)
        self.batch_size = _optional_count("batch_size", batch_size)
        self.local_noise = boolean("local_noise", local_noise)
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
        entry = (noise_level("noise_multiplier", noise_multiplier), sampling_rate("sample_rate", sample_rate))
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
        bound: str = "published",
        adjacency: str = "zero_out",
        orders: Iterable[float] | None = None,
        num_users: int | None = None,
        batch_size: int | None = None,
        **unknown: Any,
    ) -> float:
        """ε spent so far at δ; the first one that does not cover every data set warns and names the value that does.

        Args:
            delta: δ in (0, 1).
            bound: ``"published"``, ``"pair"``, ``"certified"`` or ``"certified_sharp"``.
            adjacency: ``"zero_out"``, or ``"replace"`` for the certified bounds.
            orders: Rényi orders in place of the adaptive grid, for ``"published"``.
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
        one_of("bound", bound, bounds_of(self.mechanism_class))
        adjacency = Adjacency(adjacency)
        orders = None if orders is None else renyi_orders(orders, maximum=MAX_ORDER)  # once, should it be a generator
        if not self.history:
            return 0.0
        answer = self.bound(delta, bound=bound, adjacency=adjacency, orders=orders, num_users=num_users, batch_size=batch_size)
        if not self._warned:
            self._warned = answer.guarantee is not Guarantee.PROVED
            self.warn_of_assumption(
                delta, bound=bound, adjacency=adjacency, orders=orders, num_users=num_users, batch_size=batch_size
            )
        return answer.epsilon

    def bound(
        self,
        delta: float,
        *,
        bound: str = "published",
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

    def warn_of_assumption(self, delta: float, *, bound: str = "published", **options: Any) -> None:
        """Warn if this bound is not proved for every data set, naming the value that is (options as :meth:`bound`)."""
        answer = self.bound(delta, bound=bound, **options)
        if answer.guarantee is not Guarantee.PROVED:
            options.pop("orders", None)
            certified = self.bound(delta, bound="certified", **options)
            sentence = assumption(answer, certified, emulated=self.divides_noise and not self.local_noise)
            warnings.warn(sentence, PrivacyAssumptionWarning, stacklevel=4)

    def all_bounds(self, delta: float) -> list[PrivacyBound]:
        """Every bound this accountant has, in order of registration."""
        return [self.bound(delta, bound=name) for name in bounds_of(self.mechanism_class)]

    def report(self, delta: float, *, adjacency: str = "zero_out") -> PrivacyReport:
        """Every bound, and what the same noise would give under other trust models; needs a history."""
        emulated = self.divides_noise and not self.local_noise
        return PrivacyReport(self.rounds(), delta=delta, adjacency=adjacency, simulated=self.divides_noise, emulated=emulated)

    def rounds(self, *, num_users: int | None = None, batch_size: int | None = None) -> list[tuple[Mechanism, int]]:
        """What ran: the history as mechanisms with the local σ."""
        users = self.num_users if num_users is None else integer("num_users", num_users)
        if self.num_users is not None and users != self.num_users:
            raise ValueError(f"num_users is known to be {self.num_users}, got {num_users}: leave it out")
        batch = self.batch_size if batch_size is None else integer("batch_size", batch_size)
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
            sigma = noise_level("noise_multiplier", noise_multiplier)
            if not self.local_noise and self.divides_noise:
                sigma /= math.sqrt(max(1, n * rate, batch or 1))  # that many, or a few more, share the noise of the sum
            count = integer("steps", steps)
            rounds.append((self._round(sigma, n, rate), count))
        return rounds

    def _round(self, sigma: float, num_users: int, sample_rate: float) -> Mechanism:
        """One round of this mechanism at its own ``sigma``."""
        return self.mechanism_class(noise_multiplier=sigma, num_users=num_users, sample_rate=sample_rate)

    def get_optimizer_hook_fn(self, sample_rate: float) -> Callable[[DPOptimizer], None]:
        """The step hook of Opacus, which also learns n and B from an engine that does not know this accountant.

        Raises:
            ValueError: If a stock engine's ``make_private`` asks, and its batches are no random samples as accounted.
        """
        loader = stock_engine_loader("opacus_shuffle.engine.privacy_engine")
        users = None if loader is None else len(loader.dataset)  # type: ignore[arg-type]
        if loader is not None and self.mechanism_class.sampling is not None:
            sampled = (
                (*POISSON_SAMPLERS, FixedSizeSampler) if self.mechanism_class.sampling == "fixed_size" else POISSON_SAMPLERS
            )
            if not isinstance(loader.batch_sampler, sampled):
                raise ValueError(
                    f"{self.mechanism()} accounts for batches that are random samples, got a loader with a "
                    f"{type(loader.batch_sampler).__name__} (poisson_sampling=False?): leave poisson_sampling out, use "
                    "opacus_shuffle.PrivacyEngine, or account with 'shuffle_gauss'; make the model and optimizer anew"
                )

        def record(optimizer: DPOptimizer) -> None:
            self._check_step(optimizer)
            if self.num_users is None:
                self._learn(optimizer, sample_rate, users)
            self.step(
                noise_multiplier=optimizer.noise_multiplier,
                sample_rate=min(1.0, sample_rate * optimizer.accumulated_iterations),
            )

        return record

    def _check_step(self, optimizer: DPOptimizer) -> None:
        """Refuse a step that is not what is accounted."""

    def _learn(self, optimizer: DPOptimizer, sample_rate: float, users: int | None) -> None:
        """Take n and B from a stock engine's optimizer, whose batch size is rounded down: n down too, but B up."""
        batch = finite_number("expected_batch_size", (optimizer.expected_batch_size or 0) * getattr(optimizer, "world_size", 1))
        if batch < 1:
            raise ValueError(
                f"expected_batch_size is {batch}, so the gradients were divided by nothing: use a larger batch, or "
                "opacus_shuffle.PrivacyEngine, which computes it in whole numbers"
            )
        if users is None:
            self.num_users, self.batch_size = round(batch / sample_rate), math.floor(batch) + 1
        else:
            self.num_users, self.batch_size = users, math.ceil(users * sample_rate - 1e-6)

    def state_dict(self, destination: Any = None) -> Any:
        """History, mechanism, n, B and the meaning of the multipliers."""
        destination = super().state_dict(OrderedDict() if destination is None else destination)
        destination.update(num_users=self.num_users, batch_size=self.batch_size, local_noise=self.local_noise)
        return destination

    def load_state_dict(self, state_dict: Any) -> None:
        """Restore a :meth:`state_dict`; refused whole if it is not one, or speaks of another data set or kind of noise.

        Raises:
            ValueError: If a key is missing or malformed, the mechanism differs, or an engine has already made this
                accountant account for another n or another ``local_noise``.
        """
        before = self.history
        super().load_state_dict(state_dict)
        history, self.history = self.history, before
        triples = isinstance(history, (tuple, list)) and all(
            isinstance(entry, (tuple, list)) and len(entry) == 3 for entry in history
        )
        if not triples:
            raise ValueError(f"history must hold (noise_multiplier, sample_rate, steps) triples, got {history!r}")
        entries = [
            (noise_level("noise_multiplier", sigma), sampling_rate("sample_rate", rate), integer("steps", steps))
            for sigma, rate, steps in history
        ]
        users = _optional_count("num_users", state_dict.get("num_users"))
        batch = _optional_count("batch_size", state_dict.get("batch_size"))
        local_noise = boolean("local_noise", state_dict.get("local_noise", self.local_noise))
        if self.num_users is not None and (users, local_noise) != (self.num_users, self.local_noise):
            raise ValueError(
                f"state_dict speaks of num_users={users}, local_noise={local_noise}, this accountant of "
                f"num_users={self.num_users}, local_noise={self.local_noise}: load it into an engine made private with the "
                "same data set and the same kind of noise"
            )
        self.history, self.num_users, self.batch_size, self.local_noise = entries, users, batch, local_noise


def _optional_count(name: str, value: Any) -> int | None:
    """A whole number of at least 1, or None."""
    return None if value is None else integer(name, value)


def assumption(answer: PrivacyBound, certified: PrivacyBound, *, emulated: bool = False) -> str:
    """The one sentence that goes with an ε that is not proved for every data set."""
    how = " (and the noise was added once to the sum, emulating batches of the expected size)" if emulated else ""
    return (
        f"epsilon={round_up(answer.epsilon)} (bound={answer.bound!r}, delta={answer.delta:.3g}) covers {answer.covers}"
        f"{how}, which is no guarantee "
        f"for every data set; proved for every data set is epsilon={round_up(certified.epsilon)} (bound={certified.bound!r})"
    )
