"""``opacus-shuffle epsilon``, ``noise``, ``plan``, ``report`` and ``plot``: numbers of rounds."""

from __future__ import annotations

from typing import Any

from opacus_shuffle.accountants.compute import (
    best_sample_rate,
    compute_noise_multiplier,
    privacy_bound,
    privacy_report,
)
from opacus_shuffle.accountants.mechanism import sent_per_user
from opacus_shuffle.accountants.mechanisms import MECHANISMS
from opacus_shuffle.accountants.plan import plan
from opacus_shuffle.accountants.report import PrivacyReport, contradiction
from opacus_shuffle.commands import flags
from opacus_shuffle.core.guarantees import Adjacency, Guarantee, PrivacyBound
from opacus_shuffle.core.rounding import plural, round_up
from opacus_shuffle.core.tables import paragraph
from opacus_shuffle.core.validation import reject_unknown

CommandOutput = tuple[dict[str, Any], object]
"""The values for JSON, and the object whose text is printed otherwise."""


def print_epsilon(options: dict[str, Any]) -> CommandOutput:
    """Returns ε and its meaning."""
    run = {**flags.fields_of_run(options), **options}
    answer = privacy_bound(**run)
    subject = f"epsilon of {plural(answer.rounds, 'round')} of {answer.mechanism}"
    return _explain(answer, run, round_up(answer.epsilon), subject)


def print_noise(options: dict[str, Any]) -> CommandOutput:
    """Returns the smallest σ and its meaning.

    Without a rate, secret check-in gets the rate at which the noise is about the smallest.
    """
    finds_rate = options["mechanism"] == "secret_checkin" and "sample_rate" not in options
    unknown = ("noise_multiplier", "sample_rate") if finds_rate else ("noise_multiplier",)
    fields, at_rate = flags.fields_of_run(options, without=unknown), ""
    if finds_rate:
        budget = {
            name: options[name] for name in ("target_epsilon", "target_delta", "steps", "adjacency")
        }
        fields["sample_rate"] = best_sample_rate(**fields, **budget)
        at_rate = f", at the approximately best sample rate {fields['sample_rate']:g}"
    sigma = compute_noise_multiplier(**fields, **options)
    target, delta = options.pop("target_epsilon"), options.pop("target_delta")
    run = {**fields, **options, "delta": delta, "noise_multiplier": sigma}
    answer = privacy_bound(**run)
    multiplier = (
        "local noise multiplier (sigma of one report"
        if MECHANISMS[answer.mechanism].noise_is_local
        else "noise multiplier of the sum (sigma"
    )
    subject = (
        f"{multiplier} over the clipping norm) with which {plural(answer.rounds, 'round')} of "
        f"{answer.mechanism} stay within epsilon = {target:g}{at_rate}"
    )
    values, text = _explain(answer, run, round_up(sigma, 6), subject)
    rate = {"sample_rate": run["sample_rate"]} if finds_rate else {}
    return {"noise_multiplier": sigma, **rate, **values}, text


def _explain(answer: PrivacyBound, run: dict[str, Any], number: str, subject: str) -> CommandOutput:
    """Returns a number with its meaning: the data sets it covers, its proof, what users send.

    If the number does not cover every data set, the text also has the certified ε.
    """
    # The other bounds take no orders.
    run = {name: value for name, value in run.items() if name != "orders"}
    certified = (
        answer if answer.bound == "certified" else privacy_bound(**{**run, "bound": "certified"})
    )
    mechanism = MECHANISMS[answer.mechanism]
    fields = {name: run[name] for name in mechanism.field_names() if name in run}
    sent = sent_per_user([(mechanism.build(**fields), answer.rounds)])
    sentences = [
        f"{subject} at delta = {answer.delta:.4g} (bound {answer.bound}, {answer.adjacency} "
        "adjacency)",
        f"{answer.guarantee.name}: {answer.guarantee.value}",
        "" if answer.guarantee is Guarantee.PROVED else f"covers {answer.covers}",
        f"trusting {answer.trusted}; the adversary {answer.adversary}",
        f"{answer.bound}: {answer.meaning}",
        f"{answer.adjacency}: {Adjacency(answer.adjacency).meaning}",
        answer.proof and f"proof: {answer.proof}",
        sent and str(sent),
    ]
    if answer.guarantee is not Guarantee.PROVED:
        sentences.append(f"certified for every data set: epsilon = {round_up(certified.epsilon)}")
    if answer.guarantee is Guarantee.ESTIMATE:
        sentences.append(contradiction(answer, privacy_bound(**{**run, "bound": "pair"})))
    lines = [line for sentence in sentences if sentence for line in paragraph(sentence)]
    text = "\n".join([number, *lines])
    return {
        **answer.to_dict(),
        "certified_epsilon": certified.epsilon,
        **(sent.to_dict() if sent else {}),
    }, text


def print_plan(options: dict[str, Any]) -> CommandOutput:
    """Returns the table of the noise that a budget needs in each trust model."""
    costs = plan(**options)
    return costs.to_dict(), costs


def print_report(options: dict[str, Any]) -> CommandOutput:
    """Returns the table of all bounds, for equal rounds or for the rounds in a file."""
    path = options.pop("rounds", None)
    if path is None:
        report = privacy_report(**flags.fields_of_run(options), **{"steps": None, **options})
    else:
        allowed = ("delta", "adjacency", "orders")
        rest = {name: value for name, value in options.items() if name not in allowed}
        reject_unknown("report of a file, which describes the run,", rest)
        report = PrivacyReport(flags.read_rounds(path), **options)
    return report.to_dict(), report


def draw_report(options: dict[str, Any]) -> CommandOutput:
    """Writes a plot of all bounds over the number of rounds to a file."""
    output = options.pop("output")
    flags.check_picture(output)
    figure: Any = (
        privacy_report(**flags.fields_of_run(options), **options).plot().get_figure(root=True)
    )
    figure.savefig(output, dpi=150)
    return {"output": output}, output
