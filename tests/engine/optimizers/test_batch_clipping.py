"""What an optimizer does to a shuffled batch's sum: clipped to c′ with whatever takes gradients, and σ or σ₀ of noise."""

from __future__ import annotations

import contextlib
import copy
import math

import pytest
import torch
from helpers.shuffled_runs import (
    BATCH,
    EPOCHS,
    EXACT,
    RECORDS,
    contents,
    distance,
    noise_carried_along,
    prepare,
    records,
    unshuffle,
)
from opacus.schedulers import ExponentialNoise
from scipy.stats import chi2
from torch.utils.data import TensorDataset

from opacus_shuffle import PrivacyEngine
from opacus_shuffle.engine.private_optimizer import PrivateOptimizer

pytestmark = pytest.mark.filterwarnings("ignore::opacus_shuffle.PrivacyAssumptionWarning")

STEPS = EPOCHS * RECORDS // BATCH
DELTA = 1e-5


def engine_for_weights():
    return PrivacyEngine(accountant="shuffled_fw")


def algorithm(name="mlp", *, sigma=1e-6, **options):
    """A run of Algorithm 1 with seeds, by default with next to no noise."""
    options = {"shuffle": True, "engine": engine_for_weights(), **options}
    return prepare(name, sigma=sigma, **options)


class Enough(Exception):
    """What was waited for has been seen."""


def first_gradients(run, *, physical=None):
    """What the first logical batch's gradients are before the update, times the expected batch size."""
    seen = []

    def watch(optimizer):
        found = {
            name: each.grad.detach().clone()
            for name, each in run.network.named_parameters()
            if each.grad is not None
        }
        seen.append({name: each * optimizer.expected_batch_size for name, each in found.items()})
        raise Enough

    run.optimizer.attach_step_hook(watch)
    with contextlib.suppress(Enough):
        run.train(1, physical=physical)
    return seen[0]


def norm_of(gradients, names):
    return math.sqrt(sum(float(gradients[name].square().sum()) for name in names))


MODES = [
    pytest.param("mlp", {"mode": "hooks"}, None, marks=pytest.mark.zoo),
    ("mlp", {"mode": "hooks"}, 3),
    pytest.param("mlp", {"mode": "functorch"}, 3, marks=pytest.mark.zoo),
    ("mlp", {"mode": "ew"}, None),
    pytest.param("mlp", {"mode": "ghost"}, None, marks=pytest.mark.zoo),
    ("mlp", {"mode": "ghost"}, 3),
    ("mlp", {"clipping": "per_layer", "max_grad_norm": [0.3, 0.2, 0.5, 0.4, 0.6, 0.1]}, 3),
    ("conv", {"mode": "functorch", "wrap_model": False}, 3),
    pytest.param("gpt2", {"mode": "hooks"}, 3, marks=pytest.mark.zoo),
]


@pytest.mark.parametrize(("name", "options", "physical"), MODES, ids=str)
def test_the_sum_of_the_shuffled_parameters_is_clipped_and_no_other(name, options, physical):
    free = algorithm(name, batch_clip=math.inf, **copy.deepcopy(options))
    whole = first_gradients(free, physical=physical)
    shuffled = [
        key for key, each in free.shuffler.spec.tensors(free.network).items() if key in whole
    ]
    norm = norm_of(whole, shuffled)
    assert norm > 0.1
    clip = free.optimizer.max_grad_norm
    noise = (
        1e-6 * clip * (math.sqrt(sum(each.numel() for each in whole.values())) + 6)
    )  # longer with probability 1e-8
    for batch_clip in (0.4 * norm, 2 * norm):
        run = algorithm(name, batch_clip=batch_clip, **copy.deepcopy(options))
        found = first_gradients(run, physical=physical)
        factor = min(1.0, batch_clip / norm)
        assert norm_of(found, shuffled) == pytest.approx(factor * norm, abs=2 * noise)
        for key, each in whole.items():
            expected = factor * each if key in shuffled else each
            assert float((found[key] - expected).norm()) <= 2 * noise
    assert set(whole) - set(shuffled) or name == "gpt2"


def test_without_noise_the_clipping_is_exact_and_goes_with_opacus_own_accountants():
    whole = first_gradients(prepare(shuffle=True))
    shuffled = [key for key in whole if key != "4.bias"]
    norm = norm_of(whole, shuffled)
    run = prepare(shuffle=True, batch_clip=0.25)
    found = first_gradients(run)
    assert norm_of(found, shuffled) == pytest.approx(0.25, rel=1e-14)
    assert torch.equal(found["4.bias"], whole["4.bias"])
    for key in shuffled:
        assert float((found[key] - whole[key] * (0.25 / norm)).abs().max()) <= 1e-15
    assert prepare(shuffle=True).optimizer.batch_clip is None


@pytest.mark.parametrize("mode", ["hooks", "functorch", "ew", "ghost"])
def test_empty_batches_are_noise_alone(mode, monkeypatch):
    torch.manual_seed(0)
    data = TensorDataset(*(each[:8] for each in records("mlp").tensors))
    run = algorithm(data=data, sigma=2.0, mode=mode, batch_clip=0.5)
    loader = run.loader
    sizes = []
    run.optimizer.attach_step_hook(lambda optimizer: sizes.append(optimizer.num_records))
    monkeypatch.setattr(type(loader.batch_sampler), "draw", lambda _: [[], [0, 1, 2], []])
    run.train(2)
    assert sizes == [0, 3, 0] * 2
    assert len(run.engine.accountant) == 6
    assert all(torch.isfinite(each).all() for each in run.network.parameters())


def test_with_the_noise_carried_along_algorithm_1_is_the_run_that_does_not_move():
    options = {"sigma": 1.5, "batch_clip": 0.3, "unshuffled_noise_multiplier": 4.0}
    still, run = algorithm(**options), algorithm(**options)
    still.shuffler.detach()
    still.train()
    with noise_carried_along(run):
        run.train()
    expected = contents(still)
    unshuffle(run)
    assert distance(expected, contents(run)) <= EXACT


# ---- noise
# ------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "clip"),
    [
        ({"mode": "hooks"}, 0.5),
        ({"mode": "ghost"}, 0.5),
        (
            {"clipping": "per_layer", "max_grad_norm": [0.3, 0.2, 0.5, 0.4, 0.6, 0.1]},
            math.hypot(0.3, 0.2, 0.5, 0.4, 0.6, 0.1),
        ),
    ],
)
def test_shuffled_parameters_get_sigma_and_the_others_sigma_0(options, clip):
    run = algorithm(sigma=2.0, unshuffled_noise_multiplier=3.0, **{"max_grad_norm": 0.5, **options})
    squares = {"moves": [], "stays": []}

    def watch(optimizer):
        for name, each in run.network.named_parameters():
            noise = each.grad * optimizer.expected_batch_size - each.summed_grad
            squares["stays" if name == "4.bias" else "moves"].append(noise.flatten())

    run.optimizer.attach_step_hook(watch)
    run.train(40)
    assert run.engine.accountant.planned.unshuffled_noise_multiplier == pytest.approx(3.0)
    for kind, sigma in (("moves", 2.0), ("stays", 3.0)):
        found = torch.cat(squares[kind]) / (sigma * clip)
        low, high = chi2.ppf([5e-7, 1 - 5e-7], len(found))  # outside with probability 1e-6
        assert low <= float(found.square().sum()) <= high
        assert abs(float(found.sum())) <= 5 * math.sqrt(len(found))
    assert len(torch.cat(squares["stays"])) == 40 * 4 * 3


def test_a_noise_scheduler_keeps_the_ratio_and_is_accounted():
    run = algorithm(sigma=2.0, unshuffled_noise_multiplier=6.0)
    schedule = ExponentialNoise(run.optimizer, gamma=0.9)
    run.train(after=schedule.step)
    history = run.engine.accountant.history
    assert [sigma for sigma, _, _ in history] == pytest.approx(
        [2.0 * 0.9**step for step in range(STEPS)]
    )
    for mechanism, _ in run.engine.accountant.rounds:
        assert mechanism.unshuffled_noise_multiplier == pytest.approx(
            3 * mechanism.noise_multiplier
        )
    assert run.engine.get_epsilon(DELTA, bound="certified") > 0


# ---- at the edges of floating point
# -----------------------------------------------------------------------------------------


def clipped_sum(values, batch_clip, dtype):
    weight = torch.nn.Parameter(torch.zeros(len(values), dtype=dtype))
    optimizer = PrivateOptimizer(
        torch.optim.SGD([weight], lr=1.0),
        noise_multiplier=0.0,
        max_grad_norm=1.0,
        expected_batch_size=1,
    )
    optimizer.clip_batch([weight], batch_clip=batch_clip)
    weight.summed_grad = torch.tensor(values, dtype=dtype)
    optimizer.add_noise()
    return weight.grad


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("batch_clip", [1e-50, 1e-12, 1.0, 1e30])
def test_a_sum_of_zero_stays_zero_whatever_the_norm(dtype, batch_clip):
    assert torch.equal(clipped_sum([0.0, 0.0], batch_clip, dtype), torch.zeros(2, dtype=dtype))


def test_a_norm_that_the_type_cannot_hold_does_not_clip_to_zero():
    near = clipped_sum([46_300.0, 46_300.0], 5000.0, torch.float16)
    beyond = clipped_sum(
        [46_330.0, 46_330.0], 5000.0, torch.float16
    )  # its norm is no half-precision number
    assert (
        float((near - beyond).double().norm()) <= 50
    )  # 42 apart before, and half-precision numbers are 4 apart here
    huge = clipped_sum([2e19, 2e19], 1.0, torch.float32)
    assert float(huge.norm()) == pytest.approx(1.0, rel=1e-6)
