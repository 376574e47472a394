"""The numerical check that every specification has to pass: permuted weights, same function, in double precision.

The weights are perturbed first, because a norm with scale 1 and shift 0, or a bias that is still zero, would hide that it was
forgotten.

>>> import torch
>>> from opacus_shuffle.permutation.layout import Block, Factor, Term
>>> from opacus_shuffle.permutation.spec import PermutationSpec
>>> network = torch.nn.Sequential(torch.nn.Linear(4, 6), torch.nn.ReLU(), torch.nn.Linear(6, 2))
>>> rows = Block(0, 1, 6, (Term(0, ((0, 1),)),))
>>> wrong = PermutationSpec((Factor("rows", 6),), {"0.weight": (rows,)}, {"0.weight": (6, 4)})
>>> wrong.check(network, torch.ones(1, 4))
Traceback (most recent call last):
...
ValueError: this PermutationSpec changes what Sequential computes: permuting 'rows' moves 0.weight ...
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn

import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from opacus_shuffle.permutation import sample_input as samples
from opacus_shuffle.permutation.network import results, state_kept, unwrap
from opacus_shuffle.permutation.spec import PermutationPlan, PermutationSpec

TOLERANCE = 1e-9
"""Relative to the largest output. Summing in another order in double precision stays some 1e5 times below in the deepest
networks met, and the smallest breakage met (a forgotten bias of the queries) was 1e6 times above."""

DRAWS = 3
"""Of two copies of a permutation of two things, a draw takes both alike half of the time."""

NARROW = (torch.float32, torch.float16, torch.bfloat16)


def check_invariance(spec: PermutationSpec, module: nn.Module, sample_input: Any = None) -> None:
    """See :meth:`PermutationSpec.check`."""
    network = unwrap(module)
    args, kwargs = samples.guess(network) if sample_input is None else samples.normalise(sample_input)
    check_call(spec, network, args, kwargs)


def check_call(spec: PermutationSpec, network: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
    """The check, on the arguments of one call."""
    spec.tensors(network)
    generator = torch.Generator().manual_seed(20_230_101)
    double = _perturbed_copies(network, generator)
    for training in (False, True):
        reference = _outputs(network, double, args, kwargs, training)
        again = _outputs(network, double, args, kwargs, training, seed=1) if training else reference
        if any(not torch.equal(one, two) for one, two in zip(reference, again, strict=True)):
            return  # dropout and the like: the same in distribution, not number by number
        run = functools.partial(_outputs, network, double, args, kwargs, training)
        _compare(spec, network, double, reference, generator, run)


def _compare(
    spec: PermutationSpec,
    network: nn.Module,
    double: Mapping[str, torch.Tensor],
    reference: Sequence[torch.Tensor],
    generator: torch.Generator,
    run: Callable[[], list[torch.Tensor]],
) -> None:
    """Runs the network with permuted weights and compares what it gives with the reference."""
    scale = max(float(each.abs().max()) for each in reference)
    if not scale > 0:
        raise ValueError(
            f"{type(network).__name__} gives only zeros on the sample input, so nothing can be checked: give another"
        )

    def change(plan: PermutationPlan) -> float:
        spec.move({name: [double[name]] for name in spec.blocks}, plan)
        now = run()
        spec.move({name: [double[name]] for name in spec.blocks}, spec.invert(plan))
        worst = max(float((one - two).abs().max()) for one, two in zip(reference, now, strict=True)) / scale
        return worst if worst == worst else float("inf")

    # The first leaves nothing in place, the others tell copies of one permutation apart.
    for plan in (_without_fixed_points(spec.sample(generator)), *(spec.sample(generator) for _ in range(DRAWS))):
        if (worst := change(plan)) > TOLERANCE:
            _blame(spec, network, plan, worst, change)


def _blame(
    spec: PermutationSpec, network: nn.Module, plan: PermutationPlan, worst: float, change: Callable[[PermutationPlan], float]
) -> NoReturn:
    """Says which of the permutations changes the outputs."""
    still = spec.identity()
    for number, factor in enumerate(spec.factors):
        if factor.free:
            tables = list(still.tables)
            tables[number] = plan.tables[number]
            if (alone := change(PermutationPlan(tuple(tables)))) > TOLERANCE:
                members = ", ".join(dict.fromkeys(name for name, _ in spec.perm_to_axes[factor.name]))
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
    """Each permutation made one cycle over all it moves: a uniform draw often leaves two things in place."""
    return PermutationPlan(
        tuple(
            table if table is None else torch.empty_like(table).scatter_(-1, table, table.roll(1, -1)) for table in plan.tables
        )
    )


class _InDouble(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Keeps a network that rounds to single precision inside (norms, rotary embeddings) in double precision."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Widens floating-point operands and casts."""
        kwargs = dict(kwargs or {})
        if func.overloadpacket is torch.ops.aten._to_copy and kwargs.get("dtype") in NARROW:
            kwargs["dtype"] = torch.float64
        if not func._schema.is_mutable:
            args, kwargs = tree_map(_widen, args), tree_map(_widen, kwargs)
        return func(*args, **kwargs)


def _widen(value: Any) -> Any:
    """A floating-point tensor in double precision."""
    return value.double() if isinstance(value, torch.Tensor) and value.dtype in NARROW else value


def _perturbed_copies(network: nn.Module, generator: torch.Generator) -> dict[str, torch.Tensor]:
    """Parameters, moved away from values that hide mistakes, and buffers; in double precision, tied ones still tied."""
    copies: dict[int, torch.Tensor] = {}
    found = {}
    for name, tensor in [*network.named_parameters(remove_duplicate=False), *network.named_buffers(remove_duplicate=False)]:
        if id(tensor) not in copies:
            copy = tensor.detach().to(torch.float64 if tensor.is_floating_point() else tensor.dtype, copy=True).contiguous()
            if isinstance(tensor, nn.Parameter) and copy.is_floating_point():
                spread = 0.2 if copy.dim() < 2 else 0.5 * max(float(copy.std()) if copy.numel() > 1 else 0.0, 1e-2)
                copy += spread * torch.randn(copy.shape, generator=generator, dtype=torch.float64).to(copy.device)
            copies[id(tensor)] = copy
        found[name] = copies[id(tensor)]
    return found


def _outputs(
    network: nn.Module,
    tensors: Mapping[str, torch.Tensor],
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    training: bool,
    seed: int = 0,
) -> list[torch.Tensor]:
    """What the network computes from these tensors, buffers being left as they are."""
    buffers = {name for name, _ in network.named_buffers(remove_duplicate=False)}
    own = {name: tensor.clone() if name in buffers else tensor for name, tensor in tensors.items()}
    fast_path = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        with state_kept(network), torch.no_grad(), sdpa_kernel(SDPBackend.MATH), _InDouble():  # type: ignore[no-untyped-call]
            torch.manual_seed(seed)
            network.train(training)
            outputs = torch.func.functional_call(network, own, tree_map(_widen, args), tree_map(_widen, dict(kwargs)))
    finally:
        torch.backends.mha.set_fastpath_enabled(fast_path)
    found = [leaf for leaf in tree_leaves(results(outputs)) if isinstance(leaf, torch.Tensor) and leaf.is_floating_point()]
    if not found or not any(leaf.numel() for leaf in found):
        raise ValueError(
            f"{type(network).__name__} returns no floating-point tensor on the sample input, so nothing can be checked"
        )
    if not all(bool(torch.isfinite(leaf).all()) for leaf in found):
        raise ValueError(f"{type(network).__name__} gives infinite or undefined outputs on the sample input: give another")
    return found
