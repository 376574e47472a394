"""Decides whether a network may train: whether each per-sample gradient is of one record only.

Opacus computes the gradient of record i in a layer from the i-th row of the layer's input and the
i-th row of the gradient of its output, and clips all rows i together. The check compares each of
two records among others with the same record among copies of itself. Three conditions must hold:

1. Every trained layer gets as many rows as there are records. This is tested with two numbers of
   records that are the size of no other axis. A layer that gets ``[time, batch, ...]`` has a row
   for each time step, each of which would be clipped separately. If the batch is as large as the
   sequences are long, nothing else reveals this.
2. The network's output for a record does not change when all other records become copies of it, and
   neither does the record's gradient as Opacus computes it. This fails if a network takes a mean
   over the batch, or returns a loss of the batch that is not a sum over records.
3. Opacus's hooks compute each record's gradient, or its norm, as autograd does for the loss of this
   record alone. This fails if a network sorts or flips rows for one layer and restores the order
   after it, or scales gradients in a hook by the largest one. Layers for which Opacus's rule is
   wrong or fails get PyTorch's functional gradients. If these are wrong, too, the network is
   refused: ``F.linear(x, self.embedding.weight)`` calls no layer, so that no hook sees this part of
   the gradient. Ghost clipping clips by smaller losses; with it, gradients must be proportional to
   the loss of their record.

Functions of the user that compute gradients per record (``register_grad_sampler``) are checked by
their results. The limits of a check on a few records are in docs/training_loops.rst.

If a run changes anything in the network, a further check compares the same batch after several
different batches. A step clips and noises the influence of its own records only. The influence of
an earlier batch through a memory bank, a queue or a running mean is in none of its bounds. Tensors
that are stored and not read (attention weights for plots, for example) cause a warning with their
names, because they are neither clipped nor noised, and are released with the network.

>>> class Centred(nn.Linear):
...     def forward(self, x):
...         return super().forward(x - x.mean(0))
>>> network = nn.Sequential(nn.Tanh(), Centred(3, 2))
>>> print(per_sample_check(network, ((torch.randn(6, 3),), {})).problem)
module mixes records in 1 (Centred): one record's output changes when another record does, ...
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import traceback
import warnings
from collections.abc import Collection, Iterable, Iterator, Sequence
from itertools import zip_longest
from typing import Any, NamedTuple

import torch
from opacus.grad_sample import GradSampleHooks, prepare_module
from torch import nn
from torch.nn.modules.module import register_module_forward_hook

from opacus_shuffle.core.opacus_compat import correct_layers, norms_of_records
from opacus_shuffle.networks.running import (
    Snapshot,
    results,
    rolled_back,
    seed_draws,
)
from opacus_shuffle.networks.sample_input import (
    Call,
    copies_of,
    sizes_along,
    take_records,
    tensors_of,
)

SIZES = (5, 4, 6, 7, 8, 9, 10, 11)
"""Numbers of records that are tried: some may be sizes of another axis, or fail."""
_HALF = (torch.bfloat16, torch.float16)
TARGETS = (1, 2)
"""The records that are compared. The first one is not, because networks may compare with it."""
SEED = 1
"""The seed of runs. With it, ``torch.randperm`` of so few records moves these records."""

SORT_BEFORE = (
    "so that gradients of several records are clipped as one record's; sort and select records in "
    "the loader's collate_fn, and pass all of them to every layer, in their order"
)
"""The remedy if layers get records in another order."""

_CALL_LAYERS = (
    "call each layer on one tensor with [batch, ...], nn.EmbeddingBag on indices and offsets, and "
    "none under torch.utils.checkpoint with use_reentrant=False; do not write to a layer's output "
    "in place, as nn.ReLU(inplace=True) does; use nn.utils.parametrizations.weight_norm instead of "
    "nn.utils.weight_norm, and no spectral_norm; register a rule for your own layers by "
    "opacus.grad_sample.register_grad_sampler; or freeze the layer"
)

_SHOWN = 4
"""Layers that a message names."""


@dataclasses.dataclass(frozen=True)
class NetworkCheck:
    """The result of a check of a network's per-sample gradients.

    Attributes:
        seen: Whether the network ran on several records. If not, nothing was checked.
        problem: Why the network is refused: the module, the observation, the remedy. Empty if it
            may train.
        failure: The error of the network, if it did not run.
        kept: The buffers and attributes with tensors that a run changes and no later batch reads.
        functional: The layers for which Opacus's rule is wrong and PyTorch's functional gradients
            are right.
    """

    seen: bool
    problem: str = ""
    failure: Exception | None = None
    kept: Sequence[str] = ()
    functional: Sequence[str] = ()


def per_sample_check(
    network: nn.Module,
    call: Call,
    *,
    axis: int = 0,
    mode: str = "hooks",
    more: Sequence[int] = (),
    trained: Iterable[torch.Tensor] | None = None,
) -> NetworkCheck:
    """Checks that every record's gradient is its own, and is in the row that Opacus uses.

    The network runs forwards on two numbers of records, and on copies of two records; then forwards
    and backwards with Opacus's hooks on some records, and on these copies, each time from the same
    state and with the same random numbers.

    Args:
        network: In the modes in which it trains. It is not changed.
        call: Its arguments for some records, which are cut or repeated.
        axis: The axis of records: 0, or 1 if layers get ``[time, batch, ...]``.
        mode: Opacus's ``grad_sample_mode``.
        more: Further numbers of records to try, for networks that accept only some.
        trained: The parameters that are clipped; others are not checked. By default all that
            require gradients.
    """
    runs = _Runs(network, axis, network.parameters() if trained is None else trained)
    whole = next((size for size in sizes_along(call, axis) if size > 1), 0)

    taken = {size for t in (*network.parameters(), *network.buffers()) for size in t.shape}
    runs_of: dict[int, tuple[Call, list[_ModuleCall]]] = {}
    failure: Exception | None = None
    for records in (*SIZES, whole, *more) if whole else ():
        if records in taken or len(runs_of) > 1:
            continue
        try:
            of_records = take_records(call, whole, range(records), axis)
            modules = runs.forward(of_records)
        except Exception as error:
            failure = error
            continue
        runs_of[records] = of_records, modules
        # If another axis has the same size, rows of that axis would be taken for records.
        sizes = {size for t in tensors_of([of_records, modules]) for size in t.shape}
        taken |= sizes - {records}
        runs_of = {size: run for size, run in runs_of.items() if size not in taken}
    if not runs_of:
        return NetworkCheck(False, failure=failure)
    records, (of_records, modules) = next(iter(runs_of.items()))
    try:
        problem = _mixing(runs, of_records, modules, records)
        problem = problem or _carry_over(runs, of_records, records)
        for losses_only in (False, True) if runs.has_both else (False,):
            problem = problem or _wrong_gradients(
                runs, of_records, records, mode, losses_only=losses_only
            )
    except Exception as error:
        return NetworkCheck(False, failure=error)
    kept = [name for name, has_tensors in runs.changed.items() if has_tensors]
    functional = [name for layer, name in runs.names.items() if layer in runs.functional]
    return NetworkCheck(True, problem, kept=kept, functional=functional)


# Runs of the network


class _ModuleCall(NamedTuple):
    """One call of a module: copies of its tensors, which a run may write to later."""

    name: str
    inputs: list[torch.Tensor]
    outputs: list[torch.Tensor]


class _Runs:
    """Runs of a network, each from the same state and with the same random numbers.

    Args:
        network: It is not changed.
        axis: The axis of records.
        trained: The parameters that are clipped.

    Attributes:
        changed: The parameters, buffers and attributes that some run has changed, with whether they
            contain tensors.
        functional: The layers that get PyTorch's functional gradients.
        has_both: Whether the network returned a loss of the batch and also other outputs.
    """

    has_both = False

    def __init__(self, network: nn.Module, axis: int, trained: Iterable[torch.Tensor]) -> None:
        self.network, self.axis = network, axis
        self.start, self.changed = Snapshot(network), dict[str, bool]()
        self.names = {module: name for name, module in network.named_modules()}
        named, clipped = network.named_parameters(), set(trained)
        self.trained = {name: p for name, p in named if p.requires_grad and p in clipped}
        self.functional = set[nn.Module]()

    @contextlib.contextmanager
    def from_start(self) -> Iterator[dict[str, bool]]:
        """Restores the network after a run, and yields what :func:`rolled_back` yields."""
        with (
            rolled_back(self.network, self.start) as changed,
            torch.enable_grad(),
            warnings.catch_warnings(),
        ):
            warnings.simplefilter("ignore")
            seed_draws(SEED)
            yield changed

    def forward(self, *batches: Call) -> list[_ModuleCall]:
        """Runs the network on batches one after the other.

        Returns:
            The calls of modules for the last batch, innermost first; the last one is the network's.
        """
        calls = list[_ModuleCall]()

        def note(module: nn.Module, args: Any, keywords: Any, output: Any) -> None:
            if module in self.names:
                inputs, outputs = _copy(tensors_of((args, keywords))), _copy(tensors_of(output))
                calls.append(_ModuleCall(self.names[module], inputs, outputs))

        with self.from_start() as changed, register_module_forward_hook(note, with_kwargs=True):
            for args, keywords in batches:
                calls.clear()
                seed_draws(SEED)
                outputs = results(self.network(*args, **keywords))
            calls.append(_ModuleCall("", [], _copy(outputs)))
            trained = {bool(t.dim()) for t in outputs if t.requires_grad}
            self.has_both = len(trained) > 1
            if not trained:
                raise ValueError("no output requires a gradient")
        self.changed |= changed
        return calls

    def backward(
        self, call: Call, factors: Sequence[float], mode: str, *, losses_only: bool
    ) -> tuple[_Gradients, _Gradients, bool]:
        """Runs the network forwards and backwards with Opacus's hooks.

        Args:
            call: The arguments.
            factors: The weight of each record's output rows in the loss.
            mode: Opacus's ``grad_sample_mode``.
            losses_only: Whether only losses of the batch are trained, without outputs beside them.

        Returns:
            The gradients or norms that Opacus computes for the records, autograd's gradients of the
            batch, and whether the loss has a row for each record.
        """
        with self.from_start():
            self.network.zero_grad()
            model: Any = prepare_module(
                self.network,
                grad_sample_mode=mode,
                batch_first=self.axis == 0,
                loss_reduction="sum",
            )
            correct_layers(model, self.functional)
            outputs = results(model(*call[0], **call[1]))
            total, has_rows = _loss(outputs, factors, losses_only=losses_only)
            total.backward()
            computed, gradients = {}, {}
            for name, p in self.trained.items():
                rows = norms_of_records(p) if mode == "ghost" else vars(p).get("grad_sample")
                # A layer that ran again in the backward pass has a list of several gradients.
                none = p.new_zeros(len(factors), *(() if mode == "ghost" else p.shape))
                computed[name] = rows if isinstance(rows, torch.Tensor) else none
                gradients[name] = p.new_zeros(p.shape) if p.grad is None else p.grad.to_dense()
        return computed, gradients, has_rows


_Gradients = dict[str, torch.Tensor]
"""Gradients of records, or with ghost clipping their norms, by the names of parameters."""


def _copy(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    return [t.detach().clone() for t in tensors if t.layout == torch.strided]


def _by_record(tensors: list[torch.Tensor], records: int) -> list[torch.Tensor]:
    """Returns the tensors with an axis of records, which is moved to the front."""
    return [t.movedim(t.shape.index(records), 0) for t in tensors if records in t.shape]


def _loss(
    outputs: list[torch.Tensor], factors: Sequence[float], *, losses_only: bool
) -> tuple[Any, bool]:
    """Returns a random weighted sum of outputs, and whether they have rows of records."""
    trained = [t for t in outputs if t.requires_grad and not (losses_only and t.dim())]
    by_record = _by_record(trained, len(factors))
    draws = torch.Generator().manual_seed(0)
    total: Any = 0.0
    # If there are rows of records, losses of the batch are checked in a run of their own.
    for output in by_record or trained:
        weighted = output * torch.randn(output.shape, generator=draws, device="cpu").to(output)
        if by_record:
            weighted = weighted.movedim(0, -1) * weighted.new_tensor(factors)
        total = total + weighted.sum()
    return total, bool(by_record)


# Conclusions from the runs


def _mixing(runs: _Runs, call: Call, before: list[_ModuleCall], records: int) -> str:
    """Returns which module mixes records in the forward pass, or an empty text.

    Args:
        runs: Of the network.
        call: The arguments.
        before: What :meth:`_Runs.forward` returned for them.
        records: The number of records.
    """
    for record in TARGETS:
        after = runs.forward(copies_of(call, record, records, runs.axis))
        changed = _changed_module(before, after, records, record)
        if changed is not None:
            return (
                f"module mixes records in {name_modules(runs.network, [changed])}: one record's "
                "output changes when another record does, so that clipping does not bound a "
                "record's influence; compute statistics (a mean, a norm, a rank) within each "
                "record and not over the batch, as nn.LayerNorm and nn.GroupNorm do"
            )
    return ""


def _wrong_gradients(runs: _Runs, call: Call, records: int, mode: str, *, losses_only: bool) -> str:
    """Returns how gradients of records are wrong or depend on other records, or an empty text.

    Args:
        runs: Of the network.
        call: The arguments.
        records: The number of records.
        mode: Opacus's ``grad_sample_mode``.
        losses_only: As of :meth:`_Runs.backward`.
    """
    failure, wrong = "", set[str]()
    try:
        computed, _, has_rows = runs.backward(call, [1.0] * records, mode, losses_only=losses_only)
        counts = {name: len(rows) for name, rows in computed.items() if len(rows) != records}
        if counts:
            return _wrong_counts(runs, counts, records)
        for record in TARGETS:
            # Ghost clipping multiplies losses. Products with powers of two are not rounded.
            factor = 2.0 if mode == "ghost" and has_rows else 1.0
            alone = [factor * (row == record) for row in range(records)]
            others = copies_of(call, record, records, runs.axis)
            again, gradients, _ = runs.backward(others, alone, mode, losses_only=losses_only)
            if mode == "ew":  # which leaves no gradients of the batch
                _, gradients, _ = runs.backward(others, alone, "no_op", losses_only=losses_only)
            sums = {n: rows[record] if has_rows else rows.sum(0) for n, rows in again.items()}
            # Relative to the whole gradient, because those of one parameter may cancel to rounding
            # errors.
            whole = math.hypot(*map(_size, sums.values()))
            wrong |= {
                name
                for name, rows in computed.items()
                if differ(factor * rows[record], again[name][record], 1e-6 * whole)
                or _is_wrong(sums[name], gradients[name], whole, bound=not has_rows)
            }
        odd = {runs.trained[name] for name in wrong}
        layers = {layer for layer in runs.names if not odd.isdisjoint(layer._parameters.values())}
    except Exception as error:
        if "Expanded Weights encountered" in str(error):
            raise  # PyTorch raises this in every forward pass, as users of Opacus expect
        frames = [frame.f_locals.values() for frame, _ in traceback.walk_tb(error.__traceback__)]
        passed = [v for f in frames for v in f if isinstance(v, nn.Module) and v in runs.names]
        failing = passed[-1] if passed else runs.network  # the innermost one
        layers = {layer for layer in runs.names if type(layer) is type(failing)}
        failure = (
            f"module cannot be trained with grad_sample_mode={mode!r} at "
            f"{name_modules(runs.network, [runs.names[failing]])} ({type(error).__name__}: "
            f"{error}): use another mode of 'hooks', 'functorch' and 'ew', or {_CALL_LAYERS}"
        )
    # Layers for which Opacus's rule fails or is wrong get functional gradients.
    layers = {layer for layer in layers if type(layer) in GradSampleHooks.GRAD_SAMPLERS}
    if layers - runs.functional:
        runs.functional |= layers
        return _wrong_gradients(runs, call, records, mode, losses_only=losses_only)
    if failure:
        return failure
    return _describe_wrong(runs, wrong, mode, has_rows=has_rows) if wrong else ""


def _describe_wrong(runs: _Runs, wrong: set[str], mode: str, *, has_rows: bool) -> str:
    """Returns an error message about parameters with wrong gradients of records."""
    if not has_rows:
        remedy = " (or, where arguments are [time, batch, ...], pass batch_first=False)"
        return (
            "module returns a loss of the batch that is not a sum or mean of one number per "
            "record: one record's gradient depends on the others, so that clipping does not bound "
            "a record's influence; return one loss per record, or their sum or mean (for tokens "
            "opacus_shuffle.token_loss(logits, labels).mean(), without labels=...), and let every "
            f"layer see [batch, ...]{'' if runs.axis else remedy}; or {_CALL_LAYERS}"
        )
    layers = {name.rpartition(".")[0] for name in wrong}
    ghost = (
        "; with grad_sample_mode='ghost', gradients must also shrink with their loss: do not clamp "
        "or normalise them in a hook, or use 'hooks'"
    )
    return (
        "module passes records in another order than the batch's to "
        f"{name_modules(runs.network, layers)}, uses {', '.join(sorted(wrong))} outside of the "
        "layer that it belongs to, or scales its gradient by other records (as "
        f"grad_sample_mode={mode!r} shows), {SORT_BEFORE}; take means and norms within each "
        "record, as nn.LayerNorm and nn.GroupNorm do; use another mode of 'hooks', 'functorch' and "
        f"'ew', or {_CALL_LAYERS}{ghost if mode == 'ghost' else ''}"
    )


def _is_wrong(found: torch.Tensor, gradient: torch.Tensor, whole: float, *, bound: bool) -> bool:
    """Returns whether what Opacus computes is not autograd's gradient, or its norm.

    Args:
        found: Opacus's gradient, or, with ghost clipping, its norm.
        gradient: That of autograd.
        whole: The norm of the gradient of all parameters.
        bound: Whether a norm may be too large, as a sum of the norms of several records.
    """
    is_norm = found.shape != gradient.shape
    truth = gradient.norm() if is_norm else gradient
    gap = float(truth - found) if is_norm and bound else _distance(found, truth)
    # Eight roundings: convolutions on a GPU round single precision to 11 bits, and bfloat16 has 8.
    # If a record is not finite, neither is its gradient, and nothing is refused.
    share = 2**-5 if gradient.dtype in _HALF else 2**-8
    return gap > share * whole and bool(truth.isfinite().all())


def _changed_module(
    before: list[_ModuleCall], after: list[_ModuleCall], records: int, record: int
) -> str | None:
    """Returns the innermost module that mixes records, if the network's output changes."""

    def changes(ones: list[torch.Tensor], others: list[torch.Tensor]) -> bool:
        rows = zip_longest(
            *([t[record] for t in _by_record(tensors, records)] for tensors in (ones, others)),
            fillvalue=torch.empty(0),
        )
        return any(differ(one, other) for one, other in rows)

    if not changes(before[-1].outputs, after[-1].outputs):
        return None
    pairs = [*zip(before, after, strict=False), (before[-1], after[-1])]
    one, other = next(pair for pair in pairs if changes(pair[0].outputs, pair[1].outputs))
    # If the record's input rows differ, too, a function in the module around it mixes records.
    return one.name.rpartition(".")[0] if changes(one.inputs, other.inputs) else one.name


def _carry_over(runs: _Runs, call: Call, records: int) -> str:
    """Returns how the records of one batch influence the next batch, or an empty text."""

    def tensors_after(earlier: Call) -> list[torch.Tensor]:
        return [t for one in runs.forward(earlier, call) for t in (*one.inputs, *one.outputs)]

    def gaps(earlier: Call) -> list[float]:
        pairs = zip_longest(plain, tensors_after(earlier), fillvalue=torch.empty(0))
        return [_distance(*pair) for pair in pairs]

    # Kernels with races, and draws from other sources, have another result each time. Otherwise the
    # computations are the same, including their rounding, so that the tolerance is zero: in a long
    # queue the rows of one batch have little weight.
    plain = tensors_after(call) if runs.changed else []
    noise = gaps(call) if runs.changed else []
    for record in range(records) if runs.changed else ():
        changed = gaps(copies_of(call, record, records, runs.axis))
        if any(gap > 10 * usual for gap, usual in zip_longest(changed, noise, fillvalue=0.0)):
            return (
                "module carries records of one batch into later ones by "
                f"{', '.join(sorted(runs.changed))}: a step then depends on records of earlier "
                "batches, whose influence neither its clipping nor its noise covers; reset it at "
                "the beginning of each forward pass, compute it from public data, or remove it"
            )
    return ""


def _wrong_counts(runs: _Runs, counts: dict[str, int], records: int) -> str:
    """Returns an error message about parameters whose number of rows is not that of records."""
    layers = {name.rpartition(".")[0]: count for name, count in counts.items()}
    positions = [
        name
        for name, count in layers.items()
        if count == 1 and isinstance(runs.network.get_submodule(name), nn.Embedding)
    ]
    if positions:
        return (
            "module has embeddings that see a batch of one for every batch, "
            f"{', '.join(positions)}, so Opacus cannot record their per-sample gradients; call "
            "opacus_shuffle.prepare_model(model) first, pass position ids of shape [batch, "
            "length], or freeze them"
        )
    seen = " or ".join(map(str, sorted(set(counts.values()))))
    return (
        f"module passes {seen} row{'s' if seen != '1' else ''} for {records} records to "
        f"{name_modules(runs.network, layers)}: each row would be clipped as a record, but a "
        "record may have several rows, and a row several records; pass "
        f"{'[time, batch, ...]' if runs.axis else '[batch, ...]'} to these layers (by "
        "batch_first=True if a layer has it, or by transposing inside of the layer), let no layer "
        "turn one record into several, do not hard-code the number of records, or freeze them"
    )


def name_modules(network: nn.Module, names: Collection[str]) -> str:
    """Returns the names and classes of some modules, in the network's order."""
    named = [
        f"{name or 'the module itself'} ({type(module).__name__})"
        for name, module in network.named_modules()
        if name in names
    ]
    more = f" and {len(named) - _SHOWN} more" if len(named) > _SHOWN else ""
    return ", ".join(named[:_SHOWN]) + more


def differ(one: torch.Tensor, other: torch.Tensor, slack: float = 0.0) -> bool:
    """Returns whether two tensors differ by more than rounding."""
    share = 1e-2 if one.dtype in _HALF else 1e-5
    return _distance(one, other) > share * (_size(one) + _size(other)) + slack


def _distance(one: torch.Tensor, other: torch.Tensor) -> float:
    """Returns the distance of two tensors; infinity if only one is finite at some entry."""
    if one.shape != other.shape or not torch.equal(one.isfinite(), other.isfinite()):
        return math.inf
    wide = torch.promote_types(one.dtype, torch.float64)
    return _size(one.to(wide) - other.to(wide))


def _size(tensor: torch.Tensor) -> float:
    """Returns the norm of a tensor, in which entries that are not finite count as zero."""
    wide = torch.promote_types(tensor.dtype, torch.float64)
    return float(tensor.to(wide).nan_to_num(0.0, 0.0, 0.0).norm())
