"""Random networks: hidden units sent through a random chain of operations on their axes."""

import random
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import nn

Weights = nn.ParameterList
Step = Callable[[Weights, torch.Tensor], torch.Tensor]
Maker = Callable[["Draft", torch.Tensor], "Step | None"]
STEPS: list[Maker] = []


class Draft:
    """Choices and parameters of a network in the making."""

    def __init__(self, seed: int) -> None:
        self.choose, self.weights = random.Random(seed), nn.ParameterList()

    def axis(self, x: torch.Tensor) -> int:
        return self.choose.randrange(1, x.dim())

    def weight(self, *shape: int) -> int:
        self.weights.append(nn.Parameter(torch.randn(shape)))
        return len(self.weights) - 1

    def divisor(self, n: int) -> int:
        return self.choose.choice([k for k in range(1, n + 1) if n % k == 0])


class RandomNetwork(nn.Module):
    """Twelve units, the chain, a linear layer."""

    def __init__(self, seed: int, depth: int) -> None:
        super().__init__()
        draft, x = Draft(seed), torch.randn(2, 12)
        self.first, self.steps, self.names = nn.Linear(5, 12), [], []
        while len(self.steps) < depth:
            maker = draft.choose.choice(STEPS)
            step = maker(draft, x)
            y = step(draft.weights, x) if step is not None else x.new_zeros(0)
            if y.numel() and y.numel() <= 600 and y.dim() <= 5:
                self.steps.append(step)
                self.names.append(f"{maker.__name__} -> {tuple(y.shape[1:])}")
                x = y.detach()
        self.weights, self.last = draft.weights, nn.Linear(x[0].numel(), 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for step in self.steps:
            x = step(self.weights, x)
        return self.last(x.flatten(1))


def step(maker: Maker) -> Maker:
    STEPS.append(maker)
    return maker


def when(condition: bool, value: Step) -> Step | None:
    return value if condition else None


@step
def linear(draft, x):
    i, bias = draft.weight(n := draft.choose.choice([2, 4, 6]), x.shape[-1]), draft.weight(n)
    return lambda w, x: F.linear(x, w[i], w[bias])


@step
def square_with_skip(draft, x):
    i = draft.weight(x.shape[-1], x.shape[-1])
    return lambda w, x: x + torch.tanh(x @ w[i])


@step
def factor_per_entry(draft, x):
    i = draft.weight(*x.shape[1:] if draft.choose.random() < 0.5 else x.shape[-1:])
    return lambda w, x: x * w[i]


@step
def norm(draft, x):
    rank = draft.choose.randrange(1, x.dim())
    i, j = draft.weight(*x.shape[-rank:]), draft.weight(*x.shape[-rank:])
    return lambda w, x: F.layer_norm(x, x.shape[-rank:], w[i], w[j])


@step
def group_norm(draft, x):
    groups, i = draft.divisor(x.shape[1]), draft.weight(x.shape[1])
    return when(x[0].numel() > groups, lambda w, x: F.group_norm(x, groups, w[i], w[i]))


@step
def elementwise(draft, x):
    return draft.choose.choice(
        [lambda w, x: x.sin(), lambda w, x: F.gelu(x), lambda w, x: x.masked_fill(x < 0, 0.1)]
    )


@step
def along_an_axis(draft, x):
    dim = draft.axis(x)
    kinds = [
        lambda w, x: torch.softmax(x, dim),
        lambda w, x: x - x.amax(dim, keepdim=True),
        lambda w, x: F.normalize(x, dim=dim),
        lambda w, x: x + x.cumsum(dim),
        lambda w, x: x * x.roll(1, dim),
        lambda w, x: x + x.flip(dim).sin(),
        lambda w, x: torch.cat([x, x.cos()], dim),
        lambda w, x: x.repeat_interleave(2, dim),
        lambda w, x: x.movedim(dim, -1).mul(torch.arange(x.shape[dim]).to(x)).movedim(-1, dim),
    ]
    return draft.choose.choice(kinds)


@step
def reduce(draft, x):
    dim = draft.axis(x)
    kinds = [
        lambda w, x: x.mean(dim),
        lambda w, x: x.logsumexp(dim),
        lambda w, x: x.amax(dim),
        lambda w, x: x.select(dim, 0),
    ]
    return when(x.dim() > 2, draft.choose.choice(kinds))


@step
def split_axis(draft, x):
    dim = draft.axis(x)
    k = draft.divisor(x.shape[dim])
    return lambda w, x: x.unflatten(dim, (k, x.shape[dim] // k))


@step
def reshape(draft, x):
    k = draft.divisor(x[0].numel())
    return lambda w, x: x.reshape(len(x), k, -1)


@step
def permute(draft, x):
    order = draft.choose.sample(range(1, x.dim()), x.dim() - 1)
    return lambda w, x: x.permute(0, *order)


@step
def halves(draft, x):
    dim = draft.axis(x)
    kinds = [
        lambda a, b: a * torch.sigmoid(b),
        lambda a, b: a + b,
        lambda a, b: torch.cat([b, a], dim),
    ]
    kind = draft.choose.choice([*kinds, lambda a, b: torch.stack([a, a * b], dim)])
    return when(x.shape[dim] % 2 == 0, lambda w, x: kind(*x.chunk(2, dim)))


@step
def pairs(draft, x):
    kinds = [
        lambda w, x: x @ x.mT,
        lambda w, x: x.mT @ x,
        lambda w, x: torch.softmax(x @ x.mT, -1) @ x,
        lambda w, x: x.tril(),
    ]
    kind = draft.choose.choice(kinds)
    return when(x.dim() > 2, kind) or when(
        x.shape[1] <= 8, lambda w, x: x[:, :, None] * x.sin()[:, None, :]
    )


@step
def einsum(draft, x):
    pattern = draft.choose.choice(["nab,abc->nac", "nab,abc->nc", "nab,abc->nbc"])
    return when(
        x.dim() == 3,
        (lambda i: lambda w, x: torch.einsum(pattern, x, w[i]))(draft.weight(*x.shape[1:3], 3)),
    )


@step
def convolution(draft, x):
    groups = draft.divisor(x.shape[1])
    i = draft.weight(2 * groups, x.shape[1] // groups, 3)
    return when(x.dim() == 3, lambda w, x: F.conv1d(x, w[i], padding=1, groups=groups))


def random_network(seed: int) -> tuple[nn.Module, torch.Tensor]:
    """A network of one to seven random steps; the seed decides everything but the weights."""
    return RandomNetwork(seed, depth=1 + seed % 7), torch.randn(3, 5)
