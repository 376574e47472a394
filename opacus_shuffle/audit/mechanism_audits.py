r"""Audits of mechanisms: each mechanism runs many times with and without one record.

The mechanisms are the Gaussian step of DP-SGD, the shuffle Gaussian of Liew and Takahashi (SG), and
this library's secret check-in, in which users who skip a round send noise. Each audit is about one
pair of data sets, one adversary and one test. It measures how tight a formula is. It does not show
that a training run is implemented correctly; see :mod:`opacus_shuffle.audit.training_audit`.

>>> seeded = torch.Generator().manual_seed(0)
>>> result = audit_gaussian(noise_multiplier=1.0, delta=1e-5, trials=100_000, generator=seeded)
>>> [round(claim.epsilon, 2) for claim in result.claims]
[4.38]
>>> [finding.lower.epsilon <= 4.38 for finding in result.findings]
[True, True]
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from scipy.special import logsumexp

from opacus_shuffle.accountants.bounds.registry import Rounds, compute_bound
from opacus_shuffle.accountants.mechanisms import SecretCheckIn, ShuffleGauss
from opacus_shuffle.analysis import gaussian
from opacus_shuffle.analysis.report_shapes import shape_of
from opacus_shuffle.analysis.secret_checkin import SecretRound
from opacus_shuffle.audit.lower_bounds import audit_scores, epsilon_lower_bound
from opacus_shuffle.audit.result import AuditResult, Finding
from opacus_shuffle.core.guarantees import (
    EVERY_DATA_SET,
    Adjacency,
    Guarantee,
    NotCovered,
    PrivacyBound,
)
from opacus_shuffle.core.randomness import stream_of
from opacus_shuffle.core.rounding import plural, round_up
from opacus_shuffle.core.validation import integer, noise_level, number, open_unit_interval
from opacus_shuffle.protocols.linear_reports import tilted

Vector = npt.NDArray[np.float64]

MIN_TRIALS = 1000
"""With fewer trials an audit can show only a very small ε."""

MAX_USERS = 10_000_000
MAX_TRIALS = 10**9
MAX_DRAWS = 10**12

GAUSSIAN_REPORTS, TILTED_REPORTS = 200_000_000, 20_000_000
"""Reports drawn under each hypothesis by default, which takes about a minute on one core.

A linear report takes ten times as long as a Gaussian one, because its value is found by bisection.
"""

CHUNK = 2**20
"""The number of random numbers in memory at a time, 8 MB."""


def audit_gaussian(
    *,
    noise_multiplier: float,
    delta: float,
    trials: int = 5_000_000,
    confidence: float = 0.95,
    generator: torch.Generator | None = None,
) -> AuditResult:
    """Audits one Gaussian step, whose exact ε is available: a test of the audit itself.

    The test distinguishes N(0, σ²) from N(1, σ²), in units of the clipping norm. This is the noised
    sum of the record alone, projected on its direction.

    Args:
        noise_multiplier: σ divided by the clipping norm.
        delta: δ in (0, 1).
        trials: Runs under each hypothesis, at least 1000. Half of them choose the test.
        confidence: The confidence of each finding, in (0, 1).
        generator: A CPU generator for repeatable audits. The default is a secret generator.

    Returns:
        The exact ε as the claim (Balle & Wang 2018), and two findings. The first uses counts alone.
        The second also uses the Gaussian trade-off curve of the mechanism (Nasr et al. 2023), which
        gives a larger lower bound.

    Raises:
        ValueError: If an argument is out of range.
    """
    sigma = noise_level("noise_multiplier", noise_multiplier)
    delta, trials, confidence = check_trials(delta, trials, confidence)
    rng = numpy_generator(generator)
    null = rng.standard_normal(trials)
    alternative = rng.standard_normal(trials) + 1 / sigma
    adversary = "sees the noised sum"
    counts = audit_scores(null, alternative, delta=delta, confidence=confidence)
    gdp = audit_scores(null, alternative, delta=delta, confidence=confidence, method="gdp")
    claims = (gaussian_step(sigma, delta),)
    return AuditResult(
        f"Gaussian mechanism, noise multiplier {sigma:.6g}, one step",
        delta,
        claims,
        (Finding("counts", counts, adversary), Finding("gdp", gdp, adversary)),
        detection_limit(claims, trials, delta, confidence),
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
    r"""Audits the shuffle Gaussian in one dimension.

    The adversary knows the values of all other users, v = ``others``. User 1 has the value a₁ = 1
    or a₀, which is 0 or −1. The test statistic is the exact likelihood ratio of the shuffled
    reports y, log Σᵢ p_{a₁}(yᵢ)/p_v(yᵢ) − log Σᵢ p_{a₀}(yᵢ)/p_v(yᵢ), summed over the rounds. It is
    the most powerful test for this pair of data sets. ``others=0`` gives the pair of the papers.
    ``others=-1`` gives a pair with a larger ε.

    Args:
        noise_multiplier: Local σ, the noise of one report divided by the clipping norm.
        num_users: n, the number of reports per round, at most 10⁷.
        delta: δ in (0, 1).
        others: The value of every other user, in [−1, 1] clipping norms.
        steps: The number of rounds, each with fresh noise and a fresh permutation.
        adjacency: With ``"zero_out"``, a₀ is 0. With ``"replace"``, a₀ is −1.
        trials: Runs under each hypothesis, at least 1000. By default, as many as 4·10⁸ reports
            allow, up to one million.
        confidence: The confidence of the finding, in (0, 1).
        generator: A CPU generator for repeatable audits. The default is a secret generator.

    Returns:
        The claims of :func:`opacus_shuffle.accountants.compute.privacy_bound` that cover the
        adjacency, and one finding.

    Raises:
        ValueError: If an argument is out of range.

    Formal Guarantees:
        With probability ``confidence``, the ε of this pair of data sets at δ is at least the
        finding. ``published`` and ``pair`` are only about the pair with ``others=0``.
    """
    mechanism = ShuffleGauss(noise_multiplier=noise_multiplier, num_users=num_users)
    return _audit_reports(
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
    r"""Audits secret check-in in one dimension.

    The audit is that of :func:`audit_shuffle_gauss` with a secret coin for each user. All coins are
    drawn again in every round, and the densities in the likelihood ratio are those of a report with
    an unknown coin. Linear and step reports are drawn by the same code as in training.

    Args:
        noise_multiplier: Local σ, the noise of one report divided by the clipping norm.
        num_users: n, the number of users who follow the protocol and keep their coins and noise
            secret, at most 10⁷. Reports of other users do not protect user 1 and are omitted.
        sample_rate: q in (0, 1), the probability that a user participates in a round.
        delta: δ in (0, 1).
        report: The report of a participating user: ``"linear"``, ``"step"`` or ``"gaussian"``.
        others: The value of every other user, in [−1, 1] clipping norms. −1, the value opposite to
            that of user 1, gives the largest ε that is known.
        steps: The number of rounds, each with fresh coins, fresh noise and a fresh permutation.
        adjacency: With ``"zero_out"``, the other value of user 1 is 0. With ``"replace"``, it is
            −1.
        trials: Runs under each hypothesis, at least 1000. By default, as many as 4·10⁸ reports
            allow (4·10⁷ for linear and step reports), up to one million.
        confidence: The confidence of the finding, in (0, 1).
        generator: A CPU generator for repeatable audits. The default is a secret generator.

    Returns:
        The claim ``certified``, and one finding.

    Raises:
        ValueError: If an argument is out of range.

    Formal Guarantees:
        With probability ``confidence``, the ε of this pair of data sets at δ is at least the
        finding. The ε of any bound for all data sets is then at least the finding as well.
    """
    mechanism = SecretCheckIn(
        noise_multiplier=noise_multiplier,
        num_users=num_users,
        sample_rate=sample_rate,
        report=report,
    )
    return _audit_reports(
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


def numpy_generator(generator: torch.Generator | None) -> np.random.Generator:
    """Returns a NumPy generator seeded by a torch generator, or by a secret seed."""
    return np.random.default_rng(stream_of(generator).words(4))


def chunks(total: int, width: int) -> Iterator[slice]:
    """Yields slices that divide ``total`` runs of ``width`` numbers into chunks."""
    step = max(1, CHUNK // width)
    for start in range(0, total, step):
        yield slice(start, min(start + step, total))


def finite_bounds(
    rounds: Rounds, names: Iterable[str], *, delta: float, adjacency: str = "zero_out"
) -> tuple[PrivacyBound, ...]:
    """Returns the named bounds of the rounds that are finite and cover the adjacency."""
    covered = []
    for name in names:
        with contextlib.suppress(NotCovered):
            covered.append(compute_bound(rounds, delta=delta, bound=name, adjacency=adjacency))
    return tuple(bound for bound in covered if math.isfinite(bound.epsilon))


def gaussian_step(sigma: float, delta: float) -> PrivacyBound:
    """Returns the exact ε of one Gaussian step (Balle & Wang 2018)."""
    return PrivacyBound(
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


def _audit_reports(
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
    """Audits the value of one user among the shuffled reports of the other users.

    The shuffle Gaussian is the special case in which every user participates.

    Args:
        mechanism: The mechanism; all of its users follow the protocol.
        report: The shape of a report.
        title: The name of the mechanism in the result.
        bounds: The names of the claims.
        delta: As in :func:`audit_secret_checkin`, and so are all following arguments.
        others: The value of every other user.
        steps: The number of rounds.
        adjacency: The name of the adjacency.
        trials: Runs under each hypothesis, or None.
        confidence: The confidence of the finding.
        generator: A CPU generator, or None.
    """
    steps, users = integer("steps", steps), mechanism.num_users
    rounds = SecretRound(
        noise_multiplier=mechanism.noise_multiplier,
        num_users=users,
        sample_rate=mechanism.sample_rate,
        report=report,
    )
    if users > MAX_USERS:
        raise ValueError(
            f"num_users must not exceed {MAX_USERS:,}, got {users}: every run draws all reports; "
            "audit fewer users"
        )
    requirement = "lie in [-1, 1], in units of the clipping norm"
    others = number("others", others, requirement, lambda value: -1 <= value <= 1)
    neighbours = Adjacency(adjacency)
    absent = 0.0 if neighbours is Adjacency.ZERO_OUT else -1.0
    if trials is None:
        affordable = GAUSSIAN_REPORTS if report == "gaussian" else TILTED_REPORTS
        trials = min(1_000_000, max(MIN_TRIALS, affordable // (users * steps)))
    delta, trials, confidence = check_trials(delta, trials, confidence, draws=users * steps)
    scores = likelihood_ratios(
        rounds,
        present=1.0,
        absent=absent,
        others=others,
        steps=steps,
        trials=trials,
        rng=numpy_generator(generator),
    )
    claims = finite_bounds([(mechanism, steps)], bounds, delta=delta, adjacency=neighbours)
    adversary = "sees every shuffled report of every round, and knows all other users' values"
    if rounds.sample_rate < 1:
        adversary += ", but not which users participate"
    lower = audit_scores(*scores, delta=delta, confidence=confidence)
    return AuditResult(
        f"{title}, noise multiplier {rounds.noise_multiplier:.6g}, {plural(users, 'user')}, "
        f"{plural(steps, 'round')}, {neighbours}",
        delta,
        claims,
        (Finding("likelihood ratio", lower, adversary),),
        (
            f"Audited pair: all other users have the value {others:g}, and one user has 1 or "
            f"{absent:g}.",
            *detection_limit(claims, trials, delta, confidence),
        ),
    )


def likelihood_ratios(
    rounds: SecretRound,
    *,
    present: float,
    absent: float,
    others: float,
    steps: int,
    trials: int,
    rng: np.random.Generator,
) -> tuple[Vector, Vector]:
    """Draws the log likelihood ratio of each run over all rounds, without and with the record.

    User 1 has the value ``absent`` or ``present``, and all others have ``others``, in units of the
    clipping norm.
    """
    totals = np.zeros(trials), np.zeros(trials)
    for first, total in zip((absent, present), totals, strict=True):
        # The ratio does not depend on the order of the reports, so user 1 may come first.
        values = np.append(first, np.full(rounds.num_users - 1, others))
        for chunk in chunks(trials, rounds.num_users):
            for _ in range(steps):
                reports = draw_reports(rounds, values, chunk.stop - chunk.start, rng)
                total[chunk] += log_sum_ratio(rounds, reports, present, others)
                total[chunk] -= log_sum_ratio(rounds, reports, absent, others)
    return totals


def draw_reports(
    rounds: SecretRound, values: Vector, runs: int, rng: np.random.Generator
) -> Vector:
    """Draws one report of every value, in units of the noise, of shape (runs, values).

    The coin of each report is drawn independently. Without participation a report is N(0, 1).
    """
    reports = rng.standard_normal((runs, len(values)))
    if rounds.report != "gaussian":
        # A vector shorter than the clipping norm is reported at the clipping norm, but less often.
        heads = rng.random(reports.shape) < rounds.sample_rate * np.abs(values)
        uniforms = torch.from_numpy(rng.uniform(-1.0, 1.0, np.count_nonzero(heads)))
        signs = np.broadcast_to(np.sign(values), reports.shape)[heads]
        reports[heads] = signs * tilted(uniforms, rounds.noise_multiplier, rounds.report).numpy()
    else:
        shifts = values / rounds.noise_multiplier
        # With a rate of 1 no coin is drawn.
        reports += shifts * (
            rounds.sample_rate == 1 or rng.random(reports.shape) < rounds.sample_rate
        )
    return reports


def log_density(rounds: SecretRound, value: float, reports: Vector) -> Vector:
    """Returns the log density of each report of ``value``, relative to N(0, 1)."""
    if rounds.report != "gaussian":
        excess = shape_of(rounds.report, rounds.noise_multiplier).excess(np.sign(value) * reports)
        return np.log1p(rounds.sample_rate * abs(value) * excess)
    shift, rate = value / rounds.noise_multiplier, rounds.sample_rate
    log_ratios = shift * reports - shift**2 / 2
    if rate == 1:
        return log_ratios
    return np.logaddexp(math.log1p(-rate), math.log(rate) + log_ratios)


def log_sum_ratio(rounds: SecretRound, reports: Vector, value: float, others: float) -> Vector:
    """Returns log Σᵢ f(yᵢ)/g(yᵢ) of every row y; f and g are the densities of the two values.

    Apart from the constant log n, this is the log likelihood ratio of user 1 having ``value``
    against user 1 having the value of the others.
    """
    ratios = log_density(rounds, value, reports) - log_density(rounds, others, reports)
    sums: Vector = logsumexp(ratios, axis=1)
    return sums


def check_trials(
    delta: Any, trials: Any, confidence: Any, *, draws: int = 1
) -> tuple[float, int, float]:
    """Checks the arguments that all audits share, and returns them.

    One trial takes ``draws`` random numbers.
    """
    trials = integer("trials", trials, minimum=MIN_TRIALS)
    if trials > MAX_TRIALS or trials * draws > MAX_DRAWS:
        raise ValueError(
            f"trials must not exceed {MAX_TRIALS:,}, and all trials together must not take more "
            f"than {MAX_DRAWS:,} random numbers, got {trials:,} trials of {draws:,} numbers each: "
            "reduce trials, steps or num_users"
        )
    return open_unit_interval("delta", delta), trials, open_unit_interval("confidence", confidence)


def detection_limit(
    claims: tuple[PrivacyBound, ...], trials: int, delta: float, confidence: float
) -> tuple[str, ...]:
    """Returns a sentence about the claims that even a perfect test could not contradict."""
    counted = trials - trials // 2
    limit = epsilon_lower_bound(0, 0, counted, delta, confidence).epsilon
    beyond = ", ".join(claim.bound for claim in claims if claim.epsilon > limit)
    sentence = (
        f"Counts from {counted:,} runs cannot show an epsilon above {round_up(limit, 3)}. They "
        f"cannot contradict {beyond}; for that, use more trials."
    )
    return (sentence,) if beyond else ()
