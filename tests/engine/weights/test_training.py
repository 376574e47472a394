"""Training with shuffled weights is training: the same run, its units in another order."""

from __future__ import annotations

import collections

import pytest
import torch
from helpers.shuffled_runs import (
    BATCH,
    EPOCHS,
    EXACT,
    RECORDS,
    SHUFFLE_SEED,
    STATE,
    build,
    contents,
    distance,
    logits,
    noise_carried_along,
    prepare,
    records,
    unshuffle,
    weights,
)
from scipy.stats import chi2
from torch import nn

from opacus_shuffle.engine.weights.shuffler import WeightShuffler
from opacus_shuffle.permutation import find_permutations

STEPS = EPOCHS * RECORDS // BATCH
VISIBLE = 1e-3
"""What a permutation of weights moves them by, at least: they differ from one another in the first digit."""

# Every network with every mode that it trains in, every optimizer with several of them, with and
# without virtual steps and wrapping.
RUNS = [
    ("mlp", "hooks", "SGD", None, True),
    ("mlp", "hooks", "Nesterov", 3, False),
    ("mlp", "hooks", "Adagrad", None, False),
    ("mlp", "functorch", "AMSGrad", 3, True),
    ("mlp", "functorch", "SGD", None, False),
    ("mlp", "ew", "RMSprop", None, True),
    ("mlp", "ew", "Adam", 3, True),
    ("mlp", "ghost", "Nesterov", 3, False),
    ("mlp", "ghost", "RMSprop", None, True),
    ("conv", "hooks", "AMSGrad", 3, True),
    ("conv", "hooks", "RMSprop", None, False),
    ("conv", "functorch", "Adagrad", 3, True),
    ("conv", "functorch", "Nesterov", None, False),
    ("conv", "ew", "Nesterov", None, True),
    ("conv", "ghost", "Adam", 3, True),
    ("conv", "ghost", "SGD", None, False),
    ("encoder", "hooks", "RMSprop", 3, True),
    ("encoder", "hooks", "Adam", None, False),
    ("encoder", "functorch", "Nesterov", 3, True),
    ("encoder", "ghost", "Adagrad", 3, False),
    ("encoder", "ghost", "AMSGrad", None, True),
    ("bert", "hooks", "AMSGrad", 3, True),
    ("bert", "hooks", "Nesterov", None, False),
    ("bert", "ghost", "Adam", None, True),
    ("bert", "ghost", "RMSprop", 3, False),
    ("gpt2", "hooks", "Nesterov", 3, True),
    ("gpt2", "hooks", "AMSGrad", None, False),
]
FIRST = {run[:2]: run for run in reversed(RUNS) if run[0] not in ("bert", "gpt2")}
FIRST = dict([*FIRST.items()][::2])
"""The default tests take one run of about half of the networks and modes, but for Hugging Face's."""


def both(
    name: str = "mlp",
    *,
    shuffle=True,
    physical=None,
    accumulate: int = 1,
    scheduler=None,
    **options,
):
    """A run without shuffling and one with, after training."""
    runs = [prepare(name, shuffle=level, **options) for level in (False, shuffle)]
    for run in runs:
        after = None if scheduler is None else scheduler(run)
        run.train(physical=physical, accumulate=accumulate, after=after)
    return runs


def agree(plain, shuffled) -> None:
    """The shuffled run is the plain one in another order, and in no other order than that."""
    expected = contents(plain)
    assert distance(weights(plain.network), weights(shuffled.network)) > VISIBLE
    unshuffle(shuffled)
    assert distance(expected, contents(shuffled)) <= EXACT


@pytest.mark.parametrize(
    ("name", "mode", "optimizer", "physical", "wrap"),
    [pytest.param(*run, marks=() if run in FIRST.values() else pytest.mark.zoo) for run in RUNS],
)
def test_unshuffled_afterwards_a_run_is_the_run_without_shuffling(
    name, mode, optimizer, physical, wrap
):
    plain, shuffled = both(name, mode=mode, optimizer=optimizer, physical=physical, wrap_model=wrap)
    assert shuffled.shuffler.shuffles == shuffled.shuffler.steps == STEPS
    assert [steps for _, _, steps in shuffled.engine.accountant.history] == [STEPS]
    assert plain.engine.accountant.history == shuffled.engine.accountant.history
    kinds = {key for state in shuffled.plain_optimizer.state.values() for key in state} - {"step"}
    assert STATE[optimizer] <= kinds
    assert distance(weights(build(name)), weights(plain.network)) > VISIBLE
    agree(plain, shuffled)


def groups_of_parameters(parameters):
    """Two learning rates."""
    parameters = list(parameters)
    return torch.optim.Adam(
        [{"params": parameters[::2], "lr": 0.03}, {"params": parameters[1::2], "lr": 0.005}],
        eps=0.03,
    )


def halving(run):
    return torch.optim.lr_scheduler.StepLR(run.optimizer, step_size=2, gamma=0.5).step


class Lookahead(torch.optim.SGD):
    """Goes half of the way."""

    def step(self, closure=None):
        parameters = [parameter for group in self.param_groups for parameter in group["params"]]
        before = [parameter.detach().clone() for parameter in parameters]
        super().step(closure)  # on which PyTorch calls the hooks, too
        with torch.no_grad():
            for parameter, old in zip(parameters, before, strict=True):
                parameter.lerp_(old, 0.5)


NORMS = [0.1 + 0.02 * place for place in range(8)]
ADAPTIVE = {
    "target_unclipped_quantile": 0.5,
    "clipbound_learning_rate": 0.2,
    "max_clipbound": 9.0,
    "min_clipbound": 0.01,
}
WAYS = {
    "the paper's groups": ("encoder", {"shuffle": "paper"}),
    "heads": ("encoder", {"shuffle": "heads"}),
    "learning rates that fall": ("mlp", {"optimizer": "Adam", "scheduler": halving}),
    "gradients that accumulate": ("encoder", {"accumulate": 2, "poisson_sampling": False}),
    "clipping layer by layer": (
        "conv",
        {"clipping": "per_layer", "max_grad_norm": NORMS, "optimizer": "Adam"},
    ),
    "adaptive clipping": ("mlp", {"clipping": "adaptive", "unclipped_num_std": 2.0, **ADAPTIVE}),
    "groups of parameters": ("encoder", {"optimizer": groups_of_parameters}),
    "corrections of low rank": ("low rank", {"optimizer": "Adam"}),
    "corrections of low rank, ghost": ("low rank", {"mode": "ghost", "optimizer": "Adam"}),
    "a buffer, and a layer of two names": ("buffered", {}),
    "steps inside of a step": ("mlp", {"optimizer": lambda p: Lookahead(p, lr=0.1, momentum=0.9)}),
}


@pytest.mark.parametrize("way", WAYS)
def test_whatever_belongs_to_training_goes_on(way):
    name, options = WAYS[way]
    plain, shuffled = both(name, **options)
    assert (
        shuffled.shuffler.steps
        == shuffled.shuffler.shuffles
        == STEPS // options.get("accumulate", 1)
    )
    assert shuffled.shuffler.spec.level == options.get("shuffle", "residual")
    agree(plain, shuffled)


def test_a_specification_of_ones_own_is_used_as_it_is():
    spec = prepare("encoder", shuffle="paper").shuffler.spec
    plain, shuffled = both("encoder", shuffle=spec)
    assert shuffled.shuffler.spec is spec
    agree(plain, shuffled)


def test_what_is_released_is_permuted_by_independent_uniform_draws():
    """Theorem 4.3: of three units and two releases each of the 36 pairs of orders is as likely as any other."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        network = nn.Sequential(nn.Linear(2, 3), nn.Tanh(), nn.Linear(3, 2)).double()
    start = weights(network)
    optimizer = torch.optim.SGD(network.parameters(), lr=0.2, momentum=0.9)
    x = torch.randn(4, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(0))

    def releases():
        """The hidden biases after two updates and after a third."""
        optimizer.state.clear()
        with torch.no_grad():
            for name, parameter in network.named_parameters():
                parameter.copy_(start[name])
        biases = []
        for _ in range(3):
            optimizer.zero_grad()
            network(x).square().sum().backward()
            optimizer.step()
            biases.append(network[0].bias.detach().clone())
        return biases[1:]

    truth, orders, trials = releases(), collections.Counter(), 360
    generator = torch.Generator().manual_seed(8)
    WeightShuffler(network, find_permutations(network, x), optimizer, generator=generator)
    for _ in range(trials):
        places = []
        for released, plain in zip(releases(), truth, strict=True):
            places.append(tuple((released[:, None] - plain).abs().argmin(1).tolist()))
            assert float((released - plain[list(places[-1])]).abs().max()) <= EXACT
        orders[tuple(places)] += 1
    assert len(orders) == 36
    assert chi2.sf(sum((count - 10) ** 2 / 10 for count in orders.values()), 35) > 1e-4


# Noise
# ------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "mode", "optimizer"),
    [
        ("mlp", "hooks", "Adam"),
        ("conv", "ghost", "Nesterov"),
        ("encoder", "functorch", "AMSGrad"),
        pytest.param("gpt2", "hooks", "SGD", marks=pytest.mark.zoo),
    ],
)
def test_with_the_noise_carried_along_a_noisy_run_is_the_noisy_run_without_shuffling(
    name, mode, optimizer
):
    options = {"mode": mode, "optimizer": optimizer, "sigma": 1.5}
    plain, shuffled = prepare(name, **options).train(), prepare(name, shuffle=True, **options)
    assert (
        distance(contents(plain), contents(prepare(name, **options | {"sigma": 0.0}).train()))
        > VISIBLE
    )
    with noise_carried_along(shuffled):
        shuffled.train()
    agree(plain, shuffled)


@pytest.mark.parametrize("mode", ["hooks", "ghost"])
def test_without_carrying_it_equal_seeds_put_the_noise_on_other_units(mode):
    plain, shuffled = both("mlp", mode=mode, sigma=1.5)
    unshuffle(shuffled)
    assert distance(weights(plain.network), weights(shuffled.network)) > VISIBLE
    # the first step's noise still falls on the same units
    plain, shuffled = (
        prepare("mlp", mode=mode, sigma=1.5, shuffle=shuffle) for shuffle in (False, True)
    )
    for run in (plain, shuffled):
        x, y = next(iter(run.loader))
        run.criterion(logits(run.model, x), y).backward()
        run.optimizer.step()
    agree(plain, shuffled)


def test_shuffling_leaves_the_batches_the_noise_and_the_global_random_state_alone():
    states = []
    for shuffle in (False, True):
        torch.manual_seed(0)
        run = prepare("mlp", sigma=1.0, shuffle=shuffle, own_generator=False).train()
        states.append(
            (
                torch.get_rng_state(),
                run.optimizer.generator.get_state(),
                run.loader.batch_sampler.generator.get_state(),
            )
        )
    assert all(torch.equal(one, other) for one, other in zip(*states, strict=True))


# What goes with it
# ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["conv", "encoder"])
def test_no_shuffle_changes_the_function_or_parts_gradients_and_state_from_weights(name):
    x, seen = records(name)[:5][0], []

    def outputs():
        network.eval()
        with torch.no_grad():
            found = logits(network, x)
        network.train()
        return found

    class Watched(torch.optim.Adam):
        def step(self, closure=None):
            step = torch.optim.Adam.step
            (step.__wrapped__ if hasattr(step, "hooked") else step)(self, closure)  # without hooks
            seen.append(
                (outputs(), contents(run))
            )  # what the shuffler has not seen: its hook comes before all others

    network = build(name)
    run = prepare(
        name,
        network=network,
        shuffle=True,
        optimizer=lambda parameters: Watched(parameters, lr=0.03, eps=0.03),
    )
    spec, generator = run.shuffler.spec, torch.Generator().manual_seed(SHUFFLE_SEED)

    def compare():
        before, old = seen[-1]
        assert float((outputs() - before).abs().max()) <= EXACT
        plan, new, moved = spec.sample(generator), contents(run), set()
        for key, tensor in old.items():
            name, _, kind = key.partition(" ")
            was = tensor.clone()
            if name in spec.blocks and tensor.dim():
                spec.move({name: [tensor]}, plan)
            assert torch.equal(new[key], tensor), key
            if not torch.equal(was, tensor):
                moved.add(kind)
        assert moved == {"", "(gradient)", "(exp_avg)", "(exp_avg_sq)"}

    run.train(after=compare)
    assert len(seen) == STEPS == run.shuffler.shuffles


def test_noise_and_clipping_schedules_go_on():
    from opacus.schedulers import ExponentialGradClip, ExponentialNoise

    runs = [prepare("mlp", sigma=1.0, shuffle=shuffle) for shuffle in (False, True)]
    for run, carry in zip(runs, (False, True), strict=True):
        noise, clip = (
            ExponentialNoise(run.optimizer, gamma=0.8),
            ExponentialGradClip(run.optimizer, gamma=0.9),
        )

        def step(noise=noise, clip=clip):
            noise.step()
            clip.step()

        if carry:
            with noise_carried_along(run):
                run.train(after=step)
        else:
            run.train(after=step)
    assert runs[1].optimizer.noise_multiplier == pytest.approx(0.8**STEPS)
    assert len(runs[1].engine.accountant.history) == STEPS
    assert runs[0].engine.accountant.history == runs[1].engine.accountant.history
    agree(*runs)


def test_frozen_layers_move_with_the_units_that_they_feed():
    runs = []
    for shuffle in (False, True):
        network = build("mlp")
        network[2].requires_grad_(False)
        runs.append(prepare("mlp", network=network, shuffle=shuffle).train())
    plain, shuffled = runs
    start = build("mlp")[2].weight
    assert torch.equal(plain.network[2].weight, start)
    assert not torch.equal(shuffled.network[2].weight, start)
    agree(plain, shuffled)
    assert torch.equal(shuffled.network[2].weight, start)


def test_single_precision_stays_within_its_rounding():
    plain, shuffled = (
        prepare("mlp", network=build("mlp").float(), shuffle=shuffle).train()
        for shuffle in (False, True)
    )
    expected = contents(plain)
    assert distance(weights(plain.network), weights(shuffled.network)) > VISIBLE
    unshuffle(shuffled)
    assert (
        distance(expected, contents(shuffled)) <= EXACT * 2**29
    )  # its rounding is so much coarser


def test_local_noise_and_shuffle_accountants_go_with_it():
    from opacus_shuffle import PrivacyEngine

    spent = []
    for shuffle in (False, True):
        engine = PrivacyEngine(accountant="shuffled_checkin")
        run = prepare("mlp", engine=engine, shuffle=shuffle, sigma=2.0, local_noise=True).train()
        spent.append(engine.get_epsilon(1e-5, bound="certified"))
    assert run.shuffler.shuffles == STEPS
    assert spent[0] == spent[1] > 0
