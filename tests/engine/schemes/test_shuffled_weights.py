"""WS Algorithm 1 in training: the noise that a budget asks for, sums clipped to c′, and when it is plain DP-SGD after all."""

from __future__ import annotations

import copy
import io
import math
import warnings

import pytest
import torch
from helpers.shuffled_runs import (
    build,
    contents,
    distance,
    in_record,
    prepare,
)
from helpers.toy import make_toy, run_epoch

from opacus_shuffle import PrivacyAssumptionWarning, PrivacyEngine, compute_noise_multiplier
from opacus_shuffle.engine.weights.batch_clip_plan import plan_batch_clip
from opacus_shuffle.engine.weights.weight_shuffling import WeightShuffling
from opacus_shuffle.permutation import find_permutations

pytestmark = pytest.mark.filterwarnings("ignore::opacus_shuffle.PrivacyAssumptionWarning")

DELTA = 1e-5
MOVING = 5 * 40 + 40 + 40 * 3
"""What moves of :func:`make_toy`'s network; the last bias, 3 entries, stays."""
BUDGET = {"target_epsilon": 3.0, "target_delta": DELTA, "epochs": 3}
TOY = {
    "num_users": 24,
    "steps": 12,
    "sample_rate": 0.25,
    "target_epsilon": 3.0,
    "target_delta": DELTA,
}


def engine_for_weights():
    return PrivacyEngine(accountant="shuffled_fw")


def calibrated(**options):
    """Engine and what it returned for the toy network and the budget."""
    engine = engine_for_weights()
    keywords = {**make_toy(), **BUDGET, "shuffle_weights": True, **options}
    return engine, engine.make_private_with_epsilon(**in_record(**keywords))


def algorithm(name="mlp", *, sigma=1e-6, **options):
    """A run of Algorithm 1 with seeds, by default with next to no noise."""
    options = {"shuffle": True, "engine": engine_for_weights(), **options}
    return prepare(name, sigma=sigma, **options)


# ---- the budget
# -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bound", ["published", "published_optimised", "pair", "certified"])
def test_a_budget_is_kept_for_as_long_as_promised_and_is_used_up(bound):
    engine, (model, optimizer, loader) = calibrated(bound=bound)
    for _ in range(3):
        run_epoch(model, optimizer, loader)
    assert len(engine.accountant) == engine.shuffler.shuffles == 12
    assert 3.0 * (1 - 1e-4) < engine.get_epsilon(DELTA, bound=bound) <= 3.0
    run_epoch(model, optimizer, loader)
    assert engine.get_epsilon(DELTA, bound=bound) > 3.0


@pytest.mark.zoo
@pytest.mark.parametrize("bound", ["published", "published_optimised", "pair"])
@pytest.mark.parametrize("epochs", [100, 500])
def test_a_budget_for_many_steps_is_kept_by_both_kinds_of_parameters_together(bound, epochs):
    engine, (_, optimizer, _) = calibrated(bound=bound, epochs=epochs)
    assert optimizer.unshuffled_noise_ratio > 1.5
    engine.accountant.history = [(optimizer.noise_multiplier, 0.25, 4 * epochs)]
    assert 3.0 * (1 - 1e-4) < engine.get_epsilon(DELTA, bound=bound) <= 3.0


@pytest.mark.parametrize("bound", ["published", "pair", "certified"])
def test_the_noise_is_that_of_the_bound_with_and_without_permutations(bound):
    engine, (_, optimizer, _) = calibrated(bound=bound)
    # The exact value is about the places that this network's permutations bring an entry to, the
    # estimate about all of them.
    places = engine.accountant.planned.orbit if bound == "pair" else MOVING
    assert (
        engine.accountant.planned.orbit == engine.shuffler.spec.smallest_orbit("0.weight") < MOVING
    )
    shuffled = compute_noise_multiplier("shuffled_fw", dimension=places, bound=bound, **TOY)
    plain = compute_noise_multiplier("shuffled_fw", dimension=1, bound=bound, **TOY)
    assert optimizer.noise_multiplier == shuffled
    assert optimizer.noise_multiplier * optimizer.unshuffled_noise_ratio == pytest.approx(
        plain, rel=1e-8
    )
    assert (shuffled < 0.9 * plain) == (bound != "certified")
    planned = engine.accountant.planned
    assert (planned.dimension, planned.clip, planned.batch_clip) == (MOVING, 1.0, 1.0)
    assert (
        planned.unshuffled_noise_multiplier
        == optimizer.noise_multiplier * optimizer.unshuffled_noise_ratio
    )
    assert optimizer.batch_clip == 1.0


def test_nothing_stays_without_parameters_that_stay():
    toy = make_toy()
    toy["module"][2].bias = None
    toy["optimizer"] = torch.optim.SGD(toy["module"].parameters(), lr=0.05)
    engine, (_, optimizer, _) = calibrated(**toy)
    assert engine.accountant.planned.unshuffled_noise_multiplier is None
    assert optimizer.unshuffled_noise_ratio == 1.0
    assert engine.accountant.planned.dimension == MOVING


def test_without_shuffling_it_is_dp_sgd_and_proved():
    engine, (model, optimizer, loader) = calibrated(shuffle_weights=False, bound="published")
    run_epoch(model, optimizer, loader)
    assert optimizer.noise_multiplier == compute_noise_multiplier(
        "shuffled_fw", dimension=1, bound="published", **TOY
    )
    assert engine.shuffler is None
    with warnings.catch_warnings():
        warnings.simplefilter("error", PrivacyAssumptionWarning)
        assert engine.get_epsilon(DELTA, bound="published") > 0


def test_the_noise_of_what_stays_is_made_for_records_that_no_clipping_of_sums_holds():
    # batch_clip below max_grad_norm shortens a record's way in the shuffled parameters alone.
    engine, (_, optimizer, _) = calibrated(bound="pair", batch_clip=0.2)
    plain = compute_noise_multiplier("shuffled_fw", dimension=1, bound="pair", **TOY)
    assert optimizer.noise_multiplier * optimizer.unshuffled_noise_ratio == pytest.approx(
        plain, rel=1e-8
    )
    # As far from it as for records that are five times smaller, with the coordinate in so many
    # places.
    places = compute_noise_multiplier(
        "shuffled_fw", dimension=engine.accountant.planned.orbit, bound="pair", **TOY
    )
    assert optimizer.noise_multiplier == pytest.approx(0.2 * places, rel=1e-5)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"unshuffled_noise_multiplier": 2.0}, "unshuffled_noise_multiplier is what"),
        ({"noise_multiplier": 2.0}, "noise_multiplier is what"),
        ({"bound": "certified_sharp"}, "bound must be one of"),
        ({"bound": "published", "adjacency": "replace"}, "certified"),
        ({"adjacency": "add"}, "adjacency"),
        ({"local_noise": True}, "local_noise"),
        ({"poisson_sampling": False}, "poisson_sampling"),
        ({"batch_clip": 0.0}, "batch_clip"),
        ({"dimension": "layer"}, "dimension must be one of 'model', 'layers'"),
        ({"shuffle_weights": "all"}, "shuffle_weights"),
        ({"shuffle_mode": "every_step"}, "shuffle_mode"),
        ({"target_epsilon": 0.0}, "target_epsilon"),
        (
            {"batch_clips": 1.0},
            r"batch_clips.*did you mean shuffle_weights=WeightShuffling\(batch_clip=",
        ),
        ({"batch_clip": math.inf, "sigma": 1.0}, "sigma"),
        ({"max_grad_norm": 0.0}, "max_grad_norm must be positive"),
        ({"max_grad_norm": None}, "max_grad_norm"),
        ({"max_grad_norm": []}, "max_grad_norm"),
        ({"max_grad_norm": "1"}, "max_grad_norm"),
        ({"clipping": "per_layer", "max_grad_norm": [1.0, -1.0, 1.0, 1.0]}, "max_grad_norm"),
    ],
)
def test_budgets_that_make_no_sense_are_refused_by_name(change, named):
    toy = make_toy()
    before = [type(each) for each in toy["module"].modules()]
    engine = engine_for_weights()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with pytest.raises(ValueError, match=named):
            engine.make_private_with_epsilon(
                **in_record(**{**toy, **BUDGET, "shuffle_weights": True, **change})
            )
    assert [type(each) for each in toy["module"].modules()] == before
    assert engine.accountant.state_dict() == engine_for_weights().accountant.state_dict()
    assert engine.shuffler is None


# ---- the fallback
# -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("batch_clip", [math.inf, 1e9])
def test_where_shuffling_asks_for_no_less_noise_it_is_plain_dp_sgd(batch_clip):
    def toy():
        torch.manual_seed(0)
        made = make_toy(generator=torch.Generator().manual_seed(3))
        return {
            **made,
            "noise_generator": torch.Generator().manual_seed(4),
            "grad_sample_mode": "functorch",
        }

    about_shuffling = {"shuffle_generator": torch.Generator(), "dimension": "layers"}
    with pytest.warns(UserWarning, match="falls back to plain DP-SGD"):
        engine, (model, optimizer, loader) = calibrated(
            **toy(), **about_shuffling, batch_clip=batch_clip, bound="published"
        )
    assert optimizer.noise_multiplier == compute_noise_multiplier(
        "shuffled_fw", dimension=1, bound="published", **TOY
    )
    assert engine.shuffler is None
    assert optimizer.unshuffled_noise_ratio == 1.0
    plain = PrivacyEngine(accountant="rdp").make_private(
        **toy(), noise_multiplier=optimizer.noise_multiplier
    )
    for run in ((model, optimizer, loader), plain):
        for _ in range(3):
            run_epoch(*run)
    assert all(
        torch.equal(*pair) for pair in zip(model.parameters(), plain[0].parameters(), strict=True)
    )
    assert engine.accountant.planned.dimension == 1
    assert 2.999 < engine.get_epsilon(DELTA, bound="published") <= 3.0


# ---- what counts as permuted
# ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name", ["mlp", "conv", "encoder", "low rank", pytest.param("gpt2", marks=pytest.mark.zoo)]
)
def test_the_dimension_is_the_number_of_trainable_entries_that_move(name):
    run = algorithm(name)
    spec, generator = run.shuffler.spec, torch.Generator().manual_seed(5)
    tensors = {key: each for key, each in spec.tensors(run.network).items() if each.requires_grad}
    moved = {key: torch.zeros(each.shape, dtype=torch.bool) for key, each in tensors.items()}
    for _ in range(
        60
    ):  # an entry of an axis of length 2 or more stays for all of them with probability 2**-60
        plan = spec.sample(generator)
        for key, seen in moved.items():
            places = torch.arange(seen.numel(), dtype=torch.float64).view(seen.shape)
            there = places.clone()
            spec.move({key: [there]}, plan)
            seen |= there != places
    counts = [int(each.sum()) for each in moved.values()]
    assert run.engine.accountant.planned.dimension == sum(counts)
    trainable = sum(each.numel() for each in run.network.parameters() if each.requires_grad)
    assert 0.5 * trainable < sum(counts) <= trainable
    assert (run.engine.accountant.planned.unshuffled_noise_multiplier is None) == (
        len(run.optimizer.params) == len(tensors)
    )
    by_layer = algorithm(name, dimension="layers")
    assert by_layer.engine.accountant.planned.dimension == tuple(counts)


def test_the_dimension_may_be_given():
    assert algorithm(dimension=7).engine.accountant.planned.dimension == 7


def test_frozen_layers_move_but_do_not_count():
    network = build("mlp")
    network[2].requires_grad_(False)
    run = algorithm(network=network)
    assert run.engine.accountant.planned.dimension == 5 * 16 + 16 + 9 * 3
    run.train(1)


def test_parameters_that_the_optimizer_does_not_hold_do_not_count():
    toy = make_toy()
    module = toy["module"]
    spec = find_permutations(module, torch.zeros(2, 5))
    first_layer = torch.optim.SGD(module[0].parameters(), lr=0.1)
    whole, part = (
        plan_batch_clip(WeightShuffling(), spec, module, max_grad_norm=1.0, optimizer=optimizer)
        for optimizer in (toy["optimizer"], first_layer)
    )
    assert (whole.dimension, whole.unshuffled_noise_ratio) == (MOVING, 1.0)
    assert (part.dimension, part.unshuffled_noise_ratio) == (5 * 40 + 40, None)
    assert plan_batch_clip(WeightShuffling(), spec, module, max_grad_norm=1.0) == whole


# ---- checkpoints and going on
# -----------------------------------------------------------------------------------------------

WITH_STAYING = {
    "sigma": 1.5,
    "unshuffled_noise_multiplier": 3.0,
    "batch_clip": 0.3,
    "optimizer": "Adam",
}


def checkpoint(run):
    file = io.BytesIO()
    run.engine.save_checkpoint(path=file, module=run.model, optimizer=run.optimizer)
    file.seek(0)
    return file


@pytest.mark.parametrize("own_generator", [False, True])
def test_a_resumed_run_is_the_one_that_went_on(own_generator):
    options = {**WITH_STAYING, "own_generator": own_generator}
    run = algorithm(**options).train(1)
    file, again = checkpoint(run), algorithm(**options)
    again.engine.load_checkpoint(path=file, module=again.model, optimizer=again.optimizer)
    again.optimizer.generator.set_state(
        run.optimizer.generator.get_state()
    )  # secrets that no checkpoint holds
    again.loader.batch_sampler.generator.set_state(run.loader.batch_sampler.generator.get_state())
    for each in (run, again):
        each.train(1)
    assert distance(contents(run), contents(again)) == 0
    assert again.engine.accountant.state_dict() == run.engine.accountant.state_dict()
    assert again.engine.get_epsilon(DELTA) == run.engine.get_epsilon(DELTA)


def again(run, **changes):
    """A second make_private on what the first one returned."""
    keywords = {
        "noise_multiplier": 1.5,
        "max_grad_norm": 1.0,
        "shuffle_weights": run.shuffler.spec,
        "batch_clip": 0.3,
        **changes,
    }
    return run.engine.make_private(
        module=run.model, optimizer=run.optimizer, data_loader=run.loader, **in_record(**keywords)
    )


def test_training_goes_on_with_the_same_weights_and_not_with_others():
    run = algorithm(sigma=1.5, batch_clip=0.3).train(1)
    state = run.engine.accountant.state_dict()
    for change in ({"batch_clip": 0.5}, {"max_grad_norm": 2.0}, {"dimension": "layers"}):
        with pytest.raises(ValueError, match="use a new PrivacyEngine"):
            again(run, **change)
        assert run.engine.accountant.state_dict() == state
    with pytest.raises(
        ValueError, match="use a new PrivacyEngine"
    ):  # nothing shuffled is other weights, too
        run.engine.make_private(
            module=run.model,
            optimizer=run.optimizer,
            data_loader=run.loader,
            noise_multiplier=1.5,
            max_grad_norm=1.0,
        )
    run.train(1)
    model, optimizer, loader = again(run, noise_multiplier=2.5)
    assert optimizer.batch_clip == 0.3
    run_epoch(model, optimizer, loader)
    assert [(sigma, steps) for sigma, _, steps in run.engine.accountant.history] == [
        (1.5, 8),
        (2.5, 4),
    ]


# ---- refusals
# ---------------------------------------------------------------------------------------------------------------


def frozen_but_the_last_bias():
    toy = make_toy()
    for parameter in list(toy["module"].parameters())[:-1]:
        parameter.requires_grad_(False)
    toy["optimizer"] = torch.optim.SGD([toy["module"][2].bias], lr=0.1)
    return toy


@pytest.mark.parametrize(
    ("name", "change", "named"),
    [
        ("shuffled_fw", {"local_noise": True}, "leave out local_noise=True"),
        ("shuffled_fw", {"poisson_sampling": False}, "poisson_sampling=False"),
        ("shuffled_fw", {"noise_multiplier": 0.0}, "noise_multiplier"),
        ("shuffled_fw", {"clipping": "adaptive"}, "clipping"),
        ("shuffled_fw", {"batch_clip": 0.0}, "batch_clip"),
        ("shuffled_fw", {"batch_clip": -1.0}, "batch_clip"),
        ("shuffled_fw", {"batch_clip": math.nan}, "batch_clip"),
        ("shuffled_fw", {"batch_clip": "1"}, "batch_clip"),
        ("shuffled_fw", {"batch_clip": -math.inf}, "batch_clip"),
        ("shuffled_fw", {"dimension": 0}, "dimension"),
        ("shuffled_fw", {"dimension": 2.5}, "dimension"),
        ("shuffled_fw", {"dimension": "entries"}, "dimension must be one of 'model', 'layers'"),
        (
            "shuffled_fw",
            {"unshuffled_noise_multiplier": 0.5},
            "unshuffled_noise_multiplier must be at least noise_multiplier=1.0",
        ),
        ("shuffled_fw", {"unshuffled_noise_multiplier": math.nan}, "unshuffled_noise_multiplier"),
        (
            "shuffled_fw",
            {"shuffle_weights": False, "batch_clip": 1.0},
            r"batch_clip=1\.0 is about shuffled parameters",
        ),
        (
            "shuffled_fw",
            {"shuffle_weights": False, "dimension": 5},
            "dimension=5 is about shuffled parameters",
        ),
        (
            "shuffled_fw",
            {"shuffle_weights": False, "unshuffled_noise_multiplier": 2.0},
            "is about shuffled parameters",
        ),
        ("rdp", {"shuffle_weights": False, "batch_clip": 1.0}, "pass shuffle_weights=True"),
        ("rdp", {"batch_clip": 0.0}, "batch_clip"),
        ("rdp", {"dimension": 5}, "dimension=5 does not go with accountant 'rdp'"),
        ("rdp", {"unshuffled_noise_multiplier": 2.0}, "does not go with accountant 'rdp'"),
        (
            "shuffle_gauss",
            {"batch_clip": 1.0},
            r"batch_clip=1\.0 does not go with accountant 'shuffle_gauss'",
        ),
        (
            "shuffled_checkin",
            {"dimension": "layers"},
            "dimension='layers' does not go with accountant 'shuffled_checkin'",
        ),
        (
            "subsampled_shuffle",
            {"unshuffled_noise_multiplier": 2.0},
            "use accountant='shuffled_fw'",
        ),
    ],
)
def test_what_does_not_go_together_is_refused_by_name_and_changes_nothing(name, change, named):
    toy = make_toy()
    engine = PrivacyEngine(accountant=name)
    before = copy.deepcopy(engine.accountant.__dict__)
    with pytest.raises(ValueError, match=named):
        engine.make_private(
            **in_record(**{**toy, "noise_multiplier": 1.0, "shuffle_weights": True, **change})
        )
    assert engine.accountant.__dict__ == before
    assert engine.shuffler is None
    assert type(toy["optimizer"]) is torch.optim.SGD
    assert not toy["module"][0]._forward_hooks
    run_epoch(
        *engine_for_weights().make_private(**toy, noise_multiplier=1.0, shuffle_weights=True)
    )  # and it still serves


def test_shuffling_nothing_that_is_trained_is_refused():
    with pytest.raises(
        ValueError, match=r"permutes no trainable parameter|trains none of the parameters"
    ):
        engine_for_weights().make_private(
            **frozen_but_the_last_bias(), noise_multiplier=1.0, shuffle_weights=True
        )


def test_other_accountants_clip_no_sum_unless_told():
    for shuffling, batch_clip in (
        (False, None),
        (True, None),
        (WeightShuffling(batch_clip=2), 2.0),
    ):
        engine = PrivacyEngine(accountant="rdp")
        _, optimizer, _ = engine.make_private(
            **make_toy(), noise_multiplier=1.0, shuffle_weights=shuffling
        )
        assert optimizer.batch_clip == batch_clip
