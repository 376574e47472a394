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

from opacus_shuffle.core.participation import bernoulli_indices
from opacus_shuffle.core.randomness import SecretGenerator
from opacus_shuffle.core.validation import boolean, instance_of, integer
from opacus_shuffle.federated.client_book import ClientBook
from opacus_shuffle.federated.report_format import LARGEST_ROUND, ReportFormat


class Reporter:
    """What one client does in a round, whoever the server is.

    Args:
        format: What its reports look like.
        max_rounds: T, rounds that it agreed to: a server that asks for more gets no report of its data.
        book: Where it notes which rounds it has answered: a :class:`~opacus_shuffle.federated.client_book.FileBook`; by default
            in memory, for simulations.

    Formal Guarantees:
        The server learns neither the coin nor the vector: each round gets at most one report, clipped and noised here, and the
        coin is tossed before any training. The client trains and encodes whatever the coin says, as the time that it takes
        would tell; where nobody can watch that, as in a simulation, ``always_train=False`` spares it.
    """

    def __init__(self, format: ReportFormat, *, max_rounds: int, book: ClientBook | None = None) -> None:
        self.format = instance_of("format", format, (ReportFormat,))
        self.max_rounds = integer("max_rounds", max_rounds)
        self.book = ClientBook() if book is None else instance_of("book", book, (ClientBook,))

    def answer(
        self,
        number: int,
        train: Callable[[], torch.Tensor],
        submit: Callable[[bytes], Any],
        *,
        always_train: bool = True,
    ) -> None:
        """Takes part in a round, or not, as a fresh coin says.

        Args:
            number: The round that the server asks for.
            train: Computes this client's vector, shape (d,), from its own data.
            submit: Sends a report to the shuffler.
            always_train: Train whatever the coin says, and throw the vector away if it says no; else train if it says yes.

        Raises:
            ValueError: If the round was answered before, or all that were agreed to are, or ``train`` returns something else.
        """
        round_ = integer("number", number, minimum=0, maximum=LARGEST_ROUND)
        always = boolean("always_train", always_train)
        self.book.note(round_, max_rounds=self.max_rounds, fingerprint=self.format.fingerprint)
        takes_part = bool(bernoulli_indices(1, self.format.coin_rate, SecretGenerator()))
        if not (takes_part or always):
            submit(self.format.encode(round_, None))
            return
        vector = instance_of("what train returns", train(), (torch.Tensor,))
        reports = self.format.encode(round_, vector), self.format.encode(round_, None)  # both, whatever is sent
        submit(reports[0] if takes_part else reports[1])
