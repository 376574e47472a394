"""Simulated sums and sums of reports have one distribution, worked out by hand, and no bias.

Both fast sums of roundings decide as double precision does. χ² tests have fixed seeds: a correct
implementation would fail one in a million.
"""

import dataclasses
import math
import sys

import numpy as np
import pytest
import torch
from helpers.count_distributions import (
    PLAN,
    AllBeginnings,
    assert_of_distribution,
    count_distribution,
    small_protocol,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from published_sums import published_vector_sum

from opacus_shuffle.core import compiled as compilation
from opacus_shuffle.core.randomness import SecretGenerator, stream_of
from opacus_shuffle.protocols.sums_of_roundings import FINEST, round_at_random, sum_of_roundings
from opacus_shuffle.protocols.vector_sum import ShuffleVectorSum

WIDE = 2000
# Every coordinate of user i, norms up to 1.
USERS = np.array([0.9, -0.55, 0.02, -1.0]) / math.sqrt(WIDE)
ROWS = torch.tensor(USERS).unsqueeze(1).expand(4, WIDE).contiguous()


def answers_as_counts(protocol, answer, reports):
    """The number of ones that the analyzer's answer came from."""
    counts = (answer + reports * protocol.max_norm) * protocol.granularity / (2 * protocol.max_norm)
    counts = counts + reports * protocol.noise_bits * protocol.bit_probability
    np.testing.assert_allclose(counts, counts.round(), atol=1e-6)
    return counts.round().to(torch.int64).numpy()


FORMS = {
    "float64": lambda: ROWS,
    "float32": lambda: (0.99 * ROWS).float(),
    "bfloat16": lambda: (0.99 * ROWS).bfloat16(),
    "numpy": lambda: ROWS.numpy(),
    "read-only": lambda: np.broadcast_to(ROWS[:, :1].numpy(), (4, WIDE)),
    "expanded": lambda: ROWS[:1].expand(4, WIDE),
    "blocks": lambda: (ROWS[k : k + 3] for k in (0, 3)),
    "list of blocks": lambda: [ROWS[:1], ROWS[1:2].numpy(), ROWS[2:]],
    "column-major": lambda: ROWS.T.contiguous().T,
    "requires grad": lambda: ROWS.clone().requires_grad_(),
}


@pytest.mark.parametrize("form", FORMS)
def test_simulated_counts_have_the_exact_distribution(form):
    protocol, generator = small_protocol(WIDE), torch.Generator().manual_seed(20)
    counts = []
    for _ in range(8):
        answer = protocol.simulate(FORMS[form](), generator)
        assert answer.dtype == torch.float64
        assert answer.shape == (WIDE,)
        counts.append(answers_as_counts(protocol, answer, 4))
    given_rows = FORMS[form]()
    values = given_rows[:, 0] if isinstance(given_rows, torch.Tensor) else ROWS[:, 0]
    distribution = count_distribution(values.double().tolist(), PLAN, 4)
    assert_of_distribution(counts, *distribution)


# SCO Algorithm 2.
@pytest.mark.parametrize("reports", [4, 3, 2])
def test_reports_have_the_exact_distribution_and_are_unbiased_for_those_who_sent(reports):
    protocol, generator = small_protocol(WIDE, fraction=0.5), torch.Generator().manual_seed(25)
    counts, answers = [], []
    for _ in range(8):
        total = sum(protocol.randomize(row, generator) for row in ROWS[:reports])
        answers.append(protocol.decode(total, reports))
        counts.append(answers_as_counts(protocol, answers[-1], reports))
        np.testing.assert_array_equal(counts[-1], total)
    distribution = count_distribution(USERS[:reports], PLAN, reports)
    assert_of_distribution(counts, *distribution)
    answers = torch.stack(answers).flatten()
    error = answers.std() / math.sqrt(len(answers))
    assert abs(answers.mean() - USERS[:reports].sum()) <= 5 * error
    assert answers.var() <= protocol.variance * (1 + 5 * math.sqrt(3 / len(answers)))


def test_coordinates_and_rounds_are_independent_of_each_other():
    protocol, generator = small_protocol(WIDE), torch.Generator().manual_seed(27)
    draws = torch.stack([protocol.simulate(ROWS, generator) for _ in range(40)])
    draws = (draws - draws.mean()) / draws.std()
    # Products of independent standardised numbers: mean 0, standard error about 1/√count.
    for products in (
        draws[:, 1:] * draws[:, :-1],
        draws[1:] * draws[:-1],
        draws[:, 16:] * draws[:, :-16],
    ):
        assert abs(products.mean()) <= 5 / math.sqrt(products.numel())


@given(
    fraction=st.one_of(
        st.floats(0, 1, exclude_max=True),
        st.floats(0, 2.0**-16),
        st.floats(1 - 2.0**-16, 1, exclude_max=True),
        st.integers(0, 65535).map(lambda k: k / 65536),
        st.sampled_from([0.0, 2.0**-20, 1e-9, 0.5, 1 - 2.0**-30]),
    ),
    whole=st.integers(0, 40),
)
@settings(max_examples=25)
def test_rounding_by_sixteen_bits_and_a_tie_break_keeps_the_mean_exactly(fraction, whole):
    place = torch.full((65_536, 1), whole + fraction, dtype=torch.float64)
    exact = float(place[0, 0]) - whole  # what the sum above can hold
    coarse = math.floor(exact * 65_536)
    rest = exact * 65_536 - coarse
    for later in {0.0, max(1 - rest - 2.0**-40, 0.0), min(1 - rest, 1 - 2.0**-53), 1 - 2.0**-53}:
        draws = AllBeginnings(later)
        result = round_at_random(place.clone(), draws)
        assert set(result.unique().tolist()) <= {whole, whole + 1}
        # So many decide for above whatever the rest is, and one asks for it: P(above) is (coarse +
        # rest)/2^16.
        assert draws.asked == [1]
        assert int((result == whole + 1).sum()) == coarse + (later >= 1 - rest)


def test_the_ends_of_the_range_are_not_rounded():
    protocol, generator = small_protocol(1), torch.Generator().manual_seed(2)
    ends = torch.tensor([[-1.0], [1.0]]).double()
    for _ in range(50):
        assert protocol.encode(ends.repeat(2, 1), generator).item() == 2 * 41


# SCO Theorem 3.2: error.
@pytest.mark.parametrize("make", [ShuffleVectorSum, published_vector_sum])
def test_the_real_protocols_answers_are_unbiased_with_its_variance(make):
    """The published one has so much noise that its binomials are drawn in parts."""
    protocol = make(200, 300, 2.0, 1.0, 1e-3)
    generator = torch.Generator().manual_seed(3)
    rows = 2 * torch.nn.functional.normalize(
        torch.randn(200, 300, generator=generator, dtype=torch.float64), dim=1
    )
    errors = torch.stack([protocol.simulate(rows, generator) - rows.sum(0) for _ in range(60)])
    errors, count = errors.flatten(), 60 * 300
    assert abs(errors.mean()) <= 5 * math.sqrt(protocol.variance / count)
    # At most as announced, and no less than the noise alone.
    bit = protocol.bit_probability * (1 - protocol.bit_probability)
    noise = (4.0 / protocol.granularity) ** 2 * 200 * protocol.noise_bits * bit
    spread = 5 * math.sqrt(2 / count)
    assert noise * (1 - spread) <= errors.var() <= protocol.variance * (1 + spread)
    assert protocol.mean_squared_error == pytest.approx(300 * protocol.variance)


@pytest.fixture(params=["NumPy", "Numba"])
def compiled(request):
    """Whether sums are compiled."""
    if request.param == "Numba":
        pytest.importorskip("numba")
    return request.param == "Numba"


def stream(seed=1):
    return stream_of(torch.Generator().manual_seed(seed))


@pytest.mark.parametrize(
    "granularity", [40, pytest.param(41, marks=pytest.mark.zoo), FINEST, 2**20]
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16])
def test_scaled_pieces_have_the_exact_distribution(granularity, dtype, compiled, monkeypatch):
    """Of records in pieces of different widths, each with a factor of its own."""
    monkeypatch.setattr(compilation, "WORTH_COMPILING", 4 * WIDE if compiled else 4 * WIDE + 1)
    plan = dataclasses.replace(PLAN, granularity=granularity)
    protocol = small_protocol(WIDE, plan=plan)
    factors = torch.tensor([0.25, 1.0, 2.0**-10, 0.9], dtype=torch.float64)
    given = (torch.tensor(USERS) / factors).to(dtype)
    pieces = [
        given[:, None, None].expand(4, *shape).contiguous()
        for shape in ((3, 5), (85, 1), (1900, 1))
    ]
    if dtype == torch.float16:
        pieces[1] = pieces[1].double()  # parameters need not be of one type
    values = (given.double() * factors).tolist()
    generators = (torch.Generator().manual_seed(5), SecretGenerator())
    counts = [
        protocol.encode_scaled(pieces, factors, generator) + protocol.draw_noise(4, generator)
        for generator in generators
        for _ in range(4)
    ]
    assert counts[0].dtype == torch.int64
    assert_of_distribution(torch.stack(counts).numpy(), *count_distribution(values, plan, 4))


def test_scales_that_single_precision_does_not_hold_are_worked_out_in_double(compiled):
    rows = torch.tensor([[1e-38] * 4000, [1e38] * 4000, [0.0] * 4000])
    steps = torch.tensor([2e37, -2e-38, 1e300], dtype=torch.float64)
    counts = sum_of_roundings(rows, steps, granularity=8, source=stream(), compiled=compiled)
    # 4 + 0.2, 4 - 2 and 4: between 10 and 11, on average 10.2 within five standard errors
    assert abs(float(counts.double().mean()) - 10.2) <= 5 * math.sqrt(0.16 / 4000) + 1e-6
    assert set(counts.tolist()) == {10, 11}


@pytest.mark.parametrize("shape", [(0, 5), (1, 1), (5000, 3), (200, 3000), (2, 300_000)])
def test_rows_of_whole_steps_are_summed_exactly_whatever_the_shape(shape, compiled):
    """Some of them a little less than whole, so that late bits of U decide for the step above."""
    whole = torch.randint(-60, 61, shape, generator=torch.Generator().manual_seed(2))
    steps = 2.0 ** torch.arange(shape[0], dtype=torch.float64).remainder(5)
    rows = whole / steps[:, None]
    below = rows.clone()
    below[shape[0] // 3 :] -= 2.0**-40
    for given_rows in (rows.float(), below, below.T.contiguous().T):
        counts = sum_of_roundings(
            given_rows, steps, granularity=120, source=stream(), compiled=compiled
        )
        assert torch.equal(counts, whole.sum(0) + 60 * shape[0])


@pytest.mark.parametrize("granularity", [1, 41, FINEST])
def test_what_rounding_errors_put_beyond_the_grid_is_taken_back(granularity, compiled):
    """Without that, hundreds of columns would count a step too many or too few."""
    end = torch.full((1, 400_000), granularity / 2 + 2.0**-11 + 2.0**-18, dtype=torch.float64)
    for rows, count in ((end, granularity), (-end, 0)):
        counts = sum_of_roundings(
            rows, torch.ones(1), granularity=granularity, source=stream(), compiled=compiled
        )
        assert set(counts.tolist()) == {count}


@given(
    place=st.one_of(
        st.floats(-20.5, 20.5),
        st.floats(-(2.0**-8), 2.0**-8),
        # Beside a whole number and beside a number of eight bits.
        st.builds(lambda whole, off: whole + off * 2.0**-9, *2 * [st.integers(-20, 20)]),
        st.builds(lambda whole, off: 99 * whole + off * 2.0**-22, *2 * [st.integers(-20, 20)]),
    ),
    dtype=st.sampled_from([torch.float32, torch.float64]),
    step=st.sampled_from([1.0, 0.3, 1e-40]),
    granularity=st.sampled_from([41, FINEST]),
)
@settings(max_examples=100)
def test_the_compiled_pass_has_the_mean_of_double_precision_exactly(
    place, dtype, step, granularity
):
    """The counts of all 256 beginnings of U add up to 256·(g/2 + x), but for U's later bits.

    For ⌊(a + 0)/256⌋ + … + ⌊(a + 255)/256⌋ = a, a whole number.
    """
    pytest.importorskip("numba")
    end = granularity / 2
    place = max(-end, min(end, place))
    rows = torch.full((1, 256), place / step, dtype=torch.float64).clamp(-3e38, 3e38).to(dtype)
    steps = torch.tensor([step], dtype=torch.float64)
    exact = max(-end, min(end, float(rows[0, 0]) * step)) * 256
    coarse = math.floor(exact)
    rest = exact - coarse
    for later in {0.0, max(1 - rest - 2.0**-40, 0.0), min(1 - rest, 1 - 2.0**-53), 1 - 2.0**-53}:
        draws = AllBeginnings(later, np.uint8)
        counts = sum_of_roundings(rows, steps, granularity=granularity, source=draws, compiled=True)
        assert draws.asked == [1]
        assert int(counts.max() - counts.min()) <= 1
        assert int(counts.sum()) == granularity * 128 + coarse + (later >= 1 - rest)


def test_a_seed_repeats_a_sum_of_entries_with_bits_of_their_own(compiled):
    rows, steps = torch.full((2, 2**18), 0.5), torch.ones(2)
    first, again, other = (
        sum_of_roundings(rows, steps, granularity=8, source=source, compiled=compiled)
        for source in (stream(), stream(), stream(2))
    )
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
    assert len(first.reshape(64, -1).unique(dim=0)) == 64


def test_without_numba_sums_are_those_of_numpy(monkeypatch):
    monkeypatch.setitem(sys.modules, "numba", None)  # what is None cannot be imported
    compilation.jitted.cache_clear()
    rows = torch.linspace(-3, 3, 30_000).reshape(10, 3000)
    asked, plain = (
        sum_of_roundings(rows, torch.ones(10), granularity=8, source=stream(), compiled=way)
        for way in (True, False)
    )
    compilation.jitted.cache_clear()
    assert torch.equal(asked, plain)


@pytest.mark.parametrize("granularity", [40, 41])
def test_zeros_have_the_distribution_of_zeros_that_are_rounded(granularity):
    plan = dataclasses.replace(PLAN, granularity=granularity)
    protocol = small_protocol(WIDE, plan=plan)
    generator = torch.Generator().manual_seed(4)
    counts = [
        protocol.encode_zeros(4, generator) + protocol.draw_noise(4, generator) for _ in range(8)
    ]
    assert_of_distribution(torch.stack(counts).numpy(), *count_distribution([0.0] * 4, plan, 4))
