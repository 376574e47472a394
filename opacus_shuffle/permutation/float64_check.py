"""Checking in double precision that permuted weights have the same outputs and gradients.

The check runs on a copy of the weights, which is perturbed first: a norm with scale 1 and shift 0,
or a bias that is still zero, would hide that it was forgotten.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map

from opacus_shuffle.networks.running import (
    Snapshot,
    results,
    rolled_back,
    seed_draws,
    without_graph,
)
from opacus_shuffle.networks.sample_input import Call
from opacus_shuffle.permutation.group import PermutationGroup, PermutationPlan
from opacus_shuffle.permutation.network import plain_operations, tensors_in

MASK = 1e8
"""Entries beyond this are masks (-1e9), and say nothing about the usual size of outputs."""

TOLERANCE = 1e-6
"""Relative to the largest entry.

Summing in another order in double precision changes outputs and gradients by the unit roundoff,
1e-16, times the amplification by the network's layers: up to 2e-9 in the deepest networks tested
(MobileNetV2 with norms of few entries). The smallest breakage in tests, a forgotten bias of the
queries, was 1e-3. The tolerance is the middle of the two on a logarithmic scale.
"""

FLAT = 1e-4
"""Tensors whose entries are this much below those of the largest one are compared with that.

Some are zero but for rounding, as the gradients of a bias of keys, which the softmax forgets.
"""

CONSTANT_DRAWS = dict.fromkeys(
    [
        "rand",
        "randn",
        "rand_like",
        "randn_like",
        "normal",
        "normal_",
        "uniform_",
        "exponential_",
        "cauchy_",
        "geometric_",
        "log_normal_",
        "poisson",
        "binomial",
        "_standard_gamma",
    ],
    0.5,
) | {"bernoulli": 1.0, "bernoulli_": 1.0}
"""What draws of noise are replaced by: it treats entries alike, so only its distribution counts."""

WIDER = {
    torch.float32: torch.float64,
    torch.float16: torch.float64,
    torch.bfloat16: torch.float64,
}

Tensors = dict[str, torch.Tensor]


def check_calls(group: PermutationGroup, network: nn.Module, calls: Sequence[Call]) -> None:
    """Refuses by name a group with a permutation that changes what the network computes.

    One that leaves nothing in place is tried in training mode on the first arguments, with
    gradients; and another one in evaluation mode, on all of them. The arguments must have run
    before: what Python keeps for a size must not be made in double precision first.

    Raises:
        ValueError: If outputs or gradients change, or the network cannot be checked; with the group
            concerned.
    """
    group.tensors(network)
    generator = torch.Generator().manual_seed(20_230_101)
    plans = [_without_fixed_points(group.sample(generator)), group.sample(generator)]
    buffers = True
    try:
        worst = _change(group, network, calls, plans, buffers=buffers)
    except Exception:
        # Some buffers are masks, indices or probabilities, and mean nothing perturbed.
        buffers = False
        worst = _change(group, network, calls, plans, buffers=buffers)
    if worst <= TOLERANCE:
        return
    kind, still = type(network).__name__, group.identity().tables
    for number, factor in enumerate(group.factors):
        alone = [
            PermutationPlan((*still[:number], plan.tables[number], *still[number + 1 :]))
            for plan in plans
        ]
        change = _change(group, network, calls, alone, buffers=buffers) if factor.free else 0.0
        if not change <= TOLERANCE:
            members = dict.fromkeys(name for name, _ in group.perm_to_axes[factor.name])
            raise ValueError(
                f"this PermutationSpec changes what {kind} computes: permuting {factor.name!r} "
                f"moves {', '.join(members)} and the outputs or gradients by {change:.1e} of their "
                "size. Something that belongs to it is missing or must stay in place. If it was "
                "found and not made by hand, tracing has lost these where their values leave "
                "PyTorch, or in a backward of its own: write that module with PyTorch's own "
                "operations, or leave shuffle_weights out"
            )
    raise ValueError(
        f"this PermutationSpec changes what {kind} computes by {worst:.1e} of the outputs' "
        "size, though none of its "
        "permutations does alone: use find_permutations"
    )


def _without_fixed_points(plan: PermutationPlan) -> PermutationPlan:
    """Makes each permutation one cycle over all it moves: a draw often leaves things in place."""
    cycles = [
        table if table is None else torch.empty_like(table).scatter_(-1, table, table.roll(1, -1))
        for table in plan.tables
    ]
    return PermutationPlan(tuple(cycles))


def _change(
    group: PermutationGroup,
    network: nn.Module,
    calls: Sequence[Call],
    plans: Sequence[PermutationPlan],
    *,
    buffers: bool,
) -> float:
    """Returns the relative change of outputs and gradients when a perturbed copy is moved.

    Args:
        group: The permutations.
        network: It is not changed.
        calls: Arguments to run it on.
        plans: What moves the copy before it runs in training mode, on the first arguments; and what
            moves it after that, before it runs in evaluation mode.
        buffers: Whether buffers are perturbed, too.
    """
    weights = _perturbed_copy(network, buffers=buffers)

    def move(plan: PermutationPlan, tensors: Tensors) -> None:
        group.move({name: [tensors[name]] for name in group.blocks if name in tensors}, plan)

    as_it_was = Snapshot(network)
    modes = [(calls[:1], True), (calls, False)]
    with rolled_back(network, as_it_was):
        before = [
            _run(network, weights, *mode, functools.partial(move, plan))
            for mode, plan in zip(modes, plans, strict=True)
        ]
    if not any(bool(tensor.any()) for outputs, _ in before for tensor in outputs):
        raise ValueError(
            f"{type(network).__name__} gives only zeros on the sample input: give another, so "
            "it can be checked"
        )
    worst = 0.0
    # One that counts its calls counts alike with all weights.
    with rolled_back(network, as_it_was):
        for mode, plan, (outputs, slopes) in zip(modes, plans, before, strict=True):
            move(plan, weights)
            moved_outputs, moved_slopes = _run(network, weights, *mode)
            worst = max(
                worst, _difference(outputs, moved_outputs), _difference(slopes, moved_slopes)
            )
    return worst


def _run(
    network: nn.Module,
    weights: Tensors,
    calls: Sequence[Call],
    training: bool,
    move: Callable[[Tensors], None] = lambda gradients: None,
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Returns what the network computes with these weights, and in training mode its gradients.

    Of a gradient that ``move`` has moved it returns one weighted sum per row: all gradients at once
    would take as much memory as the weights do, and more time than computing them.
    """
    # A pass may write to buffers, and gradients are noted as they come.
    own = _each_once(
        weights,
        lambda tensor: tensor.detach().requires_grad_() if tensor.requires_grad else tensor.clone(),
    )
    kind, default = type(network).__name__, torch.get_default_dtype()

    def run(arguments: Call) -> list[torch.Tensor]:
        seed_draws(0)
        args, kwargs = tree_map(_widened, arguments)
        # It exchanges tensors with those of the dictionary, wrongly for a layer of two names.
        return results(torch.func.functional_call(network, dict(own), args, kwargs))

    outputs: list[torch.Tensor] = []
    with plain_operations(network):
        network.train(training)
        torch.set_default_dtype(torch.float64)
        try:
            for arguments in calls:
                with _InDouble():  # type: ignore[no-untyped-call]
                    outputs += (
                        run(arguments)
                        if training
                        else without_graph(functools.partial(run, arguments))
                    )
        except Exception as error:
            raise ValueError(
                f"{kind} does not run in double precision, so nothing can be checked: "
                f"{type(error).__name__}: {error}"
            ) from error
        finally:
            torch.set_default_dtype(default)
    if not any(output.numel() for output in outputs):
        raise ValueError(f"{kind} returns no tensor on the sample input, so nothing can be checked")
    if any(bool(torch.isnan(output).any()) for output in outputs):
        raise ValueError(f"{kind} gives undefined outputs on the sample input: give another")
    # Tied tensors by their first name, as the specification has them.
    first_names = {tensor: name for name, tensor in reversed(own.items())}
    leaves = {
        name: tensor for tensor, name in first_names.items() if training and tensor.requires_grad
    }
    slopes = _gradients(outputs, leaves, move)
    # Numbers that can be subtracted, which whole numbers and yes or no cannot always.
    numbers = [
        output.detach() * torch.ones((), dtype=torch.float64, device="cpu") for output in outputs
    ]
    return numbers, slopes


class _InDouble(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Keeps a network that rounds inside in double precision, and its draws of noise constant."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        name = func.overloadpacket.__name__
        if kwargs.get("dtype") in WIDER:
            kwargs["dtype"] = WIDER[kwargs["dtype"]]
        narrow = any(tensor.dtype in WIDER for tensor in tensors_in(args, kwargs))
        if narrow and not func._schema.is_mutable:
            args, kwargs = tree_map(_widened, args), tree_map(_widened, kwargs)
        if name in ("native_dropout", "_fused_dropout"):
            return args[0].clone(), torch.ones_like(args[0], dtype=torch.bool)
        if name == "_grouped_mm":  # PyTorch has no kernel in double precision
            return _grouped_product(*args[:3])
        result = func(*args, **kwargs)
        if name in CONSTANT_DRAWS:
            for tensor in tensors_in(result):
                tensor.fill_(CONSTANT_DRAWS[name])
        return result


def _grouped_product(
    rows: torch.Tensor, matrices: torch.Tensor, offsets: torch.Tensor
) -> torch.Tensor:
    """Multiplies the rows up to each offset by the matrix of their group, in any precision."""
    stops = offsets.tolist()
    parts = [
        rows[start:stop] @ matrix
        for start, stop, matrix in zip([0, *stops], stops, matrices, strict=False)
    ]
    return torch.cat([*parts, rows.new_zeros(len(rows) - stops[-1], matrices.shape[-1])])


def _gradients(
    outputs: Sequence[torch.Tensor], leaves: Tensors, move: Callable[[Tensors], None]
) -> list[torch.Tensor]:
    """Returns the sums of the moved gradients of a sum of all outputs, all weighted differently."""
    tops = [output for output in outputs if output.requires_grad and not output.is_complex()]
    if not tops or not leaves:
        return []
    sums = dict.fromkeys(leaves, torch.zeros(()))

    def note(name: str, leaf: torch.Tensor) -> None:
        assert leaf.grad is not None
        # Autograd may still use its memory for the gradient of something else.
        gradient = leaf.grad.to_dense().clone()
        leaf.grad = None
        move({name: gradient})
        sums[name] = _sums_of_rows(gradient)

    for name, leaf in leaves.items():
        leaf.register_post_accumulate_grad_hook(functools.partial(note, name))  # type: ignore[no-untyped-call]
    weights = [
        torch.linspace(1, 2, output.numel(), device=output.device).to(output).view_as(output)
        for output in tops
    ]
    try:
        torch.autograd.backward(tops, weights, inputs=list(leaves.values()))
    except RuntimeError:  # something in it has no derivative
        return []
    return list(sums.values())


def _sums_of_rows(gradient: torch.Tensor) -> torch.Tensor:
    """Returns a sum over each row, of the size of an entry, in which no two entries weigh alike."""
    if gradient.dim() < 2:
        return gradient
    rows = gradient.flatten(1)
    generator = torch.Generator().manual_seed(20_230_103)
    weights = torch.randn(rows.shape[1], generator=generator, dtype=torch.float64, device="cpu")
    return rows @ (weights / max(1, len(weights)) ** 0.5).to(rows)


def _each_once(
    tensors: Mapping[str, torch.Tensor], change: Callable[[torch.Tensor], torch.Tensor]
) -> Tensors:
    """Returns the tensors changed, tied ones still tied."""
    changed = {id(tensor): change(tensor) for tensor in dict.fromkeys(tensors.values())}
    return {name: changed[id(tensor)] for name, tensor in tensors.items()}


def _widened(value: Any) -> Any:
    """Returns a tensor of floating-point numbers in double precision, else the value as it is."""
    narrow = isinstance(value, torch.Tensor) and value.dtype in WIDER
    return value.to(WIDER[value.dtype]) if narrow else value


def _perturbed_copy(network: nn.Module, *, buffers: bool) -> Tensors:
    """Copies parameters and buffers in double precision, away from values that hide mistakes."""
    generator = torch.Generator().manual_seed(20_230_102)
    # After 65,537 entries, a prime number, the noise repeats itself: drawing all takes long.
    draws = torch.randn(65_537, generator=generator, dtype=torch.float64, device="cpu")

    def perturbed(tensor: torch.Tensor) -> torch.Tensor:
        copy = tensor.detach().to(WIDER.get(tensor.dtype, tensor.dtype), copy=True)
        if copy.is_floating_point() and copy.layout == torch.strided:
            copy = copy.contiguous()
            start = int(torch.randint(len(draws), (), generator=generator, device="cpu"))
            repeated = draws.roll(start).to(copy.device)
            spread = 0.2
            if copy.dim() > 1:
                spread = 0.5 * max(float(copy.view(-1)[: len(draws)].std(correction=0)), 1e-2)
            is_parameter = isinstance(tensor, nn.Parameter)
            usual = not is_parameter and buffers and bool(torch.isfinite(copy).all())
            for part in torch.split(copy.view(-1), len(draws)):
                noise = repeated[: len(part)]
                if is_parameter:
                    part.add_(noise, alpha=spread)
                elif usual:  # a variance stays positive
                    part.copy_(torch.where(part == 0, 0.1 * noise, part * torch.exp(0.2 * noise)))
        return copy.requires_grad_(tensor.requires_grad)

    tensors = dict(network.named_parameters(remove_duplicate=False))
    return _each_once(tensors | dict(network.named_buffers(remove_duplicate=False)), perturbed)


def _difference(ones: Sequence[torch.Tensor], others: Sequence[torch.Tensor]) -> float:
    """Returns the largest change of an entry, relative to the largest one of its tensor."""
    if [one.shape for one in ones] != [other.shape for other in others]:
        return float("inf")
    sizes = [_largest(one) for one in ones]
    worst = 0.0
    for one, other, size in zip(ones, others, sizes, strict=True):
        changes = (one - other).abs().nan_to_num(nan=torch.inf)
        stays = (one == other) | (one.isnan() & other.isnan())
        changes = changes.masked_fill(stays, 0.0)  # infinities cannot be subtracted
        change = float(changes.max()) if one.numel() else 0.0
        worst = max(worst, change / (max(size, FLAT * max(sizes)) or 1.0))
    return worst


def _largest(tensor: torch.Tensor) -> float:
    """Returns the size of the largest entry that is no mask."""
    if not tensor.numel():
        return 0.0
    sizes = tensor.abs()
    return float(torch.where(sizes < MASK, sizes, 0.0).max())
