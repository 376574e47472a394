"""A gradient that a forward pass takes, as energy models do, moves what the function itself moves."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from helpers.hand_written_groups import symmetric
from helpers.labelled_operations import Function, Operation, breaks, labelled
from helpers.zoo import DOUBLE
from torch import nn

from opacus_shuffle.permutation import find_permutations

CUBE, WIDE, IMAGES, VOLUMES = (2, 3, 4), (2, 6), (2, 3, 4, 4), (1, 2, 4, 4, 4)

ENTRY_BY_ENTRY = [
    *(F.softplus, F.elu, F.leaky_relu, F.hardtanh, F.hardswish, F.hardsigmoid, F.logsigmoid, F.softshrink, F.mish, F.silu),
    *(torch.tanh, torch.sigmoid, F.gelu, torch.relu, lambda x: F.threshold(x, 0.1, 0.2)),
]
LOSSES = [F.mse_loss, F.smooth_l1_loss, F.huber_loss, F.binary_cross_entropy_with_logits]

FUNCTIONS: dict[str, tuple[Function, tuple[tuple[int, ...], ...]]] = {
    **{getattr(each, "__name__", "threshold"): (each, (CUBE,)) for each in ENTRY_BY_ENTRY},
    **{each.__name__: (lambda x, y, loss=each: loss(x, y, reduction="none"), (CUBE, CUBE)) for each in LOSSES},
    **{f"mean {each.__name__}": (lambda x, y, loss=each: loss(x, y), (CUBE, CUBE)) for each in LOSSES},
    "entropy": (lambda x: F.binary_cross_entropy(x.nan_to_num().sigmoid(), x.detach().nan_to_num().tanh().square()), (CUBE,)),
    "soft margin": (lambda x: F.soft_margin_loss(x, x.detach().sign(), reduction="none"), (CUBE,)),
    "prelu": (F.prelu, (CUBE, (3,))),
    "glu": (lambda x: F.glu(x, 1), (WIDE,)),
    "softmax": (lambda x: x.softmax(1), (CUBE,)),
    "log_softmax": (lambda x: x.log_softmax(1), (CUBE,)),
    "layer_norm": (lambda x, y, z: F.layer_norm(x, (4,), y, z), (CUBE, (4,), (4,))),
    "layer_norm of two axes": (lambda x, y: F.layer_norm(x, (3, 4), y), (CUBE, (3, 4))),
    "group_norm": (lambda x, y, z: F.group_norm(x, 2, y, z), ((2, 6, 4), (6,), (6,))),
    "batch_norm": (lambda x, y, z: F.batch_norm(x, None, None, y, z, training=True), (CUBE, (3,), (3,))),
    "distances": (lambda x, y: torch.cdist(x, y), ((3, 4), (5, 4))),
    "select": (lambda x: x[:, 1], (CUBE,)),
    "slice": (lambda x: x[:, 1:3], (WIDE,)),
    "slice to the end": (lambda x: x[:, 2:], (WIDE,)),
    "every second": (lambda x: x[:, ::2], (WIDE,)),
    "windows": (lambda x: x.unfold(1, 2, 2), (CUBE,)),
    "diagonal": (lambda x: x.diagonal(dim1=0, dim2=2), ((4, 3, 4),)),
    "beside the diagonal": (lambda x: x.diagonal(1, dim1=0, dim2=2), ((4, 3, 4),)),
    "index": (lambda x: x[torch.tensor([0, 1, 1])], (CUBE,)),
    "embedding": (lambda x: F.embedding(torch.tensor([[0, 2], [2, 1]]), x), ((3, 4),)),
    "convolution": (lambda x, y, z: F.conv1d(x, y, z), (CUBE, (5, 3, 2), (5,))),
    "convolution in groups": (lambda x, y: F.conv1d(x, y, groups=2), ((2, 4, 5), (6, 2, 2))),
    "depthwise convolution": (lambda x, y: F.conv2d(x, y, groups=3), (IMAGES, (3, 1, 2, 2))),
    "transposed convolution": (lambda x, y, z: F.conv_transpose1d(x, y, z), (CUBE, (3, 5, 2), (5,))),
    "transposed in groups": (lambda x, y: F.conv_transpose1d(x, y, groups=2), ((2, 4, 5), (4, 3, 2))),
    "max_pool1d": (lambda x: F.max_pool1d(x, 2), (CUBE,)),
    "max_pool2d": (lambda x: F.max_pool2d(x, 2), (IMAGES,)),
    "max_pool3d": (lambda x: F.max_pool3d(x, 2), (VOLUMES,)),
    "avg_pool1d": (lambda x: F.avg_pool1d(x, 2), (CUBE,)),
    "avg_pool2d": (lambda x: F.avg_pool2d(x, 2), (IMAGES,)),
    "avg_pool3d": (lambda x: F.avg_pool3d(x, 2), (VOLUMES,)),
    "adaptive_avg_pool2d": (lambda x: F.adaptive_avg_pool2d(x, 2), (IMAGES,)),
    "adaptive_max_pool2d": (lambda x: F.adaptive_max_pool2d(x, 2), (IMAGES,)),
    "nearest": (lambda x: F.interpolate(x, scale_factor=2), (IMAGES,)),
    "bilinear": (lambda x: F.interpolate(x, scale_factor=2, mode="bilinear"), (IMAGES,)),
    "bicubic": (lambda x: F.interpolate(x, scale_factor=2, mode="bicubic"), (IMAGES,)),
    "reflected": (lambda x: F.pad(x, (1, 1), mode="reflect"), (CUBE,)),
    "replicated": (lambda x: F.pad(x, (1, 1), mode="replicate"), (CUBE,)),
}


def gradients(function: Function) -> Function:
    """The gradients of half the squared norm of a function's result."""

    def of(*operands: torch.Tensor) -> tuple[torch.Tensor, ...]:
        result, pull = torch.func.vjp(function, *operands)
        return pull(result)

    return of


@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_gradient_moves_what_the_function_moves(name):
    function, shapes = FUNCTIONS[name]
    torch.manual_seed(0)
    forward, backward = Operation(function, shapes), Operation(gradients(function), shapes)
    expected, spec = labelled(forward), labelled(backward)
    assert not spec.unknown
    assert spec.log2_size() >= expected.log2_size() - 1e-6  # zeros that surround a piece move, too
    assert not breaks(backward, spec)


@pytest.mark.parametrize("at", ["input", "kernel"])
def test_the_gradient_at_a_constant_moves_as_the_other_operand_does(at):
    def gradient(operand: torch.Tensor) -> torch.Tensor:
        constant = operand.new_ones(CUBE if at == "input" else (5, 3, 2))
        pair = (constant, operand) if at == "input" else (operand, constant)
        result, pull = torch.func.vjp(F.conv1d, *pair)
        return pull(result.square())[at == "kernel"]

    torch.manual_seed(0)
    operation = Operation(gradient, ((5, 3, 2) if at == "input" else CUBE,))
    spec = labelled(operation)
    assert spec.axes_to_perm["operands.0"][1]
    assert not breaks(operation, spec)


class Energy(nn.Module):
    """The slope of an energy along its input: of what the last layer adds, nothing is left."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(5, 8), nn.Softplus(), nn.Linear(8, 7), nn.SiLU(), nn.Linear(7, 1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.detach().requires_grad_()
        return torch.autograd.grad(self.net(x).sum(), x, create_graph=self.training)[0]


class Adapted(nn.Module):
    """A network after one step on its own inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.enter, self.leave = nn.Linear(5, 8), nn.Linear(8, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        loss = self.leave(self.enter(x).relu()).square().mean()
        slopes = torch.autograd.grad(loss, list(self.parameters()), create_graph=True)
        weight, bias, *last = (each - 0.1 * slope for each, slope in zip(self.parameters(), slopes, strict=True))
        return F.linear(F.linear(x, weight, bias).relu(), *last)


class Curved(nn.Module):
    """The diagonal of an energy's second derivatives."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.vmap(torch.func.hessian(lambda each: self.net(each).sum()))(x).diagonal(dim1=1, dim2=2)


@pytest.mark.parametrize(("kind", "units"), [(Energy, (8, 7)), (Adapted, (8,)), (Curved, (8,))])
def test_a_network_that_takes_gradients_keeps_its_function_and_all_its_units_move(kind, units):
    torch.manual_seed(0)
    network = kind().double()
    spec = find_permutations(network, torch.randn(4, 5, dtype=torch.float64))
    assert spec.log2_size() == pytest.approx(sum(map(symmetric, units)))
    moved, others = copy.deepcopy(network), torch.randn(6, 5, dtype=torch.float64)
    spec.apply_(moved, spec.sample(torch.Generator().manual_seed(1)))
    torch.testing.assert_close(moved(others), network(others), rtol=DOUBLE, atol=DOUBLE)
    assert all(parameter.grad is None for parameter in network.parameters())
