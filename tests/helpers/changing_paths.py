"""Networks whose way depends on what they are given, each with a sample and with inputs that lead elsewhere."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
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
def rows_added_back_to_none() -> Case:
    def way(net, x):
        h = net.enter(x)
        rows = torch.where(x[:, 0] > 0)[0]
        return net.leave(h.index_add(0, rows, net.unit(h[rows])))

    return Net(way, **ends(), unit=unit()), negative(), signs()


@case
def two_encoders_by_a_mask() -> Case:
    def way(net, x):
        mask = x[:, 0] > 0
        h = torch.cat([net.one(x[mask]), net.two(x[~mask])])
        order = torch.cat([torch.where(mask)[0], torch.where(~mask)[0]]).argsort()
        return net.leave(torch.relu(h)[order])

    return (
        Net(way, one=nn.Linear(4, D), two=nn.Linear(4, D), leave=nn.Linear(D, 3)),
        negative(),
        signs(),
    )


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
def experts_of_sorted_records() -> Case:
    def way(net, x):
        h = net.enter(x)
        choice = net.gate(h).argmax(-1)
        order = choice.argsort()
        parts = h[order].split(choice.bincount(minlength=5).tolist())
        return net.leave(
            torch.cat([expert(part) for expert, part in zip(net.experts, parts, strict=True)])[
                order.argsort()
            ]
        )

    network = Net(
        way, **ends(), gate=nn.Linear(D, 5), experts=nn.ModuleList(unit() for _ in range(5))
    )
    return network, inputs((2, 4))[0], [*inputs((40, 4)), *signs()]


@case
def experts_that_are_chosen_two_at_a_time() -> Case:
    def way(net, x):
        h = net.enter(x)
        shares, choice = net.gate(h).softmax(-1).topk(2, -1)
        chosen, out = F.one_hot(choice, 5).permute(2, 1, 0), torch.zeros_like(h)
        for number, expert in enumerate(net.experts):
            rank, rows = torch.where(chosen[number])
            out.index_add_(0, rows, expert(h[None, rows].reshape(-1, D)) * shares[rows, rank, None])
        return net.leave(out)

    network = Net(
        way, **ends(), gate=nn.Linear(D, 5), experts=nn.ModuleList(unit() for _ in range(5))
    )
    return network, inputs((2, 4))[0], [*inputs((40, 4)), *signs()]


@case
def experts_without_a_look_at_their_number() -> Case:
    def way(net, x):
        h = net.enter(x)
        choice, out = net.gate(h).argmax(-1), torch.zeros_like(h)
        for number, expert in enumerate(net.experts):
            rows = torch.where(choice == number)[0]
            out = out.index_add(0, rows, expert(h[rows]))
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
def an_order_beyond_a_number() -> Case:
    def way(net, x):
        h = torch.relu(net.enter(x))
        return net.leave(h.cumsum(-1) if x.sum().item() > 3 else h)

    return Net(way, **ends()), negative(), signs()


@case
def an_order_behind_another_branch() -> Case:
    def way(net, x):
        h = torch.relu(net.enter(x))
        if (x > 0).all():
            h = net.unit(h)
            if x[0, 0] > x[0, 1]:
                h = h.flip(-1)
        return net.leave(h)

    return Net(way, **ends(), unit=unit()), negative(), signs()


@case
def an_index_by_a_number() -> Case:
    def way(net, x):
        h = net.enter(x)
        return net.leave(net.experts[int(x.sum().abs()) % 3](h))

    return Net(way, **ends(), experts=nn.ModuleList(unit() for _ in range(3))), negative(), signs()


@case
def equality_with_itself() -> Case:
    def way(net, x):
        h = torch.relu(net.enter(x))
        return net.leave(h if torch.equal(x, x.abs()) else h.flip(-1))

    return Net(way, **ends()), inputs((5, 4), shift=9.0)[0], signs()


@case
def an_extra_layer_for_long_inputs() -> Case:
    def way(net, x):
        h = torch.relu(net.enter(x))
        h = net.unit(h) if x.shape[1] > 6 else h
        return net.leave(h.mean(1))

    return (
        Net(way, **ends(), unit=unit()),
        inputs((2, 5, 4))[0],
        inputs((2, 5, 4), (3, 7, 4), (1, 20, 4), (2, 1, 4)),
    )


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
def queries_cut_to_the_length() -> Case:
    def way(net, x):
        queries = net.queries[: x.shape[1]]
        return net.leave(
            torch.relu(queries @ net.enter(x).transpose(1, 2)).sum(1) @ net.mix[: x.shape[1]]
        )

    queries, mix = nn.Parameter(torch.randn(6, D)), nn.Parameter(torch.randn(6, D))
    return (
        Net(way, **ends(), queries=queries, mix=mix),
        inputs((2, 6, 4))[0],
        inputs((2, 6, 4), (2, 4, 4), (3, 1, 4)),
    )


@case
def a_batch_of_one_hides_a_mixing_reshape() -> Case:
    def way(net, x):
        h = torch.relu(net.enter(x))
        return net.leave(h.t().reshape(h.shape))

    return Net(way, **ends()), inputs((1, 4))[0], inputs((1, 4), (3, 4), (5, 4))


@case
def a_length_of_one_hides_a_mixing_reshape() -> Case:
    def way(net, x):
        h = torch.relu(net.enter(x))
        return net.leave(h.transpose(1, 2).reshape(h.shape))

    return Net(way, **ends()), inputs((2, 1, 4))[0], inputs((2, 1, 4), (3, 4, 4), (5, 2, 4))


@case
def noise_from_a_seed() -> Case:
    def way(net, x):
        h = torch.relu(net.enter(x))
        return net.leave(
            h + torch.randn(h.shape[-1], generator=torch.Generator().manual_seed(3), dtype=h.dtype)
        )

    return Net(way, **ends()), negative(), signs()


@case
def a_mask_from_a_seed() -> Case:
    def way(net, x):
        h = torch.relu(net.enter(x))
        mask = torch.empty(h.shape[-1]).bernoulli_(0.5, generator=torch.Generator().manual_seed(3))
        return net.leave(h * mask)

    return Net(way, **ends()), negative(), signs()


@case
def a_layer_only_in_training() -> Case:
    def way(net, x):
        h = torch.relu(net.enter(x))
        return net.leave(net.unit(h) if net.training and x.sum() > 0 else h)

    return Net(way, **ends(), unit=unit()), negative(), signs()


def masked_places(token: Callable[[nn.Module], torch.Tensor]) -> Case:
    """A network that puts a token of its own where a mask says so, if one is given; the sample has none."""

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
def a_token_with_axes_of_one_entry() -> Case:
    network, *samples = masked_places(lambda net: net.token)
    network.token = nn.Parameter(torch.randn(1, 1, D))
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
def a_loop_until_small() -> Case:
    def way(net, x):
        h = net.enter(x)
        for _ in range(4):
            if h.norm() < 1:
                break
            h = 0.3 * torch.tanh(net.unit(h))
        return net.leave(h)

    return Net(way, **ends(), unit=unit()), negative(), signs()


@case
def results_at_every_exit() -> Case:
    def way(net, x):
        h = net.enter(x)
        for number, (layer, leave) in enumerate(zip(net.layers, net.exits, strict=True)):
            h = h + layer(h)
            if (x[:, number] > 50).all():
                return leave(h)
        return net.leave(h)

    layers, exits = (
        nn.ModuleList(make() for _ in range(3)) for make in (unit, lambda: nn.Linear(D, 3))
    )
    others = [
        inputs((5, 4), shift=99.0)[0] * torch.tensor(each)
        for each in ([-1, 1, 1, 1], [-1, -1, 1, 1], [-1, -1, -1, 1])
    ]
    return Net(way, **ends(), layers=layers, exits=exits), negative(), [*signs(), *others]


@case
def noise_from_a_seed_in_one_branch() -> Case:
    def way(net, x):
        h = torch.relu(net.enter(x))
        if x.sum() > 0:
            h = h * torch.rand(
                h.shape[-1], generator=torch.Generator().manual_seed(3), dtype=h.dtype
            )
        return net.leave(h)

    return Net(way, **ends()), negative(), signs()


@case
def noise_from_a_seed_for_long_inputs() -> Case:
    def way(net, x):
        h = torch.relu(net.enter(x))
        if x.shape[1] > 6:
            h = h * torch.rand(
                h.shape[-1], generator=torch.Generator().manual_seed(3), dtype=h.dtype
            )
        return net.leave(h.mean(1))

    return Net(way, **ends()), inputs((2, 5, 4))[0], inputs((2, 5, 4), (3, 9, 4))


@case
def as_many_steps_as_a_number() -> Case:
    def way(net, x):
        h = net.enter(x)
        for _ in range(int(x.abs().sum().clamp(max=30))):
            h = torch.tanh(net.unit(h))
        return net.leave(h)

    return Net(way, **ends(), unit=unit()), negative(), signs()


@case
def an_order_until_the_first_short_input() -> Case:
    def way(net, x):
        net.ordered = net.ordered and x.shape[1] > 6
        h = torch.relu(net.enter(x))
        return net.leave((h.cumsum(-1) if net.ordered else h).mean(1))

    network = Net(way, **ends())
    network.ordered = True
    return network, inputs((2, 5, 4))[0], inputs((2, 5, 4), (3, 7, 4), (1, 10, 4))
