"""Rows and columns of many tensors, moved by every executor, against advanced indexing."""

from __future__ import annotations

import copy

import pytest
import torch
from helpers.moves import DTYPES, check, draw_move, random_bits
from hypothesis import given, settings
from hypothesis import strategies as st

from opacus_shuffle.permutation.moving import torch_moves
from opacus_shuffle.permutation.moving.gather import gather_
from opacus_shuffle.permutation.moving.moves import Move

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


@pytest.mark.parametrize(("cache", "scratch"), [(96, 0), (96, 512), (96, 2**24), (2**20, 2**24)])
def test_every_size_of_blocks_agrees_bit_for_bit_with_advanced_indexing(cache, scratch):
    @settings(deadline=None, max_examples=40)
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


def test_parameters_and_their_states_move_together_and_training_goes_on():
    layer = torch.nn.Linear(5, 7)
    optimizer = torch.optim.AdamW(layer.parameters())
    layer(torch.randn(3, 5)).square().sum().backward()
    optimizer.step()
    r, c = torch.randperm(7), torch.randperm(5)
    states = [layer.weight, layer.weight.grad, optimizer.state[layer.weight]["exp_avg"]]
    moves = [Move(tensor, 7, 5, 1, r, c) for tensor in states] + [
        Move(layer.bias, 7, 1, 1, r, None)
    ]
    wanted = [tensor.detach()[r][:, c] for tensor in states] + [layer.bias.detach()[r]]
    gather_(moves)
    assert all(torch.equal(move.tensor, value) for move, value in zip(moves, wanted, strict=True))
    assert layer.weight.requires_grad
    assert layer.weight.is_leaf
    layer(torch.randn(3, 5)).sum().backward()
    optimizer.step()


def test_views_of_a_shared_storage_move_where_they_lie():
    flat = torch.randn(30)
    parts = [flat[:12].view(4, 3), flat[12:].view(6, 3)]
    r = [torch.randperm(4), torch.randperm(6)]
    wanted = torch.cat([part[i].reshape(-1) for part, i in zip(parts, r, strict=True)])
    gather_(
        [Move(part, len(part), 3, 1, i, None) for part, i in zip(parts, r, strict=True)],
        executor="torch",
    )
    assert torch.equal(flat, wanted)
    shared = torch.randn(4, 3).share_memory_()
    pointer = shared.data_ptr()
    gather_([Move(shared, 4, 3, 1, r[0], None)], executor="torch")
    assert shared.data_ptr() == pointer


def test_vectors_that_share_an_index_are_moved_each_by_its_own():
    shared, own = torch.randperm(9), torch.randperm(9)
    drawn = [
        random_bits((9,), dtype)
        for dtype in (torch.float32, torch.float16, torch.float32, torch.int32, torch.float32)
    ]
    check(
        [Move(each, 9, 1, 1, shared if n < 4 else own, None) for n, each in enumerate(drawn)],
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


def test_arguments_that_do_not_fit_are_refused():
    tensor, three, four = torch.randn(3, 4), torch.arange(3), torch.arange(4)
    good = Move(tensor, 3, 4, 1, three, four)
    with pytest.raises(
        ValueError, match="executor must be one of 'auto', 'torch', 'triton', got 'cuda'"
    ):
        gather_([good], executor="cuda")
    with pytest.raises(ValueError, match="comes twice"):
        gather_([good, copy.copy(good)])
    with pytest.raises(ValueError, match="comes twice"):
        gather_([good, Move(tensor.view(-1), 12, 1, 1, None, None)])
    for sizes_ in ((3, 4, 2), (4, 4, 1), (-3, -4, 1)):
        with pytest.raises(ValueError, match="does not fit a tensor of"):
            gather_([Move(tensor, *sizes_, None, None)])
    for index in (four, three.view(3, 1), three.float(), three.to(torch.int16), three.to("meta")):
        with pytest.raises(ValueError, match="row_index must be int64 or int32 of shape"):
            gather_([Move(tensor, 3, 4, 1, index, None)])
    with pytest.raises(ValueError, match="column_index must be int64 or int32 of shape"):
        gather_([Move(tensor, 3, 4, 1, None, three)])


def test_a_row_move_of_a_large_tensor_at_an_odd_offset_is_right():
    matrix = torch.randn(1 + 2100 * 2048)[1:].view(2100, 2048)
    expected, rows = matrix.clone(), torch.randperm(2100)
    gather_([Move(matrix, 2100, 2048, 1, rows, None)])
    assert torch.equal(matrix, expected[rows])
