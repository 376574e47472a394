"""Histories of rounds: lists of entries with their numbers of rounds, in the order of the run.

>>> history = [("quiet", 2)]
>>> append_rounds(history, "quiet", 3)
>>> append_rounds(history, "loud", 1)
>>> history, number_of_rounds(history)
([('quiet', 5), ('loud', 1)], 6)
>>> first_rounds(history, 4)
[('quiet', 4)]
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, TypeVar

from opacus_shuffle.core.validation import finite_number, integer

Entry = TypeVar("Entry")


def number_of_rounds(history: Iterable[tuple[Any, int]]) -> int:
    """Returns the number of rounds of a history."""
    return sum(steps for _, steps in history)


def append_rounds(history: list[tuple[Entry, int]], entry: Entry, steps: int) -> None:
    """Adds rounds at the end of a history, in place; an equal last entry is extended."""
    if history and history[-1][0] == entry:
        # One assignment: an interrupt between a removal and an addition would lose rounds.
        history[-1] = (entry, history[-1][1] + steps)
    else:
        history.append((entry, steps))


def first_rounds(history: Iterable[tuple[Entry, int]], rounds: int) -> list[tuple[Entry, int]]:
    """Returns the first ``rounds`` rounds of a history; equal neighbours are merged."""
    first: list[tuple[Entry, int]] = []
    for entry, steps in history:
        taken = min(steps, rounds)
        if taken > 0:
            append_rounds(first, entry, taken)
        rounds -= steps
    return first


def read_history(triples: Any) -> list[tuple[tuple[float, float], int]]:
    """Reads a history of Opacus: each noise multiplier and sample rate with its number of steps.

    Args:
        triples: Opacus's list of (noise multiplier, sample rate, steps).

    Raises:
        ValueError: If it is anything else.
    """
    try:
        steps = [(noise, rate, count) for noise, rate, count in triples]
    except (TypeError, ValueError):
        raise ValueError(
            "history must be a list of (noise_multiplier, sample_rate, steps) triples, got "
            f"{triples!r}"
        ) from None
    history: list[tuple[tuple[float, float], int]] = []
    for noise, rate, count in steps:
        step = (
            finite_number("noise_multiplier in history", noise),
            finite_number("sample_rate in history", rate),
        )
        append_rounds(history, step, integer("steps in history", count))
    return history


def check_load(accounted: int, *, allow_rewind: bool) -> None:
    """Refuses to load a state into an account that already holds rounds.

    Equal numbers do not make equal rounds: two runs with the same noise release different things.
    So a state never replaces accounted rounds silently.

    Raises:
        ValueError: If rounds are accounted and ``allow_rewind`` is False.
    """
    if accounted and not allow_rewind:
        raise ValueError(
            f"{accounted:,} rounds are already accounted here, and a state would replace them: "
            "load it into a new engine, made private by the same call; or pass allow_rewind=True "
            "if nobody ever saw a result of these rounds (every report will then mention them). "
            "To go on from earlier weights of this run with its whole account, load the weights "
            "alone: module.load_state_dict(...)"
        )


def rewound_sentence(rounds: int) -> str:
    """Returns what a report says about replaced rounds; empty if none were replaced."""
    if not rounds:
        return ""
    rounds_were = "1 accounted round was" if rounds == 1 else f"{rounds:,} accounted rounds were"
    return (
        f"{rounds_were} replaced in this account, because a state was loaded with "
        "allow_rewind=True or the history was set by hand: no epsilon here covers an adversary "
        "who saw a result of a replaced round."
    )
