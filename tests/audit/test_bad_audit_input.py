"""Audits accept each argument, or refuse it by name."""

import pytest
import torch
from helpers.bad_calls import require_named_refusals
from helpers.canary_runs import private

from opacus_shuffle import audit

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]
COMMON = {
    "noise_multiplier": 1.0,
    "delta": 1e-5,
    "trials": 1000,
    "confidence": 0.95,
    "generator": torch.Generator().manual_seed(0),
}
OURS = "the run's own"
"""A placeholder for an argument that the call creates."""
PAIR = {"num_users": 10, "others": 0.0, "steps": 1, "adjacency": "zero_out"}
TEST = {"delta": 1e-5, "confidence": 0.95, "method": "gdp"}
SCORES = {
    "null_scores": torch.linspace(0, 1, 20),
    "alternative_scores": torch.linspace(2, 3, 20),
}
RUN = dict.fromkeys(("model", "optimizer", "data_loader", "loss"), OURS)


def canary(**options):
    run = private()
    given = {name: value for name, value in options.items() if value is not OURS}
    parts = {"optimizer": run["optimizer"], "parameter": run["optimizer"].params[0]}
    audit.GradientCanary(**{**parts, **given})


def training(**options):
    given = {name: value for name, value in options.items() if value is not OURS}
    run = private()
    del run["engine"]
    audit.audit_training(**{**run, **given})


CALLS = {
    "gaussian": (audit.audit_gaussian, COMMON),
    "shuffle_gauss": (audit.audit_shuffle_gauss, {**COMMON, **PAIR}),
    "secret_checkin": (
        audit.audit_secret_checkin,
        {**COMMON, **PAIR, "sample_rate": 0.5, "report": "linear"},
    ),
    "scores": (audit.audit_scores, {**SCORES, **TEST}),
    "counts": (
        audit.epsilon_lower_bound,
        {"false_positives": 0, "false_negatives": 1, "trials": 100, **TEST},
    ),
    "canary": (
        canary,
        {"optimizer": OURS, "parameter": OURS, "index": 0, "generator": COMMON["generator"]},
    ),
    "training": (
        training,
        {**RUN, "steps": 100, "delta": 1e-5, "confidence": 0.95, "generator": COMMON["generator"]},
    ),
}


@pytest.mark.parametrize("call", CALLS)
def test_every_argument_is_accepted_or_refused_by_name(call):
    function, valid = CALLS[call]
    require_named_refusals(function, valid)
