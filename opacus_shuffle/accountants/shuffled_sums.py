"""``shuffled_sums``: training with multi-message shuffled sums (SCO Algorithm 2) in place of Gaussian noise.

The history holds Opacus's 3-tuples, its multiplier being 2/μ, the Gaussian mechanism on the sum that covers a round. What the
protocol is stands beside it, and is one and the same for all rounds.

>>> from opacus_shuffle.protocols.vector_sum import ShuffleVectorSum
>>> protocol = ShuffleVectorSum(500, 1000, 1.0, epsilon=1.0, delta=1e-6, calibration="tight")
>>> accountant = ShuffledSumsAccountant(num_users=50_000, aggregator=protocol)
>>> for _ in range(1000):
...     accountant.step(noise_multiplier=accountant.noise_multiplier, sample_rate=0.01)
>>> [round(accountant.bound(1e-5, bound=name).epsilon, 2) for name in ("published", "certified")]
[963.6, 0.27]
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, ClassVar

from opacus.optimizers import DPOptimizer

from opacus_shuffle.accountants.base import ShuffleAccountant
from opacus_shuffle.accountants.bounds.registry import PrivacyBound
from opacus_shuffle.accountants.mechanisms import Mechanism, ShuffledSums
from opacus_shuffle.accountants.report import PrivacyReport
from opacus_shuffle.core.validation import integer, noise_level, positive

if TYPE_CHECKING:
    from opacus_shuffle.protocols.vector_sum import ShuffleVectorSum

_REMEDY = (
    "train with opacus_shuffle.PrivacyEngine(accountant='shuffled_sums').make_private(..., aggregator=ShuffleVectorSum(...))"
)
_FIELDS = (
    "dimension",
    "granularity",
    "noise_trials",
    "bit_probability",
    "lost",
    "epsilon",
    "delta",
    "calibration",
    "honest_fraction",
)


class ShuffledSumsAccountant(ShuffleAccountant):
    """Accounts rounds of one :class:`~opacus_shuffle.protocols.vector_sum.ShuffleVectorSum` on fresh samples of fixed size.

    Args:
        num_users: n, the size of the data set.
        batch_size: B, the protocol's ``num_users``; known with the protocol.
        local_noise: Must be False: every report's noise bits are in the protocol.
        aggregator: The protocol; ``opacus_shuffle.PrivacyEngine`` sets it.

    Attributes:
        protocol: What the bounds need to know of the protocol, plain values; None while it is unknown.

    Formal Guarantees:
        See :mod:`opacus_shuffle.accountants.bounds.shuffled_sums`: every bound is proved for every data set.
    """

    mechanism_class: ClassVar[type[Mechanism]] = ShuffledSums
    divides_noise: ClassVar[bool] = False

    def __init__(
        self,
        *,
        num_users: int | None = None,
        batch_size: int | None = None,
        local_noise: bool = False,
        aggregator: ShuffleVectorSum | None = None,
    ) -> None:
        super().__init__(num_users=num_users, batch_size=batch_size, local_noise=local_noise)
        if local_noise:
            raise ValueError("shuffled_sums has its noise in the reports' own bits: leave out local_noise=True")
        self.protocol: dict[str, Any] | None = None
        if aggregator is not None:
            self.describe_protocol(aggregator)

    @property
    def noise_multiplier(self) -> float:
        """2/μ of the protocol, what every step has.

        Raises:
            ValueError: If the protocol is unknown.
        """
        return float(self._known()["noise_multiplier"])

    def describe_protocol(self, aggregator: ShuffleVectorSum, *, once: bool = False) -> None:
        """Say which protocol sums the reports.

        Args:
            aggregator: The protocol.
            once: Refuse another one even before the first step: an earlier one may be of a run that is still going on.

        Raises:
            ValueError: If rounds of another protocol are accounted already; then nothing is changed.
        """
        described = describe(aggregator)
        if (self.history or once) and self.protocol is not None and described != self.protocol:
            raise ValueError(
                f"shuffled_sums accounts for rounds of one protocol, {self.protocol}, got {described}: use a new PrivacyEngine"
            )
        self.protocol, self.batch_size = described, described["reports"]

    def _known(self) -> dict[str, Any]:
        if self.protocol is None:
            raise ValueError(f"shuffled_sums does not know its protocol: {_REMEDY}, or call describe_protocol(aggregator)")
        return self.protocol

    def _round(self, sigma: float, num_users: int, sample_rate: float) -> ShuffledSums:
        known = self._known()
        if not math.isclose(sigma, known["noise_multiplier"], rel_tol=1e-9):
            raise ValueError(
                f"noise_multiplier is {sigma} in the history, the protocol's is {known['noise_multiplier']}: a protocol's "
                "noise is fixed; use a new PrivacyEngine for another one"
            )
        round_ = ShuffledSums(
            noise_multiplier=known["noise_multiplier"],
            num_users=num_users,
            sample_rate=sample_rate,
            **{field: known[field] for field in _FIELDS},
        )
        if round(round_.expected_reports) != known["reports"]:
            raise ValueError(
                f"sample_rate={sample_rate!r} of num_users={num_users} records are {round(round_.expected_reports)} reports, "
                f"the protocol sums {known['reports']}: build it with num_users = batch size"
            )
        return round_

    def get_epsilon(self, delta: float, *, bound: str = "certified", **options: Any) -> float:
        """ε spent so far at δ, see :meth:`ShuffleAccountant.get_epsilon`.

        Both bounds are proved here, so the default is the one that is not a hundred times too large.
        """
        return super().get_epsilon(delta, bound=bound, **options)

    def bound(self, delta: float, *, bound: str = "certified", **options: Any) -> PrivacyBound:
        """As :meth:`get_epsilon`, with the meaning attached; needs a history."""
        return super().bound(delta, bound=bound, **options)

    def report(self, delta: float, *, adjacency: str = "zero_out") -> PrivacyReport:
        """Every bound, and what a trusted server with the same noise would give; needs a history."""
        return PrivacyReport(self.rounds(), delta=delta, adjacency=adjacency, simulated=True)

    def get_optimizer_hook_fn(self, sample_rate: float) -> Callable[[DPOptimizer], None]:
        """The step hook, see :meth:`ShuffleAccountant.get_optimizer_hook_fn`.

        Raises:
            ValueError: If a stock engine asks: it has no such optimizer.
        """
        self._known()
        return super().get_optimizer_hook_fn(sample_rate)

    def _check_step(self, optimizer: DPOptimizer) -> None:
        aggregator = getattr(optimizer, "aggregator", None)
        if aggregator is None:
            raise ValueError(f"this optimizer adds no shuffled sums' noise, got a {type(optimizer).__name__}: {_REMEDY}")
        known = self._known()
        if not math.isclose(optimizer.noise_multiplier, known["noise_multiplier"], rel_tol=1e-9):
            raise ValueError(
                f"noise_multiplier of the optimizer is {optimizer.noise_multiplier}, the protocol's is "
                f"{known['noise_multiplier']}: its noise is fixed, no schedule changes it; leave noise_multiplier alone"
            )
        if describe(aggregator) != known:
            raise ValueError(
                "optimizer.aggregator was changed after make_private: shuffled_sums accounts for the protocol that "
                "make_private got; call it on a new engine"
            )

    def state_dict(self, destination: Any = None) -> Any:
        """History, n, and the protocol's parameters."""
        destination = super().state_dict(destination)
        destination["protocol"] = None if self.protocol is None else dict(self.protocol)
        return destination

    def load_state_dict(self, state_dict: Any) -> None:
        """Restore a :meth:`state_dict`; refused whole if it speaks of another protocol than an engine's.

        Raises:
            ValueError: See :meth:`ShuffleAccountant.load_state_dict`.
        """
        if not isinstance(state_dict, dict) or "protocol" not in state_dict:
            got = sorted(state_dict) if isinstance(state_dict, dict) else repr(state_dict)
            raise ValueError(f"state_dict of shuffled_sums must hold protocol, got {got}")
        saved = state_dict["protocol"]
        if saved is not None:
            keys = {*_FIELDS, "noise_multiplier", "reports", "max_norm"}
            if not isinstance(saved, dict) or set(saved) != keys:
                raise ValueError(f"protocol in state_dict must hold {', '.join(sorted(keys))}, got {saved!r}")
            if self.protocol is not None and not _same(saved, self.protocol):
                raise ValueError(
                    f"state_dict speaks of {saved}, this accountant of {self.protocol}: make the same run private, with the "
                    "same protocol"
                )
        elif self.protocol is not None or state_dict.get("history"):
            raise ValueError("state_dict holds no protocol: it is of an accountant that never ran")
        probe = type(self)()
        probe.protocol = saved
        ShuffleAccountant.load_state_dict(probe, state_dict)
        if saved is not None:
            if probe.batch_size not in (None, saved["reports"]):
                raise ValueError(f"batch_size={probe.batch_size} in state_dict, its protocol sums {saved['reports']} reports")
            users = probe.num_users or integer("reports", saved["reports"])
            probe._round(noise_level("noise_multiplier", saved["noise_multiplier"]), users, saved["reports"] / users)
            positive("max_norm", saved["max_norm"])
        if probe.history:
            probe.rounds()  # refuses what no such run can have
        known = self.protocol
        super().load_state_dict(state_dict)
        self.protocol = known if known is not None or saved is None else dict(saved)


def _same(one: dict[str, Any], other: dict[str, Any]) -> bool:
    """Whether two descriptions are of one protocol: what was computed may differ as much as another SciPy's tails do."""
    loose = {"noise_multiplier": 1e-6, "lost": 1.0, "epsilon": 1e-6}
    return set(one) == set(other) and all(
        one[key] == other[key]
        or (
            key in loose
            and all(isinstance(v, float) for v in (one[key], other[key]))
            and _near(one[key], other[key], loose[key])
        )
        for key in one
    )


def _near(one: float, other: float, tolerance: float) -> bool:
    return abs(one - other) <= tolerance * max(abs(one), abs(other))


def describe(aggregator: ShuffleVectorSum) -> dict[str, Any]:
    """What the accountant keeps of a protocol: plain values."""
    return {
        "reports": aggregator.num_users,
        "max_norm": aggregator.max_norm,
        "noise_multiplier": noise_multiplier_of(aggregator),
        "dimension": aggregator.dimension,
        "granularity": aggregator.granularity,
        "noise_trials": aggregator.sum_round.noise.trials,
        "bit_probability": aggregator.bit_probability,
        "lost": aggregator.lost,
        "epsilon": aggregator.round_epsilon,
        "delta": aggregator.round_delta,
        "calibration": aggregator.calibration,
        "honest_fraction": aggregator.honest_fraction,
    }


def noise_multiplier_of(aggregator: ShuffleVectorSum) -> float:
    """2/μ, rounded down so that 2 over it is no less than μ."""
    return math.nextafter(2 / aggregator.mu, 0.0)
