"""The Triton kernel: under the interpreter against advanced indexing, compiled without a GPU, and on one where there is one."""

from __future__ import annotations

import importlib
import sys

import pytest
import torch
from helpers.moves import DTYPES, ONE_OF_EACH_SIZE, check, draw_move

from opacus_shuffle.permutation.moving import moves
from opacus_shuffle.permutation.moving.gather import EXECUTORS, gather_
from opacus_shuffle.permutation.moving.moves import Move

triton = pytest.importorskip("triton")

MODULE = "opacus_shuffle.permutation.moving.triton_moves"


def fresh_module():
    """Our kernel, compiled or interpreted as the environment now says."""
    sys.modules.pop(MODULE, None)
    return importlib.import_module(MODULE)


@pytest.fixture
def interpreted():
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_INTERPRET", "1")
        yield fresh_module()
    sys.modules.pop(MODULE)


@pytest.fixture
def compiled(monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    yield fresh_module()
    sys.modules.pop(MODULE)


@pytest.mark.parametrize("on_chip", [True, False])
@pytest.mark.parametrize("dtype", [pytest.param(d, marks=() if d in ONE_OF_EACH_SIZE else pytest.mark.zoo) for d in DTYPES])
def test_the_kernel_agrees_bit_for_bit_with_advanced_indexing(interpreted, monkeypatch, dtype, on_chip):
    torch.manual_seed(0)
    if not on_chip:
        monkeypatch.setattr(interpreted, "STAGED_BYTES", 8)
    shapes = [
        (1, 1, 1),
        (1, 70, 1),
        (70, 1, 1),
        (3, 5, 9),
        (9, 16, 1),
        (33, 17, 1),
        (2, 1500, 1),
        (0, 3, 1),
        (5, 3, 7),
        (1, 3, 70),
    ]
    which = [(True, True), (True, False), (False, True), (False, False)]
    drawn = [draw_move(*shape, dtype, which[i]) for shape in shapes for i in range(4)]
    check(drawn, executor="triton")


def test_waves_through_a_small_scratch_agree(interpreted, monkeypatch):
    monkeypatch.setattr(interpreted, "STAGED_BYTES", 8)
    monkeypatch.setattr(moves.waves, "__defaults__", (1000,))
    check([draw_move(rows, 7, 1) for rows in (3, 40, 5, 90, 8, 11)], executor="triton")


def test_tables_are_kept_while_the_tensors_stay_and_new_indices_are_used(interpreted):
    first = [draw_move(5, 8, 1), draw_move(12, 3, 1)]
    check(first, executor="triton")
    count = interpreted._tabulate.cache_info().currsize
    again = [Move(m.tensor, m.rows, m.columns, m.inner, torch.randperm(m.rows), torch.randperm(m.columns)) for m in first]
    check(again, executor="triton")
    assert interpreted._tabulate.cache_info().currsize == count
    for rows in range(2, 2 + 2 * interpreted._CACHED_TABLES):
        entry = interpreted._Entry(0, 0, -1, 0, rows, 2, 1, staged=True)
        interpreted._tabulate((entry,), torch.device("cpu"))
    assert interpreted._tabulate.cache_info().currsize <= interpreted._CACHED_TABLES


def test_tensors_on_a_cpu_need_the_interpreter(compiled):
    with pytest.raises(ValueError, match="TRITON_INTERPRET=1"):
        gather_([draw_move(2, 3, 1)], executor="triton")


@pytest.mark.parametrize("capability", [80, 90])
@pytest.mark.parametrize("word", [1, 2, 4, 8])
def test_the_kernel_compiles_without_a_gpu_and_moves_sixteen_bytes_at_a_time(compiled, word, capability):
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    constants = ["WORD", "ROWS", "BLOCK", "COLUMNS", "STAGED", "ALIGNED"]
    signature = {"table": "*i64", "tiles": "*i32", "indices": "*i32", "scratch": "*u8"} | dict.fromkeys(constants, "constexpr")
    for block, columns, staged in [(64, True, True), (4096, True, True), (1024, True, False), (1024, False, False)]:
        values = [compiled._TYPES[word], compiled.tile_rows(block), block, columns, staged, True]
        source = ASTSource(fn=compiled.move_kernel, signature=signature, constexprs=dict(zip(constants, values, strict=True)))
        kernel = triton.compile(source, target=GPUTarget("cuda", capability, 32), options={"num_warps": 8})
        assert kernel.asm["cubin"]
        assert kernel.metadata.shared <= compiled.STAGED_BYTES
        if staged and block == 4096 and word > 1:
            assert "st.global.v4.b32" in kernel.asm["ptx"] or "st.global.v2.b64" in kernel.asm["ptx"]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("executor", EXECUTORS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_on_a_gpu_every_executor_agrees_with_advanced_indexing(dtype, executor):
    torch.manual_seed(0)
    shapes = [(1, 768, 1), (768, 1, 1), (3072, 768, 1), (64, 32, 9), (33, 17_000, 1), (20_000, 3, 1), (1, 40_000, 1)]
    which = [(True, True), (True, False), (False, True)]
    drawn = [draw_move(*shape, dtype, w) for shape in shapes for w in which]
    on_gpu = [
        Move(*(value.cuda() if isinstance(value, torch.Tensor) else value for value in vars(move).values())) for move in drawn
    ]
    for _ in range(2):
        check(on_gpu, executor=executor)
