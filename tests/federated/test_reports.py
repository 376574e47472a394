"""What clients send: clipped, noised, in their format; and what is no such report is not taken."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from opacus_shuffle import ShuffledCheckIn, ShuffledSums, ShuffleGauss, SubsampledShuffle
from opacus_shuffle.core.randomness import SecretGenerator
from opacus_shuffle.federated import BitSums, GaussianReports, ReportFormat

GAUSSIAN = {
    "dimension": 5,
    "max_norm": 2.0,
    "noise_multiplier": 1.5,
    "num_users": 40,
    "sample_rate": 0.5,
}
SUMS = {
    "dimension": 5,
    "max_norm": 2.0,
    "noise_multiplier": 1.5,
    "num_users": 40,
    "sample_rate": 0.5,
    "delta": 1e-6,
}


def formats() -> list[ReportFormat]:
    return [GaussianReports(**GAUSSIAN), BitSums(**SUMS), BitSums(**SUMS, messages="bits")]


def mixed(reports: ReportFormat, sent: list[bytes]) -> list[bytes]:
    """What the shuffler hands over of these numbers."""
    held: list = []
    for each in sent:
        reports.keep(held, each)
    return reports.mix(held, SecretGenerator())


every_format = pytest.mark.parametrize("reports", formats(), ids=["gaussian", "counts", "bits"])
FAR_OUT = stats.norm.isf(1e-10)


@every_format
def test_the_estimate_is_the_clipped_sum_within_its_noise(reports):
    """Of 50 rounds' mean, every coordinate within what a Gaussian exceeds once in 10¹⁰."""
    vectors = [torch.tensor([3.0, 4, 0, 0, 0]), torch.tensor([0.0, 0, 1, 0, -1])] + [
        torch.zeros(5)
    ] * 38
    expected = torch.tensor([1.2, 1.6, 1, 0, -1])  # the first is cut to norm 2
    rounds = 50
    total = torch.zeros(5, dtype=torch.float64)
    for number in range(rounds):
        sent = [reports.open(reports.encode(number, each)).numbers for each in vectors]
        total += reports.estimate(mixed(reports, sent), len(vectors))
    one = (
        math.sqrt(40) * 1.5 * 2.0
        if isinstance(reports, GaussianReports)
        else math.sqrt(reports.protocol.variance)
    )
    assert float((total / rounds - expected).abs().max()) < FAR_OUT * one / math.sqrt(rounds)


def test_a_gaussian_report_has_its_own_noise():
    reports = GaussianReports(**{**GAUSSIAN, "dimension": 20_000})
    found = np.frombuffer(
        reports.open(reports.encode(1, torch.zeros(20_000))).numbers, "<f4"
    ).astype(np.float64)
    squares = float((found**2).sum()) / 3.0**2  # sigma times the norm is 3
    chi = stats.chi2(20_000)
    assert chi.ppf(1e-10) < squares < chi.isf(1e-10)


def test_a_count_is_that_of_the_bits_a_user_of_the_protocol_sends():
    """The distribution of one coordinate's count against that of ``randomize``, by a chi-squared test."""
    reports = BitSums(**{**SUMS, "dimension": 1})
    x = torch.tensor([0.7])
    ours = [
        int.from_bytes(reports.open(reports.encode(1, x)).numbers, "little") for _ in range(1000)
    ]
    theirs = [int(reports.protocol.randomize(x).ones()[0]) for _ in range(1000)]
    edges = np.unique(np.quantile(ours + theirs, np.linspace(0, 1, 12)))
    table = np.array([np.histogram(each, edges)[0] for each in (ours, theirs)]) + 1
    assert stats.chi2_contingency(table).pvalue > 1e-9


@every_format
@given(values=st.lists(st.floats(), min_size=5, max_size=5))
def test_no_vector_is_longer_than_the_norm_after_clipping(reports, values):
    """Also where squares over- or underflow in double precision, and where entries are no numbers."""
    vector = torch.tensor(values, dtype=torch.float64)
    clipped = reports.clip(vector)
    norm = math.hypot(*clipped.tolist())
    assert norm <= reports.max_norm
    if not torch.isfinite(vector).all():
        assert norm == 0
    elif math.hypot(*values) <= reports.max_norm:
        assert torch.equal(clipped, vector)


@every_format
@given(
    direction=st.lists(st.floats(-1, 1, width=32), min_size=5, max_size=5).filter(
        lambda each: math.hypot(*each) > 1e-3
    ),
    longer=st.one_of(st.sampled_from([1 + 1e-12, 1.005]), st.floats(1 + 1e-12, 1.1)),
)
def test_a_vector_a_little_too_long_is_cut_to_the_norm_and_keeps_its_direction(
    reports, direction, longer
):
    """Double precision scales a vector and takes its norm to some 1e-15: the norm may fall short by a rounding, and no more."""
    vector = torch.tensor(direction, dtype=torch.float64)
    vector *= longer * reports.max_norm / math.hypot(*vector.tolist())
    clipped = reports.clip(vector)
    norm = math.hypot(*clipped.tolist())
    assert reports.max_norm * (1 - 1e-11) <= norm <= reports.max_norm
    assert torch.allclose(clipped, vector / longer, rtol=1e-11, atol=0)


@pytest.mark.parametrize("bits", [64, 255, 256, 257, 65535, 65536, 65537])
def test_reports_of_nothing_but_ones_decode(bits):
    """Of every coordinate's bits all are 1: that many is the largest count, and one byte holds no 256."""
    reports = BitSums(**SUMS)
    reports.bits = bits
    width = reports.bytes_per_report // 5
    assert width == 1 if bits < 256 else width == 2 if bits < 65536 else width == 4
    all_ones = np.full(5, bits, f"<u{width}").tobytes()
    reports.check_numbers(all_ones)
    estimate = reports.estimate(mixed(reports, [all_ones] * 40), 40)
    assert torch.equal(estimate, reports.protocol.decode(torch.full((5,), 40 * bits), 40))


@every_format
def test_what_is_handed_over_does_not_depend_on_the_order_of_reports(reports):
    sent = [
        reports.open(reports.encode(1, torch.full((5,), number / 50))).numbers
        for number in range(40)
    ]
    if isinstance(reports, GaussianReports):
        assert sorted(mixed(reports, sent)) == sorted(sent)
        first = [mixed(reports, sent[:4])[0] for _ in range(400)]
        times = stats.binom(400, 0.25)
        assert all(
            times.ppf(1e-10) < first.count(numbers) < times.isf(1e-10) for numbers in sent[:4]
        )
    else:
        forwards, backwards = (
            reports.estimate(mixed(reports, order), 40) for order in (sent, sent[::-1])
        )
        assert torch.equal(forwards, backwards)


@every_format
def test_whether_a_client_takes_part_is_seen_by_nobody_but_the_shuffler(reports):
    there, again, absent = (
        reports.encode(1, vector) for vector in (torch.ones(5), torch.ones(5), None)
    )
    assert there != again
    assert len(there) == len(absent)
    if isinstance(reports, GaussianReports):  # whose zeros the shuffler takes out
        sent = [reports.open(report).numbers for report in (absent, there, absent)]
        assert mixed(reports, sent) == sent[1:2]
        assert not reports.estimate(mixed(reports, sent[:1]), 40).any()


def test_bits_and_their_counts_have_one_sum():
    bits, counts = BitSums(**SUMS, messages="bits"), BitSums(**SUMS)
    sent = [bits.open(bits.encode(1, torch.ones(5))).numbers for _ in range(40)]
    ones = [
        np.unpackbits(np.frombuffer(numbers, np.uint8).reshape(5, -1), axis=1).sum(1)
        for numbers in sent
    ]
    as_counts = [row.astype(f"<u{counts.bytes_per_report // 5}").tobytes() for row in ones]
    assert torch.equal(
        bits.estimate(mixed(bits, sent), 40), counts.estimate(mixed(counts, as_counts), 40)
    )


@every_format
@given(junk=st.binary(max_size=80))
def test_junk_is_not_taken(reports, junk):
    good = reports.encode(1, torch.zeros(5))
    with pytest.raises(ValueError, match="report"):
        reports.open(junk)
    for cut in (good[:-1], good + b"\0", b"XXXX" + good[4:]):
        with pytest.raises(ValueError, match="report"):
            reports.open(cut)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -1e30, 1e6])
def test_a_gaussian_report_that_no_honest_client_sends_is_not_taken(value):
    reports = GaussianReports(**GAUSSIAN)
    forged = reports.encode(1, torch.zeros(5))[:24] + np.array([value, 0, 0, 0, 0], "<f4").tobytes()
    with pytest.raises(ValueError, match="no honest one exceeds"):
        reports.open(forged)


def test_honest_gaussian_reports_are_taken():
    reports = GaussianReports(**GAUSSIAN)
    for number in range(2000):
        assert reports.open(reports.encode(number, torch.full((5,), 100.0))).round == number


@pytest.mark.parametrize(
    ("messages", "named"), [("counts", "ones in a coordinate of"), ("bits", "behind the")]
)
def test_more_ones_than_there_are_bits_are_not_taken(messages, named):
    """Where the last byte of a coordinate has room for more: a multiple of eight bits has none."""
    formats = (
        BitSums(**{**SUMS, "noise_multiplier": 1.5 + number / 50}, messages=messages)
        for number in range(50)
    )
    reports = next(format for format in formats if format.bits % 8)
    with pytest.raises(ValueError, match=f"{named} {reports.bits} bits"):
        reports.check_numbers(b"\xff" * reports.bytes_per_report)


@given(st.integers(1, 60), st.floats(0.01, 1.0), st.data())
def test_the_accountant_counts_on_no_report_that_may_be_a_dishonest_client_s(
    num_users, honest_fraction, data
):
    """Of the fewest reports that are released, even if all dishonest clients are among them."""
    fewest = data.draw(st.integers(1, num_users))
    dishonest = math.floor(num_users * (1 - honest_fraction) + 1e-9)
    options = {
        **GAUSSIAN,
        "num_users": num_users,
        "honest_fraction": honest_fraction,
        "min_reports": fewest,
    }
    if fewest <= dishonest:
        with pytest.raises(ValueError, match=f"min_reports={fewest}"):
            GaussianReports(**options)
    else:
        reports = GaussianReports(**options)
        assert reports.mechanism.num_users == reports.honest_reports == fewest - dishonest
        assert reports.fewest_reports == fewest


@pytest.mark.parametrize(
    ("selects", "mechanism", "fewest"),
    [
        ("poisson", ShuffledCheckIn(noise_multiplier=1.5, num_users=40, sample_rate=0.5), 1),
        ("fixed_size", SubsampledShuffle(noise_multiplier=1.5, num_users=40, sample_rate=0.5), 20),
    ],
)
def test_a_server_that_selects_asks_whom_it_drew_and_these_toss_no_coin(selects, mechanism, fewest):
    """300 draws: how often each client is among them, refused by chance once in 10⁹."""
    reports = GaussianReports(**GAUSSIAN, server_selects=selects)
    assert (reports.mechanism, reports.coin_rate, reports.fewest_reports) == (
        mechanism,
        1.0,
        fewest,
    )
    assert reports.selected
    with pytest.raises(ValueError, match="from all num_users=40 clients, got 39"):
        reports.ask(range(39))
    asked = [reports.ask(range(100, 140)) for _ in range(300)]
    if selects == "fixed_size":
        assert {len(each) for each in asked} == {20}
    times = stats.binom(300, 0.5)
    for client in range(100, 140):
        assert times.ppf(1e-11) <= sum(client in each for each in asked) <= times.isf(1e-11)


def test_the_accountant_counts_on_honest_clients_alone():
    assert GaussianReports(**GAUSSIAN).mechanism == ShuffledCheckIn(
        noise_multiplier=1.5, num_users=40, sample_rate=0.5
    )
    everyone = GaussianReports(
        **{**GAUSSIAN, "sample_rate": 1.0}, honest_fraction=0.75, min_reports=32
    )
    assert everyone.mechanism == ShuffleGauss(noise_multiplier=1.5, num_users=22)
    some = BitSums(**SUMS, honest_fraction=0.75, min_reports=30)
    assert some.mechanism == ShuffledSums.of_protocol(some.protocol, sample_rate=0.5)
    assert (some.mechanism.honest_fraction, some.fewest_reports, some.most_reports) == (0.5, 30, 40)


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({}, "kind in settings"),
        ({"kind": "laplace"}, "kind in settings"),
        ({"kind": "gaussian_reports", **GAUSSIAN, "sigma": 1}, "sigma"),
        ({"kind": "gaussian_reports", "dimension": 5}, "max_norm, noise_multiplier, num_users"),
        (
            {"kind": "gaussian_reports", **GAUSSIAN, "honest_fraction": 0.5, "min_reports": 20},
            "honest_fraction",
        ),
        ({"kind": "gaussian_reports", **GAUSSIAN, "min_reports": 41}, "min_reports"),
        ({"kind": "gaussian_reports", **GAUSSIAN, "server_selects": "coins"}, "server_selects"),
        (
            {
                "kind": "gaussian_reports",
                **GAUSSIAN,
                "server_selects": "poisson",
                "min_reports": 30,
            },
            "min_reports=30",
        ),
        (
            {
                "kind": "gaussian_reports",
                **GAUSSIAN,
                "server_selects": "fixed_size",
                "sample_rate": 1.0,
            },
            "sample_rate below 1",
        ),
        ({"kind": "bit_sums", **SUMS, "min_reports": 13}, "a third of num_users=40"),
        ({"kind": "gaussian_reports", **GAUSSIAN, "noise_multiplier": 0}, "noise_multiplier"),
        ({"kind": "bit_sums", **SUMS, "messages": "bytes"}, "messages"),
        ({"kind": "bit_sums", **SUMS, "max_norm": math.nan}, "max_norm"),
        ({"kind": "bit_sums", **SUMS, "honest_fraction": 0.1}, "honest_fraction"),
    ],
)
def test_bad_settings_are_named(settings, named):
    with pytest.raises(ValueError, match=named):
        ReportFormat.of_settings(settings)
