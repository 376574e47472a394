"""The entry for the registry of deployments: its fields, what it claims, and what it asks."""

import dataclasses

import pytest
from helpers.toy import make_toy, run_epoch

from opacus_shuffle import PrivacyEngine, PrivacyReport
from opacus_shuffle.accountants.bounds.registry import entries_of
from opacus_shuffle.accountants.deployment_registry import ASK, QUESTIONS
from opacus_shuffle.accountants.mechanisms import ShuffledCheckIn, ShuffledSums, ShuffledWeights

yaml = pytest.importorskip("yaml")
ROUNDS = [(ShuffledCheckIn(noise_multiplier=5.0, num_users=60_000, sample_rate=0.1), 5540)]

# Names, types and choices of schemas/deployments-schema.yaml in opendp/deployments-registry-data,
# commit 057e5d8, as read on 2026-11-27. There all objects refuse further names. (A list
# is written as its first entry.)
SCHEMA = {
    "url_slug": str,
    "deployment": {
        "basic": {
            "name": str,
            "data_curators": {
                0: {
                    "data_curator_name": str,
                    "data_curator_type": {"Government", "Industry", "Nonprofit"},
                }
            },
            "description": str,
            "intended_use": str,
            "data_product_type": {
                *("Summary statistics", "Machine learning model", "Dataset", "Synthetic data"),
                *("Interactive API", "SQL queries"),
            },
            "data_product_region": str,
            "data_product_sector": {
                *("Technology", "Healthcare", "Education", "Government", "Energy", "Finance"),
            },
            "publication_date": str,
        },
        "dp_variant": {
            "variant_name": {
                *("Pure DP", "Approximate DP", "Zero-concentrated DP", "Renyi DP", "Custom"),
            },
            "data_domain": str,
            "unprotected_quantities": str,
        },
        "privacy_loss": {
            "privacy_unit": str,
            "privacy_unit_details": str,
            "number_of_privacy_units": int,
            "privacy_parameters": {"epsilon": float, "delta": float, "rho": float},
            "privacy_parameters_details": str,
        },
        "deployment_model": {
            "model_name": {"Local", "Central", "Shuffle", "Federated", "Varies"},
            "model_name_details": str,
            "trust_assumptions": str,
            "actors": str,
            "release_type": {"One release", "Many releases"},
            "release_type_details": str,
            "data_source_type": {"Static", "Dynamic"},
            "data_source_type_details": str,
            "access_type": {"Interactive", "Non-interactive"},
            "access_type_details": str,
        },
        "implementation": {
            "preprocessing_and_hyperparameter_tuning": str,
            "mechanisms": str,
            "composition": str,
            "post_processing": str,
            "justification": str,
            "utility": str,
            "additional_information": str,
        },
        "administrative": {
            "evidence_sources": {
                "publication": {  # any name
                    "evidence_source_type": {
                        "Peer-reviewed publication",
                        "Formal publication by the deploying organization",
                        "Authorized organizational attestation",
                        "Other public source",
                    },
                    "misc": {"title": str, "url": str},  # or another of BibTeX's kinds and fields
                }
            },
            "status": {
                *("Converted", "Draft", "Pending", "Changes Required", "Approved"),
                *("Approved (Update Requested)", "Approved (Pending)"),
            },
            "registry_authors": {0: str},
            "tier": {1, 2, 3},
        },
    },
}
LEFT_OUT = {"rho", "data_source_type_details", "additional_information"}
"""Fields that an entry need not have, and ours have not."""

ANSWERS = dict.fromkeys(QUESTIONS, "words") | {
    "data_curator_type": "Industry",
    "data_product_sector": "Healthcare",
    "one_unit_per_person": True,
    "release_type": "One release",
    "data_source_type": "Static",
    "tuning": "public_data",
    "secure_mode": False,
    "evidence_source_type": "Other public source",
}


def faults(value, schema, path=""):
    """What the schema refuses in an entry, what the entry lacks, and what it still asks."""
    if isinstance(schema, dict):
        value = dict(enumerate(value)) if isinstance(value, list) else value
        wrong = [f"{path}: {name}" for name in (schema.keys() ^ value.keys()) - LEFT_OUT]
        for name in schema.keys() & value.keys():
            wrong += faults(value[name], schema[name], name)
        return wrong
    fits = value in schema if isinstance(schema, set) else isinstance(value, schema)
    return [] if fits and ASK not in str(value) else [f"{path}: {value!r}"]


@pytest.mark.parametrize(
    ("name", "options", "asked"),
    [
        ("shuffled_checkin", {"local_noise": True}, QUESTIONS),
        ("secret_checkin", {"local_noise": True}, QUESTIONS),
        ("random_allocation", {}, QUESTIONS),
        ("shuffled_sums", {}, QUESTIONS.keys() - {"secure_mode"}),  # whole numbers
        ("shuffled_fw", {"shuffle_weights": True}, QUESTIONS),
        ("prv", {}, QUESTIONS),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_an_answered_entry_of_every_mechanism_is_what_the_registry_takes(name, options, asked):
    engine = PrivacyEngine(accountant=name)
    run_epoch(*engine.make_private(**make_toy(), noise_multiplier=2.0, **options))
    report, answers = engine.privacy_report(1e-5), {name: ANSWERS[name] for name in asked}
    entry = yaml.safe_load(report.statement("A model", format="registry", **answers))
    assert not faults(entry, SCHEMA)
    loss, epsilon = entry["deployment"]["privacy_loss"], report.best.epsilon
    assert epsilon <= loss["privacy_parameters"]["epsilon"] <= epsilon * (1 + 1e-3)  # four digits
    assert report.statement("A model") in loss["privacy_parameters_details"]


def test_what_only_a_person_knows_is_asked_for_until_it_is_answered():
    report, answers = PrivacyReport(ROUNDS, delta=1e-5), dict(ANSWERS)
    for name in ["", *QUESTIONS]:
        answers.pop(name, None)
        text = " ".join(report.statement(format="registry", **answers).replace("\n#", "").split())
        assert f"marked {ASK}: {len(QUESTIONS) - len(answers)}." in text
        assert {name for name in QUESTIONS if f"{ASK} {name}:" in text} == {*QUESTIONS} - {*answers}


LOCAL, PAIR = (row for row in entries_of(ShuffledCheckIn) if row.name in ("local", "pair"))


@pytest.mark.parametrize(
    ("facts", "trust", "variant"),
    [
        ({"clients": True}, "Shuffle", "Approximate DP"),
        # Who plays the shuffler has seen what the mechanism hides from a server.
        ({"simulated": True}, "Central", "Approximate DP"),
        ({"clients": True, "simulated": True}, "Central", "Approximate DP"),
        ({"entries": [dataclasses.replace(LOCAL, baseline=False)]}, "Local", "Approximate DP"),
        # These rounds do not say how many records there were.
        (
            {"rounds": [(ShuffledWeights(noise_multiplier=1.0, sample_rate=0.5, dimension=9), 1)]},
            *("Central", "Approximate DP"),
        ),
        ({"entries": [PAIR]}, "Shuffle", "none: its epsilon is about one pair"),
        ({"predictable": ["seed=0"]}, "Shuffle", "none: whoever knows seed=0"),
        (
            {"rewound": 7},
            "Shuffle",
            "none: 7 accounted rounds were replaced",
        ),
    ],
)
def test_an_entry_says_whom_its_epsilon_trusts_and_files_none_that_is_no_guarantee(
    facts, trust, variant
):
    report = PrivacyReport(**{"rounds": ROUNDS, "delta": 1e-5, **facts})
    entry = yaml.safe_load(report.statement(format="registry", **ANSWERS))["deployment"]
    said = entry["deployment_model"]["model_name"], entry["dp_variant"]["variant_name"]
    assert (said[0], said[1][: len(variant)]) == (trust, variant)
    assert ("epsilon" in entry["privacy_loss"]["privacy_parameters"]) is ("none" not in variant)
    assert (entry["privacy_loss"]["number_of_privacy_units"] == 60_000) is ("rounds" not in facts)


@pytest.mark.parametrize(
    ("arguments", "refused"),
    [
        ({"format": "yaml"}, "format must be one of 'sentence', 'registry'"),
        ({"actors": "we"}, "format='registry'.*unknown keyword"),
        ({"format": "registry", "epsilon": 0.1}, "unknown keyword.*known: actors, commit"),
        ({"format": "registry", "tuning": "some"}, "tuning must be one of 'accounted'"),
        ({"format": "registry", "secure_mode": 1}, "secure_mode must be one of True, False"),
        ({"format": "registry", "actors": ["we"]}, "actors must be a str"),
    ],
)
def test_an_answer_that_is_none_is_refused_by_name(arguments, refused):
    with pytest.raises(ValueError, match=refused):
        PrivacyReport(ROUNDS, delta=1e-5).statement(**arguments)


def test_an_entry_says_of_secure_mode_and_sampling_what_ran():
    with pytest.raises(ValueError, match="secure_mode=True is not what ran"):
        PrivacyReport(ROUNDS, delta=1e-5, pytorch_noise=True).statement(
            format="registry", secure_mode=True
        )
    common = {"noise_multiplier": 1.0, "num_users": 1000, "sample_rate": 0.1, "dimension": 9}
    both = [(ShuffledSums.build(sampling=s, **common), 2) for s in ("poisson", "fixed_size")]
    words = PrivacyReport(both, delta=1e-5).statement(format="registry").split()
    assert "accounts for: fixed_size, poisson." in " ".join(words)


@pytest.mark.parametrize(
    "text",
    [
        *('"quoted": #1 ', "- item\n  two  spaces", " a ", "", "true", "1e-5", "ε ≤ 1\t\\"),
        *("\x85--- a \u2028... b \x7f\ufeff\ud800", "\u2028 \U0001f600 " * 20),
        *(
            "back\\slashes \\ at \\ ends \\ " * 9,
            "# no comment $5 " * 20,
            "long" * 40 + " word " * 9,
        ),
    ],
)
@pytest.mark.parametrize(
    "delta", [1e-05, *(pytest.param(d, marks=pytest.mark.zoo) for d in (1e-300, 0.1))]
)
def test_every_text_and_number_is_read_again_as_it_was_written(text, delta):
    """Whitespace alone is normalized."""
    report = PrivacyReport(ROUNDS, delta=delta)
    entry = yaml.safe_load(report.statement(text, format="registry", actors=text))["deployment"]
    words = " ".join(text.split())
    assert (entry["basic"]["name"], entry["deployment_model"]["actors"]) == (words, words)
    assert entry["privacy_loss"]["privacy_parameters"]["delta"] == delta
