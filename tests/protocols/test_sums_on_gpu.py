"""Sums of roundings on a GPU have the distribution of double precision, by PyTorch and by Triton.

PyTorch's operations run on a CPU, too; the kernel is interpreted there, and compiled without a GPU.
Where there is one, all of it runs on it.
"""

import dataclasses
import importlib
import math
import sys

import numpy as np
import pytest
import torch
from helpers.count_distributions import (
    PLAN,
    assert_of_distribution,
    count_distribution,
)

from opacus_shuffle.core.exact_binomials import binomials_on_gpu
from opacus_shuffle.core.randomness import SecretGenerator
from opacus_shuffle.protocols.sums_on_gpu import sum_on_gpu

MODULE = "opacus_shuffle.protocols.triton_roundings"
WIDE = 2000
USERS = np.array([0.9, -0.55, 0.02, -1.0, 0.3]) / math.sqrt(WIDE)
on_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


@pytest.fixture(params=["torch", "triton", pytest.param("a GPU", marks=on_gpu)])
def way(request):
    """How sums are taken, and where: the kernel interpreted on a CPU, all by default on a GPU."""
    if request.param == "a GPU":
        yield {"executor": "auto"}, torch.device("cuda")
        return
    if request.param == "torch":
        yield {"executor": "torch"}, torch.device("cpu")
        return
    triton = pytest.importorskip("triton")
    # Triton's own Philox is a kernel that was compiled or not when it was imported, like ours.
    philox = sys.modules[triton.language.philox.__module__]
    with pytest.MonkeyPatch.context() as patch:
        # Of a kernel that calls another one, the interpreter leaves its own functions behind.
        for scope in (triton.language, triton.language.core, triton.language.tensor):
            for name in [name for name in vars(scope) if not name.startswith("_")]:
                patch.setattr(scope, name, vars(scope)[name])
        patch.setenv("TRITON_INTERPRET", "1")
        patch.setattr(triton.language, "philox", importlib.reload(philox).philox)
        sys.modules.pop(MODULE, None)
        importlib.import_module(MODULE)
        yield {"executor": "triton"}, torch.device("cpu")
    importlib.reload(philox)
    sys.modules.pop(MODULE)


def seeded(device, seed=1):
    return torch.Generator(device).manual_seed(seed)


@pytest.mark.parametrize(
    ("granularity", "dtype"),
    [
        (40, torch.float32),
        (41, torch.float64),
        pytest.param(2**20, torch.bfloat16, marks=pytest.mark.zoo),
    ],
)
def test_sums_have_the_exact_distribution(granularity, dtype, way):
    """Of records in pieces of different widths, each with a factor of its own."""
    options, device = way
    plan = dataclasses.replace(PLAN, granularity=granularity)
    factors = torch.tensor([0.25, 1.0, 2.0**-10, 0.9, 0.5], dtype=torch.float64)
    given = (torch.tensor(USERS) / factors).to(dtype)
    widths = (15, 85, 1900)
    pieces = [given[:, None].expand(5, width).to(device) for width in widths]
    values = (given.double() * factors).tolist()
    steps = (factors * granularity / 2).to(device)
    generators = [seeded(device, 5), SecretGenerator(device)]
    counts = torch.stack(
        [
            sum_on_gpu(pieces, steps, granularity=granularity, generator=generator, **options)
            + binomials_on_gpu(5 * plan.noise_bits, plan.bit_probability, WIDE, generator)
            for generator in generators
            for _ in range(2)
        ]
    )
    assert counts.dtype == torch.int64
    assert_of_distribution(counts.cpu().numpy(), *count_distribution(values, plan, 5))


@pytest.mark.parametrize("shape", [(0, 5), (1, 1), (70, 3), (34, 520), (2, 0)])
def test_rows_of_whole_steps_are_summed_exactly_whatever_the_shape(shape, way):
    options, device = way
    whole = torch.randint(-60, 61, shape, generator=seeded("cpu", 2))
    steps = 2.0 ** torch.arange(shape[0], dtype=torch.float64).remainder(5)
    rows = (whole / steps[:, None]).float()
    for given in (rows, rows.double(), rows.T.contiguous().T):
        counts = sum_on_gpu(
            [given.to(device)],
            steps.to(device),
            granularity=120,
            generator=seeded(device),
            **options,
        )
        assert torch.equal(counts.cpu(), whole.sum(0) + 60 * shape[0])


def test_what_rounding_errors_put_beyond_the_grid_is_taken_back(way):
    options, device = way
    end = torch.full((1, 5000), 20.5 + 2.0**-11, dtype=torch.float64, device=device)
    one = torch.ones(1, dtype=torch.float64, device=device)
    for rows, count in ((end, 41), (-end, 0)):
        counts = sum_on_gpu([rows], one, granularity=41, generator=seeded(device), **options)
        assert set(counts.tolist()) == {count}


def test_every_entry_has_random_bits_of_its_own_and_every_sum_fresh_ones(way):
    """Equal bits in two rows would double the variance of their sum, and in two columns align them.

    Of 40 rows at one half, 1,024 columns' counts: their variance is 10, to five standard errors.
    """
    options, device = way
    rows = [torch.full((40, 512), 0.5, device=device) for _ in range(2)]
    steps = torch.ones(40, dtype=torch.float64, device=device)
    generator = SecretGenerator(device)
    first, second = (
        sum_on_gpu(rows, steps, granularity=8, generator=generator, **options) for _ in range(2)
    )
    for counts in (first, second, first - second, first[:512] - first[512:]):
        expected = 10 if counts is first or counts is second else 20
        error = 5 * expected * math.sqrt(2 / len(counts))
        assert float(counts.double().var()) == pytest.approx(expected, abs=error)
    assert len(first.reshape(64, -1).unique(dim=0)) == 64


def test_a_seed_repeats_a_sum_and_its_noise(way):
    options, device = way
    rows, steps = torch.full((2, 999), 0.5, device=device), torch.ones(2, device=device).double()
    first, again, other = (
        (
            sum_on_gpu([rows], steps, granularity=8, generator=generator, **options),
            binomials_on_gpu(100, 0.3, 999, generator),
        )
        for generator in (seeded(device), seeded(device), seeded(device, 2))
    )
    assert all(map(torch.equal, first, again))
    assert not any(map(torch.equal, first, other))


@pytest.mark.parametrize("dtype", ["*fp32", "*fp64", "*bf16"])
@pytest.mark.parametrize("capability", [80, 90])
def test_the_kernel_compiles_without_a_gpu(dtype, capability, monkeypatch):
    triton = pytest.importorskip("triton")
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    sys.modules.pop(MODULE, None)
    kernel = importlib.import_module(MODULE).round_and_add
    pointers = {"values": dtype, "scale": "*fp64", "counts": "*i64", "key": "i64"}
    numbers = dict.fromkeys(["number", "rows", "width"], "i32")
    constants = {"MIDDLE": 41 << 31, "ROWS": 32, "BLOCK": 512}
    source = triton.compiler.ASTSource(
        kernel, {**pointers, **numbers, **dict.fromkeys(constants, "constexpr")}, constants
    )
    target = triton.backends.compiler.GPUTarget("cuda", capability, 32)
    assert "st.local" not in triton.compile(source, target=target).asm["ptx"]
    sys.modules.pop(MODULE)
