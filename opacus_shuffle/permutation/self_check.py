"""Checking numerically that permuted weights compute the same function, in double precision.

The weights are perturbed first, because a norm with scale 1 and shift 0, or a bias that is still zero, would hide that it was
forgotten.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from opacus_shuffle.permutation.action import GroupAction
from opacus_shuffle.permutation.group import PermutationPlan
from opacus_shuffle.permutation.network import plain_attention, results, seed_draws, state_kept
from opacus_shuffle.permutation.sample_input import Call

NOISE = {"bernoulli": 1.0, "bernoulli_": 1.0} | dict.fromkeys(
    (
        *("rand", "randn", "rand_like", "randn_like", "normal", "normal_", "uniform_", "exponential_", "cauchy_", "geometric_"),
        *("log_normal_", "poisson", "binomial", "_standard_gamma"),
    ),
    0.5,
)
"""What draws of noise are replaced by: it treats entries alike, so what it does to the function is a matter of distribution."""

MASK = 1e8
"""Entries beyond this are masks (-1e9, the lowest number of a type) and say nothing about the usual size of outputs."""

TOLERANCE = 1e-9
"""Relative to an output, or to the median one if it is smaller. Summing in another order in double precision stays some 1e5
times below in the deepest networks met, and the smallest breakage met (a forgotten bias of the queries) was 1e6 times above."""

MISSED = 1 / 8
"""Of two copies of a permutation of n things a draw takes both alike once in n! times: how often that may go unnoticed."""

NARROW = (torch.float32, torch.float16, torch.bfloat16)


def check_calls(action: GroupAction, network: nn.Module, calls: Sequence[Call]) -> None:
    """Refuses a group with a permutation that changes what the network computes on these arguments, by name.

    The first is tried in both modes, the others in evaluation mode.
    """
    action.tensors(network)
    generator = torch.Generator().manual_seed(20_230_101)
    tensors: dict[str, torch.Tensor] = dict(network.named_parameters(remove_duplicate=False))
    tensors |= dict(network.named_buffers(remove_duplicate=False))
    double = _each_once(tensors, lambda tensor: _perturbed(tensor, generator, buffers=True))
    try:
        _outputs(network, double, *calls[0], False)
    except Exception:  # some buffers are masks, indices or probabilities, and mean nothing perturbed
        double = _each_once(tensors, lambda tensor: _perturbed(tensor, generator, buffers=False))
    informative, before = False, None
    for (args, kwargs), training in [(calls[0], False), (calls[0], True), *((call, False) for call in calls[1:])]:
        run = functools.partial(_outputs, network, args=args, kwargs=kwargs, training=training)
        reference = _reference(network, run, double)
        if before is None or not _same(before, reference):  # or this mode computes what the other did
            informative |= _check_run(action, network, double, run, reference, generator)
        before = reference
    if not informative:
        raise ValueError(f"{type(network).__name__} gives only zeros on the sample input: give another, so it can be checked")


def _reference(
    network: nn.Module, run: Callable[[Mapping[str, torch.Tensor]], list[torch.Tensor]], double: Mapping[str, torch.Tensor]
) -> list[torch.Tensor]:
    """Returns what the network computes before anything is permuted."""
    try:
        return run(double)
    except ValueError:
        raise
    except Exception as error:
        raise ValueError(
            f"{type(network).__name__} does not run in double precision, so nothing can be checked: "
            f"{type(error).__name__}: {error}"
        ) from error


def _same(ones: list[torch.Tensor], others: list[torch.Tensor]) -> bool:
    """Returns whether results are equal, bit by bit."""
    return len(ones) == len(others) and all(map(torch.equal, ones, others))


def _check_run(
    action: GroupAction,
    network: nn.Module,
    double: Mapping[str, torch.Tensor],
    run: Callable[[Mapping[str, torch.Tensor]], list[torch.Tensor]],
    reference: list[torch.Tensor],
    generator: torch.Generator,
) -> bool:
    """Checks one run of the network; returns whether its outputs are anything but zeros."""
    nearly = run(_each_once(double, lambda tensor: _rounded_otherwise(tensor, generator)))
    rounding = [_rounding(*pair) for pair in zip(reference, nearly, strict=True)]
    moving = {name: [double[name]] for name in action.blocks}

    def change(plan: PermutationPlan) -> float:
        action.move(moving, plan)
        now = run(double)
        action.move(moving, action.invert(plan))
        return max(_difference(*each) for each in zip(reference, now, rounding, strict=True))

    # The first leaves nothing in place, the others tell copies of one permutation apart.
    smallest = min((factor.size for factor in action.factors if factor.free), default=2)
    draws = math.ceil(-math.log(MISSED) / math.lgamma(smallest + 1))
    for plan in (_without_fixed_points(action.sample(generator)), *(action.sample(generator) for _ in range(draws))):
        if (worst := change(plan)) > TOLERANCE:
            _blame(action, network, plan, worst, change)
    return any(bool(each.any()) for each in reference)


def _blame(
    action: GroupAction, network: nn.Module, plan: PermutationPlan, worst: float, change: Callable[[PermutationPlan], float]
) -> NoReturn:
    still = action.identity()
    for number, factor in enumerate(action.factors):
        if factor.free:
            tables = list(still.tables)
            tables[number] = plan.tables[number]
            if (alone := change(PermutationPlan(tuple(tables)))) > TOLERANCE:
                members = ", ".join(dict.fromkeys(name for name, _ in action.perm_to_axes[factor.name]))
                raise ValueError(
                    f"this PermutationSpec changes what {type(network).__name__} computes: permuting {factor.name!r} moves "
                    f"{members} and the outputs by {alone:.1e} of their size. Something that belongs to it is missing or must "
                    "stay in place. If it was found and not made by hand, tracing has lost these where their values leave "
                    "PyTorch: declare that module's axes (see register_permutation)"
                )
    raise ValueError(
        f"this PermutationSpec changes what {type(network).__name__} computes by {worst:.1e} of the outputs' size, though none "
        "of its permutations does alone: use find_permutations"
    )


def _without_fixed_points(plan: PermutationPlan) -> PermutationPlan:
    """Makes each permutation one cycle over all it moves: a uniform draw often leaves two things in place."""
    return PermutationPlan(
        tuple(
            table if table is None else torch.empty_like(table).scatter_(-1, table, table.roll(1, -1)) for table in plan.tables
        )
    )


class _InDouble(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Keeps a network that rounds inside (norms, rotary embeddings) in double precision, and its draws of noise constant."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func.overloadpacket is torch.ops.aten._to_copy and kwargs.get("dtype") in NARROW:
            kwargs["dtype"] = torch.float64
        if not func._schema.is_mutable:
            args, kwargs = tree_map(_widen, args), tree_map(_widen, kwargs)
        name = func.overloadpacket.__name__
        if name in ("native_dropout", "_fused_dropout"):
            return args[0].clone(), torch.ones_like(args[0], dtype=torch.bool)
        if name.startswith("rrelu_with_noise"):
            args = (*args[:4], False)
        if name == "_grouped_mm" and len(args) > 2 and args[0].dim() == 2 and args[1].dim() == 3:
            return _grouped_product(*args[:3])
        result = func(*args, **kwargs)
        if name in NOISE:
            for tensor in tree_leaves(result):
                tensor.fill_(NOISE[name])
        return result


def _grouped_product(rows: torch.Tensor, matrices: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
    """Multiplies the rows up to each offset by a matrix of their own, which PyTorch does in low precision only."""
    result = rows.new_zeros(len(rows), matrices.shape[-1])
    start = 0
    for stop, matrix in zip(offsets.tolist(), matrices, strict=True):
        result[start:stop] = rows[start:stop] @ matrix
        start = stop
    return result


def _difference(one: torch.Tensor, two: torch.Tensor, rounding: float) -> float:
    """Returns the largest change of an entry, relative to it or to what is usual in its tensor; infinite if no number."""
    if one.shape != two.shape or not torch.equal(torch.isfinite(one), torch.isfinite(two)):
        return float("inf")
    finite = torch.isfinite(one)
    if not torch.equal(one[~finite], two[~finite]):
        return float("inf")
    before, after = one[finite].abs(), (one - two)[finite].abs()
    usual = before[(before > 0) & (before < MASK)]
    if not len(before) or not bool(after.any()):
        return 0.0
    scale = float(usual.median()) if len(usual) else 1.0
    return float(((after - rounding).clamp(min=0) / before.clamp(min=scale)).max())


def _each_once(tensors: Mapping[str, torch.Tensor], change: Callable[[torch.Tensor], torch.Tensor]) -> dict[str, torch.Tensor]:
    """Returns the tensors changed, tied ones still tied."""
    changed: dict[int, torch.Tensor] = {}
    for tensor in tensors.values():
        if id(tensor) not in changed:
            changed[id(tensor)] = change(tensor)
    return {name: changed[id(tensor)] for name, tensor in tensors.items()}


def _rounded_otherwise(tensor: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """Returns the tensor with other last digits."""
    if tensor.layout != torch.strided or tensor.dtype != torch.float64:
        return tensor
    return tensor * (1 + 1e-14 * torch.randn(tensor.shape, generator=generator).to(tensor))


def _rounding(one: torch.Tensor, two: torch.Tensor) -> float:
    """Returns how far results are apart whose weights differ in what rounding may change, with a margin of 1000."""
    if one.shape != two.shape:
        return 0.0
    both = torch.isfinite(one) & torch.isfinite(two) & (one.abs() < MASK)
    return 1e3 * float((one - two)[both].abs().max()) if bool(both.any()) else 0.0


def _widen(value: Any) -> Any:
    """Returns a floating-point tensor in double precision, and anything else as it is."""
    if isinstance(value, torch.Tensor) and value.dtype in NARROW:
        return value.double()
    return value.to(torch.complex128) if isinstance(value, torch.Tensor) and value.dtype == torch.complex64 else value


def _perturbed(tensor: torch.Tensor, generator: torch.Generator, *, buffers: bool) -> torch.Tensor:
    """Copies a parameter or a buffer in double precision, moved away from values that hide mistakes."""
    if tensor.layout != torch.strided:
        return tensor
    copy = _widen(tensor.detach()).clone(memory_format=torch.contiguous_format)
    if not copy.is_floating_point():
        return copy
    noise = torch.randn(copy.shape, generator=generator).to(copy)
    if isinstance(tensor, nn.Parameter):
        spread = 0.2 if copy.dim() < 2 else 0.5 * max(float(copy.std()) if copy.numel() > 1 else 0.0, 1e-2)
        return copy + spread * noise
    if buffers and bool(torch.isfinite(copy).all()):  # a variance stays positive
        return torch.where(copy == 0, 0.1 * noise, copy * torch.exp(0.2 * noise))
    return copy


def _outputs(
    network: nn.Module, tensors: Mapping[str, torch.Tensor], args: tuple[Any, ...], kwargs: Mapping[str, Any], training: bool
) -> list[torch.Tensor]:
    """Runs the network on these tensors and returns its results; its own buffers are left as they are."""
    buffers = {name for name, _ in network.named_buffers(remove_duplicate=False)}
    fused = not any(
        isinstance(part, nn.RNNBase) for part in network.modules()
    )  # cuDNN draws dropout inside of a recurrent layer
    own = {name: tensor.clone() if name in buffers else tensor for name, tensor in tensors.items()}
    with (
        state_kept(network),
        torch.no_grad(),
        plain_attention(),
        torch.backends.cudnn.flags(enabled=fused),
        _InDouble(),  # type: ignore[no-untyped-call]
    ):
        seed_draws(0)
        network.train(training)
        outputs = torch.func.functional_call(network, own, tree_map(_widen, args), tree_map(_widen, dict(kwargs)))
    found = [leaf.double() if not leaf.is_complex() else torch.view_as_real(leaf).double() for leaf in results(outputs)]
    if not any(leaf.numel() for leaf in found):
        raise ValueError(f"{type(network).__name__} returns no tensor on the sample input, so nothing can be checked")
    if any(bool(torch.isnan(leaf).any()) for leaf in found):
        raise ValueError(f"{type(network).__name__} gives undefined outputs on the sample input: give another")
    return found
