"""Networks whose way depends on their input, with a sample and inputs that lead elsewhere."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from helpers.model_zoo import collect

D, H = 8, 12
Case = tuple[nn.Module, Any, list[Any]]
CHANGING: dict[str, Callable[[], Case]] = {}
case = collect(CHANGING)


class Net(nn.Module):
    """Named layers, and a forward that is a function of them and of the input."""

    def __init__(
        self, forward: Callable[..., torch.Tensor], **layers: nn.Module | nn.Parameter
    ) -> None:
        super().__init__()
        for name, layer in layers.items():
            setattr(self, name, layer)
        self.way = forward

    def forward(self, *inputs: torch.Tensor, **named: torch.Tensor) -> torch.Tensor:
        return self.way(self, *inputs, **named)


def ends() -> dict[str, nn.Module]:
    """A hidden stream of D units between four inputs and three outputs."""
    return {"enter": nn.Linear(4, D), "leave": nn.Linear(D, 3)}


def unit() -> nn.Module:
    """A hidden layer that adds to the stream."""
    return nn.Sequential(nn.Linear(D, H), nn.ReLU(), nn.Linear(H, D))


def inputs(*shapes: tuple[int, ...], shift: float = 0.0) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(7)
    return [
        torch.randn(shape, generator=generator, dtype=torch.float64) + shift for shape in shapes
    ]


def signs() -> list[torch.Tensor]:
    """Inputs of either sign, and of mixed ones."""
    return [*inputs((5, 4)), *inputs((5, 4), shift=9.0), *inputs((5, 4), shift=-9.0)]


def negative() -> torch.Tensor:
    return inputs((5, 4), shift=-9.0)[0]


@case
def masked_tokens_are_selected() -> Case:
    def way(net, x):
        h = net.enter(x).clone()
        mask = x[:, 0] > 0
        h[mask] = net.unit(h[mask])
        return net.leave(h)

    return Net(way, **ends(), unit=unit()), negative(), signs()


@case
def eager_experts() -> Case:
    def way(net, x):
        h = net.enter(x)
        choice, out = net.gate(h).argmax(-1), torch.zeros_like(h)
        for number, expert in enumerate(net.experts):
            rows = (choice == number).nonzero()[:, 0]
            if rows.numel():
                out[rows] = expert(h[rows])
        return net.leave(h + out)

    network = Net(
        way, **ends(), gate=nn.Linear(D, 5), experts=nn.ModuleList(unit() for _ in range(5))
    )
    return network, inputs((2, 4))[0], [*inputs((40, 4)), *signs()]


@case
def one_of_two_layers() -> Case:
    def way(net, x):
        h = net.enter(x)
        return net.leave(net.one(h) if x.sum() < 0 else net.two(h))

    return Net(way, **ends(), one=unit(), two=unit()), negative(), signs()


@case
def an_order_in_one_branch() -> Case:
    def way(net, x):
        h = torch.relu(net.enter(x))
        return net.leave(h.cumsum(-1) if x.sum() > 0 else h)

    return Net(way, **ends()), negative(), signs()


@case
def an_index_by_a_number() -> Case:
    def way(net, x):
        h = net.enter(x)
        return net.leave(net.experts[int(x.sum().abs()) % 3](h))

    return Net(way, **ends(), experts=nn.ModuleList(unit() for _ in range(3))), negative(), signs()


@case
def an_order_for_long_inputs() -> Case:
    def way(net, x):
        h = torch.relu(net.enter(x))
        return net.leave((h.cumsum(-1) if x.shape[1] > 6 else h).mean(1))

    return (
        Net(way, **ends()),
        inputs((2, 5, 4))[0],
        inputs((2, 5, 4), (3, 7, 4), (1, 10, 4), (2, 1, 4)),
    )


@case
def a_batch_of_one_hides_a_mixing_reshape() -> Case:
    def way(net, x):
        h = torch.relu(net.enter(x))
        return net.leave(h.t().reshape(h.shape))

    return Net(way, **ends()), inputs((1, 4))[0], inputs((1, 4), (3, 4), (5, 4))


@case
def noise_from_a_seed() -> Case:
    def way(net, x):
        h = torch.relu(net.enter(x))
        return net.leave(
            h + torch.randn(h.shape[-1], generator=torch.Generator().manual_seed(3), dtype=h.dtype)
        )

    return Net(way, **ends()), negative(), signs()


@case
def a_layer_only_in_training() -> Case:
    def way(net, x):
        h = torch.relu(net.enter(x))
        return net.leave(net.unit(h) if net.training and x.sum() > 0 else h)

    return Net(way, **ends(), unit=unit()), negative(), signs()


def masked_places(token: Callable[[nn.Module], torch.Tensor]) -> Case:
    """A network that puts a token of its own where a mask says so; the sample has none."""

    def way(net, x, mask=None):
        h, put = net.enter(x), token(net)
        if mask is not None:
            h = torch.where(mask[..., None], put, h)
        return net.leave(net.unit(h))

    x = negative()[None]
    return Net(way, **ends(), unit=unit()), x, [x, {"x": x, "mask": x[..., 0] > x[..., 1]}]


@case
def a_token_for_masked_places() -> Case:
    network, *samples = masked_places(lambda net: net.token)
    network.token = nn.Parameter(torch.randn(D))
    return network, *samples


@case
def a_token_that_is_a_buffer() -> Case:
    network, *samples = masked_places(lambda net: net.token)
    network.register_buffer("token", torch.randn(D))
    return network, *samples


@case
def weights_that_only_another_method_reads() -> Case:
    def way(net, x):
        return net.leave(torch.relu(net.enter(x)))

    network = Net(way, **ends(), probe=nn.Linear(D, 2))
    return network, negative(), signs()


@case
def as_many_steps_as_a_number() -> Case:
    def way(net, x):
        h = net.enter(x)
        for _ in range(int(x.abs().sum().clamp(max=30))):
            h = torch.tanh(net.unit(h))
        return net.leave(h)

    return Net(way, **ends(), unit=unit()), negative(), signs()
