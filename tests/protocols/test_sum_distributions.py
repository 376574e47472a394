"""Simulated sums and sums of reports have one distribution, worked out by hand, and no bias.

χ² tests have fixed seeds: a correct implementation would fail one in a million.
"""

import dataclasses
import math

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

from opacus_shuffle.core.randomness import SecretGenerator
from opacus_shuffle.protocols.grid_sum import round_at_random
from opacus_shuffle.protocols.vector_sum import ShuffleVectorSum

WIDE = 2000
on_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
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
    place=st.floats(0, 40) | st.integers(0, 40) | st.floats(-(2.0**-31), 2.0**-31).map(abs),
)
@settings(max_examples=25)
def test_a_rounding_has_the_mean_of_its_value_and_leaves_whole_numbers(place):
    """All 2³² values of U are as many as 2¹⁶ in the middle of cells, up to 2⁻¹⁶ of the mean."""
    draws = AllBeginnings()
    position = torch.full((2**16,), float(place), dtype=torch.float64)
    result = round_at_random(position, draws)
    assert set(result.tolist()) <= {math.floor(place), math.ceil(place)}
    assert abs(float(result.double().mean()) - place) <= 2.0**-16


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


WAYS = ["cpu", pytest.param("cuda", marks=on_gpu)]


@pytest.mark.parametrize("device", WAYS)
@pytest.mark.parametrize("granularity", [40, 41])
def test_a_sum_that_is_rounded_once_has_the_exact_distribution(granularity, device):
    """As if a single user held the sum, with everyone's noise bits (Corollary 2.9)."""
    plan = dataclasses.replace(PLAN, granularity=granularity)
    protocol = small_protocol(WIDE, plan=plan)
    total = torch.full((WIDE,), float(USERS.sum()), dtype=torch.float64, device=device)
    generators = (torch.Generator(device).manual_seed(5), SecretGenerator(device))
    counts = [
        answers_as_counts(protocol, protocol.release_sum(total, 4, generator).cpu(), 4)
        for generator in generators
        for _ in range(4)
    ]
    # In the unit of count_distribution three users at the lower end add nothing.
    assert_of_distribution(counts, *count_distribution([USERS.sum() + 3.0, -1, -1, -1], plan, 4))


@pytest.mark.parametrize("device", WAYS)
def test_a_seed_repeats_a_release_and_entries_have_bits_of_their_own(device):
    protocol, total = small_protocol(2**16), torch.full((2**16,), 0.5, device=device)
    first, again, other = (
        protocol.release_sum(total, 4, torch.Generator(device).manual_seed(seed))
        for seed in (1, 1, 2)
    )
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
    assert len(first.reshape(64, -1).unique(dim=0)) == 64
