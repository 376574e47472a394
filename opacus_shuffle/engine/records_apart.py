"""Proves, where it can, that a network keeps records apart, by following them through one forward and one backward pass.

What is proved: no output of a record comes from another one, and every layer with parameters finds in its i-th row what comes
of record i alone, and gradients that come of it alone. Then a record's gradient is its own whatever the others are. That is for
the run that was followed: a yes or no that was read from records (is any of them padded?) is taken as it came, and results
without a row per record, a loss of the batch's, say, are not looked at. So one record's outputs, what layers get of it and its
gradients are compared besides, with others beside it. Nothing is proved of a network that keeps what comes of records after the
run, where a later batch might read it.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Container, Iterator
from typing import Any, NamedTuple

import torch
from opacus.layers import DPGRU, DPLSTM, DPRNN
from opacus.layers.dp_rnn import RNNLinear
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map_only

from opacus_shuffle.core.progress import enter_phase
from opacus_shuffle.engine.limited_reads import LimitedReads, TooManyReadsError
from opacus_shuffle.engine.mixed_records import (
    all_same,
    has_records,
    rescaled,
    untouched,
    with_others,
)
from opacus_shuffle.engine.record_flow import RecordFlow
from opacus_shuffle.networks.running import results, seed_draws
from opacus_shuffle.networks.sample_input import Call
from opacus_shuffle.permutation.finding.cheap_products import ASKING, Frugal, LeftOutProducts, cheap_products
from opacus_shuffle.permutation.finding.earlier_calls import EarlierCalls
from opacus_shuffle.permutation.finding.paths import LEAVING
from opacus_shuffle.permutation.higher_order import InsightMode
from opacus_shuffle.permutation.network import kept_activations, tensors_in

RECORDS = 4
MOST_READ = 16  # values in a run whose opposites are tried one at a time

UNSEEN = (torch.Tensor.apply_, torch.Tensor.map_, torch.Tensor.map2_, torch.Tensor.data_ptr, torch.Tensor.__repr__)
"""Functions that read the values of all their arguments where no dispatch mode sees it, or say where these lie."""

SPLITTING = (torch.Tensor.tensor_split, torch.tensor_split)
"""Functions that read in C++, unseen by dispatch modes, the places at which they split their first argument."""


def are_apart(network: nn.Module, call_of: Callable[[int], tuple[int, Call]], *, axis: int = 0) -> bool:
    """Returns whether it is proved that a network keeps records apart, for its outputs and for gradients of each record.

    Args:
        network: As it trains; left without a trace.
        call_of: The arguments for so many records, or as many as there are, and how many they are.
        axis: Where tensors have their records.

    Returns:
        True if it is proved; False if it is not, which says nothing.
    """
    enter_phase("whether they stay apart")
    try:
        records, call = call_of(RECORDS)
        if records < 2:
            return False
        followed = _followed(network, call, records, axis)
        return followed.apart and _others_do_not_matter(
            network, call, records, axis, decided=followed.decided, keeps=followed.keeps
        )
    except Exception:  # which the numerical comparison meets as well, or does not
        return False


def _followed(network: nn.Module, call: Call, records: int, axis: int) -> _Following:
    """Follows a run with zeros in place of matrix products if no value of these is read, and the whole run otherwise."""
    if all(each.device.type == "cpu" for each in (*network.parameters(), *network.buffers())):
        with contextlib.suppress(Exception):  # zeros may be the reason
            return _Following(network, call, records, axis, LeftOutProducts())
    return _Following(network, call, records, axis, None)


def _others_do_not_matter(network: nn.Module, call: Call, records: int, axis: int, *, decided: bool, keeps: bool) -> bool:
    """Returns whether a record's outputs, what layers get of it and its gradients stay beside several others, one at a time.

    Where it has ``decided`` by a yes or no, others are tried that change it. If it ``keeps`` a flag, a number or a text
    besides, or would after another answer, that must be the same whatever the answers are, each of which must have been met
    both ways.
    """

    def pair(kept: int, other: int) -> Call:
        def cut(leaf: torch.Tensor) -> torch.Tensor:
            return leaf.index_select(axis, torch.tensor([kept, other], device=leaf.device))

        return tree_map_only(torch.Tensor, lambda leaf: cut(leaf) if has_records(leaf, records, axis) else leaf, call)  # type: ignore[no-any-return]

    def changed(kept: int) -> Call:
        return with_others(pair(kept, (kept + 1) % records), 2, axis, 0, rescaled)

    beside = [pair(0, records - 1), changed(0), pair(0, 0)]
    ways: Ways = {}
    for kept in range(records) if decided else ():
        ways = _by_answers(network, [*(pair(kept, other) for other in range(records)), changed(kept)])
        if len(ways) > 1:
            beside = [way.call for way in ways.values()]
            break
    if decided and (keeps or _keeps_otherwise(network, beside[0])) and not _keep_the_same(ways):
        return False
    first = _first_rows(network, beside[0], axis, beside=0.0)
    others = 0
    for each in beside[1:]:
        with contextlib.suppress(Exception):  # what the network does not take, a probability above one, say
            if not all_same(first, _first_rows(network, each, axis, beside=16.0)):  # which rounds nothing
                return False
            others += 1
        if others and not decided:
            break
    return others > 0


class _Way(NamedTuple):
    """A call on which a network reads certain values, and the flags, numbers and texts that it keeps; None if tensors, too."""

    call: Call
    kept: dict[Any, Any] | None


Ways = dict[tuple[Any, ...], _Way]
"""One call for each sequence of values that a network reads."""


def _by_answers(network: nn.Module, calls: list[Call]) -> Ways:
    """Returns one of the calls for each sequence of values that the network reads (as in ``if mask.all()``) on any of them."""
    ways: Ways = {}
    for each in calls:
        answers, noted = _Answers(ways), EarlierCalls(network)
        with contextlib.suppress(Exception), untouched(network), torch.no_grad(), cheap_products(), answers:
            seed_draws(0)
            network(*each[0], **each[1])
            ways.setdefault(tuple(answers.met), _Way(each, noted.plain_changes()))
    return ways


def _keep_the_same(ways: Ways) -> bool:
    """Returns whether the network keeps the same whatever it reads, and each value that it reads was met both ways."""
    if () in ways:  # it reads nothing without gradients, and did with them
        return False
    both = all(len({answers[place] for answers in ways if len(answers) > place}) > 1 for place in range(max(map(len, ways))))
    kept = [way.kept for way in ways.values()]
    return both and None not in kept and all(each == kept[0] for each in kept)


def _keeps_otherwise(network: nn.Module, call: Call) -> bool:
    """Returns whether a network may keep anything of its call where any yes or no that it reads, or each, is the opposite."""
    watched = hasattr(network, "autograd_grad_sample_hooks")  # Opacus's hooks look at passes with gradients alone
    for which in (None, *range(MOST_READ)):
        noted, opposite, endless = EarlierCalls(network), _Opposite(which), False

        def run() -> None:
            opposite.read = 0  # noqa: B023
            seed_draws(0)
            with opposite:  # noqa: B023
                network(*call[0], **call[1])

        with untouched(network), torch.set_grad_enabled(not watched):
            try:
                Frugal(network)(run)
            except TooManyReadsError:
                endless = True
            except Exception:  # it refuses such records, say
                pass
            if endless or noted.plain_changes() != {}:
                return True
        if which is not None and which >= opposite.read:
            return False
    return True


def _first_rows(network: nn.Module, call: Call, axis: int, *, beside: float) -> list[torch.Tensor]:
    """Returns the first of two records' outputs, its rows of what layers get, and its gradients there.

    The other record's part of the loss is multiplied by the number that is ``beside`` the first one's 1.
    """
    watched = hasattr(network, "autograd_grad_sample_hooks")  # Opacus's hooks look at passes with gradients alone
    taken: list[tuple[torch.Tensor, int]] = []
    given: list[tuple[torch.Tensor, int]] = []

    def note(layer: nn.Module, inputs: Any, output: Any) -> None:
        along = _axis_of(layer, axis)
        taken.extend((each, along) for each in tensors_in(inputs) if has_records(each, 2, along))
        given.extend((each, along) for each in results(output) if each.requires_grad and has_records(each, 2, along))

    handles = [each.register_forward_hook(note) for each in layers_with_parameters(network)]
    try:
        with untouched(network), torch.set_grad_enabled(not watched):
            seed_draws(0)
            told = [(each, axis) for each in results(network(*call[0], **call[1])) if has_records(each, 2, axis)]
            factors = torch.tensor([1.0, beside])
            losses = [each.sin().movedim(axis, -1) * factors.to(each) for each, _ in told if each.requires_grad]
            total = sum(each.sum() for each in losses)
            if isinstance(total, torch.Tensor):
                places = [each for each, _ in given]
                gradients = torch.autograd.grad(total, places, allow_unused=True)
                told += [(each, along) for each, (_, along) in zip(gradients, given, strict=True) if each is not None]
    finally:
        for handle in handles:
            handle.remove()
    return [each.detach().select(along, 0).clone() for each, along in (*told, *taken)]  # what layers got may be written to


def _axis_of(layer: nn.Module, axis: int) -> int:
    """Returns the axis of records in a layer's input: the network's, or the first in a single step of a recurrent layer."""
    return 0 if isinstance(layer, RNNLinear) else axis


def layers_with_parameters(network: nn.Module) -> list[nn.Module]:
    """Returns the modules with trainable parameters of their own; for Opacus's recurrent layers, their cells."""
    candidates = [each for each in network.modules() if type(each) not in (DPRNN, DPLSTM, DPGRU)]
    return [each for each in candidates if any(own.requires_grad for own in each.parameters(recurse=False))]


class _Answers(InsightMode):
    """A dispatch mode that notes the values that a network reads, and ends a run that can only go the way of an earlier one.

    Args:
        known: What runs on as many records, of the same sizes, have read from their beginnings to their ends.
    """

    def __init__(self, known: Container[tuple[Any, ...]]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.met: list[Any] = []
        self._known = known

    def meet(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Performs an operation, and notes its result if Python reads it."""
        if tuple(self.met) in self._known:  # with the same sizes and answers it reads nothing more
            raise KnownWayError
        result = self.go_on(func, args, kwargs)
        if ASKING & set(func.tags) and not isinstance(result, torch.Tensor):
            self.met.append(result)
        return result


class _Opposite(LimitedReads):  # type: ignore[no-untyped-call]
    """A dispatch mode that gives the opposite of a yes or no that a network reads.

    Args:
        which: Of which, by its number among all values that are read; None: of every one of the first, after which a loop that
            the opposites have kept going may end.
    """

    def __init__(self, which: int | None) -> None:
        super().__init__()
        self._which = which

    def told(self, value: Any) -> Any:
        """Returns the value, or its opposite."""
        turned = self.read < MOST_READ if self._which is None else self.read == self._which
        return not value if turned and isinstance(value, bool) else value


class KnownWayError(Exception):
    """Raised where a run can only go on as an earlier one did."""


class _Following:
    """A run of a network in which records are followed.

    Args:
        network: It runs.
        call: On these arguments.
        records: How many there are.
        axis: Where tensors have them.
        products: Leaves products out.

    Attributes:
        apart: Whether no output has another record's values, and no row of a layer has.
        decided: Whether a yes or no was read.
        keeps: Whether the network keeps anything of its call, as an attribute, say.
    """

    def __init__(self, network: nn.Module, call: Call, records: int, axis: int, products: LeftOutProducts | None) -> None:
        self._network, self._records, self._axis = network, records, axis
        constants = [*network.parameters(), *network.buffers(), *kept_activations(network), *results(call)]
        self._products, self._flow = products, RecordFlow(records, constants)
        self._misplaced = self.decided = self.keeps = False
        self._taken: dict[nn.Module, list[Any]] = {}
        self.apart = self._follow(call)

    def _follow(self, call: Call) -> bool:
        copied = tree_map_only(torch.Tensor, lambda each: each.clone() if self._has_rows(each) else each, call)
        self._mark(copied)
        backward = not hasattr(
            self._network, "autograd_grad_sample_hooks"
        )  # Opacus's hooks look at passes with gradients alone
        with untouched(self._network), torch.set_grad_enabled(backward), warnings.catch_warnings(), self._watched():
            warnings.simplefilter("ignore")
            seed_draws(0)
            noted = EarlierCalls(self._network)
            with self._modes():
                outputs = [each for each in results(self._network(*copied[0], **copied[1])) if self._has_rows(each)]
                told = [self._flow.rows(each, self._axis) for each in outputs]
                self.decided = self._flow.decided
                if backward:
                    self._go_back(outputs)
            del copied, outputs
            self._taken.clear()
            noted.compare()
            self.keeps = bool(noted)
            self._misplaced |= self._flow.outlasting()
        if self._flow.failed:
            raise self._flow.failed
        own = [1 << record for record in range(self._records)]
        return not self._misplaced and own in told and all(map(self._apart, told))

    def _mark(self, call: Call) -> None:
        for each in tensors_in(list(call)):
            if self._has_rows(each):
                self._flow.mark(each, self._axis)

    def _has_rows(self, value: Any) -> bool:
        return has_records(value, self._records, self._axis)

    def _apart(self, rows: list[int]) -> bool:
        return all(row in (0, 1 << record) for record, row in enumerate(rows))

    def _go_back(self, outputs: list[torch.Tensor]) -> None:
        """Computes gradients of a weighted sum of the outputs, where each record's weights are marked as its own."""
        total = torch.zeros(())
        for each in outputs:
            if each.requires_grad:
                weights = torch.ones(each.shape, dtype=each.dtype, device=each.device)
                self._flow.mark(weights, self._axis)
                total = total.to(each) + (each * weights).sum()
        parameters = [each for each in self._network.parameters() if each.requires_grad]
        self._flow.decided = False
        torch.autograd.grad(total, parameters, allow_unused=True)
        self._misplaced |= self._flow.decided  # by gradients, which are larger or smaller where it trains

    @contextlib.contextmanager
    def _modes(self) -> Iterator[None]:
        with _Leaving(self._flow), self._flow if self._products is None else cheap_products(self._products, self._flow):
            yield

    @contextlib.contextmanager
    def _watched(self) -> Iterator[None]:
        """Looks at what layers with parameters get, and at gradients where Opacus takes them: behind all other hooks."""
        handles = []
        for each in layers_with_parameters(self._network):
            handles += [each.register_forward_hook(self._look), each.register_full_backward_hook(self._look_back)]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _look(self, layer: nn.Module, inputs: Any, output: Any) -> None:
        self._see(layer, inputs)
        self._taken.setdefault(layer, []).append(inputs)
        seen = (output,) if isinstance(output, torch.Tensor) else output
        # Gradients of what lies in other results come to no hook, nor do those of a parameter that is one.
        if not isinstance(seen, tuple) or len(results(output)) != len(seen) or any(each.is_leaf for each in results(output)):
            self._misplaced |= any(each.requires_grad for each in results(output))

    def _look_back(self, layer: nn.Module, inputs: Any, outputs: Any) -> None:
        self._see(layer, (outputs, self._taken[layer]))  # which Opacus reads here, and may have been written to

    def _see(self, layer: nn.Module, values: Any) -> None:
        axis = _axis_of(layer, self._axis)
        for each in tensors_in(values):
            placed = has_records(each, self._records, axis) and self._apart(self._flow.rows(each, axis))
            self._misplaced |= not placed


class _Leaving(TorchFunctionMode):
    """A function mode that ends a followed run where values of records leave PyTorch (NumPy, lists, pickles)."""

    def __init__(self, flow: RecordFlow) -> None:
        super().__init__()
        self._flow = flow

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        read: Any = ()
        if func in LEAVING:
            read = args[0]
        elif func in UNSEEN or func in SPLITTING:
            read = (args[func in SPLITTING :], kwargs)
        if any(map(self._flow.depends, tensors_in(read))):
            self._flow.leave(func.__name__)
        with contextlib.ExitStack() as inside:
            if func is torch.autograd.grad and isinstance(args[0], torch.Tensor):
                # A mode is told of this and is off meanwhile; hooks and backward methods of the network run in it.
                args[0].register_hook(lambda _: (None, inside.enter_context(_Leaving(self._flow)))[0])  # type: ignore[no-untyped-call]
            return func(*args, **(kwargs or {}))
