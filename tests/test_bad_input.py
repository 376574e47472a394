"""Bad input: every public call answers, or raises an error that names the argument."""

import contextlib
import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers.bad_calls import require_named_refusals
from helpers.canary_runs import private
from helpers.perceptron import X, mlp
from helpers.toy import make_toy
from opacus.accountants import create_accountant

import opacus_shuffle
from opacus_shuffle import (
    Guarantee,
    PrivacyBound,
    PrivacyReport,
    ShuffledCheckIn,
    ShuffledSums,
    ShuffleVectorSum,
    accountants,
    audit,
)
from opacus_shuffle.analysis import (
    advanced_composition,
    binomial_sums,
    fenton_wilkinson,
    gaussian,
    mean_ratio,
    sampled_sums,
    subsampling,
)
from opacus_shuffle.core.guarantees import Adjacency, InconsistentBound
from opacus_shuffle.protocols.calibration import noise_variance
from opacus_shuffle.protocols.scalar_sum import ShuffleScalarSum

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]
RUNS: dict[str, dict[str, Any]] = {
    "shuffle_gauss": {"noise_multiplier": 4.0, "num_users": 1000},
    "subsampled_shuffle": {"noise_multiplier": 2.0, "num_users": 1000, "sample_rate": 0.1},
    "shuffled_checkin": {"noise_multiplier": 2.0, "num_users": 1000, "sample_rate": 0.1},
    "shuffled_fw": {
        "noise_multiplier": 1.0,
        "sample_rate": 0.1,
        "dimension": 100,
        "clip": 1.0,
        "batch_clip": 1.0,
    },
    "random_allocation": {"noise_multiplier": 2.0, "num_batches": 10},
    "secret_checkin": {
        "noise_multiplier": 2.0,
        "num_users": 1000,
        "sample_rate": 0.1,
        "report": "linear",
        "honest_fraction": 0.9,
    },
    "shuffled_sums": {
        "noise_multiplier": 2.0,
        "num_users": 1000,
        "sample_rate": 0.1,
        "dimension": 4,
    },
}
ROUND = ShuffledCheckIn(noise_multiplier=5.0, num_users=1000, sample_rate=0.1)
QUESTION = {"delta": 1e-5, "bound": "certified", "adjacency": "zero_out"}
REPORT = {"delta": 1e-5, "adjacency": "zero_out"}


def fields_of(record):
    return {field.name: getattr(record, field.name) for field in dataclasses.fields(record)}


def check_in_accountant():
    one = create_accountant("shuffled_checkin")
    one.record(ROUND)
    return one


def load(state_dict):
    accountants.ShuffleAccountant(ShuffledCheckIn).load_state_dict(state_dict)


def answer_by_hand(**given):
    with contextlib.suppress(
        InconsistentBound
    ):  # what NaN, a negative epsilon and one below its lower value are
        PrivacyBound("m", "b", covers="every data set", **given)


PROTOCOL = ShuffleVectorSum(num_users=1000, dimension=4, max_norm=1.0, epsilon=2.0, delta=1e-5)
ANSWER = {
    "epsilon": 1.0,
    "delta": 1e-5,
    "adjacency": Adjacency.ZERO_OUT,
    "guarantee": Guarantee.PROVED,
    "rounds": 2,
}
HISTORY = {"rounds": [(ROUND, 2)]}


def calls() -> dict[str, tuple[Callable[..., Any], dict[str, Any]]]:
    """Every callable with arguments that it takes; those that are None may be left out, too."""
    valid_calls: dict[str, tuple[Callable[..., Any], dict[str, Any]]] = {}
    beside = {"steps": 3, "delta": 1e-5, "adjacency": "zero_out", "bound": "certified"}
    for name, fields in RUNS.items():
        valid_calls[f"compute_epsilon {name}"] = (
            opacus_shuffle.compute_epsilon,
            {"mechanism": name, **beside, **fields},
        )
        target = {"target_epsilon": 1.0, "target_delta": 1e-5, "steps": 3}
        rest = {key: value for key, value in fields.items() if key != "noise_multiplier"}
        valid_calls[f"compute_noise_multiplier {name}"] = (
            opacus_shuffle.compute_noise_multiplier,
            {"mechanism": name, **target, **rest},
        )
        if name != "shuffled_sums":
            valid_calls[f"mechanism {name}"] = (accountants.mechanisms.MECHANISMS[name], fields)
    valid_calls["privacy_report"] = (
        opacus_shuffle.privacy_report,
        {
            "mechanism": "shuffled_fw",
            "steps": 3,
            "delta": 1e-5,
            "adjacency": "zero_out",
            **RUNS["shuffled_fw"],
        },
    )
    valid_calls |= {
        "subsample": (advanced_composition.subsample, {"epsilon": 1.0, "sample_rate": 0.1}),
        "log_delta": (gaussian.log_delta, {"mu": 1.0, "epsilon": 1.0}),
        "gaussian.compute_epsilon": (gaussian.compute_epsilon, {"mu": 1.0, "delta": 1e-5}),
        "fenton_wilkinson.compute_delta": (
            fenton_wilkinson.compute_delta,
            {"epsilon": 0.2, "noise_std": 0.3, "dimension": 100, "clip": 1.0, "batch_clip": 1.0},
        ),
        "fenton_wilkinson.compute_epsilon": (
            fenton_wilkinson.compute_epsilon,
            {"delta": 1e-5, "noise_std": 0.3, "dimension": 100, "clip": 1.0, "batch_clip": 1.0},
        ),
        "mean_ratio.compute_rdp": (
            mean_ratio.compute_rdp,
            {
                "noise_multiplier": 2.0,
                "num_users": 100,
                "orders": 4,
                "sample_rate": 0.1,
                "sampling": "poisson",
            },
        ),
        "subsampling.compute_rdp": (
            subsampling.compute_rdp,
            {
                "noise_multiplier": 2.0,
                "num_users": 100,
                "orders": 4,
                "sample_rate": 0.1,
                "sampling": "poisson",
            },
        ),
        "SampledSum": (sampled_sums.SampledSum, {"mu": 1.0, "sample_rate": 0.1, "lost": 0.0}),
        "BinomialNoise": (binomial_sums.BinomialNoise, {"trials": 100, "probability": 0.5}),
        "noise_variance": (
            noise_variance,
            {"max_norm": 1.0, "epsilon": 1.0, "delta": 1e-5},
        ),
        "ShuffleVectorSum": (
            ShuffleVectorSum,
            {
                "num_users": 100,
                "dimension": 3,
                "max_norm": 1.0,
                "epsilon": 1.0,
                "delta": 1e-5,
            },
        ),
        "with_noise_multiplier": (
            ShuffleVectorSum.with_noise_multiplier,
            {
                "num_users": 100,
                "dimension": 3,
                "max_norm": 1.0,
                "noise_multiplier": 1.0,
                "delta": 1e-5,
                "honest_fraction": 1.0,
                "rounds": 2,
            },
        ),
        "ShuffleScalarSum": (
            ShuffleScalarSum,
            {"num_users": 100, "max_value": 1.0, "epsilon": 1.0, "delta": 1e-5},
        ),
        "PrivacyEngine": (
            opacus_shuffle.PrivacyEngine,
            {"accountant": "shuffled_checkin", "secure_mode": False},
        ),
        "make_private": (
            _make_private,
            {"noise_multiplier": 2.0, "max_grad_norm": 1.0, "local_noise": True},
        ),
        "make_private_with_epsilon": (
            _make_private_with_epsilon,
            {
                "target_epsilon": 1.0,
                "target_delta": 1e-5,
                "epochs": 2,
                "max_grad_norm": 1.0,
                "local_noise": True,
            },
        ),
        "get_epsilon": (
            _get_epsilon,
            {"delta": 1e-5, "bound": "certified", "adjacency": "zero_out"},
        ),
    }
    return valid_calls


def _engine() -> Any:
    return opacus_shuffle.PrivacyEngine(accountant="shuffled_checkin")


def _make_private(**options: Any) -> Any:
    return _engine().make_private(**{**make_toy(), **options})


def _make_private_with_epsilon(**options: Any) -> Any:
    return _engine().make_private_with_epsilon(**{**make_toy(), **options})


def _get_epsilon(**options: Any) -> Any:
    engine = _engine()
    engine.make_private(**make_toy(), noise_multiplier=2.0, local_noise=True)
    engine.accountant.record(engine.accountant.planned)
    return engine.get_epsilon(**options)


OURS = "the run's own"
"""A placeholder for an argument that the call creates."""


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


def wrap(**options):
    module = mlp()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    opacus_shuffle.ShuffleGradSampleModule(**{"m": module, "optimizer": optimizer, **options})


COMMON = {
    "noise_multiplier": 1.0,
    "delta": 1e-5,
    "trials": 1000,
    "confidence": 0.95,
    "generator": torch.Generator().manual_seed(0),
}
PAIR = {"num_users": 10, "others": 0.0, "steps": 1, "adjacency": "zero_out"}
TEST = {"delta": 1e-5, "confidence": 0.95, "method": "gdp"}
SCORES = {
    "null_scores": torch.linspace(0, 1, 20),
    "alternative_scores": torch.linspace(2, 3, 20),
}
RUN = dict.fromkeys(("model", "optimizer", "data_loader", "loss"), OURS)
SPEC = opacus_shuffle.find_permutations(mlp(), X)
CALLS = {
    "sums": (ShuffledSums, fields_of(ShuffledSums.of_protocol(PROTOCOL))),
    "sums for a noise": (
        ShuffledSums.build,
        {"noise_multiplier": 2.0, "num_users": 1000, "sample_rate": 0.1, "dimension": 4},
    ),
    "sums of a protocol": (ShuffledSums.of_protocol, {"protocol": PROTOCOL, "num_users": 2000}),
    "sums in epochs": (ShuffledSums.of_protocol, {"protocol": PROTOCOL, "num_batches": 5}),
    "bound of one round": (
        opacus_shuffle.privacy_bound,
        {"mechanism": ROUND, "steps": 2, **QUESTION},
    ),
    "bound": (accountants.compute_bound, {**HISTORY, **QUESTION}),
    "names of bounds": (accountants.bounds_of, {"mechanism": ShuffledCheckIn}),
    "noise": (
        accountants.smallest_noise,
        {"epsilon": lambda sigma: 1 / sigma, "target_epsilon": 1.0},
    ),
    "report": (
        PrivacyReport,
        {**HISTORY, **REPORT, "simulated": False, "emulated": False, "rewound": 0},
    ),
    "epsilon of an accountant": (
        lambda **given: check_in_accountant().get_epsilon(**given),
        {**QUESTION, "orders": None},
    ),
    "bound of an accountant": (lambda **given: check_in_accountant().bound(**given), QUESTION),
    "report of an accountant": (lambda **given: check_in_accountant().report(**given), REPORT),
    "accountant": (
        lambda **given: accountants.ShuffleAccountant(ShuffledCheckIn, **given) and None,
        {"num_users": 100, "batch_size": 10, "local_noise": True},
    ),
    "state": (load, {"state_dict": check_in_accountant().state_dict()}),
    "answer made by hand": (answer_by_hand, ANSWER),
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
    "find_permutations": (
        opacus_shuffle.find_permutations,
        {"module": mlp(), "sample_input": X, "groups": "residual"},
    ),
    "prepare_model": (opacus_shuffle.prepare_model, {"model": mlp()}),
    "check of permutations": (SPEC.check, {"module": mlp(), "sample_input": X}),
    "shuffle_ratio": (SPEC.shuffle_ratio, {"module": mlp()}),
    "moved_fraction": (SPEC.moved_fraction, {"name": "0.weight"}),
    "smallest_orbit": (SPEC.smallest_orbit, {"name": "0.weight"}),
    "WeightShuffling": (
        opacus_shuffle.WeightShuffling,
        {"groups": "residual", "generator": COMMON["generator"], "batch_clip": 1.0}
        | {"unshuffled_noise_multiplier": 2.0},
    ),
    "ShuffleGradSampleModule": (
        wrap,
        {"groups": "residual", "sample_input": X, "generator": COMMON["generator"]}
        | {"grad_sample_mode": "hooks"},
    ),
}
SAID: dict[str, dict[str, tuple[str, ...] | None]] = {
    "answer made by hand": {"epsilon": None},  # any number is one, or inconsistent
    "check of permutations": {"sample_input": ("does not run in double precision",)},
    "moved_fraction": {"name": None},  # other tensors do not move
    "smallest_orbit": {"name": None},
    "WeightShuffling": {"groups": None},
}
"""Other words for an argument in errors, as :func:`require_named_refusals` takes them."""
CALLS |= calls()


@pytest.mark.parametrize("call", CALLS)
def test_every_call_answers_or_names_the_argument(call: str) -> None:
    function, valid = CALLS[call]
    require_named_refusals(
        function, valid, **{"poisson_sampling": None, "orders": None, **SAID.get(call, {})}
    )


@pytest.mark.parametrize("call", CALLS)
def test_unknown_keywords_are_refused_by_name(call: str) -> None:
    function, valid = CALLS[call]
    with pytest.raises((TypeError, ValueError), match="bogus"):
        function(**valid, bogus=1)
