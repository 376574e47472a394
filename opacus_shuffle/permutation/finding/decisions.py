"""What the runs of a network have shown of its decisions: where they are taken, how, and how else they might be."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

from opacus_shuffle.networks.sample_input import Call
from opacus_shuffle.permutation.finding.paths import Answer, Paths, Place, possible_answers
from opacus_shuffle.permutation.finding.watched_runs import Answers, Meeting


class Decisions:
    """Knows the places at which runs that were traced have decided.

    Attributes:
        met: Places at which values or sizes decide, with the answers that were followed.
        first: Where each place was met first.
        throughout: What some run has answered every time: a loop may end later than any did.
        compared: Per place that compares sizes, those that it has compared, and with what, run by run.
        became: Per place at which sizes become something else, which ones, run by run.
        spoken_of: Per place, the numbers that the code around speaks of.
    """

    def __init__(self) -> None:
        self.met: dict[Place, set[Answer]] = {}
        self.first: dict[Place, Meeting] = {}
        self.throughout: dict[Place, set[Answer]] = {}
        self.compared: dict[Place, set[frozenset[tuple[Any, Any]]]] = {}
        self.became: dict[Place, set[frozenset[float]]] = {}
        self.spoken_of: dict[Place, list[float]] = {}

    def note(self, paths: Paths, call: Call, *, training: bool, answers: Answers, by_coins: bool, cheapest: bool) -> None:
        """Notes where a run that was traced has decided, and how; the ``cheapest`` is the one to go on from."""
        for place, numbers in paths.compared.items():
            self.compared.setdefault(place, set()).add(frozenset(numbers))
        for place, became in paths.became.items():
            self.became.setdefault(place, set()).add(frozenset(became))
        self.spoken_of = paths.spoken_of | self.spoken_of
        for place, given in paths.met.items() if not by_coins else ():
            self.met.setdefault(place, set()).update(given)
            self.throughout.setdefault(place, set()).update(given if len(given) == 1 else ())
            first = self.first.setdefault(place, Meeting(call, training, answers, next(iter(given), None)))
            if cheapest and not answers:
                self.first[place] = dataclasses.replace(first, call=call, training=training, answers=answers)

    def by_values(self) -> dict[Place, set[Answer]]:
        """Returns the places at which values decide, with their answers."""
        return {place: given for place, given in self.met.items() if place not in self.compared}

    def ways(self) -> Iterator[tuple[Place, Answer]]:
        """Yields what each place might answer."""
        return ((place, answer) for place in list(self.met) for answer in self.answers(place))

    def vary(self, place: Place) -> bool:
        """Returns whether values decide at a place, or sizes that are not the same in all runs."""
        return len(self.compared.get(place, "any")) > 1

    def answers(self, place: Place) -> list[Answer]:
        """Returns what a place might answer; nothing where only sizes decide that are the same in all runs."""
        if not self.vary(place) and not self.first[place].answers:
            return []
        return possible_answers(self.first[place].answer)
