"""Trains on every record once an epoch, in a batch that is drawn at random and in secret.

Each epoch is accounted in full when its first step is taken, because the results of an epoch may
make a run stop. An epoch that is left before its end therefore costs as much as a whole one, and
the next pass over the loader is another epoch.
"""

from __future__ import annotations

import math
from typing import Any, ClassVar

import torch
from torch.utils.data import DataLoader

from opacus_shuffle.accountants.mechanisms import Mechanism, RandomAllocation
from opacus_shuffle.engine.batches.samplers import (
    RandomAllocationSampler,
    SamplingPlan,
    TicketedSampler,
)
from opacus_shuffle.engine.schemes.base import Scheme
from opacus_shuffle.engine.step.private_optimizer import PrivateOptimizer


class EpochScheme(Scheme):
    """A scheme whose batches may be made by one draw of each record for each epoch.

    Then an epoch is accounted as a whole; other batches are drawn and accounted one by one.
    """

    _accounted_epoch: Any = None  # the pass that was accounted last
    _accounted_noise: float = 0.0
    _rewound: int = 0  # how many rounds of the account had been replaced then

    def independent_sampler(self, generator: torch.Generator | None) -> TicketedSampler:
        """Returns the sampler that draws each record's batch, or tosses its coins."""
        if self.sampling.kind != "random_allocation":
            return super().independent_sampler(generator)
        return RandomAllocationSampler(
            num_samples=self.sampling.num_users,
            batch_size=self.sampling.batch_size,
            steps=self.sampling.steps_per_epoch,
            generator=generator,
            ranks=self.ranks,
        )

    def record(self, optimizer: PrivateOptimizer) -> None:
        """Records all steps of an epoch at its first one, if its batches are drawn together.

        Raises:
            ValueError: If the noise is less than the epoch was accounted with.
        """
        if self.sampling.kind != "random_allocation":
            super().record(optimizer)
            return
        step = self.round(optimizer)
        if not self.accounted_ahead(optimizer):
            self.accountant.record(step, self.sampling.steps_per_epoch)
            self._accounted_noise, self._rewound = step.noise_multiplier, self.accountant.rewound
        elif step.noise_multiplier < self._accounted_noise:
            raise ValueError(
                f"noise_multiplier is {step.noise_multiplier}, this epoch was accounted with "
                f"{self._accounted_noise} at its first step: let it fall between epochs alone"
            )
        tickets: Any = optimizer.tickets  # there is a batch, or the step would have been refused
        self._accounted_epoch = tickets.latest.epoch

    def rehearse(self, optimizer: PrivateOptimizer, steps: int) -> Any:
        """Returns a copy of the account after so many more steps, in whole epochs.

        An epoch that has begun is assumed to continue.
        """
        if self.sampling.kind == "random_allocation":
            batches = self.sampling.steps_per_epoch
            steps -= self.accounted_ahead(optimizer)
            steps = batches * max(0, math.ceil(steps / batches))
        return super().rehearse(optimizer, steps)

    def accounted_ahead(self, optimizer: PrivateOptimizer) -> int:
        """Returns how many future steps of the begun epoch are already accounted."""
        ticket = getattr(optimizer.tickets, "latest", None)
        if ticket is None or ticket.epoch is not self._accounted_epoch:
            return 0
        # A state that was loaded in the middle of an epoch may not contain this epoch.
        if self.accountant.rewound != self._rewound:
            return 0
        return int(self.sampling.steps_per_epoch - ticket.epoch.issued + (not ticket.released))


class AllocatedDPSGD(EpochScheme):
    """DP-SGD whose batches are made by one draw of each record for each epoch."""

    mechanisms: ClassVar[tuple[type[Mechanism], ...]] = (RandomAllocation,)

    def plan_sampling(
        self,
        data_loader: DataLoader,
        *,
        poisson_sampling: bool | None = None,
        sampling: str | None = None,
    ) -> SamplingPlan:
        """Plans as many batches as the loader has; refuses other ways of drawing them."""
        if poisson_sampling is not None:
            raise ValueError(
                "random_allocation draws each record's batch once an epoch, got "
                f"poisson_sampling={poisson_sampling}: leave it out, or use an accountant of "
                "Poisson batches, such as 'prv', or of batches of one size, such as "
                "'subsampled_shuffle'"
            )
        return self.plan_batches(data_loader, "random_allocation")

    def mechanism(self, noise_multiplier: float, batches: int = 1) -> RandomAllocation:
        """Returns the mechanism of one step."""
        return RandomAllocation(
            noise_multiplier=noise_multiplier,
            num_users=self.sampling.num_users,
            num_batches=self.sampling.steps_per_epoch,
        )
