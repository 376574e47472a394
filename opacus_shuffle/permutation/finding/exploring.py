"""Tracing a network on every way that it can be seen to take: on other sizes, other values, and with other decisions."""

from __future__ import annotations

import contextlib
import itertools
import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from opacus_shuffle.core.progress import enter_phase
from opacus_shuffle.networks.rollback import random_states_kept, rolled_back
from opacus_shuffle.networks.running import without_graph
from opacus_shuffle.networks.sample_input import Call
from opacus_shuffle.permutation.finding.cheap_products import Frugal
from opacus_shuffle.permutation.finding.decisions import Decisions
from opacus_shuffle.permutation.finding.draws import Draws
from opacus_shuffle.permutation.finding.earlier_calls import EarlierCalls
from opacus_shuffle.permutation.finding.handlers import HandlerError, declared_axes
from opacus_shuffle.permutation.finding.labels import because, fix_all
from opacus_shuffle.permutation.finding.paths import (
    ALL,
    COINS,
    MASKS,
    MOST_ENTRIES,
    MOST_OPERATIONS,
    RANKED,
    Answer,
    Paths,
    Place,
    combined,
    was_raised,
)
from opacus_shuffle.permutation.finding.trace import ReplacingError, Tracer
from opacus_shuffle.permutation.finding.traced_run import TracedRun
from opacus_shuffle.permutation.finding.watched_runs import LOOKED_AT, Answers, Watched, runs_plainly
from opacus_shuffle.permutation.higher_order import OpaqueOperationError
from opacus_shuffle.permutation.network import plain_attention, python_random_states, seed_python
from opacus_shuffle.permutation.other_inputs import (
    LENGTHS,
    entries_in,
    form_of,
    many_sizes,
    of_size,
    other_sizes,
    other_values,
    with_as_many_records,
)

MOST_WAYS = 200
MOST_SIZES = 3
PYTHON_SEEDS = 16
LOOPS = 1.15  # times as many operations on inputs of another size: a loop over the size
SMALL = 20_000  # entries that all results of a run on the sample have: one on a large input takes no time
MOST_MORE = 3000  # operations of runs on many sizes, and on those that the code speaks of
MOST_TARGETS = 48
MANY_RECORDS = 64
CALLS = 3  # one after the other


class Explorer:
    """Traces a network, as often as it takes.

    Args:
        network: The network.
        run: What is told every operation.
        draws: Of a run that was watched from another random state.
        frugal: Runs it.
        earlier: Knows what it keeps from one call to the next.

    Attributes:
        lost: Decisions of which one way broke, and how.
        shortest: The shortest input that was traced, for what can be found out on any.
    """

    def __init__(self, network: nn.Module, run: TracedRun, draws: Draws, frugal: Frugal, earlier: EarlierCalls) -> None:
        self._seen = Decisions()
        self.lost: dict[Place, Exception] = {}
        self._network, self._run, self._draws, self._frugal = network, run, draws, frugal
        self._earlier = earlier
        self._lengths: dict[bool, set[int]] = {True: set(), False: set()}  # of runs in operations, in training and not
        self._most_reads = self._operations = self._most_entries = self._spent = 0
        self._exploring = self._python_draws = self._replaces = False
        self._drawing: set[bool] = set()  # modes of the network, in training or not
        self._changing: list[torch.Tensor] = []
        self._settled: list[Any] = []  # runs in which nothing depends on values
        self.shortest: Call | None = None

    def trace(
        self,
        call: Call,
        *,
        training: bool,
        answers: Answers | None = None,
        coins: int | None = None,
        name: str = "sample_input",
    ) -> None:
        """Traces one run of the network, unless one like it was traced in which nothing depends on values.

        An error calls the input by its ``name``.
        """
        answers = answers or {}
        enter_phase("tracing")
        if self._is_settled(call, training, answers, coins):
            return
        try:
            with rolled_back(self._network):
                watched = self._frugal(lambda: self._watched(call, training, answers, coins))
        except (HandlerError, OpaqueOperationError):
            raise
        except Exception as error:
            mode = "training" if training else "evaluation"
            why = f"{type(error).__name__}: {error}"
            if runs_plainly(self._network, call):
                why = f"{why.rstrip(' .:')}. {LOOKED_AT}"
            raise ValueError(f"{name} does not run through {type(self._network).__name__} in {mode} mode: {why}") from error
        self._take(watched, call, training, answers, coins)

    def knows(self, call: Call, like: Call) -> bool:
        """Returns whether runs on other values of its form were traced in which nothing depends on values.

        Its number of records may be another: other numbers than that of the call that it is ``like`` are tried anyway.
        """
        as_many = with_as_many_records(call, like)
        return all(self._is_settled(as_many, training, {}, None) for training in (True, False))

    def _take(self, watched: Watched, call: Call, training: bool, answers: Answers, coins: int | None) -> None:
        """Labels a run that was watched, and notes what it did."""
        paths = watched.paths
        self._replaces |= watched.tracer.has_replaced
        self._drawing |= {training} if watched.tracer.has_drawn else set()
        watched.tracer.label()
        with because("an output of the network"):
            self._run.fix(watched.tracer.results)
        with because("an activation that a module keeps"):
            self._run.fix(watched.tracer.kept)
        self._most_reads = max(self._most_reads, paths.reads)
        if not answers and coins is None:
            self._operations = max(self._operations, 0 if self._exploring else paths.operations)
            if all(leaf.shape[:1] != (1,) for leaf in tree_leaves(call) if isinstance(leaf, torch.Tensor)):
                self._lengths[training].add(paths.operations)  # of one record, PyTorch itself copies less
        self._most_entries = max(self._most_entries, 0 if self._exploring else paths.entries)
        if watched.draws_in_python:
            self._python_draws = True
        elif not answers and coins is None and all(place in paths.compared for place in paths.met):
            self._settled.append([training, watched.began, *form_of(call)])
        self._seen.note(
            paths, call, training=training, answers=answers, by_coins=coins is not None, cheapest=call is self.shortest
        )

    def count(self) -> None:
        """Has what the network counts be noticed where it decides, until its state is taken back."""
        self._changing = self._earlier.count()

    def explore(self, calls: Sequence[Call]) -> None:
        """Traces the runs that other inputs might have, after those on these, of which the first is the sample."""
        call, *others = calls
        self._exploring = True
        self.count()
        entire = self._run.atoms()
        sizes = [
            next((each for each in alternatives if self._try(each, training=False) is None), call)
            for alternatives in other_sizes(call)
        ]
        trains = [other is not call and self._try(other, training=True) is None for other in sizes]
        self.shortest = min([call, *(other for other, runs in zip(sizes, trains, strict=True) if runs)], key=entries_in)
        # What is cut at these sizes and was not at the sample's is cut elsewhere at others.
        fix_all((atom for atom in entire if atom.kind != "atom"), cause="cut at a place that depends on the input's size")
        loops = any(max(each) > LOOPS * min(each) for each in self._lengths.values() if each)
        if loops or self._most_entries < SMALL:  # at some place a loop may do something else
            self._try_many_sizes(call, LENGTHS if loops else LENGTHS[-1:])
        self._try_sizes_spoken_of(call)
        if self._earlier:
            self._call_again([self.shortest, *(each for each in (call, *others) if each is not self.shortest)])
        if self._python_draws:
            self._draw_in_python(self.shortest)
        if self._seen.by_values():
            for other in (self.shortest, *other_values(self.shortest)):
                self._try(other, training=False)
        elsewhere = next((other for other in sizes if other is not self.shortest), call)
        self._try_all_ways(elsewhere)
        if self._earlier:  # what is counted from the first call on decides from the second on
            self._call_before(self.shortest, training=True)
            self._try_all_ways(elsewhere)
        for coins in range(2 ** min(self._most_reads, COINS) if self._most_reads > 1 else 0):
            self._try(self.shortest, training=False, coins=coins)
        if self._run.unreached() and self._seen.by_values():
            for many in of_size(self.shortest, MANY_RECORDS, near=0):  # one of them may go there
                self._try(many, training=False, answers={RANKED: ALL})
        if self._run.unreached():  # what is met often, as in a loop over experts, may have gone past some every time
            for way in (0, -1):
                at_once = {place: self._seen.answers(place)[way] for place in self._seen.met if self._seen.answers(place)}
                self._try(self.shortest, training=False, answers=at_once)

    def _try_all_ways(self, elsewhere: Call) -> None:
        """Traces runs in which values and sizes decide otherwise."""
        tried, numbers = set[tuple[Place, Answer]](), set[tuple[Place, Answer]]()
        for _ in range(2):  # what the code speaks of may lead to other decisions, and these to other numbers
            self._try_values_spoken_of(numbers)
            self._try_ways(elsewhere, tried)

    def _try_ways(self, elsewhere: Call, tried: set[tuple[Place, Answer]]) -> None:
        """Traces runs in which every decision is taken otherwise, also those that such runs meet."""
        while waiting := [
            pair for pair in self._seen.ways() if pair not in tried and pair[1] not in self._seen.throughout[pair[0]]
        ]:
            for place, answer in waiting:
                if len(tried) == MOST_WAYS:
                    self.lost[place] = RuntimeError(f"it has more than {MOST_WAYS} ways")
                    return
                tried.add((place, answer))
                if len(self._seen.compared.get(place, ())) == 1:  # seen behind another decision alone, maybe
                    self._try(elsewhere, training=self._seen.first[place].training, answers=self._seen.first[place].answers)
                    if not self._seen.vary(place):
                        continue
                first = self._seen.first[place]
                answers = {**first.answers, place: answer}
                error = self._try(first.call, training=first.training, answers=answers)
                if error is None or not isinstance(answer, bool) or answer in self._seen.met[place] or was_raised(error):
                    continue
                if place in self._seen.compared:
                    self._at_sizes(place, answer)
                    continue
                # What a mask chose may be empty against the answer, as in ``if mask.any(): x[mask].max()``.
                if self._try(first.call, training=first.training, answers={**answers, MASKS: ALL}) is not None:
                    self.lost[place] = error

    def reads(self) -> list[Place]:
        """Returns the places at which values become numbers of Python."""
        values = self._seen.by_values().items()
        return [place for place, given in values if not all(isinstance(each, str) for each in given) or not given]

    def _try_many_sizes(self, call: Call, lengths: Sequence[int]) -> None:
        """Traces inputs of many sizes, as long as that takes few operations."""
        self._spent = 0
        for other in many_sizes(call, lengths):
            if self._spent > MOST_MORE:
                break
            self._try(other, training=False)

    def _call_again(self, calls: Sequence[Call]) -> None:
        """Traces what the network does when it was called before: on the first of these often, on each of the others once."""
        traced: list[dict[Any, Any]] = []
        for earlier, training in itertools.product(calls, (True, False)):
            with rolled_back(self._network):
                for _ in range(CALLS if earlier is calls[0] else 1):
                    before = self._earlier.state()
                    self._call_before(earlier, training=training)
                    if self._earlier.state() == before:  # nor will later calls change anything
                        break
                    if (plain := self._earlier.plain_changes()) is not None:
                        if plain in traced:
                            continue
                        traced.append(plain)
                    for mode in (True, False):
                        self._try(calls[0], training=mode)

    def _call_before(self, call: Call, *, training: bool) -> None:
        """Calls the network untraced, and leaves what it changes."""
        with contextlib.suppress(Exception), plain_attention():
            self._network.train(training)
            self._frugal(lambda: without_graph(lambda: self._network(*call[0], **call[1])))
        self.count()

    def _try_sizes_spoken_of(self, call: Call) -> None:
        """Traces inputs of the sizes that the code speaks of where sizes become something that nobody can ask."""
        self._spent = 0
        numbers = [self._seen.spoken_of[place] for place, runs in self._seen.became.items() if len(runs) > 1]
        targets = dict.fromkeys(target for each in numbers for target in combined(each) if target > 1)
        for target in itertools.islice(targets, MOST_TARGETS):
            for other in of_size(call, target):
                if self._spent > MOST_MORE:
                    return
                self._try(other, training=False)

    def _try_values_spoken_of(self, tried: set[tuple[Place, Answer]]) -> None:
        """Traces runs in which numbers that are read are those that the code speaks of."""
        self._spent = 0
        for place in [place for place in self._seen.spoken_of if place in self._seen.met and self._seen.vary(place)]:
            first = self._seen.first[place]
            if isinstance(first.answer, bool | str | None):
                continue
            for target in combined(self._seen.spoken_of[place])[:MOST_TARGETS]:
                answer = type(first.answer)(target)
                if (place, answer) in tried or answer in self._seen.met[place]:
                    continue
                if self._spent > MOST_MORE:
                    return
                tried.add((place, answer))
                self._try(first.call, training=first.training, answers={**first.answers, place: answer})

    def _draw_in_python(self, call: Call) -> None:
        """Traces runs in which Python and NumPy draw other numbers: the lowest, the highest, and at random."""
        for seed in range(-2, PYTHON_SEEDS):
            for training in (True, False):
                with random_states_kept():
                    seed_python(seed)
                    self._try(call, training=training)

    def _at_sizes(self, place: Place, answer: Answer) -> None:
        """Traces inputs of the sizes that others are compared with at a place, until one of them is answered so."""
        first = self._seen.first[place]
        targets = {
            other for run in self._seen.compared[place] for _, other in run if other is not None and math.isfinite(other)
        }
        for target in sorted(targets)[:MOST_SIZES]:
            for call in of_size(first.call, target):
                if self._try(call, training=first.training) is None and answer in self._seen.met[place]:
                    return

    def decisions(self) -> dict[str, int]:
        """Returns the places at which values or sizes decide, with the number of ways that were followed."""
        return {str(place): len(given) for place, given in sorted(self._seen.met.items()) if self._seen.vary(place)}

    def _try(self, call: Call, *, training: bool, answers: Answers | None = None, coins: int | None = None) -> Exception | None:
        """Traces a run that may be impossible; returns why, and then has labelled nothing.

        In a mode in which it draws it runs untraced before, for what it draws each time.
        """
        answers = answers or {}
        if self._is_settled(call, training, answers, coins):
            return None
        drawn, replaces = training in self._drawing, self._replaces
        if drawn or replaces:
            try:
                with random_states_kept(), self._draws.watched():
                    self._frugal(lambda: self._untraced(call, training, answers, coins))
            except Exception as error:
                if replaces:  # what is labelled on the way would stay labelled
                    return error
        with rolled_back(self._network):
            try:
                watched = self._frugal(lambda: self._watched(call, training, answers, coins, alone=replaces))
            except ReplacingError:
                self._replaces = True
            except Exception as error:
                return error
            else:
                if drawn or replaces or not watched.tracer.has_drawn:
                    self._take(watched, call, training, answers, coins)
                    return None
                self._drawing.add(training)
        return self._try(call, training=training, answers=answers, coins=coins)

    def _is_settled(self, call: Call, training: bool, answers: Answers, coins: int | None) -> bool:
        """Returns whether a run like this one was traced, in which nothing depends on values."""
        return not answers and coins is None and [training, self._earlier.state(), *form_of(call)] in self._settled

    def _untraced(self, call: Call, training: bool, answers: Answers, coins: int | None) -> None:
        args, kwargs = call

        def run() -> None:
            paths = self._paths(call, answers, coins)
            try:
                with rolled_back(self._network), plain_attention(), paths:  # type: ignore[no-untyped-call]
                    self._network.train(training)(*args, **kwargs)
            finally:
                self._spent += paths.operations

        without_graph(run)

    def _watched(self, call: Call, training: bool, answers: Answers, coins: int | None, *, alone: bool = True) -> Watched:
        args, kwargs = call

        def run() -> Watched:
            paths = self._paths(call, answers, coins)
            tracer = Tracer(self._network, self._run, self._draws)
            self._network.train(training)
            before, began = python_random_states(), self._earlier.state()
            try:
                with declared_axes(self._network, tracer):
                    tracer.watch(lambda: self._network(*args, **kwargs), paths, alone=alone)
            finally:
                self._spent += paths.operations
            return Watched(tracer, paths, before != python_random_states(), began)

        return without_graph(run)

    def _paths(self, call: Call, answers: Answers, coins: int | None = None) -> Paths:
        given = [leaf for leaf in tree_leaves(call) if isinstance(leaf, torch.Tensor)]
        most = max(MOST_OPERATIONS, 20 * self._operations) if self._exploring else math.inf
        most_entries = max(MOST_ENTRIES, 8 * self._most_entries) if self._exploring else math.inf
        varying = [*given, *self._changing, *self._network.parameters(), *self._network.buffers()]
        return Paths(varying, answers, coins=coins, most=most, most_entries=most_entries)
