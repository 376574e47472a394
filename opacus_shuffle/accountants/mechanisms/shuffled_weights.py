"""Yang, Ji and Xiang's weight shuffling (WS): DP-SGD whose weights are permuted at every step.

One trusted server trains.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any, ClassVar

from opacus_shuffle.accountants.mechanism import Mechanism, described
from opacus_shuffle.analysis.fenton_wilkinson import dimensions
from opacus_shuffle.analysis.mean_ratio import Sampling
from opacus_shuffle.core.validation import integer, noise_level, positive


@dataclasses.dataclass(frozen=True, kw_only=True)
class ShuffledWeights(Mechanism):
    """One step of WS Algorithm 1.

    It releases the noised sum of a Poisson sample's gradients and the weights, both permuted.

    Attributes:
        noise_multiplier: σ of the **sum** in units of ``clip`` (DP-SGD's own multiplier), for the
            parameters that are permuted.
        num_users: n; no bound depends on it.
        sample_rate: γ, the probability that a record is in the batch.
        dimension: d, the number of permuted coordinates; 1 is DP-SGD without shuffling. Several
            numbers apply WS's theorem to each layer as a separate release.
        clip: c, the norm that each record's gradient is clipped to.
        batch_clip: c′, the norm that the sum is clipped to before the noise, in the same units; by
            default c.
        unshuffled_noise_multiplier: σ₀ ≥ σ of the parameters that are not permuted; None if there
            are none.
        orbit: The least number of positions that a permuted entry can move to; None for d, as in WS
            (no network's permutations mix all its parameters).
    """

    name: ClassVar[str] = "shuffled_fw"
    sampling: ClassVar[Sampling] = "poisson"
    released: ClassVar[str] = "all released weights and gradients"
    zeroed: ClassVar[str] = "one record's gradients are zero"
    noise_is_local: ClassVar[bool] = False
    shuffled: ClassVar[bool] = False
    noise_multiplier: float = described(
        "noise of the sum over the clipping norm", "SIGMA", varies=True
    )
    num_users: int = described("n; no bound depends on it", "N", default=1)
    dimension: int | tuple[int, ...] = described(
        "how many parameters are permuted (1: none); several, one per layer, for the theorem layer "
        "by layer",
        "D[,D...]",
    )
    clip: float = described("clipping norm of one record's gradient", "C", default=1.0)
    batch_clip: float | None = described(
        "clipping norm of a batch's sum (default: that of a record)", "C", default=None
    )
    unshuffled_noise_multiplier: float | None = described(
        "noise of parameters that stay", "SIGMA", default=None, varies=True
    )
    orbit: int | None = described(
        "fewest places that a permuted entry can get to (default: D)", "K", default=None
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        layers = dimensions(self.dimension)
        clip = positive("clip", self.clip)
        norm = clip if self.batch_clip is None else self.batch_clip
        self._set(
            dimension=layers[0] if len(layers) == 1 else layers,
            clip=clip,
            batch_clip=positive("batch_clip", norm, infinite=True),
            orbit=None if self.orbit is None else integer("orbit", self.orbit),
        )
        if self.unshuffled_noise_multiplier is None:
            return
        self._set(
            unshuffled_noise_multiplier=noise_level(
                "unshuffled_noise_multiplier", self.unshuffled_noise_multiplier
            )
        )
        if self.unshuffled_noise_multiplier < self.noise_multiplier:
            raise ValueError(
                "unshuffled_noise_multiplier must be at least "
                f"noise_multiplier={self.noise_multiplier}, got "
                f"{self.unshuffled_noise_multiplier}: the certified epsilon needs at least this "
                "noise in parameters that are not permuted (WS Algorithm 1, line 16)"
            )

    def with_noise(self, noise_multiplier: float) -> ShuffledWeights:
        """Returns the same step at another σ, σ₀ in proportion."""
        stays = self.unshuffled_noise_multiplier
        if stays is not None and noise_multiplier != self.noise_multiplier:
            stays = max(noise_multiplier, noise_multiplier * (stays / self.noise_multiplier))
        return dataclasses.replace(
            self, noise_multiplier=noise_multiplier, unshuffled_noise_multiplier=stays
        )

    def check_optimizer(self, optimizer: Any) -> None:
        """Refuses a clipping norm other than the accounted one."""
        if self.layers != (1,) and not math.isclose(
            optimizer.max_grad_norm, self.clip, rel_tol=1e-6
        ):
            raise ValueError(
                f"max_grad_norm is {optimizer.max_grad_norm}, but shuffled_fw accounts for "
                f"clip={self.clip}: keep the norm, or describe the run with it "
                "(engine.accountant.plan)"
            )

    @property
    def layers(self) -> tuple[int, ...]:
        """The dimension of each release."""
        return dimensions(self.dimension)

    @property
    def record_norm(self) -> float:
        """The largest norm of a clipped sum of one record over ``clip``, at most 1."""
        return min(1.0, (self.batch_clip or self.clip) / self.clip)
