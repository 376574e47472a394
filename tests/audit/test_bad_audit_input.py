"""Audits answer whatever one of their arguments is, or name it."""

from __future__ import annotations

import pytest
import torch
from helpers.bad_calls import require_named_refusals
from helpers.canary_runs import private
from torch import nn

from opacus_shuffle import audit, find_permutations

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]
GENERATOR = torch.Generator().manual_seed(0)
COMMON = {
    "noise_multiplier": 1.0,
    "delta": 1e-5,
    "trials": 1000,
    "confidence": 0.95,
    "generator": GENERATOR,
}
OURS = "the run's own"
"""Stands for a part of the run that the call makes."""


def test_bad_arguments_of_an_audit_of_the_gaussian_mechanism_are_named():
    require_named_refusals(audit.audit_gaussian, COMMON)


def test_bad_arguments_of_an_audit_of_the_shuffle_gaussian_are_named():
    pair = {"num_users": 10, "others": 0.0, "steps": 1, "adjacency": "zero_out"}
    require_named_refusals(audit.audit_shuffle_gauss, {**COMMON, **pair})


@pytest.mark.parametrize("pair", ["one_coordinate", "oblique"])
def test_bad_arguments_of_an_audit_of_permuted_noise_are_named(pair):
    step = {"dimension": 10, "steps": 2, "sample_rate": 0.5, "batch_clip": 1.0, "pair": pair}
    require_named_refusals(audit.audit_permuted_gaussian, {**COMMON, **step}, dimension=("pair",))


def test_bad_arguments_of_scores_and_counts_are_named():
    test = {"delta": 1e-5, "confidence": 0.95, "method": "gdp"}
    scores = {
        "null_scores": torch.linspace(0, 1, 20),
        "alternative_scores": torch.linspace(2, 3, 20),
    }
    require_named_refusals(audit.audit_scores, {**scores, **test})
    counts = {"false_positives": 0, "false_negatives": 1, "trials": 100}
    require_named_refusals(audit.epsilon_lower_bound, {**counts, **test})


def test_bad_arguments_of_alignments_are_named():
    network = nn.Sequential(nn.Linear(5, 8), nn.ReLU(), nn.Linear(8, 3))
    spec, state = find_permutations(network, torch.zeros(2, 5)), dict(network.state_dict())
    require_named_refusals(audit.align, {"spec": spec, "before": state, "after": state})
    found = audit.align(spec, state, state)
    require_named_refusals(found.recovered, {"true_plan": found.plan}, true_plan=("plan",))
    require_named_refusals(found.undo, {"tensors": state})


def test_bad_arguments_of_canaries_are_named():
    def canary(**options):
        run = private()
        given = {name: value for name, value in options.items() if value is not OURS}
        audit.GradientCanary(
            **{"optimizer": run["optimizer"], "parameter": run["optimizer"].params[0], **given}
        )

    require_named_refusals(
        canary, {"optimizer": OURS, "parameter": OURS, "index": 0, "generator": GENERATOR}
    )


def test_bad_arguments_of_an_audit_of_training_are_named():
    def training(**options):
        audit.audit_training(
            **{**private(), **{name: value for name, value in options.items() if value is not OURS}}
        )

    parts = dict.fromkeys(("model", "optimizer", "data_loader", "loss", "engine"), OURS)
    options = {"steps": 100, "delta": 1e-5, "confidence": 0.95}
    require_named_refusals(training, {**parts, **options, "generator": GENERATOR})
