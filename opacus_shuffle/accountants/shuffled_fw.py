"""``shuffled_fw``: DP-SGD with shuffled weights (WS Algorithm 1), accounted as WS does, and as it should be.

The default, ``bound="published"``, is WS Theorem 6 (Fenton and Wilkinson's approximation) with advanced composition: an
**estimate** that is below the exact ε of a pair it should cover (``bound="pair"``). ``bound="certified"`` is DP-SGD's own ε at
the same noise, the only one that holds for every data set and for whoever sees the weights.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, ClassVar

from opacus.optimizers import DPOptimizer

from opacus_shuffle.accountants.base import ShuffleAccountant
from opacus_shuffle.accountants.mechanisms import Mechanism, ShuffledWeights
from opacus_shuffle.core.validation import finite_number, integer, positive
from opacus_shuffle.engine.optimizers.batch_clipping import BatchClipping

WEIGHTS = ("dimension", "clip", "batch_clip", "unshuffled_noise_ratio", "orbit")
"""What the accountant needs to know of a run besides its noise."""


class ShuffledWeightsAccountant(ShuffleAccountant):
    """Accounts steps of DP-SGD whose weights are permuted; multipliers in the history are those of the sum, as in Opacus.

    Args:
        num_users: n, the size of the data set; no bound depends on it.
        batch_size: Not used.
        local_noise: Must be False: the server adds the noise.
        dimension: d, the number of parameters that are permuted (``opacus_shuffle.PrivacyEngine`` counts them); 1 is plain
            DP-SGD; a sequence is WS's theorem read layer by layer.
        clip: c, the norm that each record's gradient is clipped to (``max_grad_norm``).
        batch_clip: c′, the norm that the sum of the permuted parameters' gradients is clipped to; by default c.
        unshuffled_noise_ratio: σ₀/σ ≥ 1 of the parameters that are not permuted; None if there are none.
        orbit: The fewest places that a permuted entry can get to, for ``pair``; by default d, as WS has it.

    On a stock engine nothing is permuted and no sum is clipped: there ``published`` and ``pair`` speak of a run that would do so.

    >>> accountant = ShuffledWeightsAccountant(num_users=50_000, dimension=85_800_000)
    >>> accountant.history = [(0.2738, 0.02, 500)]
    >>> [round(accountant.bound(5e-6, bound=name).epsilon, 1) for name in ("published", "pair", "certified")]
    [0.4, 1.9, 107.9]
    """

    mechanism_class: ClassVar[type[Mechanism]] = ShuffledWeights
    divides_noise: ClassVar[bool] = False

    def __init__(
        self,
        *,
        num_users: int | None = None,
        batch_size: int | None = None,
        local_noise: bool = False,
        dimension: int | Sequence[int] | None = None,
        clip: float = 1.0,
        batch_clip: float | None = None,
        unshuffled_noise_ratio: float | None = None,
        orbit: int | None = None,
    ) -> None:
        super().__init__(num_users=num_users, batch_size=batch_size, local_noise=local_noise)
        self.dimension: int | tuple[int, ...] | None
        self.clip: float
        self.batch_clip: float | None
        self.unshuffled_noise_ratio: float | None
        self.orbit: int | None
        self.describe_weights(
            dimension=dimension,
            clip=clip,
            batch_clip=batch_clip,
            unshuffled_noise_ratio=unshuffled_noise_ratio,
            orbit=orbit,
        )

    def describe_weights(
        self,
        *,
        dimension: int | Sequence[int] | None,
        clip: float = 1.0,
        batch_clip: float | None = None,
        unshuffled_noise_ratio: float | None = None,
        orbit: int | None = None,
        once: bool = False,
    ) -> None:
        """Say what is permuted and clipped (other arguments as the constructor's).

        Args:
            dimension: See there.
            clip: See there.
            batch_clip: See there.
            unshuffled_noise_ratio: See there.
            orbit: See there.
            once: Refuse another description even before the first step: an earlier one may be of a run that is still going on.

        Raises:
            ValueError: If an argument is out of range, or steps are already described otherwise; then nothing is changed.
        """
        norm = positive("clip", clip)
        ratio = unshuffled_noise_ratio
        orbit = None if orbit is None else integer("orbit", orbit)
        if ratio is not None and finite_number("unshuffled_noise_ratio", ratio) < 1:
            raise ValueError(f"unshuffled_noise_ratio must be at least 1, got {ratio!r}")
        if dimension is not None:
            probe = ShuffledWeights(
                noise_multiplier=1.0,
                num_users=1,
                dimension=tuple(dimension) if isinstance(dimension, Sequence) else dimension,
                clip=norm,
                batch_clip=batch_clip,
                orbit=orbit,
            )
            dimension, batch_clip = probe.dimension, probe.batch_clip
        elif batch_clip not in (None, math.inf):
            positive("batch_clip", batch_clip)
        weights = {
            "dimension": dimension,
            "clip": norm,
            "batch_clip": batch_clip,
            "unshuffled_noise_ratio": ratio,
            "orbit": orbit,
        }
        if (self.history or once) and self.dimension is not None and weights != self._weights():
            raise ValueError(f"shuffled_fw accounts for a run with {self._weights()}, got {weights}: use a new PrivacyEngine")
        self.__dict__.update(weights)

    def get_epsilon(
        self,
        delta: float,
        *,
        dimension: int | Sequence[int] | None = None,
        clip: float | None = None,
        batch_clip: float | None = None,
        **options: Any,
    ) -> float:
        """ε spent so far at δ, see :meth:`ShuffleAccountant.get_epsilon`.

        Args:
            delta: δ in (0, 1).
            dimension: If the accountant does not know it, like the next two (Opacus's own calibration passes such keywords).
            clip: See the constructor.
            batch_clip: See the constructor.
            **options: ``bound`` (``"published"``, ``"published_optimised"``, ``"pair"`` or ``"certified"``), ``adjacency``,
                ``num_users``; unknown ones are refused.

        Raises:
            ValueError: If the dimension is unknown, an argument is out of range or contradicts what is known.
        """
        asked = {"dimension": dimension, "clip": clip, "batch_clip": batch_clip}
        asked = {key: value for key, value in asked.items() if value is not None}
        if not asked:
            return super().get_epsilon(delta, **options)
        told = type(self)(
            num_users=self.num_users, batch_size=self.batch_size, local_noise=self.local_noise, **{**self._weights(), **asked}
        )
        if self.dimension is not None and told._weights() != self._weights():
            raise ValueError(f"the weights are known to be {self._weights()}, got {asked}: leave them out")
        told.history, told._warned = self.history, self._warned
        try:
            return told.get_epsilon(delta, **options)
        finally:
            self._warned = told._warned

    def rounds(self, *, num_users: int | None = None, batch_size: int | None = None) -> list[tuple[Mechanism, int]]:
        """What ran, see :meth:`ShuffleAccountant.rounds`."""
        if self.local_noise:
            raise ValueError("shuffled_fw adds the noise to the sum, at the server: local_noise must be False")
        if self.num_users is None and num_users is None and batch_size is None:
            num_users = 1  # nothing depends on it
        return super().rounds(num_users=num_users, batch_size=batch_size)

    def _round(self, sigma: float, num_users: int, sample_rate: float) -> ShuffledWeights:
        if self.dimension is None:
            raise ValueError(
                "shuffled_fw does not know dimension, the number of parameters that are permuted: set it with "
                "engine.accountant.describe_weights(dimension=..., clip=..., batch_clip=...) (a stock engine takes "
                "make_private_with_epsilon(..., num_users=..., dimension=...) for the noise, but forgets it), or train with "
                "opacus_shuffle.PrivacyEngine and shuffle_weights=True, which counts them"
            )
        ratio = self.unshuffled_noise_ratio
        return ShuffledWeights(
            noise_multiplier=sigma,
            num_users=num_users,
            sample_rate=sample_rate,
            dimension=self.dimension,
            clip=self.clip,
            batch_clip=self.batch_clip,
            orbit=self.orbit,
            unshuffled_noise_multiplier=None if ratio is None else max(sigma, sigma * ratio),
        )

    def _check_step(self, optimizer: DPOptimizer) -> None:
        if self.dimension in (None, 1):  # nothing is shuffled: no bound depends on a norm
            return
        if not math.isclose(optimizer.max_grad_norm, self.clip, rel_tol=1e-6):
            raise ValueError(
                f"max_grad_norm is {optimizer.max_grad_norm}, but shuffled_fw accounts for clip={self.clip}: keep the norm, or "
                "describe the weights with it (engine.accountant.describe_weights)"
            )
        if isinstance(optimizer, BatchClipping) and (optimizer.shuffled or self.orbit is not None):
            trained = frozenset(map(id, optimizer.params))
            stays = bool(trained - optimizer.shuffled)
            told = (optimizer.batch_clip, optimizer.unshuffled_noise_ratio if stays else None)
            if (
                not optimizer.shuffled
                or not optimizer.shuffled <= trained
                or told != (self.batch_clip, self.unshuffled_noise_ratio)
            ):
                raise ValueError(
                    "parameters were frozen or thawed, or the optimizer's batch_clip or unshuffled_noise_ratio set, after "
                    "make_private: shuffled_fw accounts for what make_private found; call it on a new engine"
                )

    def state_dict(self, destination: Any = None) -> Any:
        """History, n, and what is permuted and clipped."""
        destination = super().state_dict(destination)
        destination.update(self._weights())
        return destination

    def load_state_dict(self, state_dict: Any) -> None:
        """Restore a :meth:`state_dict`; refused whole if it speaks of other weights than an engine's.

        Raises:
            ValueError: See :meth:`ShuffleAccountant.load_state_dict`.
        """
        keys = tuple(self._weights())
        if not isinstance(state_dict, dict) or not set(keys) <= set(state_dict):
            got = sorted(state_dict) if isinstance(state_dict, dict) else repr(state_dict)
            raise ValueError(f"state_dict of shuffled_fw must hold {', '.join(keys)}, got {got}")
        saved = type(self)(**{key: state_dict[key] for key in keys})._weights()
        if self.dimension is not None and saved != self._weights():
            raise ValueError(f"state_dict speaks of {saved}, this accountant of {self._weights()}: make the same run private")
        super().load_state_dict(state_dict)
        self.__dict__.update(saved)

    def _weights(self) -> dict[str, Any]:
        """What is permuted and clipped."""
        return {name: getattr(self, name) for name in WEIGHTS}
