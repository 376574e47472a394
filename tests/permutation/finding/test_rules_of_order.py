"""What is put in order forgets the order it came in, unless someone asks where it was."""

from __future__ import annotations

import itertools

import pytest
import torch
from helpers.between_layers import FREE, STAYS, bits_between
from helpers.hand_written_groups import symmetric

VALUES = {
    "sort": lambda x: x.sort(-1).values,
    "stable sort": lambda x: x.sort(dim=-1, descending=True, stable=True).values,
    "topk": lambda x: x.topk(3).values,
    "smallest": lambda x: x.topk(2, largest=False).values,
    "kthvalue": lambda x: x.kthvalue(2, keepdim=True).values,
    "median": lambda x: x.median(-1, keepdim=True).values,
    "nanmedian": lambda x: x.nanmedian(-1, keepdim=True).values,
    "max": lambda x: x.max(-1, keepdim=True).values,
    "quantile": lambda x: x.nan_to_num().quantile(0.3, dim=-1, keepdim=True),
    "squeezed in place": lambda x: x.sort(-1).values.unsqueeze(1).squeeze_(1),
    "min": lambda x: x.min(-1, keepdim=True).values,
}

PLACES = {
    "sort": lambda x: torch.add(*x.sort(-1)),
    "argsort": lambda x: x.argsort(-1).to(x),
    "topk": lambda x: torch.mul(*x.topk(3)),
    "a view of where from": lambda x: x.topk(3).indices.view(-1, 3).flip(1).to(x),
    "kthvalue": lambda x: torch.add(*x.kthvalue(2, keepdim=True)),
    "median": lambda x: torch.add(*x.median(-1, keepdim=True)),
    "max": lambda x: torch.add(*x.max(-1, keepdim=True)),
    "squeezed in place": lambda x: torch.add(
        *(result.unsqueeze(1).squeeze_(1) for result in x.sort(-1))
    ),
    "min": lambda x: torch.add(*x.min(-1, keepdim=True)),
    "written elsewhere": lambda x: torch.topk(
        x, 3, out=(x.new_zeros(len(x), 3), torch.zeros(len(x), 3).long())
    )[0],
}

SEQUENTIAL = {
    "cummax": lambda x: x.cummax(-1).values,
    "cummin": lambda x: x.cummin(-1).values,
    "in any order": lambda x: x.topk(3, sorted=False).values,
    "most frequent": lambda x: x.round().mode(-1, keepdim=True).values,
    "read by Python": lambda x: x * (2.0 if x.max(-1).indices[0].item() > 2 else 1.0),
}


@pytest.mark.parametrize("name", VALUES)
def test_entries_chosen_by_rank_forget_their_order(name):
    assert bits_between(VALUES[name]) == pytest.approx(FREE)


@pytest.mark.parametrize("name", PLACES)
def test_where_entries_of_a_rank_were_depends_on_their_order(name):
    assert bits_between(PLACES[name]) == pytest.approx(STAYS)


@pytest.mark.parametrize("name", SEQUENTIAL)
def test_what_depends_on_the_order_of_entries_keeps_them_in_place(name):
    assert bits_between(SEQUENTIAL[name]) == pytest.approx(STAYS)


@pytest.mark.parametrize("name", VALUES)
def test_equal_entries_and_no_numbers_come_out_the_same_in_every_order(name):
    entries = [1.0, 1.0, float("nan"), -float("inf"), 2.0, float("inf")]
    orders = torch.tensor(list(itertools.permutations(entries)))
    results = VALUES[name](orders)
    assert torch.equal(
        results.nan_to_num(nan=7.0), results[:1].nan_to_num(nan=7.0).expand_as(results)
    )


def test_what_is_sorted_along_one_axis_moves_along_the_others():
    assert bits_between(lambda x: x.sort(0).values) == pytest.approx(FREE)
    assert bits_between(lambda x: torch.add(*x.sort(0))) == pytest.approx(FREE)


def test_across_a_sorted_axis_no_unit_has_an_order_of_its_own():
    # Two parts of three units; sorted across the parts, the three pairs have orders of their own,
    # the units one for both parts.
    apart = bits_between(lambda x: x.view(-1, 2, 3).square().sum(-1))
    mixed = bits_between(lambda x: x.view(-1, 2, 3).sort(1).values.square().sum(-1))
    assert apart == pytest.approx(2 * symmetric(3) + symmetric(2) + STAYS)
    assert mixed == pytest.approx(symmetric(3) + 3 * symmetric(2) + STAYS)
