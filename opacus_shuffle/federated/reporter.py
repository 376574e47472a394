"""The client: its own coin, its own noise, one report a round, and no more rounds than it agreed to.

>>> from opacus_shuffle.federated.gaussian_reports import GaussianReports
>>> from opacus_shuffle.federated.shuffler import Shuffler
>>> shuffler = Shuffler(GaussianReports(dimension=2, max_norm=1.0, noise_multiplier=1.0, num_users=1))
>>> shuffler.open_round(1)
>>> reporter = Reporter(shuffler.format, max_rounds=10)
>>> reporter.answer(1, lambda: torch.ones(2), lambda report: shuffler.submit("me", report))
>>> shuffler.waiting()
1
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from opacus_shuffle.core.participation import heads
from opacus_shuffle.core.randomness import secret_generator
from opacus_shuffle.core.validation import integer
from opacus_shuffle.federated.report_format import LARGEST_ROUND, ReportFormat


class Reporter:
    """What one client does in a round, whoever the server is.

    Args:
        format: What its reports look like.
        max_rounds: T, rounds that it agreed to: a server that asks for more gets no report of its data.
        rounds: Rounds that it has answered, from an earlier process.
        last: The last of them, -1 for none.

    Formal Guarantees:
        The server learns neither the coin nor the vector: each round gets at most one report, clipped and noised here, and the
        coin is tossed before any training. The client trains whatever the coin says, as the time that it takes would tell;
        where nobody can watch that, as in a simulation, ``always_train=False`` spares it.
    """

    def __init__(self, format: ReportFormat, *, max_rounds: int, rounds: int = 0, last: int = -1) -> None:
        self.format = format
        self.max_rounds = integer("max_rounds", max_rounds)
        self.rounds, self.last = integer("rounds", rounds, minimum=0), integer("last", last, minimum=-1)

    def answer(
        self,
        number: int,
        train: Callable[[], torch.Tensor],
        submit: Callable[[bytes], Any],
        *,
        always_train: bool = True,
        before: Callable[[], Any] = lambda: None,
    ) -> None:
        """Takes part in a round, or not, as a fresh coin says.

        Args:
            number: The round that the server asks for.
            train: Computes this client's vector, shape (d,), from its own data.
            submit: Sends a report to the shuffler.
            always_train: Train whatever the coin says, and throw the vector away if it says no; else train if it says yes.
            before: Called once the round is noted as answered, before anything is sent: to write that to a disk, say.

        Raises:
            ValueError: If the round was answered before, or all that were agreed to are.
        """
        round_ = integer("number", number, minimum=0, maximum=LARGEST_ROUND)
        if round_ <= self.last:
            raise ValueError(f"round {round_} was answered already (the last was {self.last}): a second report costs again")
        if self.rounds >= self.max_rounds:
            raise ValueError(f"all max_rounds={self.max_rounds} rounds that this client agreed to are over: it sends no more")
        self.last, self.rounds = round_, self.rounds + 1
        before()
        takes_part = bool(heads(1, self.format.coin_rate, secret_generator("cpu")))
        vector = train() if takes_part or always_train else None
        submit(self.format.encode(round_, vector if takes_part else None))
