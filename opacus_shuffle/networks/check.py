"""May a network train? Whether its per-sample gradients are of one record each.

Opacus computes record i's gradient in a layer from the i-th row of what the layer was given and
from the i-th row of the gradient of what it gave, and clips all that it finds in these rows
together. So a few records run through the network, then again with all but one of them changed and
their part of the loss reweighted. Three things must hold:

1. Every trained layer is given as many rows as there are records, at two numbers of records that
   are no other size of the run. A layer that sees ``[time, batch, ...]`` has a row for each time
   step, and each of these would be clipped by itself; where a batch is as large as a sequence is
   long, nothing else shows that.
2. What the network gives for a record, and the record's rows in every layer, stay as they are when
   the other records change; rows of records that the loss leaves out are zero. This fails where a
   network takes a mean over the batch, sorts or flips rows for one layer and puts them back behind
   it, scales gradients in a hook by the largest, or returns a loss of the batch that is no sum over
   records.
3. Opacus's own hooks compute each record's gradient, or its norm, on these records. Layers for
   which Opacus's rule is wrong, or fails, get PyTorch's functional gradients. If these are wrong,
   too, the network is refused: ``F.linear(x, self.embedding.weight)`` calls no layer, so that no
   hook sees this part of the gradient. For ghost clipping, which scales losses down to clip their
   gradients, gradients must grow with their record's loss.

Functions of your own that compute gradients per record (``register_grad_sampler``) are checked by
what they compute. What a check on a few records cannot see is in docs/training_loops.rst.

Then, if a run changes anything in the network: whether records of one batch act on the next, run
once after that batch and once after one of other records. A step clips and hides what its own
records do. What it reads of an earlier batch's, of a memory bank, a queue or a running mean, is in
none of its bounds. What is kept and never read (attention weights to look at, say) is warned of by
name: nothing clips or noises it, and whoever gets the network gets it.

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
    KEPT,
    Call,
    extents,
    first_of,
    tensors_of,
    with_others,
)

SIZES = (5, 4, 6, 7, 8, 9, 10, 11)
"""Numbers of records that are tried: some may be sizes of another axis, or not be taken."""
_HALF = (torch.bfloat16, torch.float16)
SEED = 1
"""Of draws: under it no ``torch.randperm`` of so few records leaves that one at its place."""

SORT_BEFORE = (
    "so that what is clipped as one record is of several; sort and pick records in the loader's "
    "collate_fn, and let every layer see all of them, in their order"
)
"""The remedy where layers see records in another order."""

_MODES = ("hooks", "ew", "functorch")
"""Modes of computing gradients per record that are tried if the requested one is wrong."""
_CALL_LAYERS = (
    "call each layer on one tensor with [batch, ...], nn.EmbeddingBag on indices and offsets, and "
    "none under torch.utils.checkpoint; do not write to a layer's output in place, as "
    "nn.ReLU(inplace=True) does; use nn.utils.parametrizations.weight_norm instead of "
    "nn.utils.weight_norm, and no spectral_norm; give a layer of your own a rule by "
    "opacus.grad_sample.register_grad_sampler; or freeze it"
)

_SHOWN = 4
"""Layers that a message names."""


@dataclasses.dataclass(frozen=True)
class NetworkCheck:
    """Whether a network's per-sample gradients are what clipping takes them for.

    Attributes:
        seen: Whether it ran on several records. If not, nothing is known of it.
        problem: Why no network like this may be clipped: the module, what was seen, the remedy.
            Empty if it may.
        failure: What the network raised, if it was not seen for that.
        kept: The buffers and attributes with tensors that a run changes, and no later batch reads.
        functional: The layers for which Opacus's own rule is wrong, and PyTorch's functional
            gradients are right.
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
    """Tells whether every record's gradient is its own, and lies where Opacus looks for it.

    The network runs forwards on two numbers of records, and forwards and backwards twice on one of
    these, from the same state and with the same random numbers each time.

    Args:
        network: As it trains; left without a trace.
        call: Its arguments for some records, of which some are taken, or all repeatedly.
        axis: Where tensors have their records: 0, or 1 where layers see ``[time, batch, ...]``.
        mode: Opacus's ``grad_sample_mode``.
        more: Numbers of records to try besides, should the network take only some.
        trained: The parameters that are clipped; all others may have any rows. By default all that
            need gradients.
    """
    runs = _Runs(network, axis, network.parameters() if trained is None else trained)
    whole = next((size for size in extents(call, axis) if size > 1), 0)

    taken = {size for t in (*network.parameters(), *network.buffers()) for size in t.shape}
    calls: dict[int, Call] = {}
    failure: Exception | None = None
    for records in (*SIZES, whole, *more) if whole else ():
        if records in taken or len(calls) > 1:
            continue
        try:
            of_records = first_of(call, whole, records, axis)
            counts, sizes = runs.count_rows(of_records)
        except Exception as error:
            failure = error
            continue
        if wrong := {name: count for name, count in counts.items() if count != records}:
            return NetworkCheck(True, _wrong_counts(network, wrong, records, axis))
        calls[records] = of_records
        # A number that another axis has as well does not tell whose rows are counted.
        taken |= sizes - {records}
        calls = {size: call for size, call in calls.items() if size not in taken}
    if not calls:
        return NetworkCheck(False, failure=failure)
    records, of_records = next(iter(calls.items()))
    try:
        problem = _dependence(runs, of_records, records, mode) or _carried(
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


# Runs, and what is seen of one record in them

_Rows = dict[tuple[str, str], list[torch.Tensor]]
"""What a run shows of the record that is kept, by kind and by the name of a module.

Its rows of the network's ``"outputs"``; of what went ``"into"`` and came ``"out of"`` each module,
innermost first; and, where it has a gradient in a trained layer, of what this was ``"given"``, and
of its ``"gradients"``, divided by the factor of the record's loss. ``"astray"`` are gradients in
rows of records whose loss was left out.
"""


_ModuleCall = tuple[str, nn.Module, list[torch.Tensor], list[torch.Tensor]]
"""One call of a module: its name, the module, the tensors that it was given, and gave."""


class _Runs:
    """Runs of a network, each from the same state and with the same random numbers.

    Args:
        network: It is left as it is.
        axis: Where layers have records.
        trained: The parameters that are clipped.

    Attributes:
        changed: The parameters, buffers and attributes that some run has changed, with whether
            there are tensors in them.
        functional: The layers that are to have PyTorch's functional gradients.
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
        # What Opacus computes gradients of: where it has no rule, of a module with all inside.
        layers = {m for _, m in trainable_modules(network) if not isinstance(m, DPRNNBase)}
        whole = [m for m in layers if type(m) not in GradSampleHooks.GRAD_SAMPLERS]
        layers -= {part for module in whole for part in [*module.modules()][1:]}
        self.layers = {m for m in layers if not self.trained.keys().isdisjoint(m.parameters())}
        self.functional = set[nn.Module]()

    @contextlib.contextmanager
    def from_start(self, *, hooked: bool = False) -> Iterator[None]:
        """A block of runs, after which all is as it was.

        Args:
            hooked: Whether Opacus's hooks run in it. Their changes do not count.
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
        """Runs the network on batches, for a block that sees its outputs and calls on the last."""
        calls = list[_ModuleCall]()

        def note(module: nn.Module, args: Any, keywords: Any, output: Any) -> Any:
            if module in self.names:
                inputs, outputs = tensors_of((args, keywords)), tensors_of(output)
                calls.append((self.names[module], module, inputs, outputs))
            # Gradients come to Opacus after the hooks of what a layer gives, and before what is
            # written into that in place.
            clone = module in self.layers
            return tree_map_only(torch.Tensor, torch.clone, output) if clone else None

        with self.from_start(), register_module_forward_hook(note, with_kwargs=True):
            for place, (args, keywords) in enumerate(batches):
                calls.clear()
                seed_draws(SEED + place)
                outputs = results(self.network(*args, **keywords))
            yield outputs, calls

    def clipped(self, calls: list[_ModuleCall]) -> list[tuple[_ModuleCall, int]]:
        """Returns the calls that are clipped, with the axis on which Opacus looks for records."""
        return [
            (call, 0 if type(module) is RNNLinear else self.axis)
            for call in calls
            for _, module, _, outputs in [call]
            if module in self.layers and module.training and outputs[0].requires_grad
        ]

    def count_rows(self, call: Call) -> tuple[dict[str, int], set[int]]:
        """Returns how many rows each trained layer gives, and the sizes of all axes of a run."""
        with self.forwards(call) as (_, calls):
            counts: dict[str, int] = defaultdict(int)
            for (name, *_, outputs), axis in self.clipped(calls):
                counts[name] = max(counts[name], outputs[0].shape[axis])
            sizes = {size for tensor in tensors_of([call, calls]) for size in tensor.shape}
        return counts, sizes

    def run(self, call: Call, factors: torch.Tensor) -> tuple[_Rows, bool]:
        """Runs the network forwards and backwards.

        Args:
            call: On these arguments.
            factors: By what each record's rows of the outputs are multiplied in the loss.

        Returns:
            What is seen of the kept record, and whether the loss is of a row for each record.
        """
        rows: _Rows = defaultdict(list)
        with self.forwards(call) as (outputs, calls):
            into = [("into", name, inputs) for name, _, inputs, _ in calls]
            out_of = [("out of", name, gave) for name, _, _, gave in calls]
            for kind, name, tensors in [("outputs", "", outputs), *into, *out_of]:
                by_record = _by_record(tensors, len(factors))
                rows[kind, name] += [tensor[KEPT].detach().clone() for tensor in by_record]
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
                    left_out = (factors == 0).to(part.device)[: len(part)] & has_rows
                    if part[: len(factors)][left_out].nan_to_num(0.0, 0.0, 0.0).any():
                        rows["astray", name].append(part)
                if len(parts[0]) > KEPT and parts[0][KEPT].any():
                    # The tokens of an embedding bag are no rows, but its offsets are.
                    given = [tensor for tensor in given if len(tensor) == len(parts[0])]
                    rows["given", name] += [tensor[KEPT].clone() for tensor in given]
                    factor = float(factors[KEPT]) if has_rows else 1.0
                    rows["gradients", name] += [part[KEPT] / factor for part in parts]
        return rows, has_rows

    def second_batch(self, earlier: Call, call: Call) -> list[torch.Tensor]:
        """Returns all that modules are given, and give, in the batch after an earlier one."""
        with self.forwards(earlier, call) as (outputs, calls):
            tensors = [*outputs, *tensors_of(calls)]
            return [t.detach().clone() for t in tensors if t.layout == torch.strided]


def _by_record(tensors: list[torch.Tensor], records: int) -> list[torch.Tensor]:
    """Returns those with a row for each record, records first; no other axis has their number."""
    return [t.movedim(t.shape.index(records), 0) for t in tensors if records in t.shape]


def _loss(outputs: list[torch.Tensor], factors: torch.Tensor) -> tuple[torch.Tensor, bool]:
    """Returns a random sum of outputs, by record if they are, and whether they are."""
    trained = [output for output in outputs if output.requires_grad]
    by_record = _by_record(trained, len(factors))
    draws, total = torch.Generator().manual_seed(0), torch.zeros(())
    # Losses of the batch that come with rows of records are of the same records.
    for output in by_record or trained:
        weighted = output * torch.randn(output.shape, generator=draws, device="cpu").to(output)
        if by_record:
            weighted = weighted.movedim(0, -1) * factors.to(weighted)
        total = total.to(weighted) + weighted.sum()
    return total, bool(by_record)


# What the runs tell


def _dependence(runs: _Runs, call: Call, records: int, mode: str) -> str:
    """Returns how one record's outputs or gradients depend on other records, or an empty text.

    Raises:
        Exception: What the network raises on these records, or all other ones.
    """
    network = runs.network
    # The losses of every other record count, so that the rows between have no gradients.
    counted = torch.arange(records) % 2 == KEPT % 2
    try:
        before, has_rows = runs.run(call, counted.float())
    except RuntimeError as error:
        if "use_reentrant" not in str(error):
            raise
        return (
            "module runs layers under torch.utils.checkpoint(use_reentrant=True), in which no hook "
            "finds a record's gradient: pass use_reentrant=False, or do not use checkpointing"
        )
    # By powers of two nothing is rounded.
    factors = torch.where(counted, 0.0, 8.0)
    factors[KEPT] = 2.0 if mode == "ghost" else 1.0
    run = partial(runs.run, factors=factors)
    after, _ = with_others(run, call, records, runs.axis, counted=not has_rows)
    if _differing(before, after, "outputs"):
        # The innermost module that gives other rows for the same record mixes it, or, where it is
        # given other ones, a function between the modules does, of the module around.
        place = next(iter(_differing(before, after, "out of")), "")
        if place in _differing(before, after, "into"):
            place = place.rpartition(".")[0]
        return (
            f"module mixes records in {listed(network, [place])}: one record's output changes "
            "when another record does, so that clipping bounds nobody's influence; compute what it "
            "takes from the batch (a mean, a norm, a rank) within each record, as nn.LayerNorm and "
            "nn.GroupNorm do"
        )
    layers = listed(network, _differing(before, after, "given", "gradients", "astray"))
    if layers and not has_rows:
        remedy = " (or, where arguments are [time, batch, ...], pass batch_first=False)"
        return (
            "module returns a loss of the batch that is not a sum or mean of one number per "
            "record: what one record's gradient is depends on the others, so that clipping bounds "
            "nobody's influence; return one loss per record, or their sum or mean (for tokens "
            "opacus_shuffle.token_loss(logits, labels).mean(), without labels=...), and let every "
            f"layer see [batch, ...]{'' if runs.axis else remedy}"
        )
    if layers:
        bent = (
            ", or changes gradients on their way (by clamping or normalising them in a hook, say), "
            "so that they do not shrink with the factors that grad_sample_mode='ghost' clips by: "
            "use 'hooks', or take that out"
        )
        return (
            f"module shows records in another order than the batch's to {layers}, or scales one's "
            f"gradient by others', {SORT_BEFORE}; a mean or norm of the batch may be taken of each "
            f"record alone, as nn.LayerNorm and nn.GroupNorm do{bent * (mode == 'ghost')}"
        )
    if runs.losses_alone or not (wrong := _miscomputed(runs, call, records, mode)):
        return ""
    if "Expanded Weights encountered" in wrong:
        # As PyTorch does in every forward pass, where users of Opacus expect it.
        raise RuntimeError(wrong)
    right = [other for other in _MODES if not _miscomputed(runs, call, records, other)]
    return f"{wrong}: " + f"use {' or '.join(map(repr, right))}, or " * bool(right) + _CALL_LAYERS


def _miscomputed(runs: _Runs, call: Call, records: int, mode: str) -> str:
    """Returns which of a network's gradients a mode computes wrongly, or an empty text.

    Layers for which Opacus's rule fails, or gives another gradient than autograd, are added to
    those with functional gradients, and the comparison is repeated.
    """
    while True:
        why, layers = _compare(runs, call, records, mode)
        rules = GradSampleHooks.GRAD_SAMPLERS
        more = {layer for layer in layers - runs.functional if type(layer) in rules}
        if not more:
            return why
        runs.functional |= more


def _compare(runs: _Runs, call: Call, records: int, mode: str) -> tuple[str, set[nn.Module]]:
    """Compares what Opacus computes for each record with autograd's gradient of its loss alone.

    Where the loss is one number, records' gradients must add up to its gradient, and their norms to
    no less than its norm.

    Returns:
        What is wrong, and the layers where it is.
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
            place = passed[-1] if passed else runs.network  # the innermost one
            alike = {layer for layer in runs.layers if _form(layer) == _form(place)}
            return (
                f"module cannot be trained with grad_sample_mode={mode!r} at "
                f"{listed(runs.network, [runs.names[place]])} ({type(error).__name__}: {error})"
            ), alike
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
                # A layer that ran again in the backward pass has a list of several batches.
                if isinstance(rows, torch.Tensor):
                    found = rows[record] if has_rows else rows.sum(0)
                bounded = ghost and not has_rows
                gap = float(truth - found) if bounded else _distance(found, truth)
                # If a record is not finite, so is the truth, and nothing is refused.
                gaps[parameter] = max(gaps[parameter], gap * bool(truth.isfinite().all()))
    # Relative to the whole gradient, as a parameter's own may cancel to rounding: eight roundings.
    # Convolutions on a GPU round single precision to 11 bits, bfloat16 has 8.
    share = 2**-5 if any(p.dtype in _HALF for p in parameters) else 2**-8
    odd = {p for p in parameters if gaps[p] > share * whole}
    if mode == "ew" and not has_rows:
        # Of rows in another order expanded weights make a gradient of the batch that is right.
        own = [layer for layer in runs.layers if type(layer) not in GradSampleHooks.GRAD_SAMPLERS]
        odd |= {parameter for layer in own for parameter in layer.parameters()}
    names = ", ".join(runs.trained[p] for p in parameters if p in odd)
    why = (
        f"module uses {names} outside of the layer that it belongs to, or in a function that sees "
        "other rows than the batch's, or scales its gradient by other records, so that "
        f"grad_sample_mode={mode!r} computes a wrong gradient for each record"
    )
    return why * bool(odd), {m for m in runs.layers if not odd.isdisjoint(m.parameters())}


def _form(layer: nn.Module) -> tuple[Any, ...]:
    """Returns a key that layers share if Opacus's rule fails for them in the same way."""
    return type(layer), *dict(layer.named_parameters())


def _carried(runs: _Runs, call: Call, records: int) -> str:
    """Returns by what the records of one batch act on the batch after it, or an empty text."""
    if not runs.changed:
        return ""
    plain = runs.second_batch(call, call)

    def gaps(earlier: Call) -> list[float]:
        pairs = zip_longest(plain, runs.second_batch(earlier, call), fillvalue=torch.empty(0))
        return [_distance(*pair) for pair in pairs]

    # Kernels that race, and draws from other sources, give another result each time. But for these
    # the computations and the numbers are the same, so that not even rounding may be another one:
    # in a long queue the rows of one batch count little.
    changed = with_others(gaps, call, records, runs.axis)
    usual = gaps(call) if any(changed) else []
    if any(gap > 10 * noise for gap, noise in zip_longest(changed, usual, fillvalue=0.0)):
        return (
            "module carries records of one batch into later ones by "
            f"{', '.join(sorted(runs.changed))}: a step then depends on records that it did not "
            "draw, which neither its clipping nor its noise accounts for; set it anew at the "
            "beginning of each forward pass, compute it from public data, or leave it out"
        )
    return ""


def _wrong_counts(network: nn.Module, counts: dict[str, int], records: int, axis: int) -> str:
    """Returns which layers have another number of rows than there are records, and what to do."""
    positions = [
        name
        for name, count in counts.items()
        if count == 1 and isinstance(network.get_submodule(name), nn.Embedding)
    ]
    if positions:
        return (
            "module has embeddings that see a batch of one whatever the batch is, "
            f"{', '.join(positions)}, so Opacus cannot record their per-sample gradients; call "
            "opacus_shuffle.prepare_model(model) first, pass position ids of shape [batch, "
            "length], or freeze them"
        )
    seen = " or ".join(map(str, sorted(set(counts.values()))))
    return (
        f"module shows {seen} row{'s' if seen != '1' else ''} for {records} records to "
        f"{listed(network, counts)}: each row would be clipped as a record, and one record may "
        "lie in several, or several in one; have these layers see "
        f"{'[time, batch, ...]' if axis else '[batch, ...]'} (by batch_first=True where a layer "
        "has it, or by transposing inside of the layer), let no layer turn one record into "
        "several, write no number of records into the network, or freeze them"
    )


def listed(network: nn.Module, names: Collection[str]) -> str:
    """Returns some modules in the network's order."""
    named = [
        f"{name or 'the module itself'} ({type(module).__name__})"
        for name, module in network.named_modules()
        if name in names
    ]
    more = f" and {len(named) - _SHOWN} more" if len(named) > _SHOWN else ""
    return ", ".join(named[:_SHOWN]) + more


def _differing(before: _Rows, after: _Rows, *kinds: str) -> list[str]:
    """Returns the modules that show a record otherwise among other records, beyond rounding."""
    gradients = [rows for (kind, _), rows in before.items() if kind == "gradients"]
    # In one layer all may be rounding: what is left of gradients that cancel.
    slack = 1e-6 * max((_size(row) for rows in gradients for row in rows), default=0.0)

    def differ(kind: str, name: str) -> bool:
        ones, others = before.get((kind, name), []), after.get((kind, name), [])
        return kind == "astray" or any(
            _distance(one, other)
            > (1e-2 if one.dtype in _HALF else 1e-5) * (_size(one) + _size(other))
            + slack * (kind == "gradients")
            for one, other in zip_longest(ones, others, fillvalue=torch.empty(0))
        )

    return [name for kind, name in {**before, **after} if kind in kinds and differ(kind, name)]


def _distance(one: torch.Tensor, other: torch.Tensor) -> float:
    """Returns how far two tensors lie apart; infinity if one is finite where the other is not."""
    if one.shape != other.shape or not torch.equal(one.isfinite(), other.isfinite()):
        return math.inf
    wide = torch.promote_types(one.dtype, torch.float64)
    return _size(one.to(wide) - other.to(wide))


def _size(tensor: torch.Tensor) -> float:
    """Returns the length of a tensor, of which what is not finite does not count."""
    wide = torch.promote_types(tensor.dtype, torch.float64)
    return float(tensor.to(wide).nan_to_num(0.0, 0.0, 0.0).norm())
