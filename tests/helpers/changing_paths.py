"""Networks whose path depends on their input, with a sample and inputs with other paths."""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from helpers.model_zoo import Wired, collect

D, H = 8, 12
Case = tuple[nn.Module, Any, list[Any]]
CHANGING: dict[str, Callable[[], Case]] = {}
case = collect(CHANGING)


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

    return Wired(way, **ends(), unit=unit()), negative(), signs()


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

    network = Wired(
        way, **ends(), gate=nn.Linear(D, 5), experts=nn.ModuleList(unit() for _ in range(5))
    )
    return network, inputs((2, 4))[0], [*inputs((40, 4)), *signs()]


@case
def one_of_two_layers() -> Case:
    def way(net, x):
        h = net.enter(x)
        return net.leave(net.one(h) if x.sum() < 0 else net.two(h))

    return Wired(way, **ends(), one=unit(), two=unit()), negative(), signs()


@case
def an_order_for_long_inputs() -> Case:
    def way(net, x):
        h = torch.relu(net.enter(x))
        return net.leave((h.cumsum(-1) if x.shape[1] > 6 else h).mean(1))

    return (
        Wired(way, **ends()),
        inputs((2, 5, 4))[0],
        inputs((2, 5, 4), (3, 7, 4), (1, 10, 4), (2, 1, 4)),
    )


@case
def a_batch_of_one_hides_a_mixing_reshape() -> Case:
    def way(net, x):
        h = torch.relu(net.enter(x))
        return net.leave(h.t().reshape(h.shape))

    return Wired(way, **ends()), inputs((1, 4))[0], inputs((1, 4), (3, 4), (5, 4))


@case
def noise_from_a_seed() -> Case:
    def way(net, x):
        h = torch.relu(net.enter(x))
        return net.leave(
            h + torch.randn(h.shape[-1], generator=torch.Generator().manual_seed(3), dtype=h.dtype)
        )

    return Wired(way, **ends()), negative(), signs()


@case
def weights_that_only_another_method_reads() -> Case:
    def way(net, x):
        return net.leave(torch.relu(net.enter(x)))

    network = Wired(way, **ends(), probe=nn.Linear(D, 2))
    return network, negative(), signs()


@case
def a_token_for_masked_places() -> Case:
    """The sample has no mask, so the token is not reached."""

    def way(net, x, mask=None):
        h = net.enter(x)
        if mask is not None:
            h = torch.where(mask[..., None], net.token, h)
        return net.leave(net.unit(h))

    x = negative()[None]
    network = Wired(way, **ends(), unit=unit(), token=torch.randn(D))
    return network, x, [x, {"x": x, "mask": x[..., 0] > x[..., 1]}]
