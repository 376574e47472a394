"""Units have a permutation of their own for each class, place or channel that stays, wherever that is known and only there."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from helpers.changing_paths import Net, inputs
from helpers.model_zoo import build, collect, run
from helpers.zoo import DOUBLE, distance
from torch import nn

from opacus_shuffle.permutation import find_permutations

OWN, SHARED = {}, {}
own, shared = collect(OWN), collect(SHARED)


def weight(*shape):
    return nn.Parameter(torch.randn(shape))


def entered(net, x):
    """Of four inputs seven hidden units for each of three classes."""
    return torch.einsum("bi,jdi->bjd", x, net.enter)


def by_class(way):
    """A network between these units and a sum of them per class, with the bits of its group."""

    def forward(net, x):
        return torch.einsum("bjd,jd->bj", way(entered(net, x)), net.leave)

    return Net(forward, enter=weight(3, 7, 4), leave=weight(3, 7)), inputs((2, 4))[0]


def factorials(*sizes):
    return sum(math.lgamma(size + 1) for size in sizes) / math.log(2)


def along_classes(h):
    """Tells classes apart before anything else does."""
    return h * torch.tensor([1.0, 2, 3], dtype=h.dtype)[:, None]


@own
def units_of_classes():
    return *by_class(torch.relu), factorials(7, 7, 7)


@own
def units_of_classes_scaled_by_constants():
    return *by_class(lambda h: along_classes(torch.relu(h))), factorials(7, 7, 7)


@own
def units_of_classes_scaled_by_constants_that_come_first():
    scales = torch.tensor([1.0, 2, 3], dtype=torch.float64)[:, None]
    return *by_class(lambda h: scales * torch.relu(h)), factorials(7, 7, 7)


@own
def two_layers_of_units_of_classes():
    def way(net, x):
        h = torch.relu(entered(net, x) + net.shift)
        h = torch.einsum("bjd,jde->bje", h, net.between).tanh()
        return torch.einsum("bje,je->bj", h, net.leave).log_softmax(-1)

    network = Net(
        way, enter=weight(3, 7, 4), shift=weight(3, 7), between=weight(3, 7, 5), leave=weight(3, 5)
    )
    return network, inputs((2, 4))[0], factorials(7, 7, 7, 5, 5, 5)


@own
def matrices_of_fixed_things():
    def way(net, x):
        return torch.bmm(torch.relu(torch.bmm(x, net.enter)), net.leave)

    return (
        Net(way, enter=weight(3, 4, 7), leave=weight(3, 7, 2)),
        inputs((3, 2, 4))[0],
        factorials(7, 7, 7),
    )


@own
def groups_of_channels_that_are_outputs():
    network = nn.Sequential(
        nn.Conv1d(2, 18, 3), nn.GroupNorm(3, 18), nn.ReLU(), nn.Conv1d(18, 3, 3, groups=3)
    )
    return network, inputs((2, 2, 9))[0], factorials(6, 6, 6)


@own
def depthwise_convolutions_of_inputs():
    network = nn.Sequential(
        nn.Conv1d(3, 15, 3, groups=3), nn.Tanh(), nn.Conv1d(15, 12, 1, groups=3), nn.ReLU()
    )
    return (
        nn.Sequential(*network, nn.Conv1d(12, 6, 1, groups=3)),
        inputs((2, 3, 9))[0],
        factorials(5, 5, 5, 4, 4, 4),
    )


@own
def capsules():
    def way(net, x):
        votes = torch.einsum("bic,ijcd->bijd", torch.tanh(x[..., None] * net.enter), net.votes)
        agreement = torch.zeros(votes.shape[:3], dtype=votes.dtype)
        for _ in range(3):
            sums = (torch.softmax(agreement, 2)[..., None] * votes).sum(1)
            sums = sums * sums.norm(dim=-1, keepdim=True) / (1 + (sums**2).sum(-1, keepdim=True))
            agreement = agreement + (votes * sums[:, None]).sum(-1)
        return sums.norm(dim=-1)

    return (
        Net(way, enter=weight(4, 6), votes=weight(4, 3, 6, 7)),
        inputs((2, 4))[0],
        factorials(6, 6, 6, 6, 7, 7, 7),
    )


@shared
def classes_reversed():
    return by_class(lambda h: torch.relu(h + h.flip(1)))


@shared
def classes_chosen():
    return by_class(lambda h: torch.relu(h + h[:, [1, 2, 0]]))


@shared
def classes_gathered_by_constants():
    return by_class(lambda h: h + h.gather(1, torch.tensor([1, 2, 0])[:, None].expand_as(h)).sin())


@shared
def classes_gathered_by_signs_of_their_own():
    return by_class(
        lambda h: (
            h
            + along_classes(h).gather(
                1, (along_classes(h).sum(-1) > 0).long()[..., None].expand_as(h)
            )
        )
    )


@shared
def classes_written_elsewhere():
    def way(h):
        h = along_classes(h)
        copy = h.clone()
        copy[:, [1, 2, 0]] = h
        return copy

    return by_class(way)


@shared
def classes_added_elsewhere():
    return by_class(
        lambda h: along_classes(h).index_add(1, torch.tensor([1, 2, 0]), along_classes(h))
    )


@shared
def largest_of_the_classes_so_far():
    return by_class(lambda h: along_classes(h).cummax(1).values)


@shared
def classes_mixed():
    mix = torch.arange(9, dtype=torch.float64).view(3, 3).sin()
    return by_class(lambda h: torch.einsum("bjd,jk->bkd", h, mix).relu())


@shared
def rows_chosen_by_indices_made_before():
    def way(net, x):
        table = torch.relu(net.table.weight + net.table(torch.tensor([2, 0, 1]) + 0))
        return x.sum(1)[:, None] * (table * net.leave).sum(1)

    return Net(way, table=nn.Embedding(3, 7), leave=weight(3, 7)), inputs((2, 4))[0]


@shared
def rows_chosen_by_numbers_of_their_own():
    def way(net, x):
        numbers = (net.table.sum(1) > 0).long()
        return x.sum(1)[:, None] * (torch.relu(F.embedding(numbers, net.table)) * net.leave).sum(1)

    return Net(way, table=weight(3, 7), leave=weight(3, 7)), inputs((2, 4))[0]


@shared
def groups_as_many_as_rows():
    def way(net, x):
        rows = net.enter.sum(1) * torch.arange(4)
        h = torch._grouped_mm(
            rows.float(), net.enter.mT.float(), torch.tensor([1, 1, 3], dtype=torch.int32)
        )
        return x.sum(1)[:, None] * (torch.relu(h).to(x) * net.leave).sum(1)

    return Net(way, enter=weight(3, 7, 4), leave=weight(3, 7)), inputs((2, 4))[0]


# Slices that are used one by one
# ----------------------------------------------------------------------------------------------


def bank(way):
    """A network with three matrices of seven units and as many vectors, each in one parameter."""
    return Net(way, enter=weight(3, 7, 4), leave=weight(3, 7)), inputs((2, 4))[0]


def one(net, x, enter, leave):
    """Uses the units of one matrix and of one vector, by their numbers."""
    return torch.relu(x @ net.enter[enter].t()) @ net.leave[leave]


@shared
def experts_by_the_values_of_inputs():
    def way(net, x):
        return one(net, x, int(x.sum().abs()) % 3, int(x[0].sum().abs()) % 2)[:, None]

    return bank(way)


@shared
def experts_by_the_number_of_records():
    return bank(lambda net, x: one(net, x, len(x) % 3, len(x) % 2)[:, None])


@shared
def experts_of_which_one_is_idle():
    return bank(lambda net, x: torch.stack([one(net, x, each, each) for each in range(2)], 1))


@shared
def experts_used_as_a_whole_too():
    def way(net, x):
        together = torch.einsum("bjd,jd->bj", torch.relu(entered(net, x)), net.leave)
        return together + torch.stack([one(net, x, each, each) for each in range(3)], 1)

    return bank(way)


@shared
def experts_whose_matrices_are_square():
    def way(net, x):
        h = [torch.tanh(x @ net.enter[each].t()) for each in range(3)]
        h = [
            torch.tanh(each @ net.again[number].t()) @ net.again[number].t()
            for number, each in enumerate(h)
        ]
        return torch.stack([each @ net.leave[number] for number, each in enumerate(h)], 1)

    network, sample = bank(way)
    network.again = weight(3, 7, 7)
    return network, sample


# Slices that an index chooses for each record
# ---------------------------------------------------------------------------------


def routed(way):
    """The units of the expert that a gate chooses for each record, and a sum of them with weights of that expert.

    The way between may have the choice, the units, and the network.
    """

    def forward(net, x):
        choice = (x @ net.gate.t()).argmax(-1)
        h = torch.relu(torch.einsum("tdi,ti->td", net.enter[choice], x))
        return (way(choice, h, net) * net.leave[choice]).sum(-1, keepdim=True)

    network = Net(
        forward, enter=weight(3, 7, 4), leave=weight(3, 7), gate=weight(3, 4), shift=weight(3, 7)
    )
    return network, inputs((5, 4))[0]


@shared
def units_of_another_record():
    return routed(lambda choice, h, net: h.roll(1, 0) + net.shift[choice])


@shared
def units_written_to_another_record():
    def way(choice, h, net):
        copy = h.clone()
        copy[torch.arange(len(h)).flip(0)] = h
        return copy + net.shift[choice]

    return routed(way)


@shared
def units_of_pairs_of_records():
    return routed(lambda choice, h, net: h * (h @ h.t()).sum(-1, keepdim=True) + net.shift[choice])


@shared
def units_of_all_experts_mixed():
    def way(choice, h, net):
        return h + (along_classes(net.shift) * h[:, None].sin()).sum(1)

    return routed(way)


@shared
def matrices_of_experts_added_to_those_chosen():
    def way(net, x):
        chosen = net.enter[[2, 0, 1]] + net.enter
        return torch.einsum("edi,ti,ed->te", chosen, x, net.leave[[2, 0, 1]])

    return Net(way, enter=weight(3, 7, 4), leave=weight(3, 7)), inputs((2, 4))[0]


# What is found
# ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", OWN)
def test_each_position_has_permutations_of_its_own_where_it_is_known(name):
    module, sample = build(lambda: OWN[name]()[:2])
    assert find_permutations(module, sample).log2_size() == pytest.approx(OWN[name]()[2], rel=1e-12)


@pytest.mark.parametrize("name", SHARED)
def test_positions_share_a_permutation_where_an_operation_mixes_them(name):
    module, sample = build(SHARED[name])
    assert find_permutations(module, sample).log2_size() == pytest.approx(factorials(7), rel=1e-12)


@pytest.mark.parametrize("name", ["capsules", "two_layers_of_units_of_classes"])
def test_a_plan_for_each_class_keeps_the_outputs(name):
    module, sample = build(lambda: OWN[name]()[:2])
    spec, before = find_permutations(module, sample), run(module, 2 * sample)
    spec.apply_(module, spec.sample(torch.Generator().manual_seed(1)))
    assert distance(before, run(module, 2 * sample)) <= DOUBLE
