"""The canary is added to the sum if the coin says so, and changes nothing else."""

import math

import pytest
import torch
from helpers.canary_runs import private, steps_of, weight
from helpers.toy import make_toy
from torch import nn

from opacus_shuffle.audit.canary import GradientCanary
from opacus_shuffle.networks.running import unwrap

MODES = [
    (False, "hooks", "flat"),
    (False, "ew", "flat"),
    (False, "ghost", "flat"),
    (True, "hooks", "per_layer"),
    *(
        pytest.param(*mode, marks=pytest.mark.zoo)
        for mode in [
            (False, "functorch", "flat"),
            (False, "hooks", "per_layer"),
            (True, "hooks", "flat"),
            (True, "ghost", "flat"),
        ]
    ),
]


@pytest.mark.parametrize(("stock", "mode", "clipping"), MODES)
def test_without_noise_the_score_is_the_canary_or_nothing(stock, mode, clipping):
    norms = {"max_grad_norm": [0.7, 0.5, 0.6, 0.4]} if clipping == "per_layer" else {}
    run = private(
        sigma=0.0,
        stock=stock,
        mode=mode,
        clipping=clipping,
        batch_size=2 if mode != "ew" else 8,
        **norms,
    )
    with GradientCanary(
        run["optimizer"], weight(run), 17, generator=torch.Generator().manual_seed(0)
    ) as canary:
        steps_of(run, 40)
    assert "add_noise" not in vars(run["optimizer"])
    size = 0.7 if clipping == "per_layer" else 1.0
    assert len(canary.trials) == 40
    assert {trial.present for trial in canary.trials} == {False, True}
    for trial in canary.trials:
        # Adding and taking away a number of size 1 rounds by 2⁻⁵³, twice.
        assert abs(trial.score - size * trial.present) < 1e-15


def test_steps_of_empty_batches_are_trials():
    run = private(sigma=0.0, batch_size=1)  # a rate of 1/64: every third batch is empty
    with GradientCanary(run["optimizer"], weight(run)) as canary:
        steps_of(run, 60)
    assert len(canary.trials) == 60
    assert sum(trial.background == 0 for trial in canary.trials) > 0


def test_only_the_entry_changes_and_only_if_the_coin_says_so():
    plain, with_canary = private(sigma=1.0), private(sigma=1.0)
    with GradientCanary(with_canary["optimizer"], weight(with_canary), 17) as canary:
        steps_of(with_canary, 1)
    steps_of(plain, 1)
    for name, parameter in unwrap(plain["model"]).named_parameters():
        off = weight(with_canary, name).grad - parameter.grad
        expected = torch.zeros_like(off)
        if name == "0.weight" and canary.trials[0].present:
            expected[3, 2] = 1 / plain["optimizer"].expected_batch_size
        torch.testing.assert_close(off, expected, rtol=0, atol=1e-15)


@pytest.mark.parametrize("batch_clip", [0.3, 1.0, 1e6])
def test_batch_clipping_shrinks_the_canary_like_a_projection(batch_clip):
    run = private("shuffled_fw", sigma=1e-6, shuffle_weights=True, batch_clip=batch_clip)
    optimizer, place = run["optimizer"], (3, 2)
    seen = []
    stepped = optimizer.clip_and_accumulate

    def noted():
        stepped()
        seen.append([total.clone() for total in optimizer.noise.sums(optimizer)])

    optimizer.clip_and_accumulate = noted
    assert optimizer.params[0] is weight(run)
    with GradientCanary(optimizer, weight(run), 17) as canary:
        steps_of(run, 30)

    def projected(sums):
        norm = math.sqrt(sum(float(total.square().sum()) for total in sums))
        return float(sums[0][place]) * min(1.0, batch_clip / norm if norm else 1.0)

    for trial, sums in zip(canary.trials, seen, strict=True):
        assert math.isclose(trial.background, projected(sums), rel_tol=1e-12, abs_tol=1e-15)
        sums[0][place] += trial.present
        assert abs(trial.observed - projected(sums)) < 1e-5  # ten standard deviations of the noise
        assert abs(trial.score) < 1 + 1e-5


@pytest.mark.parametrize(
    ("change", "message"),
    [
        *(
            ({"index": index}, r"index must be a whole number .*at most 39")
            for index in (40, -1, 1.5)
        ),
        ({"index": True}, "index must be a number"),
        (
            {"parameter": nn.Parameter(torch.zeros(2))},
            "parameter must be one that optimizer trains",
        ),
        ({"parameter": "0.weight"}, "parameter must be a Tensor"),
        ({"generator": 3}, "generator must be a Generator"),
        ({"optimizer": make_toy()["optimizer"]}, "optimizer must be a DPOptimizer"),
        ({}, "another canary"),
    ],
)
def test_invalid_canaries_are_refused(change, message):
    run = private()
    arguments = {"optimizer": run["optimizer"], "parameter": weight(run), **change}
    with GradientCanary(run["optimizer"], weight(run)), pytest.raises(ValueError, match=message):
        GradientCanary(**arguments).__enter__()
    assert "add_noise" not in vars(run["optimizer"])
