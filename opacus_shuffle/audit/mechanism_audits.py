r"""Audits of mechanisms: each is run millions of times with and without a record.

The shuffle Gaussian is Liew and Takahashi's (SG); the permuted Gaussian is that of weight shuffling
(WS, Yang, Ji and Xiang; Definition 6 there calls it shuffled); secret check-in is this library's,
where who does not take part sends noise. One pair of data sets, one adversary, one test: so these
audits say what a formula is worth, not whether a training run is programmed correctly.

>>> seeded = torch.Generator().manual_seed(0)
>>> result = audit_gaussian(noise_multiplier=1.0, delta=1e-5, trials=100_000, generator=seeded)
>>> [round(claim.epsilon, 2) for claim in result.claims]
[4.38]
>>> [finding.lower.epsilon <= 4.38 for finding in result.findings]
[True, True]

WS Theorem 6 says 0.5 of this run:

>>> result = audit_permuted_gaussian(
...     noise_multiplier=0.27372, dimension=85_800_000, steps=500, sample_rate=0.02, delta=5e-6,
...     pair="all_but_one", trials=20_000, generator=torch.Generator().manual_seed(0))
>>> [claim.name for claim in result.contradicted]
['published']
>>> result.largest.lower.epsilon > 7
True
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from scipy.special import logsumexp, ndtri_exp

from opacus_shuffle.accountants.bounds.registry import Rounds, compute_bound
from opacus_shuffle.accountants.mechanisms import SecretCheckIn, ShuffledWeights, ShuffleGauss
from opacus_shuffle.analysis import gaussian
from opacus_shuffle.analysis.report_shapes import shape_of
from opacus_shuffle.analysis.secret_checkin import SecretRound
from opacus_shuffle.audit.lower_bounds import audit_scores, epsilon_lower_bound
from opacus_shuffle.audit.result import AuditResult, Claim, Finding
from opacus_shuffle.core.guarantees import (
    EVERY_DATA_SET,
    Adjacency,
    Guarantee,
    NotCovered,
    PrivacyBound,
)
from opacus_shuffle.core.randomness import stream_of
from opacus_shuffle.core.rounding import plural, round_up
from opacus_shuffle.core.validation import (
    integer,
    noise_level,
    number,
    one_of,
    open_unit_interval,
)
from opacus_shuffle.protocols.linear_reports import tilted

Vector = npt.NDArray[np.float64]

PAIRS = {
    "one_coordinate": "the record's lies in one coordinate, at the clipping norm",
    "all_but_one": "the record's is 0 in one coordinate and the same in all others, at the "
    "clipping norm",
    "oblique": "the record's is at 46 degrees to one with equal coordinates, at the clipping norm",
}

FEWEST = 1000
"""Trials below which an audit shows next to nothing."""

MOST_USERS = 10_000_000
MOST_TRIALS = 10**9
MOST_DRAWS = 10**12

GAUSSIAN_REPORTS, TILTED_REPORTS = 200_000_000, 20_000_000
"""Reports drawn under each hypothesis where nothing else is asked for: about a minute of one core.

A linear one takes ten times as long: its place is found by halving an interval 60 times.
"""

CHUNK = 2**20
"""Random numbers held at once, 8 MB."""


def audit_gaussian(
    *,
    noise_multiplier: float,
    delta: float,
    trials: int = 5_000_000,
    confidence: float = 0.95,
    generator: torch.Generator | None = None,
) -> AuditResult:
    """Audits one Gaussian step, where everything is known: a test of the audit itself.

    N(0, σ²) against N(1, σ²), in clipping norms: the noised sum of nothing but the record,
    projected on its direction.

    Args:
        noise_multiplier: σ over the clipping norm.
        delta: δ in (0, 1).
        trials: Runs under each hypothesis, at least 1000. Half of them choose the test.
        confidence: Of each finding, in (0, 1).
        generator: A CPU generator, for repeatable audits; by default a secret one.

    Returns:
        The exact ε as the claim (Balle & Wang 2018), and two findings: from counts alone, and with
        the Gaussian trade-off curve that the mechanism has (Nasr et al. 2023), which comes closer.

    Raises:
        ValueError: If an argument is out of range.
    """
    sigma = noise_level("noise_multiplier", noise_multiplier)
    delta, trials, confidence = common(delta, trials, confidence)
    rng = numpy_generator(generator)
    null = rng.standard_normal(trials)
    alternative = rng.standard_normal(trials) + 1 / sigma
    sees = "sees the noised sum"
    counts = audit_scores(null, alternative, delta=delta, confidence=confidence)
    gdp = audit_scores(null, alternative, delta=delta, confidence=confidence, method="gdp")
    claims = (gaussian_step(sigma, delta),)
    return AuditResult(
        f"Gaussian mechanism, noise multiplier {sigma:.6g}, one step",
        delta,
        claims,
        (Finding("counts", counts, sees), Finding("gdp", gdp, sees)),
        reach(claims, trials, delta, confidence),
    )


def audit_shuffle_gauss(
    *,
    noise_multiplier: float,
    num_users: int,
    delta: float,
    others: float = 0.0,
    steps: int = 1,
    adjacency: str = "zero_out",
    trials: int | None = None,
    confidence: float = 0.95,
    generator: torch.Generator | None = None,
) -> AuditResult:
    r"""Audits the shuffle Gaussian in one dimension, against who knows all other users' values.

    All others hold v = ``others``; user 1 holds a₁ = 1 or a₀, 0 or −1. The test goes by the exact
    likelihood ratio of the shuffled reports y, log Σᵢ p_{a₁}(yᵢ)/p_v(yᵢ) − log Σᵢ
    p_{a₀}(yᵢ)/p_v(yᵢ), summed over the rounds: no test for this pair of data sets is better. With
    ``others=0`` it is the papers' pair, with −1 a worse one.

    Args:
        noise_multiplier: Local σ, one report's noise over the clipping norm.
        num_users: n, reports per round, at most 10⁷.
        delta: δ in (0, 1).
        others: Every other user's value, in [−1, 1] clipping norms.
        steps: Rounds, with fresh noise and a fresh permutation each.
        adjacency: ``"zero_out"``: user 1's value becomes 0; ``"replace"``: −1.
        trials: Runs under each hypothesis, at least 1000; by default as many as take 4·10⁸ reports,
            up to a million.
        confidence: In (0, 1).
        generator: A CPU generator, for repeatable audits; by default a secret one.

    Returns:
        The claims of :func:`opacus_shuffle.accountants.compute.privacy_bound` that cover the
        adjacency, and one finding.

    Raises:
        ValueError: If an argument is out of range.

    Formal Guarantees:
        With probability ``confidence`` the ε of this pair of data sets at δ is at least the
        finding. ``published`` and ``pair`` are about the pair with ``others=0`` only.
    """
    mechanism = ShuffleGauss(noise_multiplier=noise_multiplier, num_users=num_users)
    return audit_reports(
        mechanism,
        report="gaussian",
        title="shuffle Gaussian",
        bounds=("published", "pair", "certified"),
        delta=delta,
        others=others,
        steps=steps,
        adjacency=adjacency,
        trials=trials,
        confidence=confidence,
        generator=generator,
    )


def audit_secret_checkin(
    *,
    noise_multiplier: float,
    num_users: int,
    sample_rate: float,
    delta: float,
    report: str = "linear",
    others: float = 0.0,
    steps: int = 1,
    adjacency: str = "zero_out",
    trials: int | None = None,
    confidence: float = 0.95,
    generator: torch.Generator | None = None,
) -> AuditResult:
    r"""Audits secret check-in in one dimension, against who knows all other users' values.

    As :func:`audit_shuffle_gauss`, with each user's secret coin: user 1's and all others' are
    tossed anew in every round, and the densities in the likelihood ratio are those of a report
    whose coin is not known. Linear and step reports are drawn as training draws them.

    Args:
        noise_multiplier: Local σ, one report's noise over the clipping norm.
        num_users: n, the users who follow the protocol and keep their coins and noise secret, at
            most 10⁷. (Those of anybody else hide nothing, and can be left out.)
        sample_rate: q in (0, 1), the coins' rate.
        delta: δ in (0, 1).
        report: ``"linear"``, ``"step"`` or ``"gaussian"``: how a user reports whose coin shows
            heads.
        others: Every other user's value, in [−1, 1] clipping norms: −1, opposite to user 1's, is
            the farthest that there is, and the worst that is known.
        steps: Rounds, with fresh coins, fresh noise and a fresh permutation each.
        adjacency: ``"zero_out"``: user 1's value becomes 0; ``"replace"``: −1.
        trials: Runs under each hypothesis, at least 1000; by default as many as take 4·10⁸ reports,
            up to a million. Linear reports take ten times as long to draw: 4·10⁷ of them.
        confidence: In (0, 1).
        generator: A CPU generator, for repeatable audits; by default a secret one.

    Returns:
        The claim ``certified``, and one finding.

    Raises:
        ValueError: If an argument is out of range.

    Formal Guarantees:
        With probability ``confidence`` the ε of this pair of data sets at δ, and so that of any
        bound for all data sets that satisfy these conditions, is at least the finding.
    """
    mechanism = SecretCheckIn(
        noise_multiplier=noise_multiplier,
        num_users=num_users,
        sample_rate=sample_rate,
        report=report,
    )
    return audit_reports(
        mechanism,
        report=mechanism.report,
        title=f"secret check-in, {report} reports, sample rate {mechanism.sample_rate:.4g}",
        bounds=("certified",),
        delta=delta,
        others=others,
        steps=steps,
        adjacency=adjacency,
        trials=trials,
        confidence=confidence,
        generator=generator,
    )


def audit_permuted_gaussian(
    *,
    noise_multiplier: float,
    dimension: int,
    delta: float,
    steps: int = 1,
    sample_rate: float = 1.0,
    batch_clip: float = 1.0,
    pair: str = "one_coordinate",
    trials: int | None = None,
    confidence: float = 0.95,
    generator: torch.Generator | None = None,
) -> AuditResult:
    r"""Runs the mechanism with and without the record, and shows what one test tells.

    Per step the adversary sees d noised coordinates in uniformly random order.
    ``"one_coordinate"``: the test goes by the largest coordinate of all steps, drawn from its
    closed distribution: with K ~ Bin(T, q) steps that the record takes part in, the largest of T·d
    − K coordinates of noise, and the largest of K around c. Else it goes by the likelihood ratio of
    the T sums of coordinates. A better test can only show a larger ε.

    Args:
        noise_multiplier: σ/c, of the **sum** (as DP-SGD's).
        dimension: d, coordinates that are permuted among themselves, up to 2⁵³.
        delta: δ in (0, 1).
        steps: T.
        sample_rate: q, with which the record takes part in a step (Poisson sampling; the adversary
            is not told).
        batch_clip: c′/c, the norm that the sum is clipped to before the noise: below 1 it shrinks
            the record's gradient.
        pair: ``"one_coordinate"``, ``"all_but_one"`` or ``"oblique"``.
        trials: Runs under each hypothesis, at least 1000, half of them to choose the test. By
            default 10⁷, for the other two pairs no more than take 2·10⁸ random numbers, one per
            step.
        confidence: In (0, 1).
        generator: A CPU generator, for repeatable audits; by default a secret one.

    Returns:
        The claims ``published`` (WS Theorem 6, composed), ``pair`` (the first pair, exactly; not
        with the second) and ``certified`` (DP-SGD's own), and one finding.

    Raises:
        ValueError: If an argument is out of range.

    Formal Guarantees:
        With probability ``confidence`` the pair's ε at δ, and so that of any bound for all data
        sets that satisfy these conditions, is at least the finding, for an adversary who sees the
        permuted gradients and nothing else.
    """
    dimension, steps = integer("dimension", dimension), integer("steps", steps)
    mechanism = ShuffledWeights(
        noise_multiplier=noise_multiplier,
        sample_rate=sample_rate,
        dimension=dimension,
        batch_clip=batch_clip,
    )
    rate = mechanism.sample_rate
    one_of("pair", pair, PAIRS)
    single = pair == "one_coordinate"
    if not single and dimension < 2:
        raise ValueError(
            f"pair={pair!r} needs a dimension of at least 2, got {dimension}: use 'one_coordinate'"
        )
    if trials is None:
        trials = 10_000_000 if single else min(10_000_000, max(FEWEST, 100_000_000 // steps))
    delta, trials, confidence = common(delta, trials, confidence, draws=1 if single else steps)
    rng = numpy_generator(generator)
    shift = mechanism.record_norm / mechanism.noise_multiplier
    test = "largest coordinate" if single else "sum of coordinates"
    if single:
        scores = largest_coordinates(
            shift=shift, dimension=dimension, steps=steps, sample_rate=rate, trials=trials, rng=rng
        )
    else:
        mean = shift * (
            math.sqrt((dimension - 1) / dimension)
            if pair == "all_but_one"
            else math.cos(math.radians(46))
        )
        scores = summed_coordinates(
            mean=mean, steps=steps, sample_rate=rate, trials=trials, rng=rng
        )
    bounds = ("published", "pair", "certified") if single else ("published", "certified")
    claims = claimed([(mechanism, steps)], bounds, delta=delta)
    sees = (
        "sees the noised gradient of every step, its coordinates in random order, and knows all "
        "other records"
    )
    return AuditResult(
        f"permuted Gaussian, noise multiplier {mechanism.noise_multiplier:.6g}, dimension "
        f"{dimension:,}, "
        + plural(steps, "step")
        + (f", sample rate {rate:.4g}" if rate < 1 else ""),
        delta,
        claims,
        (Finding(test, audit_scores(*scores, delta=delta, confidence=confidence), sees),),
        (
            f"Audited: the gradients of all others add up to zero, {PAIRS[pair]}.",
            *reach(claims, trials, delta, confidence),
        ),
    )


def numpy_generator(generator: torch.Generator | None) -> np.random.Generator:
    """Makes a generator of NumPy from a torch generator, or from a secret."""
    return np.random.default_rng(stream_of(generator).words(4))


def chunks(total: int, width: int) -> Iterator[slice]:
    """Yields slices that cut ``total`` runs of ``width`` numbers into pieces."""
    step = max(1, CHUNK // width)
    for start in range(0, total, step):
        yield slice(start, min(start + step, total))


def claimed(
    rounds: Rounds, bounds: Iterable[str], *, delta: float, adjacency: str = "zero_out"
) -> tuple[Claim, ...]:
    """Returns the finite values of these bounds for the rounds."""
    covered = []
    for bound in bounds:
        with contextlib.suppress(NotCovered):
            covered.append(compute_bound(rounds, delta=delta, bound=bound, adjacency=adjacency))
    return tuple(Claim(bound) for bound in covered if math.isfinite(bound.epsilon))


def gaussian_step(sigma: float, delta: float) -> Claim:
    """Returns the exact ε of one Gaussian step (Balle & Wang 2018)."""
    return Claim(
        PrivacyBound(
            mechanism="gaussian",
            bound="certified",
            epsilon=gaussian.compute_epsilon(mu=1 / sigma, delta=delta),
            delta=delta,
            adjacency=Adjacency.ZERO_OUT,
            guarantee=Guarantee.PROVED,
            covers=EVERY_DATA_SET,
            rounds=1,
            trusted="the server",
            adversary="sees the noised sum of gradients",
        )
    )


def audit_reports(
    mechanism: ShuffleGauss | SecretCheckIn,
    *,
    report: str,
    title: str,
    bounds: Iterable[str],
    delta: float,
    others: float,
    steps: int,
    adjacency: str,
    trials: int | None,
    confidence: float,
    generator: torch.Generator | None,
) -> AuditResult:
    """Audits one user's value on a line, among the shuffled reports of users who hold another.

    In the shuffle Gaussian all take part, as if every coin had rate 1.

    Args:
        mechanism: What is audited; all its users are honest.
        report: The shape of its reports.
        title: What the mechanism is called.
        bounds: Names of the claims.
        delta: As of :func:`audit_secret_checkin`, and so are all that follow.
        others: In [−1, 1].
        steps: Rounds.
        adjacency: Whether user 1's value becomes 0 or −1.
        trials: Runs under each hypothesis, or None.
        confidence: In (0, 1).
        generator: A CPU generator, or None.
    """
    steps, users = integer("steps", steps), mechanism.num_users
    kind = SecretRound(
        noise_multiplier=mechanism.noise_multiplier,
        num_users=users,
        sample_rate=mechanism.sample_rate,
        report=report,
    )
    if users > MOST_USERS:
        raise ValueError(
            f"num_users must not exceed {MOST_USERS:,}, got {users}: every run draws all reports; "
            "audit fewer users"
        )
    wanted = "lie in [-1, 1], in units of the clipping norm"
    others = number("others", others, wanted, lambda value: -1 <= value <= 1)
    neighbours = Adjacency(adjacency)
    absent = 0.0 if neighbours is Adjacency.ZERO_OUT else -1.0
    if trials is None:
        affordable = GAUSSIAN_REPORTS if report == "gaussian" else TILTED_REPORTS
        trials = min(1_000_000, max(FEWEST, affordable // (users * steps)))
    delta, trials, confidence = common(delta, trials, confidence, draws=users * steps)
    rng = numpy_generator(generator)
    scores = likelihood_ratios(
        kind, present=1.0, absent=absent, others=others, steps=steps, trials=trials, rng=rng
    )
    claims = claimed([(mechanism, steps)], bounds, delta=delta, adjacency=neighbours)
    sees = "sees every shuffled report of every round, and knows all other users' values"
    unseen = ", but not who takes part" if kind.sample_rate < 1 else ""
    return AuditResult(
        f"{title}, noise multiplier {kind.noise_multiplier:.6g}, {plural(users, 'user')}, "
        f"{plural(steps, 'round')}, {neighbours}",
        delta,
        claims,
        (
            Finding(
                "likelihood ratio",
                audit_scores(*scores, delta=delta, confidence=confidence),
                f"{sees}{unseen}",
            ),
        ),
        (
            f"Audited: all other users hold {others:g}, and one user holds 1 or {absent:g}.",
            *reach(claims, trials, delta, confidence),
        ),
    )


def likelihood_ratios(
    kind: SecretRound,
    *,
    present: float,
    absent: float,
    others: float,
    steps: int,
    trials: int,
    rng: np.random.Generator,
) -> tuple[Vector, Vector]:
    """Draws each run's log likelihood ratio over all rounds, without and with the record.

    User 1 holds ``absent`` or ``present``, all others hold ``others``, in clipping norms.
    """
    totals = np.zeros(trials), np.zeros(trials)
    for held, total in zip((absent, present), totals, strict=True):
        # The order of reports carries nothing: user 1 may as well come first.
        values = np.append(held, np.full(kind.num_users - 1, others))
        for part in chunks(trials, kind.num_users):
            for _ in range(steps):
                reports = draw_reports(kind, values, part.stop - part.start, rng)
                total[part] += log_sum_ratio(kind, reports, present, others)
                total[part] -= log_sum_ratio(kind, reports, absent, others)
    return totals


def draw_reports(kind: SecretRound, values: Vector, runs: int, rng: np.random.Generator) -> Vector:
    """Draws one report of every value, in units of their noise, of shape (runs, values).

    Every report's coin is tossed anew: where it shows tails the report is N(0, 1).
    """
    reports = rng.standard_normal((runs, len(values)))
    if kind.report != "gaussian":
        # A shorter vector is reported as one at the clipping norm, more rarely.
        heads = rng.random(reports.shape) < kind.sample_rate * np.abs(values)
        uniforms = torch.from_numpy(rng.uniform(-1.0, 1.0, np.count_nonzero(heads)))
        signs = np.broadcast_to(np.sign(values), reports.shape)[heads]
        reports[heads] = signs * tilted(uniforms, kind.noise_multiplier, kind.report).numpy()
    else:
        shifts = values / kind.noise_multiplier
        # No coin is tossed where all take part.
        reports += shifts * (kind.sample_rate == 1 or rng.random(reports.shape) < kind.sample_rate)
    return reports


def log_density(kind: SecretRound, value: float, reports: Vector) -> Vector:
    """Returns the log density of each report if it is one of ``value``, over that of N(0, 1)."""
    if kind.report != "gaussian":
        excess = shape_of(kind.report, kind.noise_multiplier).excess(np.sign(value) * reports)
        return np.log1p(kind.sample_rate * abs(value) * excess)
    shift = value / kind.noise_multiplier
    return log_sampled(shift * reports - shift**2 / 2, kind.sample_rate)


def log_sampled(log_ratios: Vector, sample_rate: float) -> Vector:
    """Returns log(1 − q + qR) of log R: the ratio if a coin of rate q says who takes part."""
    if sample_rate == 1:
        return log_ratios
    return np.logaddexp(math.log1p(-sample_rate), math.log(sample_rate) + log_ratios)


def log_sum_ratio(kind: SecretRound, reports: Vector, value: float, others: float) -> Vector:
    """Returns log Σᵢ f(yᵢ)/g(yᵢ) of every row y: f is the density of ``value``, g of ``others``.

    It is the likelihood ratio of user 1's value to the others', but for log n.
    """
    ratios = log_density(kind, value, reports) - log_density(kind, others, reports)
    sums: Vector = logsumexp(ratios, axis=1)
    return sums


def common(delta: Any, trials: Any, confidence: Any, *, draws: int = 1) -> tuple[float, int, float]:
    """Checks the arguments that all audits share, and returns them.

    A trial takes ``draws`` random numbers.
    """
    trials = integer("trials", trials, minimum=FEWEST)
    if trials > MOST_TRIALS or trials * draws > MOST_DRAWS:
        raise ValueError(
            f"trials must not exceed {MOST_TRIALS:,}, nor all random numbers together "
            f"{MOST_DRAWS:,}, got {trials:,} trials "
            f"of {draws:,} numbers each: take fewer trials, steps or num_users"
        )
    return open_unit_interval("delta", delta), trials, open_unit_interval("confidence", confidence)


def reach(
    claims: tuple[Claim, ...], trials: int, delta: float, confidence: float
) -> tuple[str, ...]:
    """Returns a sentence if not even a perfect test could have contradicted the claim."""
    counted = trials - trials // 2
    most = epsilon_lower_bound(0, 0, counted, delta, confidence).epsilon
    beyond = ", ".join(claim.name for claim in claims if claim.epsilon > most)
    said = (
        f"Counts alone, from {counted:,} runs, cannot show an epsilon above {round_up(most, 3)}, "
        "so they could not contradict"
    )
    return (f"{said} {beyond}: that takes more trials.",) if beyond else ()


def largest_coordinates(
    *,
    shift: float,
    dimension: int,
    steps: int,
    sample_rate: float,
    trials: int,
    rng: np.random.Generator,
) -> tuple[Vector, Vector]:
    """Draws each run's largest coordinate over all steps, without and with the record.

    They are in units of the noise.
    """
    coordinates = float(steps) * dimension
    null = largest_normal(coordinates, trials, rng)
    shifted = rng.binomial(steps, sample_rate, trials)
    noise = largest_normal(coordinates - shifted, trials, rng)
    return null, np.maximum(noise, shift + largest_normal(shifted, trials, rng))


def largest_normal(count: npt.ArrayLike, size: int, rng: np.random.Generator) -> Vector:
    """Draws ``size`` times the largest of ``count`` standard normals; −∞ of none at all.

    ``count`` is one number, or one per draw. It is Φ⁻¹(U^{1/count}): one random number, however
    large the count is. With the exponential E = −log U that is the quantile whose logarithm is
    −E/count, and inverting log Φ loses nothing where Φ itself rounds to 1.
    """
    exponential = rng.standard_exponential(size)
    with np.errstate(divide="ignore"):
        return ndtri_exp(-exponential / np.asarray(count, dtype=np.float64))


def summed_coordinates(
    *, mean: float, steps: int, sample_rate: float, trials: int, rng: np.random.Generator
) -> tuple[Vector, Vector]:
    """Draws each run's log likelihood ratio of the steps' sums, without and with the record.

    A sum is N(0, 1), and with rate q N(``mean``, 1) if the record is there.
    """
    totals = np.zeros(trials), np.zeros(trials)
    for present, total in zip((False, True), totals, strict=True):
        for part in chunks(trials, steps):
            sums = rng.standard_normal((part.stop - part.start, steps))
            if present:
                sums += mean * (rng.random(sums.shape) < sample_rate)
            total[part] = log_sampled(mean * sums - mean**2 / 2, sample_rate).sum(axis=1)
    return totals
