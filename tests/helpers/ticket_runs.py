"""Short private runs whose released steps and accounted steps are counted, each by itself."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from helpers.toy import make_toy
from opacus_shuffle import PrivacyEngine

ACCOUNTANTS = ("shuffle_gauss", "subsampled_shuffle", "shuffled_checkin", "shuffled_sums", "rdp")
every_accountant = pytest.mark.parametrize("name", ACCOUNTANTS)


class Toy:
    """A short private run, whose released steps are counted by the weights that they change."""

    def __init__(
        self, name="subsampled_shuffle", *, records=24, batch_size=6, loader=None, **options
    ):
        self.toy = make_toy(records=records, batch_size=batch_size, **(loader or {}))
        self.engine = PrivacyEngine(accountant=name)
        self.criterion = nn.CrossEntropyLoss()
        made = self.engine.make_private(**self.toy, noise_multiplier=2.0, **options)
        self.model, self.optimizer, self.loader = made[0], made[1], made[-1]
        if len(made) == 4:
            self.criterion = made[2]
        self.plain = self.toy["optimizer"]
        self.steps = 0
        self.plain.register_step_post_hook(self._count)

    def _count(self, *_):
        self.steps += 1

    def backward(self, batch):
        x, y = batch
        self.criterion(self.model(x), y).backward()

    def train(self, batches):
        for batch in batches:
            self.optimizer.zero_grad()
            self.backward(batch)
            self.optimizer.step()

    @property
    def accounted(self):
        return sum(steps for *_, steps in self.engine.accountant.history)

    def refused(self, match, step=None):
        """The step is refused, nothing is released or accounted, and the next batch trains as usual."""
        steps, accounted, before = (
            self.steps,
            self.accounted,
            [p.detach().clone() for p in self.optimizer.params],
        )
        with pytest.raises(ValueError, match=match):
            (step or self.optimizer.step)()
        assert (self.steps, self.accounted) == (steps, accounted)
        assert all(
            torch.equal(one, other)
            for one, other in zip(before, self.optimizer.params, strict=True)
        )
        self.optimizer.zero_grad()
        self.train([next(iter(self.loader))])
        assert (self.steps, self.accounted) == (steps + 1, accounted + 1)
        self.optimizer.zero_grad()
