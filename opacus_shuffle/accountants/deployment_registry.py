"""Writes a report as an entry of the registry of differential-privacy deployments, in YAML.

The registry (https://registry.opendp.org) takes one YAML file for each deployment. The names of its
fields are those of ``schemas/deployments-schema.yaml`` in opendp/deployments-registry-data, commit
057e5d8, read on 2026-11-27. :data:`ENTRY` is the template of an entry.
"""

from __future__ import annotations

import json
import string
import textwrap
from collections.abc import Mapping
from typing import Any

from opacus_shuffle._version import __version__
from opacus_shuffle.core.guarantees import SHUFFLER, Guarantee
from opacus_shuffle.core.rounding import plural, round_up
from opacus_shuffle.core.tables import WIDTH, paragraph
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
    "unprotected_quantities": "what else is released without noise, such as test accuracies, "
    "scaling constants and vocabularies; or nothing",
    "one_unit_per_person": "True or False: nobody owns more than one of these units",
    "actors": "who holds the data, who trains or shuffles, who sees the model; why each of them is "
    "trusted, and what else they may know",
    "release_type": "One release, or Many releases if training goes on",
    "data_source_type": "Static, or Dynamic if new data come in",
    "tuning": "'accounted', 'public_data', 'not_accounted' or 'none'",
    "preprocessing": "how the data were processed and inspected before training",
    "secure_mode": "True or False, as the PrivacyEngine had it",
    "hardware": "what it ran on, and who else had access to that machine",
    "security": "how the data were collected, where they are stored, and who can read them",
    "commit": "the commit of your training code, and where it can be read",
    "post_processing": "how the model was processed after training, or nothing",
    "justification": "why this epsilon, delta and trust model, and who reviewed that choice",
    "utility": "how accurate the model is, and for which groups it is less accurate",
    "evidence_source_type": "Peer-reviewed publication, Formal publication by the deploying "
    "organization, Authorized organizational attestation or Other public source",
    "title": "what was published about the deployment",
    "url": "where that can be found",
    "registry_authors": "who wrote this entry",
}
"""The keywords of an entry with their questions. Most are names of fields of the registry."""

CHOICES: dict[str, dict[Any, str]] = {
    "one_unit_per_person": {
        True: "Nobody owns more than one of these units, so epsilon is that of a person.",
        False: "A person may own several of these units. Epsilon is that of one unit, not of the "
        "person.",
    },
    "tuning": {
        "accounted": "Settings were tuned on the protected data. The curator states that the "
        "privacy loss of tuning is accounted for.",
        "public_data": "The curator states that settings were tuned on public data alone.",
        "not_accounted": "Settings were tuned on the protected data. The privacy loss of tuning is "
        "not accounted for, so epsilon does not cover it.",
        "none": "The curator states that all settings were fixed before the data were used.",
    },
    "secure_mode": {
        True: "Secure mode: sums of data and noise are computed in double precision and rounded to "
        "a grid that does not depend on the data, so their last bits reveal nothing.",
        False: "Noise is an ordinary floating-point number. The last bits of data and noise can "
        "reveal the magnitude of the data (Mironov 2012).",
    },
}
"""The keywords with a fixed set of answers, and the sentence that each answer stands for."""

TRUST_MODELS = {"nobody": "Local", SHUFFLER: "Shuffle"}
"""The registry's names of trust models. Any other trusted party holds the data: Central."""

ENTRY = string.Template("""\
url_slug: $url_slug
deployment:
  basic:
    name: $name
    data_curators:
      - data_curator_name: $data_curator_name
        data_curator_type: $data_curator_type
    description: $description
    intended_use: $intended_use
    data_product_type: "Machine learning model"
    data_product_region: $data_product_region
    data_product_sector: $data_product_sector
    publication_date: $publication_date
  dp_variant:
    variant_name: $variant_name
    data_domain: $data_domain
    unprotected_quantities: $unprotected_quantities
  privacy_loss:
    privacy_unit: $privacy_unit
    privacy_unit_details: $privacy_unit_details
    number_of_privacy_units: $number_of_privacy_units
    privacy_parameters: $privacy_parameters
    privacy_parameters_details: $privacy_parameters_details
  deployment_model:
    model_name: $model_name
    model_name_details: $model_name_details
    trust_assumptions: $trust_assumptions
    actors: $actors
    release_type: $release_type
    release_type_details: $release_type_details
    data_source_type: $data_source_type
    access_type: "Non-interactive"
    access_type_details: "This mechanism answers no queries of analysts."
  implementation:
    preprocessing_and_hyperparameter_tuning: $tuning
    mechanisms: $mechanisms
    composition: $composition
    post_processing: $post_processing
    justification: $justification
    utility: $utility
  administrative:
    evidence_sources:
      publication:
        evidence_source_type: $evidence_source_type
        misc:
          title: $title
          url: $url
    status: "Draft"
    registry_authors:
      - $registry_authors
    tier: 3
""")


def registry_statement(
    report: Any, model: str, answers: Mapping[str, Any], *, settings: str, compared: str
) -> str:
    """Returns the entry as YAML, below a comment that counts the open questions.

    Args:
        report: A :class:`~opacus_shuffle.accountants.report.PrivacyReport`.
        model: The model's name.
        answers: What only a person knows, by the names in :data:`QUESTIONS`.
        settings: The numbers of the run, in words.
        compared: The run that the adjacency compares with, in words.

    Raises:
        ValueError: If an answer has an unknown name, is not a string or one of its choices, or
            contradicts what ran.
    """
    # If reports are bits, the question about their last bits is already answered.
    bits = report.noisiest.count_bits_per_coordinate is not None
    questions = {
        name: question for name, question in QUESTIONS.items() if name != "secure_mode" or not bits
    }
    unknown = {name: answer for name, answer in answers.items() if name not in questions}
    reject_unknown("statement", unknown, questions)
    texts = {name: f"{ASK} {name}: {question}" for name, question in questions.items()}
    if bits:
        texts["secure_mode"] = "Reports and noise are whole numbers, which have no last bits."
    texts |= {
        name: CHOICES[name][one_of(name, answer, CHOICES[name])]
        if name in CHOICES
        else instance_of(name, answer, (str,))
        for name, answer in answers.items()
    }
    if answers.get("secure_mode") and (report.pytorch_noise or report.numpy_noise):
        raise ValueError(
            "secure_mode=True is not what ran, because the noise is that of PyTorch or NumPy: "
            "answer False, or train with PrivacyEngine(secure_mode=True)"
        )
    texts |= _known_texts(report, model, texts, settings=settings, compared=compared)
    best, reason = report.best, why_no_guarantee(report)
    values = {name: _quote(text) for name, text in texts.items()}
    # Rounds without a known number of users have 0 or 1.
    users = report.num_users or max(mechanism.num_users for mechanism, _ in report.rounds)
    values["number_of_privacy_units"] = str(users) if users > 1 else _quote(f"{ASK} how many")
    # YAML 1.1 reads a number with an exponent as a text, unless it has a point.
    delta = repr(best.delta) if "." in repr(best.delta) else repr(best.delta).replace("e", ".0e")
    numbers = f"epsilon: {float(round_up(best.epsilon))}, delta: {delta}"
    values["privacy_parameters"] = "{}" if reason else f"{{{numbers}}}"
    body = ENTRY.substitute(values)
    head = (f"Nothing to file: {reason}. " if reason else "") + (
        "An entry for the registry of differential-privacy deployments, by opacus_shuffle "
        f"{__version__}. Fields that only you can answer, marked {ASK}: {body.count(ASK)}. Answer "
        'here, or by keywords of these names: statement(format="registry", actors="...").'
    )
    lines = [f"# {line}" for line in paragraph(head)]
    for line in body.splitlines():
        # A quoted string may continue on the next line, which is indented more than any field.
        lines += textwrap.wrap(
            line, WIDTH, subsequent_indent=" " * 12, break_long_words=False, break_on_hyphens=False
        )
    return "\n".join(lines)


def why_no_guarantee(report: Any) -> str:
    """Returns why the report's best ε is no guarantee for the run; empty if it is one."""
    if report.predictable:
        return f"whoever knows {' or '.join(report.predictable)} can draw the noise again"
    if report.rewound:
        return f"{report.rewound:,} accounted rounds were replaced, and its epsilon leaves them out"
    worth = report.best.guarantee
    return "" if worth is Guarantee.PROVED else f"its epsilon is {worth.value}"


def _known_texts(
    report: Any, model: str, texts: Mapping[str, str], *, settings: str, compared: str
) -> dict[str, str]:
    """Returns the texts of all fields that the report knows something about."""
    best, reason = report.best, why_no_guarantee(report)
    all_rounds = plural(best.rounds, "round")
    ran = [f"{plural(count, 'round')} of {mechanism!r}" for mechanism, count in report.rounds]
    sampling = sorted({mechanism.sampling or "none" for mechanism, _ in report.rounds})
    others = [
        f"{bound.bound} {round_up(bound.epsilon)} (trusting {bound.trusted}; "
        f"{bound.guarantee.value})"
        for bound in report.bounds
        if bound is not best
    ]
    (cites,) = (entry.cites for entry in report.entries if entry.name == best.bound)
    generator = (
        "AES-256 in counter mode, keyed by the operating system (on a GPU, PyTorch's generator "
        "with a fresh key from it in every step)"
    )
    if report.pytorch_noise or report.numpy_noise:
        generator = f"the generator of {'PyTorch' if report.pytorch_noise else 'NumPy'}"
    if report.predictable:
        generator = f"a generator that others know ({', '.join(report.predictable)})"
    trust = f"It trusts {best.trusted} against an adversary who {best.adversary}"
    if report.simulated:
        # The party that simulates the shuffler sees what the shuffle model hides.
        trust += (
            ". The shuffler ran in the server's process, which saw the sender of every report, so "
            "the server is trusted as well"
            if report.clients
            else ". One run saw every record and simulated the records' owners and the shuffler, "
            "so the party that ran it is trusted as well"
        )
    return {
        "name": model,
        "variant_name": f"none: {reason}" if reason else "Approximate DP",
        "unprotected_quantities": _sentences(
            f"Settings of the run: {settings}, {all_rounds}",
            f"Of the data: {texts['unprotected_quantities']}",
        ),
        "privacy_unit": "Client-level" if report.clients else "Record-level",
        "privacy_unit_details": _sentences(
            f"Adjacency {best.adjacency}: compared with a run in which {compared}",
            texts["one_unit_per_person"],
        ),
        "privacy_parameters_details": _sentences(
            report.statement(model),
            f"Other values at the same delta: {'; '.join(others) or 'none'}",
        ),
        "model_name": "Central" if report.simulated else TRUST_MODELS.get(best.trusted, "Central"),
        "model_name_details": _sentences(
            f"{best.mechanism}: {best.meaning}", str(report.sent or "")
        ),
        "trust_assumptions": _sentences(trust),
        "release_type_details": f"The statement covers {report.mechanism_class.released} of the "
        f"whole run, {all_rounds}, and nothing that is computed from the data afterwards.",
        "tuning": _sentences(texts["tuning"], texts["preprocessing"]),
        "mechanisms": _sentences(
            f"{'; '.join(ran[:3])}{'; and others' if ran[3:] else ''}",
            f"Implemented by opacus_shuffle {__version__}. Code: {texts['commit']}",
            f"Randomness: {generator}",
            texts["secure_mode"],
            f"Hardware: {texts['hardware']}",
            f"Security: {texts['security']}",
        ),
        "composition": _sentences(
            f"The whole run, {all_rounds}, by {best.bound!r} "
            f"({', '.join(filter(None, [best.proof, cites]))})",
            f"Sampling that it accounts for: {', '.join(sampling)}",
            f"It covers {best.covers}",
        ),
    }


def _sentences(*parts: str) -> str:
    """Joins the parts that are not empty, each with a full stop."""
    return " ".join(f"{part.rstrip(' .')}." for part in parts if part)


def _quote(text: str) -> str:
    """Returns a text as a quoted string of YAML. Whitespace becomes single spaces."""
    quoted = json.dumps(" ".join(text.split()), ensure_ascii=False)
    # YAML takes characters that cannot be printed as escapes only.
    return "".join(sign if sign.isprintable() else f"\\U{ord(sign):08x}" for sign in quoted)
