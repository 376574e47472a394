"""Bad input: every public call answers, or raises an error that names the argument."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers.bad_calls import require_named_refusals

import opacus_shuffle
from opacus_shuffle import ShuffleVectorSum, accountants, sco
from opacus_shuffle.analysis import (
    advanced_composition,
    binomial_sums,
    fenton_wilkinson,
    gaussian,
    mean_ratio,
    sampled_sums,
    subsampling,
)
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
X = torch.nn.functional.normalize(
    torch.arange(60.0, dtype=torch.float64).reshape(30, 2).sin(), dim=1
)
DATA = (X, torch.where(X[:, 0] > 0, 1.0, -1.0).double())
SOLVE = {
    "loss": sco.logistic_loss,
    "constraint": sco.L2Ball(1.0),
    "lipschitz": 1.0,
    "epsilon": 2.0,
    "delta": 1e-6,
    "dimension": 2,
}


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
        "step_budget": (
            advanced_composition.step_budget,
            {"epsilon": 1.0, "delta": 1e-5, "steps": 5, "sample_rate": 0.1},
        ),
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
        "L2Ball": (sco.L2Ball, {"radius": 1.0, "center": None}),
        "Box": (sco.Box, {"low": 0.0, "high": 1.0, "dimension": 2}),
        "PrivacyBudget": (sco.PrivacyBudget, {"epsilon": 1.0, "delta": 1e-5}),
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
    solvers = {
        sco.shuffle_sgd: {"batch_size": 10},
        sco.shuffle_accelerated_sgd: {"smoothness": 0.25},
        sco.shuffle_gradient_descent: {"rounds": 2, "smoothness": 0.25},
        sco.shuffle_strongly_convex: {"strong_convexity": 0.1, "smoothness": 0.25},
    }
    for solver, more in solvers.items():
        valid_calls[solver.__name__] = (
            _solving(solver),
            {**SOLVE, **more, "diameter": 2.0, "clip": True},
        )
    return valid_calls


_OF_THE_PROBLEM = ("constraint", "lipschitz", "smoothness", "dimension", "diameter", "clip")


def _solving(solver: Callable[..., Any]) -> Callable[..., Any]:
    def solve(*, epsilon: Any, delta: Any, loss: Any, **options: Any) -> Any:
        given = {name: options.pop(name) for name in _OF_THE_PROBLEM if name in options}
        return solver(
            sco.Problem(loss, DATA, **given), sco.PrivacyBudget(epsilon, delta), **options
        )

    return solve


def _parts() -> dict[str, Any]:
    model = torch.nn.Linear(2, 1)
    loader = torch.utils.data.DataLoader(
        torch.utils.data.TensorDataset(X.float(), DATA[1].float()), batch_size=10
    )
    return {
        "module": model,
        "optimizer": torch.optim.SGD(model.parameters(), lr=0.1),
        "data_loader": loader,
    }


def _engine() -> Any:
    return opacus_shuffle.PrivacyEngine(accountant="shuffled_checkin")


def _make_private(**options: Any) -> Any:
    return _engine().make_private(**_parts(), **options)


def _make_private_with_epsilon(**options: Any) -> Any:
    return _engine().make_private_with_epsilon(**_parts(), **options)


def _get_epsilon(**options: Any) -> Any:
    engine = _engine()
    engine.make_private(**_parts(), noise_multiplier=2.0, max_grad_norm=1.0, local_noise=True)
    engine.accountant.record(engine.accountant.planned)
    return engine.get_epsilon(**options)


@pytest.mark.parametrize("call", calls())
def test_every_call_answers_or_names_the_argument(call: str) -> None:
    function, valid = calls()[call]
    require_named_refusals(function, valid, poisson_sampling=None, orders=None)


@pytest.mark.parametrize("call", calls())
def test_unknown_keywords_are_refused_by_name(call: str) -> None:
    function, valid = calls()[call]
    with pytest.raises((TypeError, ValueError), match="bogus"):
        function(**valid, bogus=1)
