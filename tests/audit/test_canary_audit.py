"""Audits of training runs with a canary, compared with what the noise allows."""

import copy
import math

import pytest
import torch
from helpers.canary_runs import DELTA, accounted, audit, private, steps_of, weight
from opacus.optimizers import DPOptimizer
from opacus.utils.batch_memory_manager import BatchMemoryManager
from scipy.stats import binom
from torch import nn
from torch.nn.functional import cross_entropy

from opacus_shuffle.analysis import gaussian
from opacus_shuffle.audit.canary import CanaryTrial, GradientCanary
from opacus_shuffle.audit.lower_bounds import audit_scores
from opacus_shuffle.core.guarantees import Guarantee
from opacus_shuffle.networks.running import unwrap

# What it shows of DP-SGD

SIGMA = 0.5
EXACT = gaussian.compute_epsilon(mu=1 / SIGMA, delta=DELTA)


@pytest.fixture(scope="module")
def trials() -> list[CanaryTrial]:
    """8,000 sums of the gradients of other records, with the noise of Opacus's optimizer."""
    parameter = nn.Parameter(torch.zeros(2))
    optimizer = DPOptimizer(
        torch.optim.SGD([parameter], lr=0.1),
        noise_multiplier=SIGMA,
        max_grad_norm=1.0,
        expected_batch_size=4,
        generator=torch.Generator().manual_seed(0),
    )
    others = torch.randn(8000, 2, generator=torch.Generator().manual_seed(1))
    with GradientCanary(
        optimizer, parameter, 1, generator=torch.Generator().manual_seed(2)
    ) as canary:
        for gradient in others:
            parameter.summed_grad = gradient.clone()
            optimizer.add_noise()
    assert [trial.background for trial in canary.trials] == others[:, 1].tolist()
    return canary.trials


def split(trials):
    return [
        [trial.score for trial in trials if trial.present is present] for present in (False, True)
    ]


def test_the_scores_have_the_distribution_of_the_noise_and_the_coin_is_fair(trials):
    null, alternative = (torch.tensor(scores, dtype=torch.float64) for scores in split(trials))
    assert binom.ppf(1e-6, 8000, 0.5) <= len(null) <= binom.ppf(1 - 1e-6, 8000, 0.5)
    for scores, mean in ((null, 0.0), (alternative, 1.0)):
        # Five standard deviations of a mean, and of a variance (whose is √(2/n)·σ²).
        assert abs(float(scores.mean()) - mean) < 5 * SIGMA / math.sqrt(len(scores))
        assert abs(float(scores.var()) / SIGMA**2 - 1) < 5 * math.sqrt(2 / len(scores))


def test_audits_exceed_the_exact_value_no_more_often_than_stated(trials):
    for method in ("clopper_pearson", "gdp"):
        epsilons = [
            audit_scores(
                *split(trials[start : start + 100]), delta=DELTA, confidence=0.6, method=method
            ).epsilon
            for start in range(0, 8000, 100)
        ]
        assert sum(epsilon > EXACT for epsilon in epsilons) <= binom.ppf(
            1 - 1e-6, len(epsilons), 0.4
        )
        assert max(epsilons) > 0


# The audit of a run


@pytest.mark.parametrize("accountant", ["rdp", pytest.param("prv", marks=pytest.mark.zoo)])
def test_opacus_s_engine_can_be_audited(accountant):
    result = audit(private(accountant, stock=True, sigma=0.2), steps=200)
    assert [finding.name for finding in result.findings] == ["gradient"]
    assert [claim.bound for claim in result.claims] == ["certified"]
    assert result.claims[0].epsilon == gaussian.compute_epsilon(mu=5, delta=DELTA)
    assert result.claims[0].guarantee is Guarantee.PROVED
    assert 0 < result.largest.lower.epsilon <= result.claims[0].epsilon
    assert result.contradicted == ()


@pytest.mark.parametrize("shuffled", [pytest.param(False, marks=pytest.mark.zoo), True])
def test_an_audited_run_is_the_same_run_and_virtual_steps_are_no_trials(shuffled):
    audited, plain = private(shuffle_weights=shuffled), private(shuffle_weights=shuffled)
    with BatchMemoryManager(
        data_loader=audited["data_loader"],
        max_physical_batch_size=3,
        optimizer=audited["optimizer"],
    ) as data_loader:
        audit({**audited, "data_loader": data_loader})
    coins = torch.Generator().manual_seed(9)
    with GradientCanary(plain["optimizer"], weight(plain), generator=coins):
        steps_of(plain, 100)
    for one, other in zip(
        unwrap(audited["model"]).parameters(), unwrap(plain["model"]).parameters(), strict=True
    ):
        torch.testing.assert_close(one, other)  # Physical batches change the order of sums.
    assert accounted(audited) == 100


def test_the_optimizer_is_restored_when_the_loss_fails():
    run = private()

    def failing(model, batch):
        if accounted(run) == 3:
            raise RuntimeError("no more")
        return cross_entropy(model(batch[0]), batch[1])

    with pytest.raises(RuntimeError, match="no more"):
        audit({**run, "loss": failing})
    assert "add_noise" not in vars(run["optimizer"])


def test_the_canary_is_by_default_in_the_largest_trained_tensor():
    assert "entry (0, 0) of '2.weight'" in audit(private(sizes=(3, 4, 50))).notes[0]


ADAPTIVE = {
    "target_unclipped_quantile": 0.5,
    "clipbound_learning_rate": 0.1,
    "max_clipbound": 2.0,
    "min_clipbound": 0.1,
    "unclipped_num_std": 5.0,
}
REFUSED = [
    (
        {"engine": "shuffled_checkin", "local_noise": True},
        "adds noise to each report",
    ),
    ({"engine": "secret_checkin", "local_noise": True}, "audit_secret_checkin"),
    ({"sigma": 0.0}, r"optimizer.noise_multiplier must be positive"),
    ({"clipping": "adaptive", **ADAPTIVE}, "clips adaptively"),
]


@pytest.mark.parametrize(("options", "message"), REFUSED)
def test_runs_that_cannot_be_audited_are_refused(options, message):
    run = private(**options)
    before = {name: value.clone() for name, value in unwrap(run["model"]).named_parameters()}
    with pytest.raises(ValueError, match=message):
        audit(run)
    assert all(
        torch.equal(before[name], value) for name, value in unwrap(run["model"]).named_parameters()
    )
    assert "add_noise" not in vars(run["optimizer"])


def quieter(run):
    """A loss that changes the noise in every step."""

    def loss(model, batch):
        run["optimizer"].noise_multiplier *= 0.99
        return cross_entropy(model(batch[0]), batch[1])

    return loss


@pytest.mark.parametrize(
    ("name", "changed", "message"),
    [
        ("loss", quieter, "must not change"),
        ("loss", lambda run: lambda model, batch: None, "a scalar tensor, got NoneType"),
        ("loss", lambda run: None, "loss must be a function"),
        ("model", lambda run: run["model"].eval(), r"call model\.train"),
        (
            "model",
            lambda run: copy.deepcopy(run["model"]),
            "does not train this model's",
        ),
        ("data_loader", lambda run: [], "data_loader must be a DataLoader"),
        ("optimizer", lambda run: torch.optim.SGD(run["model"].parameters()), "DPOptimizer"),
    ],
)
def test_arguments_that_do_not_belong_together_are_refused(name, changed, message):
    run = private()
    with pytest.raises(ValueError, match=message):
        audit({**run, name: changed(run)})
