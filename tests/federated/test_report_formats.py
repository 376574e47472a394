"""What clients send: clipped, noised, in their format; and what is no such report is not taken."""

import json
import math

import numpy as np
import pytest
import torch
from helpers.report_ratios import RATIOS, integral
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats
from scipy.special import ndtr

from opacus_shuffle import SecretCheckIn, ShuffledCheckIn, ShuffledSums, ShuffleGauss
from opacus_shuffle.core.randomness import SecretGenerator
from opacus_shuffle.federated import (
    GaussianReports,
    ReportFormat,
    SecretReports,
    ShuffledSumReports,
)

USERS = 10
GAUSSIAN = {
    "dimension": 5,
    "max_norm": 2.0,
    "noise_multiplier": 1.5,
    "num_users": USERS,
    "sample_rate": 0.5,
}
SUMS = {**GAUSSIAN, "delta": 1e-6}
SECRET = {
    "secret, linear": SecretReports(**GAUSSIAN),
    "secret, gaussian": SecretReports(**GAUSSIAN, report="gaussian"),
    "secret, step": SecretReports(**GAUSSIAN, report="step"),
}
VECTORS = {"gaussian": GaussianReports(**GAUSSIAN), **SECRET}
FORMATS = {"sums": ShuffledSumReports(**SUMS), **VECTORS}
every_format = pytest.mark.parametrize("reports", FORMATS.values(), ids=FORMATS)
every_vector_format = pytest.mark.parametrize("reports", VECTORS.values(), ids=VECTORS)


def mixed(reports: ReportFormat, sent: list[bytes]) -> bytes:
    """What the shuffler hands over of these reports."""
    stored: list = []
    for report in sent:
        reports.keep(stored, reports.open(report)[1])
    return reports.mix(stored, SecretGenerator())


def sized(reports: ReportFormat, **sizes) -> ReportFormat:
    """The format with other sizes."""
    return ReportFormat.of_settings({**reports.settings, **sizes})


def numbers_of(reports: ReportFormat, *vectors: torch.Tensor | None) -> np.ndarray:
    """The numbers of these clients' reports, over the standard deviation of their noise."""
    stream = SecretGenerator()
    sent = b"".join(reports.open(reports.encode(1, vector, stream))[1] for vector in vectors)
    return np.frombuffer(sent, "<f4").reshape(len(vectors), -1).astype(np.float64) / reports.scale


@every_format
def test_the_estimate_is_the_clipped_sum_within_its_noise(reports):
    """Of 50 rounds' mean, every coordinate within what a Gaussian exceeds once in 10¹⁰."""
    vectors = [torch.tensor([3.0, 4, 0, 0, 0]), torch.tensor([0.0, 0, 1, 0, -1])]
    vectors += [torch.zeros(5)] * (USERS - 2)
    expected = torch.tensor([1.2, 1.6, 1, 0, -1])  # the first vector is cut to norm 2
    rounds, total, stream = 50, torch.zeros(5, dtype=torch.float64), SecretGenerator(secure=True)
    for number in range(rounds):
        sent = [reports.encode(number, vector, stream) for vector in vectors]
        total += reports.estimate(mixed(reports, sent), USERS)
    # Along its vector a linear report may vary by a quarter more than across (13.4).
    noise = math.sqrt(USERS + 0.5) * 1.5 * 2.0
    if isinstance(reports, ShuffledSumReports):
        noise = math.sqrt(reports.protocol.variance)
    most = stats.norm.isf(1e-10) * noise / math.sqrt(rounds)
    assert float((total / rounds - expected).abs().max()) < most


@every_vector_format
def test_every_report_has_noise_of_its_own(reports):
    """Squared norms of noise of 20,000 coordinates, refused by chance once in 10¹⁰.

    Of one report, and of the sum of all ten.
    """
    reports, chi = sized(reports, dimension=20_000), stats.chi2(20_000)
    alone = numbers_of(reports, *[torch.zeros(20_000)] * USERS)
    for noise, count in ((alone[0], 1), (alone.sum(axis=0), USERS)):
        assert chi.ppf(5e-11) < np.square(noise).sum() / count < chi.isf(5e-11)


@pytest.mark.parametrize("reports", SECRET.values(), ids=SECRET)
@pytest.mark.parametrize("share", [0.6, 1.0])
def test_a_secret_report_has_the_law_of_its_shape_along_the_vector_and_is_normal_across(
    reports, share
):
    """Kolmogorov-Smirnov tests of 400 reports, each of which refuses by chance once in 10⁹.

    With so little noise that half of a norm more or less would show.
    """
    reports, ratio = sized(reports, noise_multiplier=0.3), RATIOS[reports.report](0.3)

    def along(z):
        """The chance of a smaller part along a vector of this share of the norm C."""
        if reports.report == "gaussian":
            return ndtr(z - share / 0.3)
        return share * (1 - ratio.above(z)) + (1 - share) * ndtr(z)

    unit = np.array([0.6, 0.0, -0.8, 0.0, 0.0])
    others = np.array([[0.8, 0.0, 0.6, 0.0, 0.0], [0.0, 1.0, 0.0, 0.0, 0.0]])
    drawn = numbers_of(reports, *[torch.from_numpy(share * 2.0 * unit)] * 400)
    assert stats.kstest(drawn @ unit, along).pvalue > 1e-9
    for other in others:
        assert stats.kstest(drawn @ other, "norm").pvalue > 1e-9


@pytest.mark.parametrize("sign", [1, -1])
def test_a_part_along_the_vector_lies_as_far_out_as_107_bits_reach(sign, monkeypatch):
    """A step report of a number, in either tail, by the chance of what lies beyond it.

    A uniform number of 53 bits ends at 8.3 deviations, where that chance is 1e-16.
    """
    reports, ratio = sized(SECRET["secret, step"], dimension=1), RATIOS["step"](1.5)
    drawn = torch.tensor([sign * 2.0**-100], dtype=torch.float64)
    monkeypatch.setattr(SecretGenerator, "signed_uniforms", lambda *_: drawn)
    part = float(numbers_of(reports, torch.tensor([2.0])).squeeze())
    beyond = integral(ratio.tilt, *sorted((part, part + 9 * sign)), kinks=[0.0])
    # A grid of 1e-6 deviations moves a chance eleven deviations out by 1e-5 of it.
    assert beyond == pytest.approx(2.0**-101, rel=1e-4)


@pytest.mark.parametrize("reports", SECRET.values(), ids=SECRET)
@pytest.mark.parametrize("scale", [None, 0.0, 1e-320, 1e-12, 1e-3, 1.0, 100.0])
def test_no_bit_of_a_secret_report_tells_whether_a_vector_is_in_it(reports, scale):
    """All are multiples of one grid, and the last three bits of 20,000 are uniform.

    A χ² test, which refuses by chance once in 10⁹; single precision holds all of them exactly.
    """
    reports = sized(reports, dimension=20_000, max_norm=1.7)
    direction = torch.linspace(-1, 1, 20_000, dtype=torch.float64) / 80
    vector = None if scale is None else scale * direction
    report = reports.encode(1, vector)
    assert len(report) == 12 + 4 * 20_000
    steps = np.frombuffer(report[12:], "<f4").astype(np.float64) / reports.grid
    assert math.log2(reports.grid).is_integer()
    assert reports.longest_report / reports.grid <= 2**24  # so many steps have 24 bits
    assert reports.grid < 1e-3 * reports.scale  # far below the noise
    assert np.array_equal(steps, np.round(steps))
    last_bits = np.bincount(steps.astype(np.int64) & 7, minlength=8)
    assert stats.chisquare(last_bits).pvalue > 1e-9


def test_a_count_is_that_of_the_bits_a_user_of_the_protocol_sends():
    """The distribution of coordinates' counts against that of ``randomize``, by a χ² test."""
    reports = ShuffledSumReports(**{**SUMS, "dimension": 2000})
    x = torch.full((2000,), 0.7 * 2.0 / math.sqrt(2000))
    ours = np.frombuffer(reports.open(reports.encode(1, x))[1], reports.count_type).astype(int)
    theirs = reports.protocol.randomize(x).numpy()
    edges = np.unique(np.quantile(np.concatenate([ours, theirs]), np.linspace(0, 1, 12)))
    table = np.array([np.histogram(counts, edges)[0] for counts in (ours, theirs)]) + 1
    assert stats.chi2_contingency(table).pvalue > 1e-9


@given(values=st.lists(st.floats(), min_size=5, max_size=5))
def test_no_vector_is_longer_than_the_norm_after_clipping(values):
    """Also where squares over- or underflow in double precision, and entries are no numbers."""
    vector = torch.tensor(values, dtype=torch.float64)
    clipped = FORMATS["gaussian"].clip(vector)
    norm = math.hypot(*clipped.tolist())
    assert norm <= 2.0
    if not torch.isfinite(vector).all():
        assert norm == 0
    elif math.hypot(*values) <= 2.0:
        assert torch.equal(clipped, vector)


@given(
    direction=st.lists(st.floats(-1, 1, width=32), min_size=5, max_size=5).filter(
        lambda entries: math.hypot(*entries) > 1e-3
    ),
    longer=st.one_of(st.sampled_from([1 + 1e-12, 1.005]), st.floats(1 + 1e-12, 1.1)),
)
def test_a_vector_a_little_too_long_is_cut_to_the_norm_and_keeps_its_direction(direction, longer):
    """Double precision scales a vector to some 1e-15: the norm falls short by a rounding alone."""
    vector = torch.tensor(direction, dtype=torch.float64)
    vector *= longer * 2.0 / math.hypot(*vector.tolist())
    clipped = FORMATS["sums"].clip(vector)
    assert 2.0 * (1 - 1e-11) <= math.hypot(*clipped.tolist()) <= 2.0
    assert torch.allclose(clipped, vector / longer, rtol=1e-11, atol=0)


@pytest.mark.parametrize(
    ("bits", "width"), [(64, 1), (255, 1), (256, 2), (65535, 2), (65536, 4), (2**32, 8)]
)
def test_reports_of_nothing_but_ones_decode(bits, width):
    """Where all bits are 1, that many is the largest count, and one byte holds no 256."""
    reports = ShuffledSumReports(**SUMS)
    reports.bits = bits
    assert reports.bytes_per_report == 5 * width
    all_ones = reports.encode(1, torch.zeros(5))[:12] + np.full(5, bits, f"<u{width}").tobytes()
    estimate = reports.estimate(mixed(reports, [all_ones] * USERS), USERS)
    assert torch.equal(estimate, reports.protocol.decode(torch.full((5,), USERS * bits), USERS))
    if bits < 2 ** (8 * width) - 1:
        one_more = all_ones[:12] + np.full(5, bits + 1, f"<u{width}").tobytes()
        with pytest.raises(ValueError, match=f"counts {bits + 1} ones in a coordinate of {bits}"):
            reports.open(one_more)


def test_what_is_handed_over_does_not_depend_on_the_order_of_reports():
    """Of four Gaussian reports each is the first with a chance of 1/4; refused once in 10⁹."""
    sums, gaussian = FORMATS["sums"], FORMATS["gaussian"]
    sent = [sums.encode(1, torch.full((5,), number / 50)) for number in range(4)]
    assert mixed(sums, sent) == mixed(sums, sent[::-1])
    sent = [gaussian.encode(1, torch.zeros(5)) for _ in range(4)]
    orders = [mixed(gaussian, sent) for _ in range(400)]
    times = stats.binom(400, 0.25)
    for report in sent:
        assert all(report[12:] in order for order in orders)
        first = sum(order.startswith(report[12:]) for order in orders)
        assert times.ppf(1e-10) < first < times.isf(1e-10)


@every_format
def test_whether_a_client_takes_part_is_seen_by_nobody_but_the_shuffler(reports):
    there, again, absent = (
        reports.encode(1, vector) for vector in (torch.ones(5), torch.ones(5), None)
    )
    assert there != again
    assert len(there) == len(absent)
    if isinstance(reports, SecretReports):  # of which the shuffler cannot tell, either
        assert sorted(numbers_of(reports, None, torch.ones(5)).any(axis=1)) == [True, True]
        assert len(mixed(reports, [absent, there, absent])) == 3 * reports.bytes_per_report
    if isinstance(reports, GaussianReports):  # whose zeros the shuffler takes out
        assert mixed(reports, [absent, there, absent]) == there[12:]
        assert not reports.estimate(mixed(reports, [absent]), USERS).any()


@every_format
@given(junk=st.binary(max_size=80))
def test_junk_is_not_taken(reports, junk):
    good = reports.encode(1, torch.zeros(5))
    for cut in (junk, good[:-1], good + b"\0", good[:4] + b"XXXXXXXX" + good[12:]):
        with pytest.raises(ValueError, match="report"):
            reports.open(cut)


@every_vector_format
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -1e30, 1e6])
def test_a_vector_s_report_that_no_honest_client_sends_is_not_taken(reports, value):
    """By the shuffler, nor by the server if the shuffler hands it over."""
    forged = np.array([value, 0, 0, 0, 0], "<f4").tobytes()
    honest = reports.encode(1, torch.zeros(5))
    for taking in (
        lambda: reports.open(honest[:12] + forged),
        lambda: reports.estimate(honest[12:] + forged, 2),
    ):
        with pytest.raises(ValueError, match="honest reports do not exceed"):
            taking()


@every_vector_format
def test_honest_reports_are_taken_and_longer_ones_than_they_ever_are_not(reports):
    stream = SecretGenerator()
    for number in range(300):
        assert reports.open(reports.encode(number, torch.full((5,), 100.0), stream))[0] == number
    # Noise in five coordinates is longer than 16 deviations once in 10⁵⁰.
    assert 2.0 + 9 * 3.0 < reports.longest_report < 2.0 + 17 * 3.0


@pytest.mark.parametrize("noise_multiplier", [0.2, 1.0, 50.0])
@pytest.mark.parametrize("report", ["linear", "step"])
def test_the_longest_report_is_that_whose_chance_is_bounded_by_its_variance(
    report, noise_multiplier
):
    """P(longer)² ≤ E X²·P(noise alone is longer) = 1e-60, with E X² integrated here.

    The exact tail alone does not tell: it is so far below that a wrong variance stays hidden.
    """
    reports = sized(SECRET[f"secret, {report}"], noise_multiplier=noise_multiplier)
    ratio, longest = RATIOS[report](noise_multiplier), reports.longest_report / reports.scale
    square = integral(lambda z: np.square(ratio.tilt(z)), kinks=[ratio.threshold])
    assert square * stats.chi2(5).sf(longest**2) == pytest.approx(1e-60, rel=1e-6, abs=0)


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


def test_what_is_accounted_is_the_mechanism_of_the_honest_reports():
    gaussian = {"noise_multiplier": 1.5, "num_users": USERS}
    assert FORMATS["gaussian"].mechanism == ShuffledCheckIn(**gaussian, sample_rate=0.5)
    assert FORMATS["gaussian"].min_reports == USERS
    for report in ("linear", "gaussian", "step"):
        secret = SecretCheckIn(**gaussian, sample_rate=0.5, report=report)
        assert SECRET[f"secret, {report}"].mechanism == secret
    forty = {**GAUSSIAN, "num_users": 40, "honest_fraction": 0.75}
    everyone = GaussianReports(**{**forty, "sample_rate": 1.0}, min_reports=32)
    assert everyone.mechanism == ShuffleGauss(noise_multiplier=1.5, num_users=22)
    hidden = SecretReports(**forty, min_reports=32)
    assert hidden.mechanism == SecretCheckIn(noise_multiplier=1.5, num_users=22, sample_rate=0.5)
    some = ShuffledSumReports(**forty, delta=1e-6, min_reports=30)
    assert some.mechanism == ShuffledSums.of_protocol(some.protocol, sample_rate=0.5)
    assert (some.mechanism.num_users, some.mechanism.honest_fraction) == (40, 0.5)
    assert some.mechanism.noise_multiplier >= 1.5


@every_format
def test_settings_make_the_format_that_they_are_of(reports):
    again = ReportFormat.of_settings(json.loads(json.dumps(reports.settings)))
    assert again.settings == reports.settings
    assert again.fingerprint == reports.fingerprint
    numbers = {"num_users": np.int64(USERS), "noise_multiplier": np.float64(1.5)}
    same = ReportFormat.of_settings({**reports.settings, **numbers, "min_reports": None})
    assert same.fingerprint == reports.fingerprint


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({}, "kind in settings"),
        ({"kind": "laplace"}, "kind in settings"),
        ({"kind": "gaussian_reports", **GAUSSIAN, "maxnorm": 1}, "did you mean max_norm"),
        ({"kind": "gaussian_reports", "dimension": 5}, "missing .*'max_norm'"),
        ({"kind": "shuffled_sum_reports", **SUMS, "honest_fraction": 0.3}, "honest_fraction=0.3"),
        ({"kind": "gaussian_reports", **GAUSSIAN, "min_reports": 41}, "min_reports"),
        ({"kind": "gaussian_reports", **GAUSSIAN, "noise_multiplier": 0}, "noise_multiplier"),
        ({"kind": "gaussian_reports", **GAUSSIAN, "max_norm": 1e-40}, "max_norm=1e-40"),
        ({"kind": "gaussian_reports", **GAUSSIAN, "max_norm": 1e35}, "max_norm=1e\\+35"),
        ({"kind": "secret_reports", **GAUSSIAN, "report": "bits"}, "report must be"),
        ({"kind": "secret_reports", **GAUSSIAN, "sample_rate": 1}, "sample_rate of secret"),
        ({"kind": "secret_reports", **GAUSSIAN, "noise_multiplier": 0.1}, "noise_multiplier of li"),
        ({"kind": "secret_reports", **GAUSSIAN, "max_norm": 1e30}, "range of single"),
        ({"kind": "shuffled_sum_reports", **SUMS, "min_reports": 3}, "a third of num_users=10"),
        ({"kind": "shuffled_sum_reports", **SUMS, "max_norm": math.nan}, "max_norm"),
        ({"kind": "shuffled_sum_reports", **SUMS, "dimension": 0}, "dimension"),
    ],
)
def test_bad_settings_are_named(settings, named):
    with pytest.raises(ValueError, match=named):
        ReportFormat.of_settings(settings)
