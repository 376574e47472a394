"""WS Algorithm 1: σ and σ₀ of a budget, sums clipped to c′, and plain DP-SGD where that is less."""

from __future__ import annotations

import math
import warnings

import pytest
import torch
from helpers.private_runs import Run, same
from helpers.shuffled_runs import SeededRun, build, in_record, spec_of
from helpers.toy import generator_here
from opacus.schedulers import ExponentialNoise
from scipy.stats import chi2
from torch import nn

from opacus_shuffle import (
    PrivacyAssumptionWarning,
    WeightShuffling,
    compute_noise_multiplier,
)

pytestmark = [
    pytest.mark.filterwarnings("ignore::opacus_shuffle.PrivacyAssumptionWarning"),
    pytest.mark.filterwarnings("ignore:This run is not private", "ignore:shuffle_weights moves"),
]
DELTA = 1e-5
MOVING = 5 * 40 + 40 + 40 * 3
"""What moves of the small network; its last bias, 3 entries, stays."""
BUDGET = {"target_epsilon": 3.0, "target_delta": DELTA}
NUMBERS = {"num_users": 24, "steps": 12, "sample_rate": 0.25, **BUDGET}


def calibrated(**options):
    """A run for the budget of three epochs."""
    asked = {"shuffle_weights": True, "epochs": 3, **BUDGET, **options}
    return Run("shuffled_fw", sigma=None, **in_record(**asked))


def noise_for(dimension, bound):
    return compute_noise_multiplier("shuffled_fw", dimension=dimension, bound=bound, **NUMBERS)


def seeded():
    """Fresh generators for a run that can be repeated."""
    torch.manual_seed(0)
    own = torch.Generator().manual_seed(3)
    return {"loader": {"generator": own}, "noise_generator": generator_here(4)}


# ---- the budget -----------------------------------------------------------------------------


@pytest.mark.parametrize("bound", ["published", "pair", "certified"])
def test_a_budget_is_kept_and_used_up_by_the_noise_with_and_without_permutations(bound):
    run = calibrated(bound=bound)
    planned, sigma = run.engine.accountant.planned, run.optimizer.noise_multiplier
    assert (planned.dimension, planned.clip, planned.batch_clip) == (MOVING, 1.0, 1.0)
    # The exact value is about the places that this network's permutations bring an entry to, the
    # estimate about all of them.
    orbit = run.engine.shuffler.spec.smallest_orbit("0.weight")
    assert planned.orbit == orbit < MOVING
    plain = noise_for(1, bound)
    assert sigma == noise_for(orbit if bound == "pair" else MOVING, bound)
    assert planned.unshuffled_noise_multiplier == pytest.approx(plain, rel=1e-8)
    assert (sigma < 0.9 * plain) == (bound != "certified")
    run.train().train().train()
    assert run.accounted == run.engine.shuffler.shuffles == 12
    assert 3.0 * (1 - 1e-4) < run.engine.get_epsilon(DELTA, bound=bound) <= 3.0
    assert run.train().engine.get_epsilon(DELTA, bound=bound) > 3.0


def test_the_noise_of_what_stays_is_made_for_records_that_no_clipping_of_sums_holds():
    """A batch_clip below max_grad_norm shortens a record's way in the shuffled parameters alone."""
    planned = calibrated(bound="pair", batch_clip=0.2).engine.accountant.planned
    assert planned.unshuffled_noise_multiplier == pytest.approx(noise_for(1, "pair"), rel=1e-8)
    # As for records that are five times smaller, with the coordinate in so many places.
    assert planned.noise_multiplier == pytest.approx(
        0.2 * noise_for(planned.orbit, "pair"), rel=1e-5
    )


@pytest.mark.parametrize("flags", [{}, {"batch_clip": math.inf}])
def test_where_nothing_is_shuffled_or_it_asks_for_no_less_noise_it_is_plain_dp_sgd(flags):
    said = "falls back to plain DP-SGD" if flags else "shuffled_fw without shuffle_weights is plain"
    with pytest.warns(UserWarning, match=said):
        run = calibrated(**seeded(), bound="published", shuffle_weights=bool(flags), **flags)
    sigma = run.optimizer.noise_multiplier
    assert sigma == noise_for(1, "published")
    assert run.engine.shuffler is None
    assert run.engine.accountant.planned.dimension == 1
    plain = Run("rdp", sigma=sigma, **seeded())
    weights = [trained.train().train().train().weights() for trained in (run, plain)]
    assert same(*weights)
    with warnings.catch_warnings():
        warnings.simplefilter("error", PrivacyAssumptionWarning)  # it is proved
        assert 2.999 < run.engine.get_epsilon(DELTA, bound="published") <= 3.0


# ---- what counts as permuted ----------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "dimension"),
    [
        ("mlp", (5 + 1 + 9) * 16 + (1 + 3) * 9),
        # Of the corrections all units move; their frozen bases do not count.
        ("low rank", (5 * 4 + 4 * 12) + (12 * 4 + 4 * 10) + (10 * 4 + 4 * 3)),
    ],
)
def test_the_dimension_is_the_number_of_trainable_entries_that_move(name, dimension):
    run = SeededRun(name, accountant="shuffled_fw", sigma=1.0, shuffle=spec_of(name))
    planned = run.engine.accountant.planned
    assert planned.dimension == dimension
    all_move = dimension == sum(parameter.numel() for parameter in run.optimizer.params)
    assert (planned.unshuffled_noise_multiplier is None) == all_move


def test_what_is_not_trained_does_not_count_and_where_nothing_stays_there_is_no_other_noise():
    frozen = build("mlp")
    frozen[2].requires_grad_(False)
    asked = {"accountant": "shuffled_fw", "sigma": 1.0, "shuffle": spec_of("mlp")}
    run = SeededRun(network=frozen, **asked).fit(1)
    assert run.engine.accountant.planned.dimension == 5 * 16 + 16 + 9 * 3
    whole = nn.Sequential(nn.Linear(5, 40), nn.ReLU(), nn.Linear(40, 3, bias=False))
    shuffling = WeightShuffling(unshuffled_noise_multiplier=5.0)
    with pytest.raises(ValueError, match=r"noise_multiplier=5\.0 applies to parameters"):
        Run("shuffled_fw", toy={"module": whole}, shuffle_weights=shuffling)
    last = {"optimizer": lambda parameters: torch.optim.SGD([[*parameters][-1]], lr=0.1)}
    with pytest.raises(ValueError, match="permutes no trainable parameter"):
        Run("shuffled_fw", shuffle_weights=True, **last)


# ---- the sum --------------------------------------------------------------------------------


def first_sum(run, *, physical=None):
    """The first logical batch's released gradients times their divisor, by name."""
    sums = []

    def watch(optimizer):
        named = run.network.named_parameters()
        sums.append({key: value.grad * optimizer.expected_batch_size for key, value in named})

    run.optimizer.attach_step_hook(watch)
    run.fit(1, physical=physical)
    return sums[0]


def norm_of(sums, names):
    return math.hypot(*(float(sums[name].norm()) for name in names))


def run_norm(options):
    """The clipping norm of a whole record."""
    norms = options.get("max_grad_norm", 1.0)
    return math.hypot(*norms) if isinstance(norms, list) else norms


SIX_NORMS = [0.3, 0.2, 0.5, 0.4, 0.6, 0.1]


@pytest.mark.parametrize(
    ("options", "physical"),
    [
        ({"mode": "functorch"}, None),
        ({"mode": "ghost"}, 3),
        ({"mode": "no wrapper", "clipping": "per_layer", "max_grad_norm": SIX_NORMS}, 3),
    ],
    ids=str,
)
def test_the_sum_of_the_shuffled_parameters_is_clipped_and_no_other(options, physical):
    asked = {"shuffle": spec_of("mlp"), **options}
    whole = first_sum(SeededRun(**asked), physical=physical)
    moving = [name for name in whole if name != "4.bias"]
    norm = norm_of(whole, moving)
    for batch_clip in (0.4 * norm, 2 * norm, math.inf):
        run = SeededRun(accountant="shuffled_fw", sigma=1e-6, batch_clip=batch_clip, **asked)
        clipped = first_sum(run, physical=physical)
        for name, total in whole.items():
            expected = total * (min(1.0, batch_clip / norm) if name in moving else 1.0)
            noise = 1e-6 * run_norm(options)
            assert float((clipped[name] - expected).abs().max()) <= 10 * noise
    clip = run_norm(options)  # c′ is c by default
    ours = first_sum(SeededRun(accountant="shuffled_fw", sigma=1e-6, **asked), physical=physical)
    assert norm_of(ours, moving) == pytest.approx(min(clip, norm), rel=1e-4)


# WS Algorithm 1.
@pytest.mark.parametrize(
    "options",
    [
        {"mode": "ghost", "max_grad_norm": 0.5},
        {"clipping": "per_layer", "max_grad_norm": SIX_NORMS},
    ],
    ids=str,
)
def test_shuffled_parameters_get_sigma_and_the_others_sigma_0_and_a_schedule_keeps_the_ratio(
    options,
):
    asked = {"shuffle": spec_of("mlp"), "unshuffled_noise_multiplier": 3.0, **options}
    run = SeededRun(accountant="shuffled_fw", sigma=2.0, **asked)
    noise, schedule = {True: [], False: []}, ExponentialNoise(run.optimizer, gamma=0.5)
    for step in range(48):
        x, y = run.batch()
        run.optimizer.zero_grad()
        run.criterion(0 * run.model(x), y).backward()
        run.optimizer.step()
        scale = run.optimizer.noise_multiplier * run_norm(options)
        for name, parameter in run.network.named_parameters():
            stays = name == "4.bias"
            sums = parameter.grad.flatten() * run.optimizer.expected_batch_size
            noise[stays].append(sums / (scale * 1.5 if stays else scale))
        if step == 23:
            schedule.step()
    for draws in map(torch.cat, noise.values()):
        low, high = chi2.ppf([5e-7, 1 - 5e-7], len(draws))  # outside with probability 1e-6
        assert low <= float(draws.square().sum()) <= high
    rounds = run.engine.accountant.rounds
    noises = [(m.noise_multiplier, m.unshuffled_noise_multiplier, steps) for m, steps in rounds]
    assert noises == [(2.0, pytest.approx(3.0), 24), (1.0, pytest.approx(1.5), 24)]


# ---- going on -------------------------------------------------------------------------------


def test_training_goes_on_with_the_same_weights_and_not_with_others():
    run = Run("shuffled_fw", **in_record(shuffle_weights=True, batch_clip=0.3)).train()
    toy = {**run.toy, "module": run.model, "optimizer": run.optimizer, "data_loader": run.loader}
    same_again = {"shuffle_weights": run.engine.shuffler.spec, "batch_clip": 0.3}
    for change in ({"batch_clip": 0.5}, {"max_grad_norm": 2.0}):
        with pytest.raises(ValueError, match="use a new PrivacyEngine"):
            run.engine.make_private(
                **in_record(**{**toy, **same_again, "noise_multiplier": 2.0, **change})
            )
    run.train()
    again = Run("shuffled_fw", engine=run.engine, toy=toy, sigma=2.5, **in_record(**same_again))
    again.train()
    assert again.engine.accountant.history == [(2.0, 0.25, 8), (2.5, 0.25, 4)]
    other = Run("shuffled_fw", **in_record(**{**same_again, "batch_clip": 0.25}))
    with pytest.raises(ValueError, match=r"this accountant of one with batch_clip=0\.25, "):
        other.load(again.saved())
