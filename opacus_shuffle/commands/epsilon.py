"""``opacus-shuffle epsilon``, ``noise``, ``plan``, ``report``, ``plot``: what rounds cost."""

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

Printed = tuple[dict[str, Any], object]
"""Values for JSON, and what is printed instead."""


def print_epsilon(options: dict[str, Any]) -> Printed:
    """Returns ε and its meaning."""
    run = {**flags.fields_of_run(options), **options}
    answer = privacy_bound(**run)
    what = f"epsilon of {plural(answer.rounds, 'round')} of {answer.mechanism}"
    return _meaning(answer, run, round_up(answer.epsilon), what)


def print_noise(options: dict[str, Any]) -> Printed:
    """Returns the smallest σ and its meaning, at the best rate of secret coins if none is given."""
    chooses = options["mechanism"] == "secret_checkin" and "sample_rate" not in options
    found = ("noise_multiplier", "sample_rate") if chooses else ("noise_multiplier",)
    fields, chosen = flags.fields_of_run(options, without=found), ""
    if chooses:
        budget = {
            name: options[name] for name in ("target_epsilon", "target_delta", "steps", "adjacency")
        }
        fields["sample_rate"] = best_sample_rate(**fields, **budget)
        chosen = f", at sample rate {fields['sample_rate']:g}, about the best one"
    sigma = compute_noise_multiplier(**fields, **options)
    target, delta = options.pop("target_epsilon"), options.pop("target_delta")
    run = {**fields, **options, "delta": delta, "noise_multiplier": sigma}
    answer = privacy_bound(**run)
    whose = (
        "local noise multiplier (one report's own sigma"
        if MECHANISMS[answer.mechanism].noise_is_local
        else "noise multiplier of the sum (sigma"
    )
    what = (
        f"{whose} over the clipping norm) with which {plural(answer.rounds, 'round')} of "
        f"{answer.mechanism} stay within epsilon = {target:g}{chosen}"
    )
    values, text = _meaning(answer, run, round_up(sigma, 6), what)
    rate = {"sample_rate": run["sample_rate"]} if chosen else {}
    return {"noise_multiplier": sigma, **rate, **values}, text


def _meaning(answer: PrivacyBound, run: dict[str, Any], number: str, what: str) -> Printed:
    """Returns a number with its meaning: the data sets it covers, its proof, what users send.

    If it does not cover every data set, the ε that does stands beside it.
    """
    run = {
        name: value for name, value in run.items() if name != "orders"
    }  # the other bounds use none
    certified = (
        answer if answer.bound == "certified" else privacy_bound(**{**run, "bound": "certified"})
    )
    kind = MECHANISMS[answer.mechanism]
    sent = sent_per_user(
        [
            (
                kind.build(**{name: run[name] for name in kind.field_names() if name in run}),
                answer.rounds,
            )
        ]
    )
    said = [
        f"{what} at delta = {answer.delta:.4g} (bound {answer.bound}, {answer.adjacency} "
        "adjacency)",
        f"{answer.guarantee.name}: {answer.guarantee.value}",
        "" if answer.guarantee is Guarantee.PROVED else f"covers {answer.covers}",
        f"trusting {answer.trusted}; the adversary {answer.adversary}",
        f"{answer.bound}: {answer.meaning}",
        f"{answer.adjacency}: {Adjacency(answer.adjacency).meaning}",
        answer.proof and f"the proof that gives it: {answer.proof}",
        sent and str(sent),
    ]
    if answer.guarantee is not Guarantee.PROVED:
        said.append(f"certified for every data set: epsilon = {round_up(certified.epsilon)}")
    if answer.guarantee is Guarantee.ESTIMATE:
        said.append(contradiction(answer, privacy_bound(**{**run, "bound": "pair"})))
    text = "\n".join([number, *(line for words in said if words for line in paragraph(words))])
    return {
        **answer.to_dict(),
        "certified_epsilon": certified.epsilon,
        **(sent.to_dict() if sent else {}),
    }, text


def print_plan(options: dict[str, Any]) -> Printed:
    """Returns the table of what a budget costs with each kind of trust."""
    costs = plan(**options)
    return costs.to_dict(), costs


def print_report(options: dict[str, Any]) -> Printed:
    """Returns the table of all bounds, of equal rounds or of those of a file."""
    path = options.pop("rounds", None)
    if path is None:
        report = privacy_report(**flags.fields_of_run(options), **{"steps": None, **options})
    else:
        known = ("delta", "adjacency", "orders")
        more = {name: value for name, value in options.items() if name not in known}
        reject_unknown("report of a file, which says what ran,", more)
        report = PrivacyReport(flags.read_rounds(path), **options)
    return report.to_dict(), report


def draw_report(options: dict[str, Any]) -> Printed:
    """Draws all bounds over the number of rounds into a file."""
    output = options.pop("output")
    flags.check_picture(output)
    figure: Any = (
        privacy_report(**flags.fields_of_run(options), **options).plot().get_figure(root=True)
    )
    figure.savefig(output, dpi=150)
    return {"output": output}, output
