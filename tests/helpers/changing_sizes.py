"""Networks whose way depends on sizes, on numbers that Python compares, or on what Python draws, each with other inputs."""

from __future__ import annotations

import math
import random
from collections.abc import Callable

import numpy as np
import torch
from torch import nn

from helpers.changing_paths import Case, D, Net, ends, inputs, negative, signs, unit
from helpers.model_zoo import collect

SIZED: dict[str, Callable[[], Case]] = {}


def lengths() -> list[torch.Tensor]:
    """Sequences of many lengths."""
    return inputs(*((2, length, 4) for length in (1, 2, 3, 6, 7, 8, 12, 13, 16, 17, 20, 33, 64)))


def batches() -> list[torch.Tensor]:
    """Batches of many sizes, of either sign."""
    return [*signs(), *inputs(*((size, 4) for size in (1, 2, 3, 4, 7, 11, 33))), *inputs((64, 4), shift=3.0)]


def either(
    choose: Callable[[torch.Tensor], object], change: Callable[[torch.Tensor], torch.Tensor]
) -> Callable[..., torch.Tensor]:
    """A forward that changes the hidden units for the inputs that are chosen."""

    def way(net: Net, x: torch.Tensor) -> torch.Tensor:
        h = torch.relu(net.enter(x))
        h = change(h) if choose(x) else h
        return net.leave(h.mean(1) if h.dim() == 3 else h)

    return way


LENGTHS: dict[str, Callable[[torch.Tensor], object]] = {
    "even_lengths": lambda x: x.shape[1] % 2 == 0,
    "length_seven": lambda x: x.size(1) == 7,
    "long_inputs": lambda x: x.shape[1] > 60,
    "two_lengths": lambda x: x.shape[1] in (13, 17),
    "many_entries": lambda x: x.numel() > 300,
    "many_in_the_first_record": lambda x: len(x[0]) / 2 >= 12.5,
    "lengths_cut_to_forty": lambda x: min(x.shape[1], 40) == 40,
    "a_length_as_a_plain_number": lambda x: float(x.shape[1]) / 2 > 20.5,
    "a_length_as_a_tensor": lambda x: bool(torch.tensor(x.shape[1]) > 10),
    "a_length_as_a_key": lambda x: {20: True}.get(x.shape[1]),
    "a_length_in_a_text": lambda x: f"of {x.shape[1]}" == "of 20",
    "a_length_in_an_array": lambda x: np.array([x.shape[1]]).max() == 20,
    "parts_of_a_length": lambda x: divmod(x.shape[1], 4) == (5, 0),
    "a_bit_of_a_length": lambda x: x.shape[1] & 64,
    "a_logarithm_of_a_length": lambda x: math.log2(x.shape[1]) == 6,
    "a_whole_logarithm_of_a_length": lambda x: int(math.log2(x.shape[1])) == 6,
    "deep_halvings": lambda x: math.ceil(x.shape[1] / 4) > 4,
}

BATCHES: dict[str, Callable[[torch.Tensor], object]] = {
    "an_even_batch": lambda x: not len(x) % 2,
    "a_batch_of_eleven": lambda x: x.shape == (11, 4),
    "squares": lambda x: x.shape[0] == x.shape[1],
    "many_chosen": lambda x: len(x[x[:, 0] > 0]) > 10,
    "one_chosen": lambda x: torch.where(x[:, 0] > 0)[0].shape[0] == 1,
    "an_odd_number_chosen": lambda x: (x[:, 0] > 0).nonzero().size(0) % 2,
    "many_different": lambda x: torch.unique(x[:, 0].round()).numel() > 6,
    "a_sign_of_two_numbers": lambda x: (x[0, 0].item(), x[0, 1].item()) > (0.0, 0.0) and x[0, 1].item() < 0,
    "one_number_above_another": lambda x: x[:, 0].sum().item() > x[:, 1].sum().item() + 20,
    "a_list_in_order": lambda x: sorted(range(4), key=x[0].tolist().__getitem__)[0] == 3,
    "a_large_number_in_a_list": lambda x: max(x[:, 0].tolist()) > 5,
    "truth_in_a_list": lambda x: sum((x[0] > 0).tolist()) > 2,
    "an_array": lambda x: (x.numpy() > 5).any(),
    "a_sum_as_a_plain_number": lambda x: int(x.sum()) // 100 == 7,
    "a_mean_among_others": lambda x: int(x.mean().abs()) in {31, 8},
    "a_narrow_range": lambda x: 8.9 < x.mean().item() < 9.4,
}

DRAWS: dict[str, Callable[[torch.Tensor], object]] = {
    "a_rare_draw_of_python": lambda x: random.random() < 0.02,
    "a_rare_draw_of_numpy": lambda x: np.random.uniform() > 0.98,  # noqa: NPY002
    "a_choice_of_python": lambda x: random.choice([False, False, False, True]),
}

for _name, _choose in LENGTHS.items():
    SIZED[_name] = lambda choose=_choose: (Net(either(choose, lambda h: h.flip(-1)), **ends()), inputs((2, 5, 4))[0], lengths())
for _name, _choose in BATCHES.items():
    SIZED[_name] = lambda choose=_choose: (Net(either(choose, lambda h: h.cumsum(-1)), **ends()), negative(), batches())
for _name, _choose in DRAWS.items():
    SIZED[_name] = lambda choose=_choose: (Net(either(choose, lambda h: h.flip(-1)), **ends()), negative(), signs() * 20)

case = collect(SIZED)


@case
def a_step_that_only_long_loops_reach() -> Case:
    def way(net, x):
        h = torch.relu(net.enter(x))
        return net.leave(sum(h[:, step].flip(-1) if step == 15 else h[:, step] for step in range(x.shape[1])))

    return Net(way, **ends()), inputs((2, 5, 4))[0], lengths()


@case
def as_many_layers_as_the_length_has() -> Case:
    def way(net, x):
        h = torch.relu(net.enter(x))
        for number in range(min(len(net.layers), x.shape[1] // 4)):
            h = net.layers[number](h)
        return net.leave(h.mean(1))

    return Net(way, **ends(), layers=nn.ModuleList(unit() for _ in range(4))), inputs((2, 5, 4))[0], lengths()


@case
def a_loop_that_goes_on_longer_than_the_sample_s() -> Case:
    def way(net, x):
        h, steps = torch.relu(net.enter(x)), 0
        while h.norm() > 3 and steps < 20:
            h, steps = 0.5 * torch.tanh(net.unit(h)), steps + 1
        return net.leave(h.flip(-1) if steps > 15 else h)

    return Net(way, **ends(), unit=unit()), 1e-3 * negative(), [*inputs((12, 4), (64, 4)), *signs()]


@case
def layers_that_python_leaves_out() -> Case:
    def way(net, x):
        h = torch.relu(net.enter(x))
        for layer in net.layers:
            h = h if random.uniform(0, 1) < 0.1 else layer(h)
        return net.leave(h)

    return Net(way, **ends(), layers=nn.ModuleList(unit() for _ in range(3))), negative(), signs() * 6


@case
def a_mask_that_is_drawn_once() -> Case:
    def way(net, x):
        if not hasattr(net, "mask"):
            net.mask = torch.rand(D)
        return net.leave(torch.relu(net.enter(x)) * net.mask)

    return Net(way, **ends()), negative(), signs()


@case
def positions_that_are_interpolated() -> Case:
    def way(net, x):
        h, table = torch.relu(net.enter(x)), net.positions
        if x.shape[1] != len(table):
            table = torch.nn.functional.interpolate(table.t()[None], x.shape[1]).squeeze(0).t()
        return net.leave((h * table).sum(1))

    return Net(way, **ends(), positions=nn.Parameter(torch.randn(6, D))), inputs((2, 5, 4))[0], lengths()
