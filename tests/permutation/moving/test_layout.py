"""Index vectors follow the tables of the factors; one pass does what one per axis does."""

from __future__ import annotations

import pytest
import torch

from opacus_shuffle.permutation.moving.layout import (
    Block,
    Factor,
    IndexPlan,
    Term,
    plan_movement,
)

FACTORS = (
    Factor("heads", 2),
    Factor("width", 3, inside=(0,)),
    Factor("units", 4),
    Factor("fixed", 2, free=False),
)
TABLES = (
    torch.tensor([1, 0]),
    torch.tensor([[2, 0, 1], [0, 2, 1]]),
    torch.tensor([3, 1, 0, 2]),
    None,
)


def test_each_head_moves_its_own_dimensions_and_the_heads_move_with_them():
    index = index_vector((Block(0, 1, 7, (Term(1, ((0, 3), (1, 1))),)),))
    heads, width = TABLES[0], TABLES[1]
    expected = [0] + [1 + 3 * int(heads[h]) + int(width[h, i]) for h in range(2) for i in range(3)]
    assert index.tolist() == expected


def test_fixed_factors_stay_and_strides_may_be_of_any_order():
    index = index_vector((Block(0, 1, 8, (Term(0, ((2, 1), (3, 4))),)),))
    assert index.tolist() == [3, 1, 0, 2, 7, 5, 4, 6]


def index_vector(layout):
    return IndexPlan([layout], FACTORS).index(TABLES)


UNITS, HEADS = (Term(0, ((2, 1),)),), (Term(0, ((0, 3), (1, 1))),)


@pytest.mark.parametrize(
    ("shape", "blocks"),
    [
        ((4,), [Block(0, 1, 4, UNITS)]),
        ((4, 5), [Block(0, 1, 4, UNITS)]),
        ((5, 4), [Block(1, 2, 4, UNITS)]),
        ((1, 4, 2, 3), [Block(1, 2, 4, UNITS)]),
        ((4, 6), [Block(0, 1, 4, UNITS), Block(1, 2, 6, HEADS)]),
        ((2, 4, 3, 6, 2), [Block(1, 2, 4, UNITS), Block(3, 4, 6, HEADS)]),
        ((4, 2, 3, 4), [Block(0, 1, 4, UNITS), Block(1, 3, 6, HEADS), Block(3, 4, 4, UNITS)]),
    ],
)
def test_rows_and_columns_together_do_what_each_block_does(shape, blocks):
    tensor = torch.randn(shape)
    expected = tensor
    for block in blocks:
        flat = expected.flatten(block.start, block.stop - 1)
        expected = flat.index_select(block.start, index_vector((block,))).view(shape)
    sizes, *moving = plan_movement(shape, tuple(blocks))
    moved = tensor.view(sizes)
    for axis, layout in enumerate(moving):
        if layout:
            moved = moved.index_select(axis, index_vector(layout))
    assert torch.equal(moved.reshape(shape), expected)
