"""The Triton kernel: under the interpreter against advanced indexing, compiled without a GPU, and on one where there is one."""

from __future__ import annotations

import importlib
import re
import subprocess
import sys
import tempfile
import types
from pathlib import Path

import pytest
import torch
from helpers.moves import DTYPES, ONE_OF_EACH_SIZE, check, draw_move

from opacus_shuffle.permutation.moving import moves
from opacus_shuffle.permutation.moving.gather import EXECUTORS, gather_
from opacus_shuffle.permutation.moving.moves import Move

triton = pytest.importorskip("triton")
from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.compiler import ASTSource  # noqa: E402

MODULE = "opacus_shuffle.permutation.moving.triton_moves"


def resources(cubin):
    """Registers of a thread and bytes of its stack, as Triton's own copy of CUDA's tools says."""
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        said = subprocess.run(
            [tool, "-res-usage", file.name], capture_output=True, text=True, check=True
        )
    found = re.search(r"REG:(\d+) STACK:(\d+)", said.stdout + said.stderr)
    assert found is not None, said
    return int(found[1]), int(found[2])


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


@pytest.mark.parametrize("words_on_chip", [pytest.param(2**14, marks=pytest.mark.zoo), 32])
@pytest.mark.parametrize(
    "dtype",
    [pytest.param(d, marks=() if d in ONE_OF_EACH_SIZE else pytest.mark.zoo) for d in DTYPES],
)
def test_the_kernel_agrees_bit_for_bit_with_advanced_indexing(
    interpreted, monkeypatch, dtype, words_on_chip
):
    torch.manual_seed(0)
    monkeypatch.setattr(interpreted, "STAGED_WORDS", words_on_chip)
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


@pytest.mark.usefixtures("interpreted")
def test_waves_through_a_small_scratch_agree(monkeypatch):
    monkeypatch.setattr(moves.waves, "__defaults__", (1000,))
    check([draw_move(rows, 7, 1) for rows in (3, 40, 5, 90, 8, 11)], executor="triton")


def test_tables_are_kept_while_the_shapes_stay_and_new_tensors_and_indices_are_used(interpreted):
    first = [draw_move(5, 16, 1), draw_move(12, 32, 1)]
    check(first, executor="triton")
    count = interpreted._launches.cache_info().currsize
    again = [draw_move(5, 16, 1), draw_move(12, 32, 1)]
    assert not {move.tensor.data_ptr() for move in first} & {
        move.tensor.data_ptr() for move in again
    }
    check(again, executor="triton")
    assert interpreted._launches.cache_info().currsize == count
    for rows in range(2, 2 + 2 * interpreted._CACHED_TABLES):
        shape = interpreted._Shape(rows, 2, 1, -1, 0, aligned=False)
        interpreted._launches((shape,), 4, 2**14, torch.device("cpu"))
    assert interpreted._launches.cache_info().currsize <= interpreted._CACHED_TABLES


@pytest.mark.parametrize(
    ("memory", "words"),
    [
        (232_448, {1: 16_384, 2: 16_384, 4: 16_384, 8: 8192}),
        (101_376, {1: 16_384, 2: 16_384, 4: 16_384, 8: 8192}),
        (65_536, {1: 16_384, 2: 16_384, 4: 16_384, 8: 8192}),
        (49_152, {1: 16_384, 2: 16_384, 4: 8192, 8: 4096}),
    ],
)
def test_no_program_takes_more_memory_than_the_card_has(compiled, monkeypatch, memory, words):
    card = types.SimpleNamespace(shared_memory_per_block_optin=memory)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: card)
    found = {word: compiled.staged_words(word, torch.device("cuda:0")) for word in (1, 2, 4, 8)}
    assert found == words
    for word, limit in words.items():
        for width in [*range(1, 70), 4095, 4096, 4097, 8191, 8192, 8193, 16_384, 28_672, 50_257]:
            for aligned in (True, False):
                mode = compiled._Shape(3, width, 1, -1, 0, aligned).mode(word, limit)
                block = compiled.block_of(mode, width, limit, aligned=aligned)
                assert block * word <= memory
                assert mode != "whole" or width <= block < max(2 * width, 65)


def test_rows_beyond_the_chip_come_in_pieces_until_reading_every_word_by_itself_costs_no_more(
    compiled,
):
    def modes(word, limit):
        return [
            compiled._Shape(1, width, 1, -1, 0, aligned=True).mode(word, limit)
            for width in (8192, 28_672, 131_072, 131_073)
        ]

    assert modes(4, 16_384) == ["whole", "pieces", "pieces", "words"]
    assert modes(8, 8192) == ["whole", "pieces", "words", "words"]
    assert compiled._Shape(5, 28_672, 1, 0, -1, aligned=True).mode(4, 16_384) == "rows"


def test_tensors_on_a_cpu_need_the_interpreter(compiled):
    with pytest.raises(ValueError, match="TRITON_INTERPRET=1"):
        gather_([draw_move(2, 3, 1)], executor="triton")


def variants(module, word, limit):
    """Every mode, block and alignment that words of this size are compiled for."""
    for aligned in (True, False):
        yield from (("whole", 2**power, aligned) for power in range(6, limit.bit_length()))
        yield from (
            (mode, block, aligned) for mode in ("rows", "words") for block in module._ROWS_BLOCKS
        )
        yield "pieces", module.block_of("pieces", 2 * limit, limit, aligned=aligned), aligned


@pytest.mark.parametrize(
    ("capability", "memory", "some"),
    [
        (80, 2**16, True),
        *(
            pytest.param(*each, False, marks=pytest.mark.zoo)
            for each in [(80, 2**16), (86, 49_152), (90, 2**16)]
        ),
    ],
)
@pytest.mark.parametrize("word", [1, 2, 4, 8])
def test_every_variant_compiles_without_a_gpu_keeps_its_values_in_registers_and_moves_sixteen_bytes_at_a_time(
    compiled, monkeypatch, word, capability, memory, some
):
    monkeypatch.setattr(compiled, "STAGED_BYTES", memory)
    limit = compiled.staged_words(word, torch.device("cpu"))
    names = ["WORD", "ROWS", "BLOCK", "MODE", "ALIGNED"]
    pointers = {
        "table": "*i64",
        "tiles": "*i32",
        "addresses": "*i64",
        "indices": "*i32",
        "scratch": "*u8",
    }
    for mode, block, aligned in variants(compiled, word, limit):
        if some and (
            block < limit or not aligned
        ):  # in the default tests those that take most registers
            continue
        constants = {
            "WORD": compiled._TYPES[word],
            **compiled.constants_of(mode, block, aligned=aligned),
        }
        options = {"num_warps": constants.pop("num_warps")}
        source = ASTSource(
            compiled.move_kernel, pointers | dict.fromkeys(names, "constexpr"), constants
        )
        kernel = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
        assert kernel.metadata.shared <= memory
        assert "st.local" not in kernel.asm["ptx"]
        registers, stack = resources(kernel.asm["cubin"])
        assert stack == 0, (mode, block, aligned)  # registers that were spilled lie there
        assert registers * 32 * options["num_warps"] <= 2**16
        if aligned and block >= 4096 and word > 1:
            assert (
                "st.global.v4.b32" in kernel.asm["ptx"] or "st.global.v2.b64" in kernel.asm["ptx"]
            )


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("executor", EXECUTORS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_on_a_gpu_every_executor_agrees_with_advanced_indexing(dtype, executor):
    torch.manual_seed(0)
    shapes = [
        (1, 768, 1),
        (768, 1, 1),
        (3072, 768, 1),
        (64, 32, 9),
        (33, 17_000, 1),
        (20_000, 3, 1),
        (1, 40_000, 1),
    ]
    which = [(True, True), (True, False), (False, True)]
    drawn = [draw_move(*shape, dtype, w) for shape in shapes for w in which]
    on_gpu = [
        Move(
            *(
                value.cuda() if isinstance(value, torch.Tensor) else value
                for value in vars(move).values()
            )
        )
        for move in drawn
    ]
    for _ in range(2):
        check(on_gpu, executor=executor)
