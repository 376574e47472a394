"""Trains on every record once an epoch, in a batch that is drawn at random and in secret.

Each epoch is accounted in full when its first step is taken, because what the epoch shows may make
a run stop. So an epoch that is left before its end costs what a whole one does, and the next pass
over the loader is another epoch.
"""

from __future__ import annotations

import math
from typing import Any, ClassVar

import torch

from opacus_shuffle.accountants.mechanisms import Mechanism, RandomAllocation
from opacus_shuffle.engine.private_optimizer import PrivateOptimizer
from opacus_shuffle.engine.sampling.samplers import (
    RandomAllocationSampler,
    SamplingPlan,
    TicketedSampler,
)
from opacus_shuffle.engine.schemes.base import Scheme, plan_on_ranks
from opacus_shuffle.engine.training_plan import Request, Run


class EpochScheme(Scheme):
    """A scheme whose batches may be made by one draw of each record for each epoch.

    Then an epoch is accounted as a whole; other batches are drawn and accounted one by one.

    Attributes:
        epoch: Stands for the epoch that was accounted last.
        noise: The noise multiplier that it was accounted with.
        rewound: How many rounds of the account had been replaced then.
    """

    epoch: Any = None
    noise: float = 0.0
    rewound: int = 0

    def independent_sampler(self, run: Run, generator: torch.Generator | None) -> TicketedSampler:
        """Returns the sampler that draws each record's batch, or tosses its coins."""
        if run.sampling.kind != "random_allocation":
            return super().independent_sampler(run, generator)
        return RandomAllocationSampler(
            num_samples=run.sampling.num_users,
            batch_size=run.sampling.batch_size,
            steps=run.sampling.steps_per_epoch,
            generator=generator,
            ranks=run.request.ranks,
        )

    def record(self, run: Run, optimizer: PrivateOptimizer) -> None:
        """Records all steps of an epoch at its first one, where its batches are drawn together.

        Raises:
            ValueError: If the noise is less than what the epoch was accounted with.
        """
        if run.sampling.kind != "random_allocation":
            super().record(run, optimizer)
            return
        step = self.round(run, optimizer)
        if not self.accounted_ahead(run, optimizer):
            self.accountant.record(step, run.sampling.steps_per_epoch)
            self.noise, self.rewound = step.noise_multiplier, self.accountant.rewound
        elif step.noise_multiplier < self.noise:
            raise ValueError(
                f"noise_multiplier is {step.noise_multiplier}, this epoch was accounted with "
                f"{self.noise} at its first step: let it fall between epochs alone"
            )
        tickets: Any = optimizer.tickets  # there is a batch, or the step would have been refused
        self.epoch = tickets.latest.ticket.epoch

    def rehearse(self, run: Run, optimizer: PrivateOptimizer, steps: int) -> Any:
        """Returns a copy of the account after so many more steps, in whole epochs.

        An epoch that has begun is assumed to continue.
        """
        if run.sampling.kind == "random_allocation":
            batches = run.sampling.steps_per_epoch
            steps -= self.accounted_ahead(run, optimizer)
            steps = batches * max(0, math.ceil(steps / batches))
        return super().rehearse(run, optimizer, steps)

    def accounted_ahead(self, run: Run, optimizer: PrivateOptimizer) -> int:
        """Returns how many future steps of the begun epoch are already accounted."""
        part = getattr(optimizer.tickets, "latest", None)
        if part is None or part.ticket.epoch is not self.epoch:
            return 0
        # A state that was loaded in the middle of an epoch may not contain this epoch.
        if self.accountant.rewound != self.rewound:
            return 0
        ticket = part.ticket
        return int(run.sampling.steps_per_epoch - ticket.epoch.issued + (not ticket.released))


class AllocatedDPSGD(EpochScheme):
    """DP-SGD whose batches are made by one draw of each record for each epoch."""

    mechanisms: ClassVar[tuple[type[Mechanism], ...]] = (RandomAllocation,)
    noise_elsewhere: ClassVar[str] = "adds the noise to the sum, at the server"

    def plan_sampling(self, request: Request) -> SamplingPlan:
        """Plans as many batches as the loader has; refuses other ways of drawing them."""
        if request.poisson_sampling is not None:
            raise ValueError(
                "random_allocation draws each record's batch once an epoch, got "
                f"poisson_sampling={request.poisson_sampling}: leave it out, or use an accountant "
                "of Poisson batches, such as 'prv', or of batches of one size, such as "
                "'subsampled_shuffle'"
            )
        secure = self.engine.secure_mode
        return plan_on_ranks(self.name, request, "random_allocation", secure_mode=secure)

    def mechanism(self, run: Run, noise_multiplier: float, batches: int = 1) -> RandomAllocation:
        """Returns the mechanism of one step."""
        return RandomAllocation(
            noise_multiplier=noise_multiplier,
            num_users=run.sampling.num_users,
            num_batches=run.sampling.steps_per_epoch,
        )
