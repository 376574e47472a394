"""What finds, describes and applies permutations answers, or names the bad argument."""

import pytest
import torch
from helpers.bad_calls import require_named_refusals
from torch import nn

from opacus_shuffle import (
    ShuffleGradSampleModule,
    WeightShuffling,
    find_permutations,
    prepare_model,
)

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]
SAMPLE = torch.zeros(2, 5)
GENERATOR = torch.Generator()


def network():
    return nn.Sequential(nn.Linear(5, 8), nn.ReLU(), nn.Linear(8, 3))


def test_bad_arguments_of_finding_and_preparing_are_named():
    require_named_refusals(
        find_permutations, {"module": network(), "sample_input": SAMPLE, "groups": "residual"}
    )
    require_named_refusals(prepare_model, {"model": network()})


def test_bad_arguments_of_specifications_are_named():
    module = network()
    spec = find_permutations(module, SAMPLE)
    double = ("does not run in double precision",)  # the sample's own fault
    require_named_refusals(
        spec.check, {"module": module, "sample_input": SAMPLE}, sample_input=double
    )
    require_named_refusals(spec.shuffle_ratio, {"module": module})
    for method in (spec.moved_fraction, spec.smallest_orbit):
        require_named_refusals(method, {"name": "0.weight"}, name=None)  # other tensors do not move


def test_bad_arguments_of_weight_shuffling_are_named():
    options = {"groups": "residual", "generator": GENERATOR, "batch_clip": 1.0}
    options["unshuffled_noise_multiplier"] = 2.0
    require_named_refusals(WeightShuffling, options, groups=None)


def test_bad_arguments_of_networks_that_shuffle_themselves_are_named():
    def wrap(**options):
        module = network()
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
        ShuffleGradSampleModule(**{"m": module, "optimizer": optimizer, **options})

    options = {"groups": "residual", "sample_input": SAMPLE, "generator": GENERATOR}
    require_named_refusals(wrap, {**options, "grad_sample_mode": "hooks"})
