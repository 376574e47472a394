"""Checking numerically that permuted weights compute the same function: outputs and gradients, in double precision.

The check runs on a copy of the weights, which is perturbed first: a norm with scale 1 and shift 0,
or a bias that is still zero, would hide that it was forgotten.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NoReturn

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from opacus_shuffle.core.progress import enter_phase
from opacus_shuffle.networks.rollback import rolled_back
from opacus_shuffle.networks.running import results, seed_draws, without_graph
from opacus_shuffle.networks.sample_input import Call, run_quietly
from opacus_shuffle.permutation.action import GroupAction
from opacus_shuffle.permutation.group import PermutationPlan
from opacus_shuffle.permutation.network import plain_attention

MASK = 1e8
"""Entries beyond this are masks (-1e9, the lowest number of a type) and say nothing about the usual size of outputs."""

TOLERANCE = 1e-9
"""Relative to an output, or to the median one if it is smaller. Summing in another order in double precision stays some 1e5
times below in the deepest networks met, and the smallest breakage met (a forgotten bias of the
queries) was 1e6 times above.
"""

FLAT = 1e-4
"""Gradients this much below the largest one of the network are compared with that: some are zero but for rounding, as those
of a bias of keys, which the softmax forgets.
"""

MISSED = 1 / 8
"""How often two copies of a permutation of n things may go unnoticed: a draw takes both alike once in n! times, and a draw of
one cycle over all once in (n-1)! times.
"""

NOISE = {"bernoulli": 1.0, "bernoulli_": 1.0} | dict.fromkeys(
    (
        *(
            "rand",
            "randn",
            "rand_like",
            "randn_like",
            "normal",
            "normal_",
            "uniform_",
            "exponential_",
            "cauchy_",
        ),
        *("geometric_", "log_normal_", "poisson", "binomial", "_standard_gamma"),
    ),
    0.5,
)
"""What draws of noise are replaced by: it treats entries alike, so what it does to the function is a matter of distribution."""

NARROW = (torch.float32, torch.float16, torch.bfloat16)

Tensors = dict[str, torch.Tensor]
Outcome = tuple[list[torch.Tensor], Tensors]
"""Outputs, and gradients by the parameters' names."""


def check_calls(action: GroupAction, network: nn.Module, calls: Sequence[Call]) -> None:
    """Refuses a group with a permutation that changes what the network computes on these arguments, by name.

    The first is tried in both modes, with gradients, the others in evaluation mode without; each
    with as many permutations as tell two copies of one apart.

    Raises:
        ValueError: If outputs or gradients change, or the network cannot be checked; with the group
            concerned.
    """
    enter_phase("checking")
    action.tensors(network)
    generator = torch.Generator().manual_seed(20_230_101)
    anything = False
    for number, call in enumerate(calls):
        with contextlib.suppress(
            Exception
        ):  # what Python keeps for a size must not be made in double precision first
            run_quietly(network, *call)
        check = _Check(action, network, call, generator, gradients=number == 0)
        for plan in _plans(action, generator):
            if (worst := check.change(plan)) > TOLERANCE:
                check.blame(plan, worst)
        anything |= any(
            bool(output.any()) for outputs, _ in check.before.values() for output in outputs
        )
    if not anything:
        raise ValueError(
            f"{type(network).__name__} gives only zeros on the sample input: give another, so it "
            "can be checked"
        )


def _plans(action: GroupAction, generator: torch.Generator) -> Iterator[PermutationPlan]:
    """Yields a permutation that leaves nothing in place, and then others."""
    yield _without_fixed_points(action.sample(generator))
    smallest = min((factor.size for factor in action.factors if factor.free), default=2)
    left = -math.log(MISSED) - math.lgamma(smallest)
    for _ in range(math.ceil(left / math.lgamma(smallest + 1))):
        yield action.sample(generator)


def _without_fixed_points(plan: PermutationPlan) -> PermutationPlan:
    """Makes each permutation one cycle over all it moves: a uniform draw often leaves two things in place."""
    cycles = [
        table if table is None else torch.empty_like(table).scatter_(-1, table, table.roll(1, -1))
        for table in plan.tables
    ]
    return PermutationPlan(tuple(cycles))


class _Check:
    """Compares what a network computes on one input with permuted weights with what it does with these weights.

    Attributes:
        before: Outputs and gradients with the perturbed weights, by mode of the network.
    """

    def __init__(
        self,
        action: GroupAction,
        network: nn.Module,
        call: Call,
        generator: torch.Generator,
        *,
        gradients: bool,
    ) -> None:
        self._action, self._network, self._call, self._generator = action, network, call, generator
        self._gradients = gradients
        self._rounding: dict[bool, tuple[list[float], dict[str, float]]] = {}
        try:
            self._weights = _perturbed_copy(network, generator, buffers=True)
            self.before = {False: self._run(self._weights, training=False)}
        except (
            Exception
        ):  # some buffers are masks, indices or probabilities, and mean nothing perturbed
            self._weights = _perturbed_copy(network, generator, buffers=False)
            self.before = {False: self._run_or_refuse(training=False)}
        if gradients:
            trained = self._run_or_refuse(training=True)
            if not _same(self.before[False], trained):  # or this mode computes what the other did
                self.before[True] = trained

    def change(self, plan: PermutationPlan) -> float:
        """Returns how far outputs and gradients get, relative to their size, beyond what rounding explains."""
        if (worst := self._distance(plan)) <= TOLERANCE:
            return worst
        for training, (outputs, gradients) in self.before.items() if not self._rounding else ():
            nearly = self._run(
                _each_once(self._weights, self._rounded_otherwise), training=training
            )
            self._rounding[training] = (
                [_rounding(*pair) for pair in zip(outputs, nearly[0], strict=True)],
                {
                    name: _rounding(gradient, nearly[1][name])
                    for name, gradient in gradients.items()
                },
            )
        return self._distance(plan)

    def blame(self, plan: PermutationPlan, worst: float) -> NoReturn:
        """Refuses the group for a permutation that changes the function, naming the factor that does so alone."""
        name = type(self._network).__name__
        still = self._action.identity()
        for number, factor in enumerate(self._action.factors):
            if factor.free:
                tables = list(still.tables)
                tables[number] = plan.tables[number]
                if (alone := self.change(PermutationPlan(tuple(tables)))) > TOLERANCE:
                    members = ", ".join(
                        dict.fromkeys(name for name, _ in self._action.perm_to_axes[factor.name])
                    )
                    raise ValueError(
                        f"this PermutationSpec changes what {name} computes: permuting "
                        f"{factor.name!r} moves {members} and "
                        f"the outputs or gradients by {alone:.1e} of their size. Something that "
                        "belongs to it is missing or "
                        "must stay in place. If it was found and not made by hand, tracing has "
                        "lost these where their values "
                        "leave PyTorch, or in a backward of its own: declare that module's axes "
                        "(see register_permutation)"
                    )
        raise ValueError(
            f"this PermutationSpec changes what {name} computes by {worst:.1e} of the outputs' "
            "size, though none of its "
            "permutations does alone: use find_permutations"
        )

    def _distance(self, plan: PermutationPlan) -> float:
        moved = _each_once(self._weights, torch.clone)
        self._action.move({name: [moved[name]] for name in self._action.blocks}, plan)
        worst = 0.0
        for training, (outputs, gradients) in self.before.items():
            expected = {name: gradient.clone() for name, gradient in gradients.items()}
            self._action.move(
                {name: [expected[name]] for name in self._action.blocks if name in expected}, plan
            )
            got, slopes = self._run(moved, training=training)
            if len(got) != len(outputs) or slopes.keys() != expected.keys():
                return math.inf
            steepest = max(
                (float(slope.abs().max()) for slope in expected.values() if slope.numel()),
                default=0.0,
            )
            margins = self._rounding.get(
                training, ([0.0] * len(outputs), dict.fromkeys(expected, 0.0))
            )
            worst = max([worst, *map(_difference, outputs, got, margins[0])])
            for name, slope in expected.items():
                worst = max(
                    worst, _difference(slope, slopes[name], margins[1][name], FLAT * steepest)
                )
        return worst

    def _run_or_refuse(self, *, training: bool) -> Outcome:
        try:
            return self._run(self._weights, training=training)
        except ValueError:
            raise
        except Exception as error:
            raise ValueError(
                f"{type(self._network).__name__} does not run in double precision, so nothing can "
                "be checked: "
                f"{type(error).__name__}: {error}"
            ) from error

    def _run(self, weights: Mapping[str, torch.Tensor], *, training: bool) -> Outcome:
        """Returns what the network computes with these weights, and gradients of its outputs."""
        network, (args, kwargs) = self._network, tree_map(_widened, self._call)
        trained = {
            name for name, parameter in network.named_parameters() if parameter.requires_grad
        }
        # cuDNN draws dropout inside of a recurrent layer.
        fused = not any(isinstance(part, nn.RNNBase) for part in network.modules())

        def run() -> Outcome:
            seed_draws(0)
            network.train(training)
            _leave_out_hooks_of_training(network)
            own = _each_once(weights, torch.clone)  # which a forward pass may write to
            with torch.no_grad():
                leaves = _each_once(
                    {name: own[name] for name in trained}, lambda tensor: tensor.requires_grad_()
                )
            outputs = results(torch.func.functional_call(network, own, args, kwargs))
            slopes = _gradients(outputs, leaves) if torch.is_grad_enabled() else {}
            return [_as_real(output.detach()) for output in outputs], slopes

        in_double = _InDouble()  # type: ignore[no-untyped-call]
        with (
            rolled_back(network),
            plain_attention(),
            torch.backends.cudnn.flags(enabled=fused),
            in_double,
        ):
            outcome = run() if self._gradients else without_graph(run)
        if not any(output.numel() for output in outcome[0]):
            raise ValueError(
                f"{type(network).__name__} returns no tensor on the sample input, so nothing can "
                "be checked"
            )
        if any(bool(torch.isnan(output).any()) for output in outcome[0]):
            raise ValueError(
                f"{type(network).__name__} gives undefined outputs on the sample input: give "
                "another"
            )
        return outcome

    def _rounded_otherwise(self, tensor: torch.Tensor) -> torch.Tensor:
        """Returns a tensor with other last digits."""
        if tensor.layout != torch.strided or tensor.dtype != torch.float64:
            return tensor
        return tensor * (
            1 + 1e-14 * torch.randn(tensor.shape, generator=self._generator).to(tensor)
        )


def _leave_out_hooks_of_training(network: nn.Module) -> None:
    """Removes hooks of Opacus's and of ours, which would take the check for a pass of training."""
    for part in network.modules():
        for hooks in (part._forward_pre_hooks, part._forward_hooks, part._backward_hooks):
            for number, hook in list(hooks.items()):
                if str(getattr(getattr(hook, "func", hook), "__module__", "")).startswith("opacus"):
                    del hooks[number]


class _InDouble(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Keeps a network that rounds inside (norms, rotary embeddings) in double precision, and its draws of noise constant."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        name = func.overloadpacket.__name__
        made_of_floats = name in ("zeros", "ones", "empty") or (
            name == "full" and isinstance(args[1], float)
        )
        if (
            kwargs.get("dtype") or (torch.get_default_dtype() if made_of_floats else None)
        ) in NARROW:
            kwargs["dtype"] = torch.float64
        if not func._schema.is_mutable:
            args, kwargs = tree_map(_widened, args), tree_map(_widened, kwargs)
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


def _grouped_product(
    rows: torch.Tensor, matrices: torch.Tensor, offsets: torch.Tensor
) -> torch.Tensor:
    """Multiplies the rows up to each offset by a matrix of their own, which PyTorch does in low precision only."""
    result = rows.new_zeros(len(rows), matrices.shape[-1])
    start = 0
    for stop, matrix in zip(offsets.tolist(), matrices, strict=True):
        result[start:stop] = rows[start:stop] @ matrix
        start = stop
    return result


def _gradients(outputs: Sequence[torch.Tensor], leaves: Tensors) -> Tensors:
    """Returns the gradients of a sum of all outputs, in which no two entries weigh the same; zeros where there are none."""
    tops = [output for output in outputs if output.requires_grad and not output.is_complex()]
    if not tops or not leaves:
        return {}
    weights = [torch.linspace(1, 2, output.numel()).to(output).view_as(output) for output in tops]
    try:
        found = torch.autograd.grad(tops, list(leaves.values()), weights, allow_unused=True)
    except RuntimeError:  # something in it has no derivative
        return {}
    zeros = [
        torch.zeros_like(leaf) if slope is None else slope
        for leaf, slope in zip(leaves.values(), found, strict=True)
    ]
    return {name: _as_real(slope.to_dense()) for name, slope in zip(leaves, zeros, strict=True)}


def _as_real(tensor: torch.Tensor) -> torch.Tensor:
    return torch.view_as_real(tensor).double() if tensor.is_complex() else tensor.double()


def _each_once(
    tensors: Mapping[str, torch.Tensor], change: Callable[[torch.Tensor], torch.Tensor]
) -> Tensors:
    """Returns the tensors changed, tied ones still tied."""
    changed: dict[int, torch.Tensor] = {}
    for tensor in tensors.values():
        if id(tensor) not in changed:
            changed[id(tensor)] = change(tensor)
    return {name: changed[id(tensor)] for name, tensor in tensors.items()}


def _widened(value: Any) -> Any:
    """Returns a floating-point tensor in double precision, and anything else as it is."""
    if isinstance(value, torch.Tensor) and value.dtype in NARROW:
        return value.double()
    return (
        value.to(torch.complex128)
        if isinstance(value, torch.Tensor) and value.dtype == torch.complex64
        else value
    )


def _perturbed_copy(network: nn.Module, generator: torch.Generator, *, buffers: bool) -> Tensors:
    """Copies parameters and buffers in double precision, moved away from values that hide mistakes."""

    def perturbed(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.layout != torch.strided:
            return tensor
        copy: torch.Tensor = _widened(tensor.detach()).clone(memory_format=torch.contiguous_format)
        if not copy.is_floating_point():
            return copy
        noise = torch.randn(copy.shape, generator=generator).to(copy)
        if isinstance(tensor, nn.Parameter):
            spread = (
                0.2
                if copy.dim() < 2
                else 0.5 * max(float(copy.std()) if copy.numel() > 1 else 0.0, 1e-2)
            )
            return copy.add_(noise, alpha=spread)
        if buffers and bool(torch.isfinite(copy).all()):  # a variance stays positive
            return torch.where(copy == 0, 0.1 * noise, copy * torch.exp(0.2 * noise))
        return copy

    tensors = dict(network.named_parameters(remove_duplicate=False))
    return _each_once(tensors | dict(network.named_buffers(remove_duplicate=False)), perturbed)


def _same(one: Outcome, other: Outcome) -> bool:
    """Returns whether outputs and gradients are equal, bit by bit."""
    ones, others = [*one[0], *one[1].values()], [*other[0], *other[1].values()]
    return len(ones) == len(others) and all(map(torch.equal, ones, others))


def _difference(one: torch.Tensor, two: torch.Tensor, rounding: float, least: float = 0.0) -> float:
    """Returns the largest change of an entry, relative to it or to what is usual in its tensor; infinite if no number.

    Less than ``rounding`` is no change, and what is usual is not smaller than ``least``.
    """
    if (
        one.shape == two.shape
        and one.numel()
        and (gap := float((one - two).abs().max())) <= TOLERANCE * least
    ):
        return (
            gap / least if least else 0.0
        )  # whatever is usual, it is no change; what is takes long to find
    if one.shape != two.shape or not torch.equal(torch.isfinite(one), torch.isfinite(two)):
        return float("inf")
    finite = torch.isfinite(one)
    if not torch.equal(one[~finite], two[~finite]):
        return float("inf")
    before, after = one[finite].abs(), (one - two)[finite].abs()
    usual = before[(before > 0) & (before < MASK)]
    if not len(before) or not bool(after.any()):
        return 0.0
    scale = max(float(usual.median()), least) if len(usual) else 1.0
    return float(((after - rounding).clamp(min=0) / before.clamp(min=scale)).max())


def _rounding(one: torch.Tensor, two: torch.Tensor) -> float:
    """Returns how far results are apart whose weights differ in what rounding may change, with a margin of 1000."""
    if one.shape != two.shape:
        return 0.0
    both = torch.isfinite(one) & torch.isfinite(two) & (one.abs() < MASK)
    return 1e3 * float((one - two)[both].abs().max()) if bool(both.any()) else 0.0
