"""Each rule holds: permuting operands along their labels permutes results along theirs, with ties and infinities, too."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from helpers.labelled_operations import Function, Operation, breaks, labelled

from opacus_shuffle.permutation.finding import rules
from opacus_shuffle.permutation.finding.labels import fixed_factors


def positive(x: torch.Tensor) -> torch.Tensor:
    return (x > 0).long()


def diagonal_written_to(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    written = x.clone()
    written.diagonal().add_(y)
    return written


def identity() -> torch.Tensor:
    """Ones put into zeros through a view of them."""
    matrix = torch.zeros(4, 4, dtype=torch.float64)
    matrix.diagonal().fill_(1)
    return matrix


MATRIX, CUBE, SQUARE = (3, 4), (2, 3, 4), (4, 4)
CASES: dict[str, tuple[Function, tuple[tuple[int, ...], ...]]] = {
    "where": (lambda x, y, z: torch.where(x > 0, y, z), (CUBE, (4,), (3, 1))),
    "masked in place": (lambda x, y: x.clone().masked_fill_(y > 0, torch.tensor(2.0)), (CUBE, (3, 1))),
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
    "the largest of each": (lambda x: torch.where(x < x.kthvalue(3, 1, keepdim=True).values, 0.0, x), (MATRIX,)),
    "chosen by the largest": (lambda x, y: y.gather(1, x.topk(2, 1).indices), (MATRIX, MATRIX)),
    "running largest": (lambda x: tuple(x.cummax(1)), (CUBE,)),
    "running sum": (lambda x: x.cumsum(1), (CUBE,)),
    "one hot": (lambda x: F.one_hot(x.nan_to_num().argmax(1), 3), (CUBE,)),
    "scattered sum": (lambda x, y: x.scatter_add(1, positive(y), y), (CUBE, CUBE)),
    "scattered mean": (lambda x, y: x.scatter_reduce(1, positive(y), y, "mean"), (CUBE, (2, 5, 4))),
    "scattered largest": (lambda x, y: x.scatter_reduce(1, positive(y), y, "amax", include_self=False), (CUBE, CUBE)),
    "scattered": (lambda x, y: x.scatter(1, positive(y), y), (CUBE, CUBE)),
    "scattered number": (lambda x, y: x.scatter(1, positive(y), 1.5), (CUBE, (2, 5, 4))),
    "scattered in place": (lambda x: torch.zeros(2, 2, 4).double().scatter_add_(1, positive(x), x), (CUBE,)),
    "scattered in part": (lambda x, y: x.scatter_add(1, positive(y), y), (CUBE, (1, 2, 4))),
    "index_add": (lambda x, y: x.index_add(1, torch.tensor([1, 1]), y[:, :2]), (CUBE, CUBE)),
    "index_reduce": (lambda x, y: x.index_reduce(1, torch.tensor([1, 1]), y[:, :2], "amax"), (CUBE, CUBE)),
    "gather": (lambda x, y: x.gather(1, positive(y)), (CUBE, CUBE)),
    "distances": (lambda x, y: torch.cdist(x, y), (MATRIX, (5, 4))),
    "distances in heads": (lambda x, y: torch.cdist(x, y, p=1), ((2, 1, 3, 4), (3, 5, 4))),
    "distances of many": (lambda x, y: torch.cdist(x, y), ((26, 2), (27, 2))),
    "distances of pairs": (torch.pdist, (MATRIX,)),
    "fourier": (lambda x: torch.view_as_real(torch.fft.fft(x, dim=1)), (CUBE,)),
    "real fourier": (lambda x: torch.fft.irfft(torch.fft.rfft(x, dim=1), n=5, dim=1), (CUBE,)),
    "short-time fourier": (
        lambda x: torch.view_as_real(torch.stft(x, 4, 2, window=torch.ones(4).double(), center=False, return_complex=True)),
        ((3, 8),),
    ),
    "renorm": (lambda x: x.renorm(2, 1, 0.7), (CUBE,)),
    "bucketize": (lambda x: torch.bucketize(x, torch.tensor([-1.0, 0.5]).double()), (CUBE,)),
    "searchsorted": (lambda x, y: torch.searchsorted(y.nan_to_num().tanh().exp().cumsum(-1), x), (CUBE, (2, 3, 5))),
    "searched in one": (lambda x, y: torch.searchsorted(y.sort().values, x), (CUBE, (5,))),
    "diagonal": (lambda x: x.diagonal(), (SQUARE,)),
    "diagonal of heads": (lambda x: x.view(2, 2, 2, 2).diagonal(dim1=1, dim2=3), (SQUARE,)),
    "beside the diagonal": (lambda x: x.diagonal(1), (SQUARE,)),
    "diagonal of no square": (lambda x: x.diagonal(dim1=1, dim2=2), (CUBE,)),
    "diagonal written to": (diagonal_written_to, (SQUARE, (4,))),
    "unit matrix": (lambda x: x @ identity(), (MATRIX,)),
    "diagonal matrix": (lambda x, y: x @ torch.diag_embed(y.nan_to_num()), (MATRIX, (4,))),
    "diagonal matrices": (lambda x: torch.diag_embed(x, dim1=0, dim2=2), (MATRIX,)),
    "trace": (torch.trace, (SQUARE,)),
    "sparse": (lambda x: torch.sparse.mm(torch.eye(3).double().roll(1, 0).to_sparse(), x), (MATRIX,)),
    "transposed convolution": (lambda x, y: F.conv_transpose1d(x, y, groups=2), ((2, 4, 5), (4, 3, 2))),
    "across groups": (lambda x, y: F.conv_transpose1d(x, y, groups=2).unflatten(1, (2, -1)).sum(1), ((2, 4, 5), (4, 3, 2))),
    "folded": (lambda x: F.fold(x, (4, 4), 2, stride=2), ((2, 8, 4),)),
    "padded volume": (lambda x: F.pad(x, (1, 1, 1, 1, 1, 1), mode="reflect"), ((2, 3, 2, 3, 4),)),
    "replicated volume": (lambda x: F.pad(x, (1, 1, 1, 1, 1, 1), mode="replicate"), ((2, 3, 2, 3, 4),)),
    "fractions": (
        lambda x, y: F.fractional_max_pool2d(x, 2, output_size=2, _random_samples=y.detach().nan_to_num().sigmoid()),
        ((2, 3, 4, 5), (2, 3, 2)),
    ),
    "nearest": (lambda x: F.interpolate(x, scale_factor=2, mode="nearest-exact"), (CUBE,)),
    "shortened rows": (lambda x: torch.embedding_renorm_(x.clone(), torch.tensor([0, 2]), 1.0, 2.0), (MATRIX,)),
    "squared error": (lambda x, y: F.mse_loss(x, y), (CUBE, CUBE)),
    "weighted entropy": (
        lambda x, y, z: F.binary_cross_entropy_with_logits(x, y, z.detach(), reduction="none"),
        (CUBE, CUBE, (4,)),
    ),
    "sampled at places": (lambda x, y: F.grid_sample(x, y, align_corners=False), ((2, 3, 4, 4), (2, 1, 3, 2))),
    "rows put in by a mask": (
        lambda x, y, z: x.masked_scatter((y > 0).expand(2, 3, 4), z),
        (CUBE, (2, 3, 1), (6, 4)),
    ),
    "places put in by a mask": (lambda x, y, z: x.masked_scatter(y > 0, z), (CUBE, (3, 4), (6, 4))),
    "rows put in by a mask of full size": (lambda x, y, z: x.masked_scatter(y[..., None] > 0, z), (CUBE, (2, 3), (9, 4))),
    "every other": (lambda x: x[:, ::2], (MATRIX,)),
    "every other one and the ones between": (lambda x: x[:, ::2] * x[:, 1::2], (MATRIX,)),
    "every other one written to": (lambda x, y: torch.cat([1 * x, y])[:, 1::2].mul_(2), (MATRIX, MATRIX)),
    "every other of an odd number": (lambda x: x[:, 1::2], (CUBE,)),
    "windows": (lambda x: x.unfold(-1, 2, 1), (CUBE,)),
    "overlapping windows": (lambda x: x.as_strided((2, 2, 2, 4), (12, 4, 4, 1)), (CUBE,)),
    "memory in another order": (lambda x: x.as_strided((4, 3), (1, 4)), (MATRIX,)),
    "memory between": (lambda x: x.as_strided((2, 4), (4, 1), 2), (MATRIX,)),
    "memory of a piece": (lambda x: x[1:].as_strided((1, 4), (4, 1), 8), (MATRIX,)),
    "memory of a diagonal": (lambda x: x.clone().fill_diagonal_(0.0), (SQUARE,)),
}


NOTHING_MOVES = {"places put in by a mask", "beside the diagonal", "memory between", "memory of a diagonal"}


@pytest.mark.parametrize("name", CASES)
def test_permuted_operands_give_permuted_results(name):
    torch.manual_seed(0)
    operation = Operation(*CASES[name])
    spec = labelled(operation)
    assert bool(spec.blocks) == (name not in NOTHING_MOVES)
    assert not breaks(operation, spec)


@pytest.mark.parametrize("name", ["running sum", "running largest", "sorted and where", "chosen by the largest"])
def test_a_rule_that_does_not_hold_is_seen(name, monkeypatch):
    def keeps_labels(run, call):
        for result in call.outputs:
            run.set(result, run.dimensions(call.inputs[0]))

    def forgets_labels(run, call):
        for result in call.outputs:
            run.set(result, [*run.dimensions(call.inputs[0])[:1], fixed_factors(result.shape[1])])

    monkeypatch.setattr(rules, "RULES", rules.RULES | dict.fromkeys(("aten.cumsum", "aten.cummax", "aten.sort"), keeps_labels))
    monkeypatch.setitem(rules.RULES, "aten.topk", forgets_labels)
    operation = Operation(*CASES[name])
    assert breaks(operation, labelled(operation))
