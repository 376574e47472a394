"""Simulated sums and summed messages have one distribution, worked out by hand; the answers are unbiased.

χ² tests with fixed seeds: a right implementation would fail one in a million.
"""

from __future__ import annotations

import dataclasses
import math
import resource
import warnings

import numpy as np
import pytest
import torch
from helpers.count_distributions import (
    PLAN,
    assert_of_distribution,
    count_distribution,
    small_protocol,
)
from hypothesis import given, settings
from hypothesis import strategies as st

from opacus_shuffle.protocols.sums_of_roundings import round_at_random
from opacus_shuffle.protocols.vector_sum import ShuffleVectorSum


def assert_mean_and_variance(counts, first, distribution):
    counts = np.asarray(counts, dtype=float).ravel()
    outcomes = first + np.arange(len(distribution))
    mean = float(distribution @ outcomes)
    variance = float(distribution @ (outcomes - mean) ** 2)
    fourth = float(distribution @ (outcomes - mean) ** 4)
    assert abs(counts.mean() - mean) <= 5 * math.sqrt(variance / len(counts))
    assert abs(counts.var() - variance) <= 5 * math.sqrt((fourth - variance**2) / len(counts))


WIDE = 2000
USERS = np.array([0.9, -0.55, 0.02, -1.0]) / math.sqrt(
    WIDE
)  # every coordinate of user i, norms up to 1


def answers_as_counts(protocol, answer, reports):
    """The number of ones that the analyzer's answer came from."""
    counts = (answer + reports * protocol.max_norm) * protocol.granularity / (2 * protocol.max_norm)
    counts = counts + reports * protocol.noise_bits * protocol.bit_probability
    np.testing.assert_allclose(counts, counts.round(), atol=1e-6)
    return counts.round().to(torch.int64).numpy()


def shapes():
    """The same four users' rows in every form that is taken."""
    rows = torch.tensor(USERS).unsqueeze(1).expand(4, WIDE).contiguous()
    return {
        "float64": lambda: rows,
        "numpy": lambda: rows.numpy(),
        "blocks": lambda: (rows[k : k + 3] for k in (0, 3)),
        "list of blocks": lambda: [rows[:1], rows[1:2].numpy(), rows[2:]],
        "column-major": lambda: rows.T.contiguous().T,
        "coo": lambda: rows.to_sparse(),
        "csr": lambda: rows.to_sparse_csr(),
        "uncoalesced": lambda: torch.sparse_coo_tensor(
            torch.cat([rows.to_sparse().indices()] * 2, 1),
            torch.cat([0.25 * rows.flatten(), 0.75 * rows.flatten()]),
            rows.shape,
        ),
        "requires grad": lambda: rows.clone().requires_grad_(),
        "row by row, expanded": lambda: [row.unsqueeze(0).expand(1, WIDE) for row in rows],
    }


@pytest.mark.parametrize("shape", list(shapes()))
@pytest.mark.filterwarnings("ignore:Sparse CSR")
@pytest.mark.filterwarnings("ignore:Sparse invariant")
def test_simulated_counts_have_the_exact_distribution(shape):
    protocol = small_protocol(WIDE)
    generator = torch.Generator().manual_seed(20)
    counts = []
    for _ in range(8):
        answer = protocol.simulate(shapes()[shape](), generator)
        assert answer.dtype == torch.float64
        assert answer.shape == (WIDE,)
        counts.append(answers_as_counts(protocol, answer, 4))
    distribution = count_distribution(USERS, PLAN, 4)
    assert_of_distribution(counts, *distribution)
    assert_mean_and_variance(counts, *distribution)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_single_and_half_precision_have_the_distribution_of_their_values(dtype):
    protocol = small_protocol(WIDE)
    rows = (0.99 * torch.tensor(USERS)).to(dtype).unsqueeze(1).expand(4, WIDE).contiguous()
    generator = torch.Generator().manual_seed(21)
    counts = [answers_as_counts(protocol, protocol.simulate(rows, generator), 4) for _ in range(8)]
    assert_of_distribution(counts, *count_distribution(rows[:, 0].double().tolist(), PLAN, 4))


@pytest.mark.parametrize("users", [1, 2, 4, 60])
@pytest.mark.parametrize("value", [0.7, -0.31, 1.0, 0.0])
def test_an_expanded_row_has_the_distribution_of_its_copies(users, value):
    value = value / math.sqrt(WIDE)
    protocol = small_protocol(WIDE, users)
    generator = torch.Generator().manual_seed(22)
    row = torch.full((1, WIDE), value, dtype=torch.float64).expand(users, WIDE)
    broadcast = np.broadcast_to(row[0].numpy(), (users, WIDE))
    counts = [
        answers_as_counts(protocol, protocol.simulate(row, generator), users) for _ in range(8)
    ]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # PyTorch's about arrays that are not writable
        counts += [
            answers_as_counts(protocol, protocol.simulate(broadcast, generator), users)
            for _ in range(4)
        ]
    assert_of_distribution(counts, *count_distribution([value] * users, PLAN, users))


def test_sparse_rows_with_zeros_have_the_exact_distribution():
    protocol = small_protocol(WIDE)
    dense = torch.zeros(4, WIDE, dtype=torch.float64)
    dense[0] = USERS[0]
    dense[1, ::2] = USERS[1]
    for sparse in (dense.to_sparse(), dense.to_sparse_coo()):
        generator = torch.Generator().manual_seed(23)
        counts = np.array(
            [answers_as_counts(protocol, protocol.simulate(sparse, generator), 4) for _ in range(8)]
        )
        assert_of_distribution(
            counts[:, ::2], *count_distribution([USERS[0], USERS[1], 0, 0], PLAN, 4)
        )
        assert_of_distribution(counts[:, 1::2], *count_distribution([USERS[0], 0, 0, 0], PLAN, 4))


@pytest.mark.parametrize("even", [False, True])
def test_all_zero_sparse_rows_have_the_exact_distribution(even):
    plan = dataclasses.replace(PLAN, granularity=40 if even else 41)
    protocol = small_protocol(WIDE, plan=plan)
    generator = torch.Generator().manual_seed(24)
    empty = torch.zeros(4, WIDE).to_sparse()
    counts = [answers_as_counts(protocol, protocol.simulate(empty, generator), 4) for _ in range(8)]
    assert_of_distribution(counts, *count_distribution([0.0] * 4, plan, 4))


@pytest.mark.parametrize("reports", [4, 3, 2])
def test_messages_have_the_exact_distribution_and_are_unbiased_for_those_who_sent(reports):
    protocol = small_protocol(WIDE, fraction=0.5)
    generator = torch.Generator().manual_seed(25)
    counts, answers = [], []
    for _ in range(8):
        sent = [
            protocol.randomize(torch.full((WIDE,), float(value), dtype=torch.float64), generator)
            for value in USERS[:reports]
        ]
        shuffled = protocol.shuffle(sent, generator)
        assert shuffled.num_reports == reports
        answer = protocol.analyze(shuffled)
        answers.append(answer)
        counts.append(answers_as_counts(protocol, answer, reports))
        np.testing.assert_array_equal(counts[-1], shuffled.ones())
    distribution = count_distribution(USERS[:reports], PLAN, reports)
    assert_of_distribution(counts, *distribution)
    assert_mean_and_variance(counts, *distribution)
    answers = torch.stack(answers).flatten()
    error = answers.std() / math.sqrt(len(answers))
    assert abs(answers.mean() - USERS[:reports].sum()) <= 5 * error
    assert answers.var() <= protocol.variance * (1 + 5 * math.sqrt(3 / len(answers)))


def test_coordinates_and_rounds_are_independent_of_each_other():
    protocol = small_protocol(WIDE)
    generator = torch.Generator().manual_seed(27)
    rows = torch.tensor(USERS).unsqueeze(1).expand(4, WIDE).contiguous()
    draws = torch.stack([protocol.simulate(rows, generator) for _ in range(40)])
    draws = (draws - draws.mean()) / draws.std()
    # Products of independent standardised numbers: mean 0, standard error about 1/√count.
    for products in (
        draws[:, 1:] * draws[:, :-1],
        draws[1:] * draws[:-1],
        draws[:, 16:] * draws[:, :-16],
    ):
        assert abs(products.mean()) <= 5 / math.sqrt(products.numel())


def test_a_seed_repeats_a_simulation_and_no_seed_does_not():
    protocol = ShuffleVectorSum(50, 20, 1.0, 1.0, 1e-3, "tight")
    rows = torch.zeros(50, 20)
    one, two = (protocol.simulate(rows, torch.Generator().manual_seed(1)) for _ in range(2))
    torch.testing.assert_close(one, two, rtol=0, atol=0)
    torch.manual_seed(0)
    first = protocol.simulate(rows)
    torch.manual_seed(0)
    assert not torch.equal(first, protocol.simulate(rows))


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
@settings(max_examples=60, deadline=None)
def test_rounding_by_sixteen_bits_and_a_tie_break_keeps_the_mean_exactly(fraction, whole):
    place = torch.full((65_536, 1), whole + fraction, dtype=torch.float64)
    exact = float(place[0, 0]) - whole  # what the sum above can hold
    coarse = math.floor(exact * 65_536)
    rest = exact * 65_536 - coarse

    class AllBeginnings:
        """Words in which the sixteen bits of 65,536 entries are every number once; the later bits are all the same."""

        def __init__(self, later):
            self.later, self.asked = later, []

        def words(self, count):
            return np.arange(4 * count, dtype=np.uint16).view(np.uint64)

        def uniforms(self, count):
            self.asked.append(count)
            return torch.full((count,), self.later, dtype=torch.float64)

    for later in {0.0, max(1 - rest - 2.0**-40, 0.0), min(1 - rest, 1 - 2.0**-53), 1 - 2.0**-53}:
        draws = AllBeginnings(later)
        result = round_at_random(place.clone(), draws)
        assert set(result.unique().tolist()) <= {whole, whole + 1}
        # So many decide for above whatever the rest is, and one asks for it: P(above) is (coarse +
        # rest)/2^16.
        assert draws.asked == [1]
        assert int((result == whole + 1).sum()) == coarse + (later >= 1 - rest)


def test_whole_numbers_and_the_ends_of_the_range_are_not_rounded():
    protocol = small_protocol(1)
    generator = torch.Generator().manual_seed(2)
    ends = torch.tensor([[-1.0], [1.0]]).double()
    for _ in range(50):
        assert protocol.encode(ends[:1].expand(4, 1), generator).item() == 0
        assert protocol.encode(ends[1:].expand(4, 1), generator).item() == 4 * 41
        assert protocol.encode(ends.repeat(2, 1), generator).item() == 2 * 41
        assert protocol.encode(ends.repeat(2, 1).to_sparse(), generator).item() == 2 * 41


def test_the_real_protocols_answers_are_unbiased_with_its_variance():
    protocol = ShuffleVectorSum(200, 300, 2.0, 1.0, 1e-3, "tight")
    generator = torch.Generator().manual_seed(3)
    rows = 2 * torch.nn.functional.normalize(
        torch.randn(200, 300, generator=generator, dtype=torch.float64), dim=1
    )
    errors = torch.stack(
        [protocol.simulate(rows, generator) - rows.sum(0) for _ in range(60)]
    ).flatten()
    count = len(errors)
    assert abs(errors.mean()) <= 5 * math.sqrt(protocol.variance / count)
    # At most as announced, and no less than the noise alone.
    noise = (4.0 / protocol.granularity) ** 2 * 200 * protocol.noise_bits / 4
    assert (
        noise * (1 - 5 * math.sqrt(2 / count))
        <= errors.var()
        <= protocol.variance * (1 + 5 * math.sqrt(2 / count))
    )
    assert protocol.mean_squared_error == pytest.approx(300 * protocol.variance)


def test_a_hundred_thousand_users_and_coordinates_need_little_memory():
    protocol = ShuffleVectorSum(10**5, 10**5, 1.0, 1.0, 1e-6, "tight")
    row = torch.zeros(1, 10**5)
    row[0, 0] = 1.0
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    answer = protocol.simulate(row.expand(10**5, -1), torch.Generator().manual_seed(4))
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    assert grown < 2**20  # KiB: less than 1 GiB more
    deviation = math.sqrt(protocol.variance)
    assert abs(answer[0] - 10**5) <= 6 * deviation
    assert answer[1:].abs().max() <= 7 * deviation
    assert answer[1:].std() == pytest.approx(deviation, rel=0.05)
