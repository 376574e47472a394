"""Single operations on parameters, their permutations, and a check of these."""

from collections.abc import Callable, Sequence

import torch
from torch import nn

from helpers.zoo import DOUBLE
from opacus_shuffle.permutation.finding.nesting import build_spec
from opacus_shuffle.permutation.finding.trace import Tracer
from opacus_shuffle.permutation.finding.traced_run import Findings, TracedRun
from opacus_shuffle.permutation.spec import PermutationSpec

Function = Callable[..., torch.Tensor | tuple[torch.Tensor, ...]]


class Operation(nn.Module):
    """An operation on parameters."""

    def __init__(self, function: Function, shapes: tuple[tuple[int, ...], ...]) -> None:
        super().__init__()
        self.function = function
        self.operands = nn.ParameterList(
            [torch.randn(shape, dtype=torch.float64) for shape in shapes]
        )

    def forward(self) -> list[torch.Tensor]:
        results = self.function(*(1 * operand for operand in self.operands))
        return [results] if isinstance(results, torch.Tensor) else list(results)


def labelled(operation: Operation) -> PermutationSpec:
    """Returns the permutations of operands and results, which are not fixed as outputs."""
    findings = Findings()
    for _ in range(3):
        run = TracedRun(operation, findings)
        with torch.no_grad(), Tracer(operation, run):
            results = [result.clone() for result in operation()]
    for number, result in enumerate(results):
        name = f"result {number}"
        run.tensors[name] = result
        run.used.add(name)
    return build_spec(run, "residual")


def entries(
    shape: tuple[int, ...], generator: torch.Generator, special: float | None
) -> torch.Tensor:
    """Returns normal numbers, or integers with many ties and some special values."""
    if special is None:
        return torch.randn(shape, generator=generator, dtype=torch.float64)
    numbers = torch.randint(-2, 3, shape, generator=generator).double()
    return torch.where(torch.rand(shape, generator=generator) < 0.2, special, numbers)


SPECIAL = (None, 0.0, float("nan"), float("inf"))


def breaks(
    operation: Operation, spec: PermutationSpec, specials: Sequence[float | None] = SPECIAL
) -> bool:
    """Returns whether permuted operands do not give the permuted results."""
    generator = torch.Generator().manual_seed(0)
    for special in specials:
        for _ in range(3):
            for operand in operation.operands:
                operand.data.copy_(entries(tuple(operand.shape), generator, special))
            expected = {
                f"result {number}": [result.contiguous().clone()]
                for number, result in enumerate(operation())
            }
            plan = spec.sample(generator)
            moving = {
                name: [operand.data] for name, operand in operation.named_parameters()
            } | expected
            spec.move(
                {name: tensors for name, tensors in moving.items() if name in spec.blocks}, plan
            )
            for got, (result,) in zip(operation(), expected.values(), strict=True):
                if not torch.allclose(
                    got.to(result), result, rtol=DOUBLE, atol=DOUBLE, equal_nan=True
                ):
                    return True
    return False
