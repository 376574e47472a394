"""Tensors of every dtype to be moved, and a check of the result, bit for bit."""

import torch

from opacus_shuffle.permutation.moving.gather import Move, gather_
from opacus_shuffle.permutation.moving.torch_moves import WORDS

DTYPES = [
    *(
        torch.float32,
        torch.float64,
        torch.bfloat16,
        torch.float16,
        torch.int8,
        torch.uint8,
        torch.int16,
        torch.int32,
    ),
    *(torch.int64, torch.bool, torch.complex64, torch.complex128),
]

ONE_OF_EACH_SIZE = (torch.bfloat16, torch.float32, torch.bool, torch.complex128)
"""Default tests of slow executors use these, because entries move as integers."""


def random_bits(shape, dtype):
    """Returns random bits, including NaN payloads; random values for booleans."""
    if dtype is torch.bool:
        return torch.randint(0, 2, shape).bool()
    wide = [*shape, dtype.itemsize]
    return torch.randint(0, 256, wide, dtype=torch.uint8).view(dtype).view(shape)


def bits(tensor):
    return tensor.detach().contiguous().view(-1).view(torch.uint8).clone()


def expected(move):
    cube = move.tensor.detach().clone().contiguous()
    cube = (
        cube.view(-1)
        .view(WORDS[cube.element_size()])
        .view(move.rows, move.columns, move.inner * (2 if move.tensor.element_size() == 16 else 1))
    )
    cube = cube if move.row_index is None else cube[move.row_index.long()]
    cube = cube if move.column_index is None else cube[:, move.column_index.long()]
    return bits(cube)


def draw_move(
    rows, columns, inner, dtype=torch.float32, which=(True, True), index_dtype=torch.int64
):
    row_index, column_index = (
        torch.randperm(n).to(index_dtype) if w else None
        for n, w in zip((rows, columns), which, strict=True)
    )
    return Move(
        random_bits((rows, columns, inner), dtype), rows, columns, inner, row_index, column_index
    )


def check(moves, **options):
    wanted = [expected(move) for move in moves]
    pointers = [move.tensor.data_ptr() for move in moves]
    gather_(moves, **options)
    for move, bits_wanted, pointer in zip(moves, wanted, pointers, strict=True):
        assert torch.equal(bits(move.tensor), bits_wanted), (move, options)
        assert move.tensor.data_ptr() == pointer
