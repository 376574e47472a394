"""Each rule holds: permuting operands permutes results, with ties and infinities, too."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from helpers.labelled_operations import Function, Operation, breaks, labelled

from opacus_shuffle.permutation.finding import rules

MATRIX, CUBE = (3, 4), (2, 3, 4)
CASES: dict[str, tuple[Function, tuple[tuple[int, ...], ...]]] = {
    "where": (lambda x, y, z: torch.where(x > 0, y, z), (CUBE, (4,), (3, 1))),
    "masked in place": (
        lambda x, y: x.clone().masked_fill_(y > 0, torch.tensor(2.0)),
        (CUBE, (3, 1)),
    ),
    "largest and where": (lambda x: tuple(x.max(1)), (CUBE,)),
    "largest": (lambda x: x.max(1, keepdim=True).values, (CUBE,)),
    "median": (lambda x: x.median(1).values, (CUBE,)),
    "median of numbers": (lambda x: x.nanmedian(1).values, (CUBE,)),
    "most frequent": (lambda x: x.mode(1).values, (CUBE,)),
    "kth": (lambda x: x.kthvalue(2, 1).values, (CUBE,)),
    "sorted": (lambda x: x.sort(1).values, (CUBE,)),
    "sorted and where": (lambda x: tuple(x.sort(1)), (CUBE,)),
    "sorted heads": (lambda x: x.view(3, 2, 2).sort(1).values, (MATRIX,)),
    "sorted together": (lambda x, y: torch.cat([x, y], 1).sort(1).values, (MATRIX, (3, 2))),
    "sorted stack": (lambda x, y: torch.stack([x, y]).sort(0).values, (MATRIX, MATRIX)),
    "ranks": (lambda x: x.argsort(1).argsort(1), (MATRIX,)),
    "topk": (lambda x: x.topk(2, 1).values, (CUBE,)),
    "topk in any order": (lambda x: x.topk(2, 1, sorted=False).values, (CUBE,)),
    "the largest of each": (
        lambda x: torch.where(x < x.kthvalue(3, 1, keepdim=True).values, 0.0, x),
        (MATRIX,),
    ),
    "running largest": (lambda x: tuple(x.cummax(1)), (CUBE,)),
    "running sum": (lambda x: x.cumsum(1), (CUBE,)),
    "sparse": (
        lambda x: torch.sparse.mm(torch.eye(3).double().roll(1, 0).to_sparse(), x),
        (MATRIX,),
    ),
    "padded volume": (lambda x: F.pad(x, (1, 1, 1, 1, 1, 1), mode="reflect"), ((2, 3, 2, 3, 4),)),
    "replicated volume": (
        lambda x: F.pad(x, (1, 1, 1, 1, 1, 1), mode="replicate"),
        ((2, 3, 2, 3, 4),),
    ),
    "nearest": (lambda x: F.interpolate(x, scale_factor=2, mode="nearest-exact"), (CUBE,)),
    "every other": (lambda x: x[:, ::2], (MATRIX,)),
    "every other one and the ones between": (lambda x: x[:, ::2] * x[:, 1::2], (MATRIX,)),
    "every other one written to": (
        lambda x, y: torch.cat([1 * x, y])[:, 1::2].mul_(2),
        (MATRIX, MATRIX),
    ),
    "every other of an odd number": (lambda x: x[:, 1::2], (CUBE,)),
}


@pytest.mark.parametrize("name", CASES)
def test_permuted_operands_give_permuted_results(name):
    torch.manual_seed(0)
    operation = Operation(*CASES[name])
    spec = labelled(operation)
    assert spec.blocks
    assert not breaks(operation, spec)


@pytest.mark.parametrize("name", ["running sum", "running largest", "sorted and where"])
def test_a_rule_that_does_not_hold_is_seen(name, monkeypatch):
    def keeps_axes(run, call):
        for result in call.outputs:
            run.set(result, run.axes(call.inputs[0]))

    for operation in ("cumsum", "cummax", "sort"):
        monkeypatch.setitem(rules.RULES, f"aten.{operation}", keeps_axes)
    operation = Operation(*CASES[name])
    assert breaks(operation, labelled(operation))
