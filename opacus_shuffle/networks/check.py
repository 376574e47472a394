"""Decides whether a network may train: whether each per-sample gradient is of one record only.

Opacus computes the gradient of record i in a layer from the i-th row of the layer's input and the
i-th row of the gradient of its output, and clips all rows i together. The check runs the network on
a few records, and again with all records changed except one, whose loss has another weight. Three
conditions must hold:

1. Every trained layer gets as many rows as there are records. This is tested with two numbers of
   records that are the size of no other axis. A layer that gets ``[time, batch, ...]`` has a row
   for each time step, each of which would be clipped separately. If the batch is as large as the
   sequences are long, nothing else reveals this.
2. The network's output for a record, and the record's rows in every layer, do not change when other
   records change. The gradient rows of records without a loss are zero. This fails if a network
   takes a mean over the batch, sorts or flips rows for one layer and restores the order after it,
   scales gradients in a hook by the largest one, or returns a loss of the batch that is not a sum
   over records.
3. Opacus's hooks compute each record's gradient, or its norm, correctly on these records. Layers
   for which Opacus's rule is wrong or fails get PyTorch's functional gradients. If these are wrong,
   too, the network is refused: ``F.linear(x, self.embedding.weight)`` calls no layer, so that no
   hook sees this part of the gradient. Ghost clipping clips by smaller losses; with it, gradients
   must be proportional to the loss of their record.

Functions of the user that compute gradients per record (``register_grad_sampler``) are checked by
their results. The limits of a check on a few records are in docs/training_loops.rst.

If a run changes anything in the network, a further check compares the same batch after two
different batches. A step clips and noises the influence of its own records only. The influence of
an earlier batch through a memory bank, a queue or a running mean is in none of its bounds. Tensors
that are stored and not read (attention weights for plots, for example) cause a warning with their
names, because they are neither clipped nor noised and leave with the network.

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
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Sequence
from functools import partial
from itertools import zip_longest
from typing import Any

import torch
from opacus.grad_sample import GradSampleHooks, prepare_module
from opacus.layers.dp_rnn import DPRNNBase, RNNLinear
from opacus.utils.module_utils import trainable_modules
from torch import nn
from torch.nn.modules.module import register_module_forward_hook
from torch.utils._pytree import tree_map_only

from opacus_shuffle.core.opacus_compat import correct_layers, norms_of_records
from opacus_shuffle.networks.running import (
    Snapshot,
    results,
    rolled_back,
    seed_draws,
)
from opacus_shuffle.networks.sample_input import (
    TARGET,
    Call,
    sizes_along,
    take_records,
    tensors_of,
    with_others,
)

SIZES = (5, 4, 6, 7, 8, 9, 10, 11)
"""Numbers of records that are tried: some may be sizes of another axis, or fail."""
_HALF = (torch.bfloat16, torch.float16)
SEED = 1
"""The seed of runs. With it, ``torch.randperm`` of so few records moves the target record."""

SORT_BEFORE = (
    "so that gradients of several records are clipped as one record's; sort and select records in "
    "the loader's collate_fn, and pass all of them to every layer, in their order"
)
"""The remedy if layers get records in another order."""

_CALL_LAYERS = (
    "call each layer on one tensor with [batch, ...], nn.EmbeddingBag on indices and offsets, and "
    "none under torch.utils.checkpoint; do not write to a layer's output in place, as "
    "nn.ReLU(inplace=True) does; use nn.utils.parametrizations.weight_norm instead of "
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

    The network runs forwards on two numbers of records, and forwards and backwards twice on one of
    them, each time from the same state and with the same random numbers.

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
    calls: dict[int, Call] = {}
    failure: Exception | None = None
    for records in (*SIZES, whole, *more) if whole else ():
        if records in taken or len(calls) > 1:
            continue
        try:
            of_records = take_records(call, whole, records, axis)
            counts, sizes = runs.count_rows(of_records)
        except Exception as error:
            failure = error
            continue
        if wrong := {name: count for name, count in counts.items() if count != records}:
            return NetworkCheck(True, _wrong_counts(network, wrong, records, axis))
        calls[records] = of_records
        # If another axis has the same size, the counted rows may be rows of that axis.
        taken |= sizes - {records}
        calls = {size: call for size, call in calls.items() if size not in taken}
    if not calls:
        return NetworkCheck(False, failure=failure)
    records, of_records = next(iter(calls.items()))
    try:
        problem = _dependence(runs, of_records, records, mode) or _carry_over(
            runs, of_records, records
        )
        if runs.has_both and not problem:
            runs.losses_alone = True
            problem = _dependence(runs, of_records, records, "hooks")
    except Exception as error:
        return NetworkCheck(False, failure=error)
    kept = [name for name, has_tensors in runs.changed.items() if has_tensors]
    functional = [name for layer, name in runs.names.items() if layer in runs.functional]
    return NetworkCheck(True, problem, kept=kept, functional=functional)


# Runs, and the rows of one record in them

_Rows = dict[tuple[str, str], list[torch.Tensor]]
"""The rows of the target record in a run, by kind and by the name of a module.

``"outputs"`` are those of the network. ``"into"`` and ``"out of"`` are inputs and outputs of each
module, innermost first. For trained layers in which the record has a gradient, ``"given"`` are the
inputs, and ``"gradients"`` the gradients divided by the weight of the record's loss. ``"leaked"``
are gradients in rows of records without a loss.
"""


_ModuleCall = tuple[str, nn.Module, list[torch.Tensor], list[torch.Tensor]]
"""One call of a module: its name, the module, its input tensors, its output tensors."""


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
        has_both: Whether the network returned a loss of the batch and also rows of records.
        losses_alone: Whether only such losses are trained, as with models of ``transformers``.
    """

    has_both = losses_alone = False

    def __init__(self, network: nn.Module, axis: int, trained: Iterable[torch.Tensor]) -> None:
        self.network, self.axis = network, axis
        self.start, self.changed = Snapshot(network), dict[str, bool]()
        self.names = {module: name for name, module in network.named_modules()}
        named, clipped = network.named_parameters(), set(trained)
        self.trained = {p: name for name, p in named if p.requires_grad and p in clipped}
        # The modules for which Opacus computes gradients; without a rule, a module with all inside.
        layers = {m for _, m in trainable_modules(network) if not isinstance(m, DPRNNBase)}
        whole = [m for m in layers if type(m) not in GradSampleHooks.GRAD_SAMPLERS]
        layers -= {part for module in whole for part in [*module.modules()][1:]}
        self.layers = {m for m in layers if not self.trained.keys().isdisjoint(m.parameters())}
        self.functional = set[nn.Module]()

    @contextlib.contextmanager
    def from_start(self, *, hooked: bool = False) -> Iterator[None]:
        """Restores the network after a block of runs.

        Args:
            hooked: Whether Opacus's hooks run in the block. Their changes do not count.
        """
        with (
            rolled_back(self.network, self.start) as changed,
            torch.enable_grad(),
            warnings.catch_warnings(),
        ):
            warnings.simplefilter("ignore")
            yield
        self.changed |= {} if hooked else changed

    @contextlib.contextmanager
    def forwards(self, *batches: Call) -> Iterator[tuple[list[torch.Tensor], list[_ModuleCall]]]:
        """Runs the network on batches, and yields outputs and calls of modules for the last one."""
        calls = list[_ModuleCall]()

        def note(module: nn.Module, args: Any, keywords: Any, output: Any) -> Any:
            if module in self.names:
                inputs, outputs = tensors_of((args, keywords)), tensors_of(output)
                calls.append((self.names[module], module, inputs, outputs))
            # Opacus gets gradients after the hooks of a layer's output, and before operations that
            # write to that output in place.
            clone = module in self.layers
            return tree_map_only(torch.Tensor, torch.clone, output) if clone else None

        with self.from_start(), register_module_forward_hook(note, with_kwargs=True):
            for number, (args, keywords) in enumerate(batches):
                calls.clear()
                seed_draws(SEED + number)
                outputs = results(self.network(*args, **keywords))
            yield outputs, calls

    def clipped(self, calls: list[_ModuleCall]) -> list[tuple[_ModuleCall, int]]:
        """Returns the calls that are clipped, with the axis that Opacus takes for records."""
        return [
            (call, 0 if type(module) is RNNLinear else self.axis)
            for call in calls
            for _, module, _, outputs in [call]
            if module in self.layers and module.training and outputs[0].requires_grad
        ]

    def count_rows(self, call: Call) -> tuple[dict[str, int], set[int]]:
        """Returns the number of output rows of each trained layer, and all axis sizes of a run."""
        with self.forwards(call) as (_, calls):
            counts: dict[str, int] = defaultdict(int)
            for (name, *_, outputs), axis in self.clipped(calls):
                counts[name] = max(counts[name], outputs[0].shape[axis])
            sizes = {size for tensor in tensors_of([call, calls]) for size in tensor.shape}
        return counts, sizes

    def run(self, call: Call, factors: torch.Tensor) -> tuple[_Rows, bool]:
        """Runs the network forwards and backwards.

        Args:
            call: The arguments.
            factors: The weight of each record's output rows in the loss.

        Returns:
            The rows of the target record, and whether the loss has a row for each record.
        """
        rows: _Rows = defaultdict(list)
        with self.forwards(call) as (outputs, calls):
            into = [("into", name, inputs) for name, _, inputs, _ in calls]
            out_of = [("out of", name, gave) for name, _, _, gave in calls]
            for kind, name, tensors in [("outputs", "", outputs), *into, *out_of]:
                by_record = _by_record(tensors, len(factors))
                rows[kind, name] += [tensor[TARGET].detach().clone() for tensor in by_record]
            losses = [output for output in outputs if not output.dim() and output.requires_grad]
            total, has_rows = _loss(losses if self.losses_alone else outputs, factors)
            self.has_both = has_rows and bool(losses)
            clipped = self.clipped(calls)
            targets = [gave[0] for (*_, gave), _ in clipped]
            gradients = torch.autograd.grad(total, targets, allow_unused=True)
            for ((name, layer, inputs, _), axis), gradient in zip(clipped, gradients, strict=True):
                if gradient is None:
                    continue
                given = [t.detach().movedim(axis, 0) for t in inputs if t.dim() > axis]
                parts = [gradient.movedim(axis, 0)]
                sampler = GradSampleHooks.GRAD_SAMPLERS.get(type(layer))
                if sampler is not None and not str(sampler.__module__).startswith("opacus."):
                    parts += sampler(layer, given, parts[0]).values()
                for part in parts:
                    without_loss = (factors == 0).to(part.device)[: len(part)] & has_rows
                    if part[: len(factors)][without_loss].nan_to_num(0.0, 0.0, 0.0).any():
                        rows["leaked", name].append(part)
                if len(parts[0]) > TARGET and parts[0][TARGET].any():
                    # An embedding bag has rows of offsets, and tokens, which are not rows.
                    given = [tensor for tensor in given if len(tensor) == len(parts[0])]
                    rows["given", name] += [tensor[TARGET].clone() for tensor in given]
                    factor = float(factors[TARGET]) if has_rows else 1.0
                    rows["gradients", name] += [part[TARGET] / factor for part in parts]
        return rows, has_rows

    def second_batch(self, earlier: Call, call: Call) -> list[torch.Tensor]:
        """Returns inputs and outputs of all modules for a batch after an earlier one."""
        with self.forwards(earlier, call) as (outputs, calls):
            tensors = [*outputs, *tensors_of(calls)]
            return [t.detach().clone() for t in tensors if t.layout == torch.strided]


def _by_record(tensors: list[torch.Tensor], records: int) -> list[torch.Tensor]:
    """Returns the tensors with an axis of records, which is moved to the front."""
    return [t.movedim(t.shape.index(records), 0) for t in tensors if records in t.shape]


def _loss(outputs: list[torch.Tensor], factors: torch.Tensor) -> tuple[torch.Tensor, bool]:
    """Returns a random weighted sum of outputs, and whether they have rows of records."""
    trained = [output for output in outputs if output.requires_grad]
    by_record = _by_record(trained, len(factors))
    draws, total = torch.Generator().manual_seed(0), torch.zeros(())
    # If there are rows of records, losses of the batch are checked in a run of their own.
    for output in by_record or trained:
        weighted = output * torch.randn(output.shape, generator=draws, device="cpu").to(output)
        if by_record:
            weighted = weighted.movedim(0, -1) * factors.to(weighted)
        total = total.to(weighted) + weighted.sum()
    return total, bool(by_record)


# Conclusions from the runs


def _dependence(runs: _Runs, call: Call, records: int, mode: str) -> str:
    """Returns how one record's outputs or gradients depend on other records, or an empty text.

    Raises:
        Exception: The network fails on these records, or on all changed ones.
    """
    network = runs.network
    # Only every second record has a loss, so that the rows between must have no gradients.
    counted = torch.arange(records) % 2 == TARGET % 2
    try:
        before, has_rows = runs.run(call, counted.float())
    except RuntimeError as error:
        if "use_reentrant" not in str(error):
            raise
        return (
            "module runs layers under torch.utils.checkpoint(use_reentrant=True), in which hooks "
            "get no gradients of records: pass use_reentrant=False, or do not use checkpointing"
        )
    # Products with powers of two are not rounded.
    factors = torch.where(counted, 0.0, 8.0)
    factors[TARGET] = 2.0 if mode == "ghost" else 1.0
    run = partial(runs.run, factors=factors)
    after, _ = with_others(run, call, records, runs.axis, counted=not has_rows)
    if _changed_modules(before, after, "outputs"):
        # The innermost module with other output rows for the same record mixes records. If its
        # input rows differ, too, a function in the module around it does.
        name = next(iter(_changed_modules(before, after, "out of")), "")
        if name in _changed_modules(before, after, "into"):
            name = name.rpartition(".")[0]
        return (
            f"module mixes records in {name_modules(network, [name])}: one record's output changes "
            "when another record does, so that clipping does not bound a record's influence; "
            "compute statistics (a mean, a norm, a rank) within each record and not over the "
            "batch, as nn.LayerNorm and nn.GroupNorm do"
        )
    layers = name_modules(network, _changed_modules(before, after, "given", "gradients", "leaked"))
    if layers and not has_rows:
        remedy = " (or, where arguments are [time, batch, ...], pass batch_first=False)"
        return (
            "module returns a loss of the batch that is not a sum or mean of one number per "
            "record: one record's gradient depends on the others, so that clipping does not bound "
            "a record's influence; return one loss per record, or their sum or mean (for tokens "
            "opacus_shuffle.token_loss(logits, labels).mean(), without labels=...), and let every "
            f"layer see [batch, ...]{'' if runs.axis else remedy}"
        )
    if layers:
        return (
            f"module passes records in another order than the batch's to {layers}, or scales one "
            f"record's gradient by others', {SORT_BEFORE}; take means and norms within each "
            "record, as nn.LayerNorm and nn.GroupNorm do (with grad_sample_mode='ghost', gradients "
            "must also shrink with their loss: do not clamp or normalise them in a hook, or use "
            "'hooks')"
        )
    wrong = "" if runs.losses_alone else _wrong_gradients(runs, call, records, mode)
    if "Expanded Weights encountered" in wrong:
        # PyTorch raises this in every forward pass, as users of Opacus expect.
        raise RuntimeError(wrong)
    return (
        wrong and f"{wrong}: use another mode of 'hooks', 'functorch' and 'ew', or {_CALL_LAYERS}"
    )


def _wrong_gradients(runs: _Runs, call: Call, records: int, mode: str) -> str:
    """Returns which of a network's gradients a mode computes wrongly, or an empty text.

    Layers for which Opacus's rule fails, or computes another gradient than autograd, are added to
    those with functional gradients, and the comparison is repeated.
    """
    while True:
        why, layers = _compare_gradients(runs, call, records, mode)
        rules = GradSampleHooks.GRAD_SAMPLERS
        more = {layer for layer in layers - runs.functional if type(layer) in rules}
        if not more:
            return why
        runs.functional |= more


def _compare_gradients(
    runs: _Runs, call: Call, records: int, mode: str
) -> tuple[str, set[nn.Module]]:
    """Compares Opacus's gradients of each record with autograd's gradient of the record's loss.

    If the loss is one number, the records' gradients must add up to its gradient, and the sum of
    their norms must not be below its norm.

    Returns:
        An error message, or an empty text, and the layers with wrong gradients.
    """
    ghost, parameters = mode == "ghost", list(runs.trained)
    with runs.from_start(hooked=True):
        try:
            model: Any = prepare_module(
                runs.network,
                grad_sample_mode=mode,
                batch_first=runs.axis == 0,
                loss_reduction="sum",
            )
            correct_layers(model, runs.functional)
            seed_draws(SEED)
            total, has_rows = _loss(results(model(*call[0], **call[1])), torch.ones(records))
            total.backward()  # type: ignore[no-untyped-call]
        except Exception as error:
            passed = [
                value
                for f, _ in traceback.walk_tb(error.__traceback__)
                for value in f.f_locals.values()
                if isinstance(value, nn.Module) and value in runs.names
            ]
            failing = passed[-1] if passed else runs.network  # the innermost one
            return (
                f"module cannot be trained with grad_sample_mode={mode!r} at "
                f"{name_modules(runs.network, [runs.names[failing]])} "
                f"({type(error).__name__}: {error})"
            ), {layer for layer in runs.layers if type(layer) is type(failing)}
        computed = [norms_of_records(p) if ghost else vars(p)["grad_sample"] for p in parameters]
    gaps, whole = dict.fromkeys(parameters, 0.0), 0.0
    with runs.forwards(call) as (outputs, _):
        for record, factors in enumerate(torch.eye(records) if has_rows else [torch.ones(records)]):
            total, _ = _loss(outputs, factors)
            gradients = torch.autograd.grad(
                total, parameters, retain_graph=True, materialize_grads=True
            )
            whole = max(whole, math.hypot(*map(_size, gradients)))
            for parameter, rows, gradient in zip(parameters, computed, gradients, strict=True):
                truth = gradient.to_dense().norm() if ghost else gradient.to_dense()
                found = torch.zeros_like(truth)
                # A layer that ran again in the backward pass has a list of several gradients.
                if isinstance(rows, torch.Tensor):
                    found = rows[record] if has_rows else rows.sum(0)
                bounded = ghost and not has_rows
                gap = float(truth - found) if bounded else _distance(found, truth)
                # If a record is not finite, neither is its gradient, and nothing is refused.
                gaps[parameter] = max(gaps[parameter], gap * bool(truth.isfinite().all()))
    # Relative to the whole gradient, because a parameter's own may cancel to rounding errors. Eight
    # roundings: convolutions on a GPU round single precision to 11 bits, and bfloat16 has 8.
    share = 2**-5 if any(p.dtype in _HALF for p in parameters) else 2**-8
    odd = {p for p in parameters if gaps[p] > share * whole}
    names = ", ".join(runs.trained[p] for p in parameters if p in odd)
    why = (
        f"module uses {names} outside of the layer that it belongs to, or in a function of rows "
        "that are not records, or scales its gradient by other records, so that "
        f"grad_sample_mode={mode!r} computes a wrong gradient for each record"
    )
    return why * bool(odd), {m for m in runs.layers if not odd.isdisjoint(m.parameters())}


def _carry_over(runs: _Runs, call: Call, records: int) -> str:
    """Returns how the records of one batch influence the next batch, or an empty text."""
    if not runs.changed:
        return ""
    plain = runs.second_batch(call, call)

    def gaps(earlier: Call) -> list[float]:
        pairs = zip_longest(plain, runs.second_batch(earlier, call), fillvalue=torch.empty(0))
        return [_distance(*pair) for pair in pairs]

    # Kernels with races, and draws from other sources, have another result each time. Otherwise the
    # computations are the same, including their rounding, so that the tolerance is zero: in a long
    # queue the rows of one batch have little weight.
    changed = with_others(gaps, call, records, runs.axis)
    usual = gaps(call) if any(changed) else []
    if any(gap > 10 * noise for gap, noise in zip_longest(changed, usual, fillvalue=0.0)):
        return (
            "module carries records of one batch into later ones by "
            f"{', '.join(sorted(runs.changed))}: a step then depends on records of earlier "
            "batches, whose influence neither its clipping nor its noise covers; reset it at the "
            "beginning of each forward pass, compute it from public data, or remove it"
        )
    return ""


def _wrong_counts(network: nn.Module, counts: dict[str, int], records: int, axis: int) -> str:
    """Returns an error message about layers whose number of rows is not that of records."""
    positions = [
        name
        for name, count in counts.items()
        if count == 1 and isinstance(network.get_submodule(name), nn.Embedding)
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
        f"{name_modules(network, counts)}: each row would be clipped as a record, but a record "
        "may have several rows, and a row several records; pass "
        f"{'[time, batch, ...]' if axis else '[batch, ...]'} to these layers (by batch_first=True "
        "if a layer has it, or by transposing inside of the layer), let no layer turn one record "
        "into several, do not hard-code the number of records, or freeze them"
    )


def name_modules(network: nn.Module, names: Collection[str]) -> str:
    """Returns some modules in the network's order."""
    named = [
        f"{name or 'the module itself'} ({type(module).__name__})"
        for name, module in network.named_modules()
        if name in names
    ]
    more = f" and {len(named) - _SHOWN} more" if len(named) > _SHOWN else ""
    return ", ".join(named[:_SHOWN]) + more


def _changed_modules(before: _Rows, after: _Rows, *kinds: str) -> list[str]:
    """Returns the modules in which a record's rows change with other records, beyond rounding."""
    gradients = [rows for (kind, _), rows in before.items() if kind == "gradients"]
    # Gradients of one layer may cancel, so that only rounding errors remain.
    slack = 1e-6 * max((_size(row) for rows in gradients for row in rows), default=0.0)

    def differ(kind: str, name: str) -> bool:
        ones, others = before.get((kind, name), []), after.get((kind, name), [])
        return kind == "leaked" or any(
            _distance(one, other)
            > (1e-2 if one.dtype in _HALF else 1e-5) * (_size(one) + _size(other))
            + slack * (kind == "gradients")
            for one, other in zip_longest(ones, others, fillvalue=torch.empty(0))
        )

    return [name for kind, name in {**before, **after} if kind in kinds and differ(kind, name)]


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
