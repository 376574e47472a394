"""Writes ε with its meaning to TensorBoard (the extra ``tensorboard``), or what has its manners.

>>> import opacus_shuffle
>>> report = opacus_shuffle.privacy_report(
...     "shuffle_gauss", noise_multiplier=4.0, num_users=1000, steps=10, delta=1e-5)
>>> class Printer:
...     def add_scalar(self, name, value, step): print(step, name, round(value, 3))
...     def add_text(self, name, text, step): print(step, name, text[:33])
>>> log_privacy(Printer(), report, step=3)
3 privacy/epsilon 0.164
3 privacy/statement The model was trained by 10 round
"""

from __future__ import annotations

from typing import Any

from opacus_shuffle.accountants.report import PrivacyReport
from opacus_shuffle.core.rounding import up_to_single


def log_privacy(writer: Any, report: PrivacyReport, step: int) -> None:
    """Writes the ε that a report would have you quote, and the sentence that gives it a meaning.

    Args:
        writer: A ``torch.utils.tensorboard.SummaryWriter``, or anything with its ``add_scalar`` and
            ``add_text``.
        report: Of ``engine.privacy_report(delta)``. It takes from milliseconds to seconds, so ask
            once an epoch.
        step: Where on the horizontal axis.
    """
    writer.add_scalar("privacy/epsilon", up_to_single(report.best.epsilon), step)
    writer.add_text("privacy/statement", report.statement(), step)
