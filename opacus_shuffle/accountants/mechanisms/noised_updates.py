"""Rounds of other software, such as Flower: Gaussian noise on clipped updates.

The server adds the noise, or each client does. This package does not train so; the records account
for runs elsewhere.

>>> ServerNoise(noise_multiplier=1.0, num_users=100, sample_rate=0.1).noise_of_mean
0.1
"""

from __future__ import annotations

import dataclasses
import math
from typing import ClassVar

from opacus_shuffle.accountants.mechanism import Mechanism, described
from opacus_shuffle.analysis.mean_ratio import Sampling
from opacus_shuffle.core.validation import number


@dataclasses.dataclass(frozen=True, kw_only=True)
class ServerNoise(Mechanism, trains=False):
    """A trusted server averages clipped updates, adds Gaussian noise, and releases the model.

    Attributes:
        noise_multiplier: The noise's standard deviation over the sensitivity to one client's
            update: the clipping norm for a sum, the clipping norm times the largest weight for a
            weighted mean.
        num_users: n, all clients.
        sample_rate: The share of them in the round. It gains nothing, because the proofs need coins
            and a server draws samples of fixed size.
        count_noise: Standard deviation of the noise on the number of updates above the clipping
            norm, if it is released as by adaptive clipping; else infinite.
    """

    name: ClassVar[str] = "server_noise"
    sampling: ClassVar[Sampling] = None
    released: ClassVar[str] = "the models of all rounds"
    zeroed: ClassVar[str] = "one client's update is zero, and its weight what it was"
    noise_is_local: ClassVar[bool] = False
    count_noise: float = described(
        "noise on the number of updates above the clipping norm, where that is released",
        "SIGMA",
        varies=True,
        default=math.inf,
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        wanted = "be at least 1e-6"
        number("count_noise", self.count_noise, wanted, lambda std: std >= 1e-6, infinite=True)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ClientNoise(ServerNoise, trains=False):
    """Every client adds Gaussian noise to its own clipped update, and a server sees each by name.

    Attributes:
        noise_multiplier: The noise's standard deviation over the clipping norm.
        num_users: n, all clients.
        sample_rate: The share of them in a round. It gains nothing.
    """

    name: ClassVar[str] = "client_noise"
    released: ClassVar[str] = "all that one client sends"
    noise_is_local: ClassVar[bool] = True
