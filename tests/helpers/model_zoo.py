"""Small networks of many architectures, each with an input, for finding permutations.

All weights are random (a LayerNorm with scale 1 and shift 0 would hide an error), dropout is off,
and sizes differ where they may. :func:`build` returns an entry that is ready for use.
"""

import copy
import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils._pytree import tree_leaves, tree_map

Builder = Callable[[], tuple[nn.Module, Any]]
NETWORKS: dict[str, Builder] = {}

BATCH = 3


def collect(zoo: dict[str, Builder]) -> Callable[[Builder], Builder]:
    """Returns a decorator that adds a builder to a zoo under its name."""

    def add(builder: Builder) -> Builder:
        zoo[builder.__name__] = builder
        return builder

    return add


network = collect(NETWORKS)


def build(
    builder: Builder, *, dtype: torch.dtype = torch.float64, seed: int = 0
) -> tuple[nn.Module, Any]:
    """Returns the network in evaluation mode with random weights, and its input."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        module, sample = builder()
    randomise(module, seed)
    return module.eval().to(dtype), cast(sample, dtype)


def randomise(module: nn.Module, seed: int) -> None:
    """Sets random weights that keep activations of size 1, and none of which is 0 or 1."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in module.parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            fan_in = math.prod(parameter.shape[1:])
            parameter.copy_(
                1.4 * noise / math.sqrt(fan_in) if parameter.dim() > 1 else 0.7 + 0.4 * noise
            )
        for name, buffer in module.named_buffers():
            if name.endswith(("running_mean", "running_var")):
                buffer.copy_(0.5 + torch.rand(buffer.shape, generator=generator))


def cast(sample: Any, dtype: torch.dtype) -> Any:
    """Returns the same input with floating-point numbers of another dtype."""
    return tree_map(
        lambda leaf: leaf.to(dtype) if torch.is_tensor(leaf) and leaf.is_floating_point() else leaf,
        sample,
    )


def another(sample: Any, seed: int = 1) -> Any:
    """Returns an input of the same shapes: normal numbers, shuffled tokens, the same masks."""
    generator = torch.Generator().manual_seed(seed)

    def draw(leaf: Any) -> Any:
        if not torch.is_tensor(leaf):
            return leaf
        if leaf.is_floating_point():
            return torch.randn(leaf.shape, generator=generator).to(leaf)
        if leaf.dtype == torch.bool or leaf.max() <= 1:
            return leaf
        return leaf.flatten()[torch.randperm(leaf.numel(), generator=generator)].view_as(leaf)

    return tree_map(draw, sample)


def run(module: nn.Module, sample: Any) -> list[torch.Tensor]:
    """Returns all floating-point tensors in the output of the network."""
    positional = (
        () if isinstance(sample, dict) else sample if isinstance(sample, tuple) else (sample,)
    )
    result = module(*positional, **(sample if isinstance(sample, dict) else {}))
    result = list(result.values()) if isinstance(result, dict) else result
    return [
        leaf for leaf in tree_leaves(result) if torch.is_tensor(leaf) and leaf.is_floating_point()
    ]


def gradients(module: nn.Module, sample: Any) -> dict[str, torch.Tensor]:
    """Returns the gradients of a fixed nonlinear function of the outputs, also in ``.grad``."""
    module.zero_grad(set_to_none=True)
    generator = torch.Generator().manual_seed(0)
    outputs = run(module, sample)
    sum(
        (torch.tanh(y) * torch.randn(y.shape, generator=generator).to(y)).sum() for y in outputs
    ).backward()
    return {name: p.grad for name, p in module.named_parameters() if p.grad is not None}


def entry_moves(spec: Any, module: nn.Module, plan: Any) -> dict[str, torch.Tensor]:
    """Returns the old position of each entry of each parameter under a plan."""
    numbered = copy.deepcopy(module).double()
    with torch.no_grad():
        for parameter in numbered.parameters():
            parameter.copy_(torch.arange(parameter.numel()).view(parameter.shape))
    spec.apply_(numbered, plan)
    return {name: parameter.detach().long() for name, parameter in numbered.named_parameters()}


class Apply(nn.Module):
    """A function as a layer."""

    def __init__(self, function: Callable[..., torch.Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, *inputs: torch.Tensor) -> torch.Tensor:
        return self.function(*inputs)


class Wired(nn.Module):
    """Named layers and parameters, and a function of them and the input as the forward."""

    def __init__(self, wiring: Callable[..., Any], **parts: nn.Module | torch.Tensor) -> None:
        super().__init__()
        self.wiring = wiring
        for name, part in parts.items():
            setattr(self, name, nn.Parameter(part) if torch.is_tensor(part) else part)

    def forward(self, *inputs: torch.Tensor, **named: torch.Tensor) -> Any:
        return self.wiring(self, *inputs, **named)


# Perceptrons
# ------------------------------------------------------------------------------------------


@network
def mlp():
    layers = [nn.Linear(12, 64), nn.GELU(), nn.Linear(64, 48), nn.ReLU(), nn.Linear(48, 5)]
    return nn.Sequential(*layers), torch.randn(BATCH, 12)


@network
def gated_linear_units():
    return nn.Sequential(nn.Linear(7, 2 * 9), nn.GLU(), nn.Linear(9, 4)), torch.randn(BATCH, 7)


@network
def maxout():
    layers = [
        nn.Linear(7, 5 * 3),
        nn.Unflatten(1, (5, 3)),
        Apply(lambda x: x.amax(-1)),
        nn.Linear(5, 4),
    ]
    return nn.Sequential(*layers), torch.randn(BATCH, 7)


@network
def autoencoder_with_one_matrix():
    def wiring(m, x):
        return F.linear(torch.relu(F.linear(x, m.weight, m.bias)), m.weight.T)

    return Wired(wiring, weight=torch.randn(9, 7), bias=torch.randn(9)), torch.randn(BATCH, 7)


@network
def low_rank_adapter():
    def wiring(m, x):
        h = m.base(x) + 2 * m.b(m.a(x))
        return m.out(torch.relu(h))

    layers = {
        "base": nn.Linear(7, 9),
        "a": nn.Linear(7, 4, bias=False),
        "b": nn.Linear(4, 9, bias=False),
        "out": nn.Linear(9, 5),
    }
    return Wired(wiring, **layers), torch.randn(BATCH, 7)


@network
def siamese():
    def wiring(m, x, y):
        a, b = m.encoder(x), m.encoder(y)
        return m.out(torch.cat([a, b, a * b], 1))

    encoder = nn.Sequential(nn.Linear(7, 9), nn.ReLU(), nn.Linear(9, 6))
    return Wired(wiring, encoder=encoder, out=nn.Linear(18, 2)), (
        torch.randn(BATCH, 7),
        torch.randn(BATCH, 7),
    )


# Experts
# ------------------------------------------------------------------------------------------


@network
def ensemble():
    def wiring(m, x):
        h = torch.relu(torch.bmm(x.expand(4, *x.shape), m.into) + m.bias.unsqueeze(1))
        return torch.bmm(h, m.out).mean(0)

    weights = {"into": torch.randn(4, 7, 6), "bias": torch.randn(4, 6), "out": torch.randn(4, 6, 5)}
    return Wired(wiring, **weights), torch.randn(BATCH, 7)


@network
def mixture_of_experts():
    def wiring(m, x):
        routes = torch.softmax(m.router(x), -1)
        h = F.gelu(torch.einsum("bd,edf->bef", x, m.into))
        return torch.einsum("bef,efo,be->bo", h, m.out, routes)

    return Wired(
        wiring, router=nn.Linear(7, 4), into=torch.randn(4, 7, 6), out=torch.randn(4, 6, 5)
    ), torch.randn(BATCH, 7)
