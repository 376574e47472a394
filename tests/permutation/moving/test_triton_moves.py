"""The Triton kernel: interpreted, compiled without a GPU, and on one where there is one."""

import importlib
import sys
import types

import pytest
import torch
from helpers.moves import DTYPES, ONE_OF_EACH_SIZE, check, draw_move

from opacus_shuffle.permutation.moving.gather import EXECUTORS, Move, gather_, waves

triton = pytest.importorskip("triton")
from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.compiler import ASTSource  # noqa: E402

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


@pytest.mark.parametrize(
    "words_on_chip", [128, *(pytest.param(n, marks=pytest.mark.zoo) for n in (32, 2**14))]
)
@pytest.mark.parametrize(
    "dtype",
    [pytest.param(d, marks=() if d in ONE_OF_EACH_SIZE else pytest.mark.zoo) for d in DTYPES],
)
def test_the_kernel_agrees_bit_for_bit_with_advanced_indexing(
    interpreted, monkeypatch, dtype, words_on_chip
):
    torch.manual_seed(0)
    monkeypatch.setattr(interpreted, "STAGED_WORDS", words_on_chip)
    monkeypatch.setattr(interpreted, "BLOCK_WORDS", 64)  # which most of these have several of
    shapes = [
        (1, 1, 1),
        (1, 70, 1),
        (70, 1, 1),
        (3, 5, 9),
        (9, 16, 1),
        (33, 17, 1),
        (6, 70, 1),
        (2, 300, 1),
        (0, 3, 1),
        (5, 3, 7),
        (1, 3, 70),
    ]
    which = [(True, True), (True, False), (False, True), (False, False)]
    # Two of the four ways for each shape, and all four among shapes of each sort.
    drawn = [
        draw_move(*shape, dtype, which[(number + turn) % 4])
        for number, shape in enumerate(shapes)
        for turn in range(2)
    ]
    check(drawn, executor="triton")


@pytest.mark.usefixtures("interpreted")
def test_waves_through_a_small_scratch_agree(monkeypatch):
    monkeypatch.setattr(waves, "__defaults__", (1000,))
    check([draw_move(rows, 7, 1) for rows in (3, 40, 5, 90, 8, 11)], executor="triton")


@pytest.mark.parametrize(
    ("memory", "words"),
    [
        (232_448, {1: 16384, 2: 16384, 4: 16384, 8: 8192}),
        (101_376, {1: 16384, 2: 16384, 4: 16384, 8: 8192}),
        (65_536, {1: 16384, 2: 16384, 4: 16384, 8: 8192}),
        (49_152, {1: 16384, 2: 16384, 4: 8192, 8: 4096}),
    ],
)
def test_no_program_takes_more_memory_than_the_card_has(compiled, monkeypatch, memory, words):
    card = types.SimpleNamespace(shared_memory_per_block_optin=memory)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: card)
    limits = {word: compiled.staged_words(word, torch.device("cuda:0")) for word in (1, 2, 4, 8)}
    assert limits == words
    for word, limit in words.items():
        for width in [*range(1, 70), 4095, 4096, limit]:
            block = compiled.constants_of("whole", width, word, aligned=True)["BLOCK"]
            assert block * word <= memory
            assert width <= block


def test_tensors_on_a_cpu_need_the_interpreter(compiled):
    with pytest.raises(ValueError, match="TRITON_INTERPRET=1"):
        gather_([draw_move(2, 3, 1)], executor="triton")


def variants(limit):
    """Every mode, width of a row and alignment that kernels for words of a size differ in."""
    for aligned in (True, False):
        yield from (("whole", 2**power, aligned) for power in range(12, limit.bit_length()))
        yield from ((mode, limit, aligned) for mode in ("copy", "rows", "words"))


@pytest.mark.parametrize(
    ("capability", "memory", "some"),
    [
        (80, 2**16, True),
        *(
            pytest.param(*card, False, marks=pytest.mark.zoo)
            for card in [(80, 2**16), (86, 49_152), (90, 2**16)]
        ),
    ],
)
@pytest.mark.parametrize("word", [1, 2, 4, 8])
def test_every_variant_compiles_without_local_memory_and_moves_sixteen_bytes_at_once(
    compiled, monkeypatch, word, capability, memory, some
):
    monkeypatch.setattr(compiled, "STAGED_BYTES", memory)
    limit = compiled.staged_words(word, torch.device("cpu"))
    names = ["WORD", "BLOCK", "BLOCKS", "MODE", "LONG", "ALIGNED"]
    pointers = {
        "tiles": "*i32",
        "addresses": "*i64",
        "indices": "*i32",
    }
    for mode, width, aligned in variants(limit):
        if some and (width < limit or not aligned):
            continue  # in the default tests those that take most registers
        constants = {
            "WORD": compiled._TYPES[word],
            **compiled.constants_of(mode, width, word, aligned=aligned),
        }
        options = {"num_warps": constants.pop("num_warps")}
        source = ASTSource(
            compiled.move_kernel, pointers | dict.fromkeys(names, "constexpr"), constants
        )
        kernel = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
        assert kernel.metadata.shared <= memory
        assert "st.local" not in kernel.asm["ptx"]
        if aligned and width >= 4096 and word > 1:
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
        Move(*(value.cuda() if isinstance(value, torch.Tensor) else value for value in move))
        for move in drawn
    ]
    for _ in range(2):
        check(on_gpu, executor=executor)
