"""Writes a report as an entry of the registry of differential-privacy deployments, in YAML.

The registry (https://registry.opendp.org) takes one YAML file for each deployment. The names of its
fields are those of ``schemas/deployments-schema.yaml`` in opendp/deployments-registry-data, commit
057e5d8, read on 2026-11-27.

YAML is written by hand, so that the package needs no library for it. ``json.dumps`` would not do:
to readers of YAML 1.1 its ``1e-05`` is a word. Strings are quoted as in JSON, which YAML reads.

>>> for line in yaml_lines({"delta": 1e-05, "registry_authors": ["Ada"], "evidence_sources": {}}):
...     print(line)
delta: 1.0e-05
registry_authors:
  - "Ada"
evidence_sources: {}
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from opacus_shuffle._version import __version__
from opacus_shuffle.core.guarantees import SHUFFLER, Guarantee
from opacus_shuffle.core.rounding import plural, round_up
from opacus_shuffle.core.tables import paragraph
from opacus_shuffle.core.validation import instance_of, one_of, reject_unknown

ASK = "<ask>"
"""Marks what the report cannot know."""

QUESTIONS = {
    "url_slug": "words-with-hyphens, for the address of this entry",
    "data_curator_name": "who publishes the model",
    "data_curator_type": "Government, Industry or Nonprofit",
    "description": "what the model is",
    "intended_use": "what it is for",
    "data_product_region": "where the people in the data live, or whose law applies",
    "data_product_sector": "Technology, Healthcare, Education, Government, Energy or Finance",
    "publication_date": "YYYY-MM-DD",
    "data_domain": "which data sets could have been used: whose records, and of what",
    "unprotected_quantities": "what else gets out of the data without noise, such as test "
    "accuracies, scaling constants and vocabularies; or nothing",
    "one_unit_per_person": "True or False: nobody owns more than one of these units",
    "actors": "who holds the data, who trains or shuffles, who sees the model; why each of them is "
    "trusted with it, and what else they may know",
    "release_type": "One release, or Many releases if training goes on",
    "data_source_type": "Static, or Dynamic if new data come in",
    "tuning": "'accounted', 'public_data', 'not_accounted' or 'none'",
    "preprocessing": "what was done with the data and read in them before training",
    "secure_mode": "True or False, as the PrivacyEngine had it",
    "hardware": "what it ran on, and who else could watch that machine",
    "security": "how the data were collected, where they lie, and who can read them",
    "commit": "which commit of your code trained it, and where it can be read",
    "post_processing": "what was done with the model after training, or nothing",
    "justification": "why this epsilon, delta and trust, and who checked that choice",
    "utility": "how good the model is, and for whom it is worse",
    "evidence_source_type": "Peer-reviewed publication, Formal publication by the deploying "
    "organization, Authorized organizational attestation or Other public source",
    "title": "what was published about the deployment",
    "url": "where that is",
    "registry_authors": "who wrote this entry",
}
"""The keywords of an entry, and what they ask. Most are the registry's own names of fields."""

CHOICES: dict[str, dict[Any, str]] = {
    "one_unit_per_person": {
        True: "Nobody owns more than one of these units, so that epsilon is a person's.",
        False: "A person may own several of these units: epsilon is that of one, not a person's.",
    },
    "tuning": {
        "accounted": "Settings were tuned on the protected data, and the curator says that the "
        "privacy loss of it is accounted for.",
        "public_data": "The curator says that settings were tuned on public data alone.",
        "not_accounted": "Settings were tuned on the protected data, and the privacy loss of it is "
        "not accounted for: epsilon does not cover it.",
        "none": "The curator says that all settings were fixed before the data were used.",
    },
    "secure_mode": {
        True: "Secure mode: sums of data and noise are made in double precision and rounded to a "
        "grid that does not depend on the data, so that their last bits tell nothing of them.",
        False: "Noise is an ordinary floating-point number: the last bits of data and noise can "
        "tell how large the data were (Mironov 2012).",
    },
}
"""The answers that are one of several, and what each says."""

MODEL_NAMES = {"nobody": "Local", SHUFFLER: "Shuffle"}
"""The registry's word for whom an ε trusts; whatever else it trusts has the data: Central."""


def registry_statement(
    report: Any, model: str, answers: Mapping[str, Any], *, settings: str, compared: str
) -> str:
    """Returns the whole entry as YAML, below a comment that counts what is still asked.

    Args:
        report: A :class:`~opacus_shuffle.accountants.report.PrivacyReport`.
        model: The model's name.
        answers: What only a person knows, by the names in :data:`QUESTIONS`.
        settings: The numbers of the run, in words.
        compared: What the adjacency compares with, in words.

    Raises:
        ValueError: If an answer has an unknown name, is no string, is none of its choices, or is
            not what ran.
    """
    # Where reports are bits, nobody needs to be asked what their last bits might tell.
    bits = report.noisiest.count_bits_per_coordinate is not None
    questions = {
        name: said for name, said in QUESTIONS.items() if name != "secure_mode" or not bits
    }
    reject_unknown(
        "statement",
        {name: value for name, value in answers.items() if name not in questions},
        questions,
    )
    said = {name: f"{ASK} {name}: {question}" for name, question in questions.items()}
    if bits:
        said["secure_mode"] = "Reports and noise are whole numbers, which have no last bits."
    for name, answer in answers.items():
        if name in CHOICES:
            said[name] = CHOICES[name][one_of(name, answer, CHOICES[name])]
        else:
            said[name] = instance_of(name, answer, (str,))
    if answers.get("secure_mode") and (report.pytorch_noise or report.numpy_noise):
        raise ValueError(
            "secure_mode=True is not what ran, its noise is PyTorch's own, or NumPy's: answer "
            "False, or train with PrivacyEngine(secure_mode=True)"
        )
    body = "\n".join(yaml_lines(_entry(report, model, said, settings=settings, compared=compared)))
    why = no_guarantee(report)
    head = f"Nothing to file: {why}. " if why else ""
    head += (
        "An entry for the registry of differential-privacy deployments, by opacus_shuffle "
        f"{__version__}. Fields that only you can answer, marked {ASK}: {body.count(ASK)}. Answer "
        'here, or by keywords of these names: statement(format="registry", actors="...").'
    )
    return "\n".join([*(f"# {line}" for line in paragraph(head)), body])


def no_guarantee(report: Any) -> str:
    """Returns why the report's best ε is no guarantee of what ran; empty if it is one."""
    if report.predictable:
        return f"whoever knows {' or '.join(report.predictable)} can draw the noise again"
    if report.rewound:
        return f"its epsilon leaves out {report.rewound:,} rounds that ran"
    worth = report.best.guarantee
    return "" if worth is Guarantee.PROVED else f"its epsilon is {worth.value}"


def _entry(
    report: Any, model: str, said: Mapping[str, str], *, settings: str, compared: str
) -> dict[str, Any]:
    """Returns the entry's fields: what the report knows, and what was said or is asked."""
    best, why = report.best, no_guarantee(report)
    record = "client" if report.clients else "record"
    # Rounds that know no number of users say 0 or 1.
    users = report.num_users or max(mechanism.num_users for mechanism, _ in report.rounds)
    all_rounds = plural(best.rounds, "round")
    ran = [f"{plural(count, 'round')} of {mechanism!r}" for mechanism, count in report.rounds]
    sampling = sorted({mechanism.sampling or "none" for mechanism, _ in report.rounds})
    rows = [
        f"{bound.bound} {round_up(bound.epsilon)} (trusting {bound.trusted}; "
        f"{bound.guarantee.value})"
        for bound in report.bounds
        if bound is not best
    ]
    (cites,) = (bound.cites for bound in report.entries if bound.name == best.bound)
    proof = ", ".join(filter(None, [best.proof, cites]))
    generator = (
        "AES-256 in counter mode, keyed by the operating system (on a GPU, PyTorch's generator "
        "with a fresh key from it in every step)"
    )
    if report.pytorch_noise or report.numpy_noise:
        generator = f"{'PyTorch' if report.pytorch_noise else 'NumPy'}'s own generator"
    if report.predictable:
        generator = f"a generator that is known to others ({', '.join(report.predictable)})"
    trust = f"It trusts {best.trusted} against an adversary who {best.adversary}"
    if report.simulated:
        # Who played the shuffler has seen what the shuffle model would have hidden from them.
        trust += (
            ". The shuffler ran in the server's process, which saw whose report is whose: the "
            "server is trusted, too"
            if report.clients
            else ". One run saw every record and played the records' owners and the shuffler: "
            "whoever ran it is trusted, too"
        )
    return {
        "url_slug": said["url_slug"],
        "deployment": {
            "basic": {
                "name": model,
                "data_curators": [
                    {name: said[name] for name in ("data_curator_name", "data_curator_type")}
                ],
                "description": said["description"],
                "intended_use": said["intended_use"],
                "data_product_type": "Machine learning model",
                "data_product_region": said["data_product_region"],
                "data_product_sector": said["data_product_sector"],
                "publication_date": said["publication_date"],
            },
            "dp_variant": {
                "variant_name": f"none: {why}" if why else "Approximate DP",
                "data_domain": said["data_domain"],
                "unprotected_quantities": _sentences(
                    f"Settings of the run: {settings}, {all_rounds}",
                    f"Of the data: {said['unprotected_quantities']}",
                ),
            },
            "privacy_loss": {
                "privacy_unit": f"{record.capitalize()}-level",
                "privacy_unit_details": _sentences(
                    f"Adjacency {best.adjacency}: compared with a run in which {compared}",
                    said["one_unit_per_person"],
                ),
                "number_of_privacy_units": users if users > 1 else f"{ASK} how many {record}s",
                "privacy_parameters": {}
                if why
                else {"epsilon": float(round_up(best.epsilon)), "delta": best.delta},
                "privacy_parameters_details": _sentences(
                    report.statement(model),
                    f"Other values at the same delta: {'; '.join(rows) or 'none'}",
                ),
            },
            "deployment_model": {
                "model_name": "Central"
                if report.simulated
                else MODEL_NAMES.get(best.trusted, "Central"),
                "model_name_details": _sentences(
                    f"{best.mechanism}: {best.meaning}", str(report.sent or "")
                ),
                "trust_assumptions": _sentences(trust),
                "actors": said["actors"],
                "release_type": said["release_type"],
                "release_type_details": f"What is stated is about {report.kind.released} of "
                f"the whole run, {all_rounds}, and nothing that is computed from the data "
                "afterwards.",
                "data_source_type": said["data_source_type"],
                "access_type": "Non-interactive",
                "access_type_details": "This mechanism answers no queries of analysts.",
            },
            "implementation": {
                "preprocessing_and_hyperparameter_tuning": _sentences(
                    said["tuning"], said["preprocessing"]
                ),
                "mechanisms": _sentences(
                    f"{'; '.join(ran[:3])}{'; and others' if ran[3:] else ''}",
                    f"Implemented by opacus_shuffle {__version__}. Code: {said['commit']}",
                    f"Randomness: {generator}",
                    said["secure_mode"],
                    f"Hardware: {said['hardware']}",
                    f"Security: {said['security']}",
                ),
                "composition": _sentences(
                    f"The whole run, {all_rounds}, by {best.bound!r} ({proof})",
                    f"Sampling that it accounts for: {', '.join(sampling)}",
                    f"It covers {best.covers}",
                ),
                "post_processing": said["post_processing"],
                "justification": said["justification"],
                "utility": said["utility"],
            },
            "administrative": {
                "evidence_sources": {
                    "publication": {
                        "evidence_source_type": said["evidence_source_type"],
                        "misc": {"title": said["title"], "url": said["url"]},
                    }
                },
                "status": "Draft",
                "registry_authors": [said["registry_authors"]],
                "tier": 3,
            },
        },
    }


def _sentences(*parts: str) -> str:
    """Joins what is said to one text, with a full stop after each part that is not empty."""
    return " ".join(f"{part.rstrip(' .')}." for part in parts if part)


def yaml_lines(values: Mapping[str, Any] | list[Any], indent: str = "") -> list[str]:
    """Returns nested dicts and lists of strings and numbers as lines of YAML, long ones wrapped."""
    named = values.items() if isinstance(values, Mapping) else [("-", value) for value in values]
    lines = []
    for name, value in named:
        head = f"{indent}{name} " if name == "-" else f"{indent}{name}: "
        if isinstance(value, Mapping | list) and value:
            lines += [head.rstrip(), *yaml_lines(value, f"{indent}  ")]
            continue
        text = json.dumps(value, ensure_ascii=False)
        # YAML ends lines at characters that JSON leaves as they are, and takes no others unseen.
        text = "".join(sign if sign.isprintable() else f"\\U{ord(sign):08x}" for sign in text)
        if isinstance(value, float) and "." not in text:
            text = text.replace("e", ".0e")  # YAML 1.1 knows no number without a point
        # A quoted string may go on in the next line, which counts as one space, never as two.
        if "  " in text:
            lines.append(head + text)
        else:
            lines += paragraph(text, term=head, indent=len(indent) + 2)
    return lines
