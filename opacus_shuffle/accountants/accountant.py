"""Accounts a training run for Opacus: records every round as a mechanism, and answers with any bound on them.

>>> from opacus_shuffle.accountants.mechanisms import ShuffledCheckIn
>>> accountant = ShuffleAccountant(ShuffledCheckIn, num_users=60_000, local_noise=True)
>>> for _ in range(100):
...     accountant.step(noise_multiplier=5.0, sample_rate=0.1)
>>> accountant.rounds
[(ShuffledCheckIn(noise_multiplier=5.0, num_users=60000, sample_rate=0.1), 100)]
>>> accountant.history
[(5.0, 0.1, 100)]
>>> round(accountant.get_epsilon(1e-5), 3)
0.012
"""

from __future__ import annotations

import copy
import dataclasses
import math
import warnings
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from opacus.optimizers import DPOptimizer

from opacus_shuffle.accountants.bounds.registry import bounds_of, compute_bound
from opacus_shuffle.accountants.flag_warnings import little_noise, unread_flags
from opacus_shuffle.accountants.history import RecordedRounds, optional_count
from opacus_shuffle.accountants.lineage import rewound_sentence
from opacus_shuffle.accountants.report import PrivacyReport
from opacus_shuffle.analysis.mean_ratio import MAX_ORDER
from opacus_shuffle.core.guarantees import (
    Adjacency,
    Guarantee,
    PrivacyAssumptionWarning,
    PrivacyBound,
)
from opacus_shuffle.core.opacus_compat import POISSON_SAMPLERS, stock_engine_call
from opacus_shuffle.core.randomness import is_secret
from opacus_shuffle.core.rounding import round_up
from opacus_shuffle.core.validation import finite_number, one_of, open_unit_interval, renyi_orders

_STOCK_GENERATOR = "the state of the generator of opacus.PrivacyEngine's noise, which is no cipher,"


class ShuffleAccountant(RecordedRounds):
    """Accounts for the rounds of one run, all of one mechanism.

    Arguments and attributes are those of
    :class:`~opacus_shuffle.accountants.history.RecordedRounds`.

    Formal Guarantees:
        Those of the bound; ``bound="certified"``, the default, is proved for every data set.
    """

    def get_epsilon(
        self,
        delta: float,
        *,
        bound: str = "certified",
        adjacency: str = "zero_out",
        orders: Iterable[float] | None = None,
        **fields: Any,
    ) -> float:
        """Returns ε spent so far; warns once if it does not cover every data set, and names the value that does.

        Args:
            delta: δ in (0, 1).
            bound: ``"certified"``, ``"pair"``, ``"published"``, or another that the mechanism has.
            adjacency: ``"zero_out"`` or ``"replace"``, for which some bounds have no value.
            orders: Rényi orders in place of the adaptive grid, for bounds that use any.
            **fields: What the accountant does not know: ``num_users``, n (Opacus's own calibration
                passes it here), ``batch_size``, B, and other fields of the mechanism.

        Returns:
            ε, rounded up; 0 if nothing ran.

        Raises:
            ValueError: If something is unknown, out of range or contradicts what is known, or a
                keyword is unknown.
        """
        told = self._with_fields(fields)
        open_unit_interval("delta", delta)
        one_of("bound", bound, bounds_of(self.mechanism_class))
        Adjacency(adjacency)
        orders = (
            None if orders is None else renyi_orders(orders, maximum=MAX_ORDER)
        )  # once, should it be a generator
        if self.rewound:
            warnings.warn(rewound_sentence(self.rewound), PrivacyAssumptionWarning, stacklevel=3)
        if not len(self):
            return 0.0
        answer = told.bound(delta, bound=bound, adjacency=adjacency, orders=orders)
        if not self._warned and answer.guarantee is not Guarantee.PROVED:
            self._warned = True
            sentence = assumption(
                answer, told.bound(delta, adjacency=adjacency), emulated=self.emulated
            )
            warnings.warn(sentence, PrivacyAssumptionWarning, stacklevel=3)
        return answer.epsilon

    def _with_fields(self, facts: dict[str, Any]) -> ShuffleAccountant:
        """Returns an accountant of the same rounds that knows these fields, too; refuses what contradicts what is known."""
        given = {name: value for name, value in facts.items() if value is not None}
        told = copy.copy(self)
        for name in ("num_users", "batch_size"):
            known, asked = getattr(self, name), optional_count(name, given.pop(name, None))
            if known is not None and asked not in (None, known):
                raise ValueError(f"{name} is known to be {known}, got {asked}: leave it out")
            setattr(told, name, asked if known is None else known)
        if self._recorded() and (told.num_users, told.batch_size) != (
            self.num_users,
            self.batch_size,
        ):
            raise ValueError(
                f"every round is known, up to {self._recorded()[-1]}: leave out num_users and "
                "batch_size"
            )
        told._fields = {**self._fields, **self._known_fields(given)}
        if not self._unknown():
            known = self.planned or (self.rounds[-1][0] if self.rounds else None)
            if known is not None and dataclasses.replace(known, **given) != known:
                raise ValueError(f"a round is known to be {known}, got {given}: leave it out")
        return told

    def bound(self, delta: float, **options: Any) -> PrivacyBound:
        """Returns ε with its meaning, and does not warn; needs at least one round.

        Args:
            delta: δ in (0, 1).
            **options: ``bound``, ``adjacency`` and ``orders``, as :meth:`get_epsilon` takes them.
        """
        return compute_bound(self.rounds, delta=delta, **options)

    def report(
        self,
        delta: float,
        *,
        adjacency: str = "zero_out",
        max_grad_norms: Sequence[float] = (),
    ) -> PrivacyReport:
        """Returns every bound, and what the same noise would give under other trust models; needs at least one round.

        Args:
            delta: δ in (0, 1).
            adjacency: ``"zero_out"`` or ``"replace"``.
            max_grad_norms: What rounds were clipped to, for the statement: no bound depends on it.
        """
        simulated = self.mechanism_class.shuffled
        return PrivacyReport(
            self.rounds,
            delta=delta,
            adjacency=adjacency,
            simulated=simulated,
            emulated=self.emulated,
            rewound=self.rewound,
            predictable=self.predictable,
            max_grad_norms=max_grad_norms,
            num_users=self.num_users,
            unchecked=self.unchecked,
        )

    def get_optimizer_hook_fn(self, sample_rate: float) -> Callable[[DPOptimizer], None]:
        """Returns the step hook of a stock engine, which also learns n and B from it.

        Raises:
            ValueError: If the engine's batches are no random samples as accounted, or it cannot add
                such noise.

        Warns:
            UserWarning: If the engine was given flags that it does not read; and at the first step,
                if a noise multiplier that is the sum's was likely meant for each report.
        """
        kind = self.mechanism_class
        if self.planned is None and not kind.trains_on_stock_engines:
            raise ValueError(
                f"{kind.name} is not what Opacus's engine does: train with "
                "opacus_shuffle.PrivacyEngine"
            )
        loader, unread = stock_engine_call()
        users = None if loader is None else len(loader.dataset)  # type: ignore[arg-type]
        expected = kind.sampling if self.planned is None else self.planned.sampling
        if loader is not None:
            sampler = loader.batch_sampler
            # A fixed-size sampler says so: it belongs to the engine, a storey above.
            drawn = (
                "poisson"
                if isinstance(sampler, POISSON_SAMPLERS)
                else getattr(sampler, "sampling", None)
            )
            if expected is not None and drawn not in ("poisson", expected):
                raise ValueError(
                    f"{kind.name} accounts for batches that are random samples, got a loader with "
                    "a "
                    f"{type(sampler).__name__} (poisson_sampling=False?): leave poisson_sampling "
                    "out, use "
                    "opacus_shuffle.PrivacyEngine, or account with 'shuffle_gauss'; make the model "
                    "and optimizer anew"
                )
            if drawn == "poisson" and expected != "poisson":
                warnings.warn(
                    f"opacus.PrivacyEngine draws every record by a coin of its own, {kind.name} "
                    "accounts for batches of one "
                    "size: its epsilon is that of batches of the expected size, and no guarantee "
                    "of these; use "
                    "opacus_shuffle.PrivacyEngine, which draws such batches, or "
                    "accountant='shuffled_checkin'",
                    PrivacyAssumptionWarning,
                    stacklevel=3,
                )
        if sentence := unread_flags(unread):
            warnings.warn(sentence, stacklevel=3)
        stepped = False

        def record(optimizer: DPOptimizer) -> None:
            nonlocal stepped
            if self.num_users is None:
                self._learn(optimizer, sample_rate, users)
            sigma, rate = (
                optimizer.noise_multiplier,
                min(1.0, sample_rate * optimizer.accumulated_iterations),
            )
            if not self._unknown():
                mechanism = self._round(sigma, rate)
                mechanism.check_optimizer(optimizer)
                if self.emulated and not stepped and (sentence := little_noise(mechanism, sigma)):
                    warnings.warn(
                        sentence, stacklevel=4
                    )  # the hook is called by the optimizer's step
            stepped = True
            if not is_secret(optimizer.generator):
                self.predictable = tuple(dict.fromkeys((*self.predictable, _STOCK_GENERATOR)))
            self.step(noise_multiplier=sigma, sample_rate=rate)

        return record

    def _learn(self, optimizer: DPOptimizer, sample_rate: float, users: int | None) -> None:
        """Takes n and B from a stock engine's optimizer, whose batch size is rounded down: n down too, but B up."""
        batch = finite_number(
            "expected_batch_size",
            (optimizer.expected_batch_size or 0) * getattr(optimizer, "world_size", 1),
        )
        if batch < 1:
            raise ValueError(
                f"expected_batch_size is {batch}, so the gradients were divided by nothing: use a "
                "larger batch, or "
                "opacus_shuffle.PrivacyEngine, which computes it in whole numbers"
            )
        if users is None:
            self.num_users, self.batch_size = round(batch / sample_rate), math.floor(batch) + 1
        else:
            self.num_users, self.batch_size = users, math.ceil(users * sample_rate - 1e-6)


def assumption(answer: PrivacyBound, certified: PrivacyBound, *, emulated: bool = False) -> str:
    """Returns the one sentence that goes with an ε that is not proved for every data set."""
    how = (
        " (and the noise was added once to the sum, emulating batches of the expected size)"
        if emulated
        else ""
    )
    return (
        f"epsilon={round_up(answer.epsilon)} (bound={answer.bound!r}, delta={answer.delta:.3g}) "
        f"covers {answer.covers}{how}, "
        "which is no guarantee for every data set; proved for every data set is "
        f"epsilon={round_up(certified.epsilon)} (bound={certified.bound!r})"
    )
