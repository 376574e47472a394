"""Rows and columns of many tensors, moved by every executor, against advanced indexing.

Index vectors follow the tables of the factors; one pass does what one per axis does.
"""

import copy
import types

import pytest
import torch
from helpers.moves import DTYPES, check, draw_move, random_bits
from hypothesis import given, settings
from hypothesis import strategies as st

from opacus_shuffle.permutation.moving import torch_moves
from opacus_shuffle.permutation.moving.gather import Move, gather_
from opacus_shuffle.permutation.moving.layout import (
    Block,
    Factor,
    IndexPlan,
    Term,
    plan_movement,
)

sizes = st.sampled_from([0, 1, 2, 3, 7, 16, 33])


moves_drawn = st.lists(
    st.tuples(
        sizes,
        sizes,
        st.sampled_from([1, 1, 4, 9]),
        st.sampled_from(DTYPES),
        st.tuples(st.booleans(), st.booleans()),
        st.sampled_from([torch.int32, torch.int64]),
    ),
    min_size=1,
    max_size=4,
)


@pytest.mark.parametrize(("cache", "scratch"), [(96, 0), (96, 512), (2**20, 2**24)])
def test_every_size_of_blocks_agrees_bit_for_bit_with_advanced_indexing(cache, scratch):
    @settings(max_examples=25)
    @given(drawn=moves_drawn, seed=st.integers(0, 2**32))
    def agrees(drawn, seed):
        torch.manual_seed(seed)
        check([draw_move(*one) for one in drawn], executor="torch")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch_moves, "CACHE_BYTES", cache)
        patch.setattr(torch_moves, "SCRATCH_BYTES", scratch)
        patch.setattr(torch_moves, "NARROW_BYTES", cache // 8)
        agrees()


def test_nan_payloads_survive():
    payloads = torch.tensor(
        [0x7FA00001, 0x7FC12345, -0x200001, 0x7F800001], dtype=torch.int32
    )  # quiet and signalling
    tensor = payloads.clone().view(torch.float32)
    gather_([Move(tensor, 4, 1, 1, torch.tensor([3, 2, 1, 0]), None)], executor="torch")
    assert tensor.view(torch.int32).tolist() == payloads.flip(0).tolist()


def test_tensors_that_are_not_contiguous_are_moved_where_they_lie():
    images = torch.randn(6, 4, 3, 5).contiguous(memory_format=torch.channels_last)
    transposed = torch.randn(5, 7).t()
    every_other = torch.randn(8, 10)[::2, 1::3]
    conjugated = torch.randn(4, 3, dtype=torch.complex64).conj()
    for tensor in (images, transposed, every_other, conjugated):
        rows, columns, strides = tensor.shape[0], tensor.shape[1], tensor.stride()
        r, c = torch.randperm(rows), torch.randperm(columns)
        wanted, pointer = tensor[r][:, c].clone(), tensor.data_ptr()
        gather_([Move(tensor, rows, columns, tensor[0, 0].numel(), r, c)], executor="torch")
        assert torch.equal(tensor, wanted)
        assert (tensor.stride(), tensor.data_ptr()) == (strides, pointer)


def test_vectors_that_share_an_index_are_moved_each_by_its_own():
    shared, own = torch.randperm(9), torch.randperm(9)
    vectors = [
        random_bits((9,), dtype)
        for dtype in (torch.float32, torch.float16, torch.float32, torch.int32, torch.float32)
    ]
    check(
        [Move(vector, 9, 1, 1, shared if n < 4 else own, None) for n, vector in enumerate(vectors)],
        executor="torch",
    )


def test_large_tensors_move_in_place_with_bounded_scratch():
    rows = 3 * torch_moves.SCRATCH_BYTES // 4096
    tensor = torch.arange(rows * 1024, dtype=torch.int32).view(rows, 1024)
    r, c = torch.randperm(rows), torch.randperm(1024)
    wanted = tensor[r][:, c]
    gather_([Move(tensor, rows, 1024, 1, r, c)], executor="torch")
    assert torch.equal(tensor, wanted)


def test_a_move_without_indices_changes_nothing():
    tensor = torch.randn(3, 4)
    before = tensor.clone()
    gather_(
        [
            Move(tensor, 3, 4, 1, None, None),
            Move(torch.tensor(1.0), 1, 1, 1, torch.tensor([0]), torch.tensor([0])),
        ]
    )
    gather_([])
    assert torch.equal(tensor, before)


def test_an_expanded_tensor_is_refused_before_anything_moves():
    """As a gradient that was set by hand; one entry in memory cannot go to several places."""
    weight, gradient = torch.arange(12.0).view(3, 4), torch.ones(1).expand(3, 4)
    turned = torch.tensor([1, 2, 0])
    before = weight.clone()
    with pytest.raises(ValueError, match=r"shape \(3, 4\) and strides \(0, 0\) is expanded"):
        gather_([Move(tensor, 3, 4, 1, turned, None) for tensor in (weight, gradient)])
    assert torch.equal(weight, before)


def test_arguments_that_do_not_fit_are_refused():
    tensor, three, four = torch.randn(3, 4), torch.arange(3), torch.arange(4)
    good = Move(tensor, 3, 4, 1, three, four)
    with pytest.raises(
        ValueError, match="executor must be one of 'auto', 'torch', 'triton', got 'cuda'"
    ):
        gather_([good], executor="cuda")
    with pytest.raises(ValueError, match="occurs twice"):
        gather_([good, copy.copy(good)])
    with pytest.raises(ValueError, match="occurs twice"):
        gather_([good, Move(tensor.view(-1), 12, 1, 1, torch.arange(12), None)])


def test_views_that_overlap_in_part_are_refused_and_neighbours_are_moved():
    memory = torch.arange(40.0)
    before, turned = memory.clone(), torch.arange(31, -1, -1)
    weight = Move(memory[:32], 32, 1, 1, turned, None)
    with pytest.raises(ValueError, match="a part of its memory"):
        gather_([weight, Move(memory[28:36], 8, 1, 1, torch.arange(7, -1, -1), None)])
    assert torch.equal(memory, before)
    gather_([weight, Move(memory[32:], 8, 1, 1, torch.arange(7, -1, -1), None)])
    assert torch.equal(memory, torch.cat([before[:32].flip(0), before[32:].flip(0)]))
    # Columns of one matrix lie between each other's, and share nothing.
    matrix = before.view(4, 10).clone()
    left, right = (
        Move(part, 4, 5, 1, torch.tensor([3, 2, 1, 0]), None) for part in matrix.split(5, 1)
    )
    gather_([left, right])
    assert torch.equal(matrix, before.view(4, 10).flip(0))


def test_a_cuda_graph_that_is_captured_is_refused_before_anything_moves(monkeypatch):
    weight, three = torch.randn(3), torch.tensor([2, 0, 1])
    before = weight.clone()
    on_a_gpu = types.SimpleNamespace(
        numel=lambda: 3, device=torch.device("cuda:0"), data_ptr=lambda: 512
    )
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    with pytest.raises(ValueError, match="shuffle outside of the graph"):
        gather_([Move(weight, 3, 1, 1, three, None), Move(on_a_gpu, 3, 1, 1, three, None)])
    assert torch.equal(weight, before)


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
