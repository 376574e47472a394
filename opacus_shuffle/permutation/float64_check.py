"""Checks in double precision that permuted weights have the same outputs and gradients.

The check runs on a perturbed copy of the weights. At initialization, the scale of a norm is 1 and
its shift is 0, so the outputs would not change if a permutation left them out.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
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
from opacus_shuffle.permutation.network import FastMode, plain_operations, tensors_in

MASK = 1e8
"""Larger entries are masks (such as -1e9), and do not count for the size of outputs."""

TOLERANCE = 1e-6
"""Relative to the largest entry.

Another order of summation changes outputs and gradients by the unit roundoff of double precision,
1e-16, times the amplification by the layers: up to 2e-9 in the deepest networks tested (MobileNetV2
with norms of few entries). The smallest change by a wrong permutation in tests was 1e-3, for a bias
of the queries that was left out. The tolerance is the geometric mean of the two.
"""

NEGLIGIBLE = 1e-4
"""Smaller tensors, relative to the largest one, are compared with this fraction of it.

Some are zero up to rounding, such as the gradients of a bias of keys, which softmax cancels.
"""

NOISE_LENGTH = 65_537
"""The noise of a tensor repeats itself after so many entries (a prime number), to save time."""

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
"""Constants that replace draws of noise, whose distribution is the same for all entries."""

DOUBLE_OF = {
    torch.float32: torch.float64,
    torch.float16: torch.float64,
    torch.bfloat16: torch.float64,
}

Tensors = dict[str, torch.Tensor]


def check_calls(
    group: PermutationGroup,
    network: nn.Module,
    calls: Sequence[Call],
    before: Snapshot | None = None,
) -> None:
    """Refuses a group with a permutation that changes the outputs or gradients of the network.

    A permutation without fixed points is tested in training mode on the first arguments, with
    gradients, and another one in evaluation mode on all arguments. The network must have run on the
    arguments before, because it may cache tensors that should not be in double precision.

    Args:
        group: The permutations.
        network: The network; it is not changed.
        calls: Its arguments.
        before: A snapshot of the network's current state, if there is one.

    Raises:
        ValueError: If outputs or gradients change, with the name of the permutation that changes
            them, or if the network cannot be checked.
    """
    group.tensors(network)
    generator = torch.Generator().manual_seed(20_230_101)
    plans = [_without_fixed_points(group.sample(generator)), group.sample(generator)]
    change_of = functools.partial(_change, group, network, calls, before or Snapshot(network))
    buffers = True
    try:
        worst = change_of(plans, buffers=buffers)
    except Exception:
        # Some buffers are masks, indices or probabilities, which are invalid if perturbed.
        buffers = False
        worst = change_of(plans, buffers=buffers)
    if worst <= TOLERANCE:
        return
    name, identity = type(network).__name__, group.identity().tables
    for number, factor in enumerate(group.factors):
        alone = [
            PermutationPlan((*identity[:number], plan.tables[number], *identity[number + 1 :]))
            for plan in plans
        ]
        change = change_of(alone, buffers=buffers) if factor.free else 0.0
        if not change <= TOLERANCE:
            members = dict.fromkeys(member for member, _ in group.perm_to_axes[factor.name])
            raise ValueError(
                f"this PermutationSpec changes what {name} computes: permuting {factor.name!r} "
                f"moves {', '.join(members)} and the outputs or gradients by {change:.1e} of their "
                "size. A tensor that must move too is missing, or one of them must stay. If "
                "find_permutations returned it, tracing failed where values leave PyTorch or in a "
                "custom backward pass: write that module with PyTorch's own operations, or leave "
                "shuffle_weights out"
            )
    raise ValueError(
        f"this PermutationSpec changes what {name} computes by {worst:.1e} of the outputs' size, "
        "although none of its permutations does so alone: use find_permutations"
    )


def _without_fixed_points(plan: PermutationPlan) -> PermutationPlan:
    """Turns each permutation into one cycle, because a random one may have fixed points."""
    cycles = [
        table if table is None else torch.empty_like(table).scatter_(-1, table, table.roll(1, -1))
        for table in plan.tables
    ]
    return PermutationPlan(tuple(cycles))


def _change(
    group: PermutationGroup,
    network: nn.Module,
    calls: Sequence[Call],
    before: Snapshot,
    plans: Sequence[PermutationPlan],
    *,
    buffers: bool,
) -> float:
    """Returns the relative change of outputs and gradients when a perturbed copy is moved.

    Args:
        group: The permutations.
        network: The network; it is not changed.
        calls: Its arguments.
        before: A snapshot of the network's state.
        plans: The permutation before the run in training mode, on the first arguments, and the one
            before the run in evaluation mode.
        buffers: Whether buffers are perturbed too.
    """
    weights = _perturbed_copy(network, buffers=buffers)
    run = functools.partial(_run, network, weights, before)

    def move(plan: PermutationPlan) -> None:
        group.move({name: [weights[name]] for name in group.blocks}, plan)

    outputs, gradients = run(calls[:1], training=True)
    move(plans[0])
    moved_outputs, moved_gradients = run(calls[:1], training=True)
    move(plans[1])
    evaluated, _ = run(calls, training=False)
    if not any(bool(tensor.any()) for tensor in (*outputs, *evaluated)):
        raise ValueError(
            f"{type(network).__name__} returns only zeros on the sample input, so it cannot be "
            "checked: pass another sample_input"
        )
    # Most networks compute the same in both modes, because noise is replaced by constants. If this
    # one does, its outputs in training mode show whether those in evaluation mode stay.
    change = _difference(outputs, evaluated)
    if change > TOLERANCE:
        move(plans[1])
        change = _difference(evaluated, run(calls, training=False)[0])
    return max(change, _difference(outputs, moved_outputs), _difference(gradients, moved_gradients))


def _run(
    network: nn.Module,
    weights: Tensors,
    before: Snapshot,
    calls: Sequence[Call],
    *,
    training: bool,
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Returns the outputs with these weights, and in training mode summaries of the gradients.

    The network is restored, so that a counter of calls has the same value in all runs.
    """
    # Copies, because a pass may write to buffers.
    copies = _each_once(
        weights,
        lambda tensor: tensor.detach().requires_grad_() if tensor.requires_grad else tensor.clone(),
    )
    name, default = type(network).__name__, torch.get_default_dtype()

    def run(arguments: Call) -> list[torch.Tensor]:
        seed_draws(0)
        args, kwargs = tree_map(_in_double, arguments)
        # A copy of the dictionary, in which functional_call exchanges tensors.
        return results(torch.func.functional_call(network, dict(copies), args, kwargs))

    outputs: list[torch.Tensor] = []
    with rolled_back(network, before), plain_operations(network):
        network.train(training)
        torch.set_default_dtype(torch.float64)
        try:
            for arguments in calls:
                with _DoublePrecision():  # type: ignore[no-untyped-call]
                    outputs += (
                        run(arguments)
                        if training
                        else without_graph(functools.partial(run, arguments))
                    )
        except Exception as error:
            raise ValueError(
                f"{name} does not run in double precision, so it cannot be checked: "
                f"{type(error).__name__}: {error}"
            ) from error
        finally:
            torch.set_default_dtype(default)
        if not any(output.numel() for output in outputs):
            raise ValueError(
                f"{name} returns no tensor on the sample input, so it cannot be checked"
            )
        if any(bool(torch.isnan(output).any()) for output in outputs):
            raise ValueError(f"{name} returns NaN on the sample input: pass another sample_input")
        # Tied tensors by their first name, as the specification has them.
        first_names = {tensor: name for name, tensor in reversed(copies.items())}
        leaves = {
            first: tensor
            for tensor, first in first_names.items()
            if training and tensor.requires_grad
        }
        gradients = _gradients(outputs, leaves)
    # Floating-point numbers, because unsigned integers and booleans cannot be subtracted.
    numbers = [
        output.detach() * torch.ones((), dtype=torch.float64, device="cpu") for output in outputs
    ]
    return numbers, gradients


class _DoublePrecision(FastMode):  # type: ignore[no-untyped-call]
    """Runs all operations in double precision, and replaces draws of noise by constants."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        name = func.overloadpacket.__name__
        if kwargs.get("dtype") in DOUBLE_OF:
            kwargs["dtype"] = DOUBLE_OF[kwargs["dtype"]]
        narrow = any(tensor.dtype in DOUBLE_OF for tensor in tensors_in(*args, *kwargs.values()))
        if narrow and not func._schema.is_mutable:
            args, kwargs = tree_map(_in_double, args), tree_map(_in_double, kwargs)
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


def _gradients(outputs: Sequence[torch.Tensor], leaves: Tensors) -> list[torch.Tensor]:
    """Returns summaries of the gradients of a weighted sum of all outputs.

    All gradients together would take as much memory as the weights, so each is summarized and
    deleted when it is complete.
    """
    roots = [output for output in outputs if output.requires_grad and not output.is_complex()]
    if not roots or not leaves:
        return []
    summaries = dict.fromkeys(leaves, torch.zeros(()))

    def summarize(name: str, leaf: torch.Tensor) -> None:
        assert leaf.grad is not None
        summaries[name] = _summary(leaf.grad.to_dense(), leaf.detach())
        leaf.grad = None

    for name, leaf in leaves.items():
        leaf.register_post_accumulate_grad_hook(functools.partial(summarize, name))  # type: ignore[no-untyped-call]
    weights = [
        torch.linspace(1, 2, output.numel(), device=output.device).to(output).view_as(output)
        for output in roots
    ]
    try:
        torch.autograd.backward(roots, weights, inputs=list(leaves.values()))
    except RuntimeError:  # an operation has no derivative
        return []
    return list(summaries.values())


def _summary(gradient: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Returns the norm of a gradient, and its product with a direction that moves as it should.

    A function of each entry of the weight is permuted with the weight, so no gradient has to be
    moved. This function is as good as random, unlike the weight itself, whose product with the
    gradient does not depend on positions in a homogeneous layer.
    """
    direction = (weight.real.reshape(-1) * 1e4).frac_().to(gradient)
    return torch.stack([gradient.norm().to(gradient), gradient.reshape(-1).dot(direction)])


def _each_once(
    tensors: Mapping[str, torch.Tensor], change: Callable[[torch.Tensor], torch.Tensor]
) -> Tensors:
    """Applies a function to each tensor once, so that tied tensors stay tied."""
    changed = {id(tensor): change(tensor) for tensor in dict.fromkeys(tensors.values())}
    return {name: changed[id(tensor)] for name, tensor in tensors.items()}


def _in_double(value: Any) -> Any:
    """Converts floating-point tensors to double precision; returns other values unchanged."""
    narrow = isinstance(value, torch.Tensor) and value.dtype in DOUBLE_OF
    return value.to(DOUBLE_OF[value.dtype]) if narrow else value


def _perturbed_copy(network: nn.Module, *, buffers: bool) -> Tensors:
    """Copies parameters and buffers in double precision, and adds noise."""
    generator = torch.Generator().manual_seed(20_230_102)
    draws = torch.randn(
        NOISE_LENGTH, generator=generator, dtype=torch.float64, device="cpu"
    ).repeat(2)

    def perturbed(tensor: torch.Tensor) -> torch.Tensor:
        copy = tensor.detach().to(DOUBLE_OF.get(tensor.dtype, tensor.dtype), copy=True)
        if copy.is_floating_point() and copy.layout == torch.strided:
            copy = copy.contiguous()
            start = int(torch.randint(NOISE_LENGTH, (), generator=generator, device="cpu"))
            repeated = draws[start : start + min(NOISE_LENGTH, copy.numel())].to(copy.device)
            spread = 0.2
            if copy.dim() > 1:
                spread = 0.5 * max(float(copy.view(-1)[:NOISE_LENGTH].std(correction=0)), 1e-2)
            is_parameter = isinstance(tensor, nn.Parameter)
            usual = not is_parameter and buffers and bool(torch.isfinite(copy).all())
            for part in torch.split(copy.view(-1), NOISE_LENGTH):
                noise = repeated[: len(part)]
                if is_parameter:
                    part.add_(noise, alpha=spread)
                elif usual:  # multiplied, so that a variance stays positive
                    part.copy_(torch.where(part == 0, 0.1 * noise, part * torch.exp(0.2 * noise)))
        return copy.requires_grad_(tensor.requires_grad)

    tensors = dict(network.named_parameters(remove_duplicate=False))
    return _each_once(tensors | dict(network.named_buffers(remove_duplicate=False)), perturbed)


def _difference(ones: Sequence[torch.Tensor], others: Sequence[torch.Tensor]) -> float:
    """Returns the largest change of an entry, relative to the largest entry of its tensor."""
    if [one.shape for one in ones] != [other.shape for other in others]:
        return float("inf")
    sizes = [_largest(one) for one in ones]
    worst = 0.0
    for one, other, size in zip(ones, others, sizes, strict=True):
        changes = (one - other).abs().nan_to_num(nan=torch.inf)
        stays = (one == other) | (one.isnan() & other.isnan())
        changes = changes.masked_fill(stays, 0.0)  # infinities cannot be subtracted
        change = float(changes.max()) if one.numel() else 0.0
        worst = max(worst, change / (max(size, NEGLIGIBLE * max(sizes)) or 1.0))
    return worst


def _largest(tensor: torch.Tensor) -> float:
    """Returns the largest absolute value of an entry that is no mask."""
    sizes = tensor.abs()
    return float(torch.where(sizes < MASK, sizes, 0.0).max()) if sizes.numel() else 0.0
