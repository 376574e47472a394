"""Per-record gradients of networks against plain autograd; networks without a fixed loss per record are refused."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from helpers.convex_problems import normal, seeded
from opacus.grad_sample import GradSampleModule
from torch import nn

from opacus_shuffle.sco.module_objective import ModuleObjective

CLOSE = {"rtol": 1e-10, "atol": 1e-12}


# Convolutions in single precision: sums of a few hundred products, to 2⁻²⁴ each.
SINGLE = {"rtol": 1e-4, "atol": 1e-5}


def small_network(dtype=torch.float32):
    with torch.random.fork_rng():
        torch.manual_seed(3)
        return nn.Sequential(
            nn.Conv2d(1, 3, 3, stride=2),
            nn.GroupNorm(3, 3),
            nn.ReLU(),
            nn.Flatten(),
            nn.Linear(27, 4),
            nn.Tanh(),
            nn.Linear(4, 3),
        ).to(dtype)


def images(users=7, dtype=torch.float32):
    return normal(users, 1, 8, 8).to(dtype), torch.randint(0, 3, (users,), generator=seeded(4))


def module_by_autograd(network, criterion, inputs, targets):
    rows = []
    parameters = [parameter for parameter in network.parameters() if parameter.requires_grad]
    for i in range(len(targets)):
        value = criterion(network(inputs[i : i + 1]), targets[i : i + 1]).sum()
        rows.append(
            torch.cat(
                [
                    g.reshape(-1)
                    for g in torch.autograd.grad(
                        value, parameters, materialize_grads=True, allow_unused=True
                    )
                ]
            )
        )
    return torch.stack(rows)


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_module_gradients_are_those_of_autograd(reduction):
    network, (inputs, targets) = small_network(torch.float64), images(dtype=torch.float64)
    criterion = nn.CrossEntropyLoss(
        reduction=reduction, weight=torch.tensor([1.0, 2.0, 3.0], dtype=torch.float64)
    )
    objective = ModuleObjective(network, criterion)
    objective.chunk_size = 3
    expected = module_by_autograd(network, criterion, inputs, targets)
    for _ in range(2):  # nothing is left over from a call
        torch.testing.assert_close(
            objective.gradients(objective.initial, (inputs, targets)), expected, **CLOSE
        )
    assert objective.dimension == expected.shape[1]


def test_frozen_parameters_are_no_part_of_theta_and_the_module_changes_by_load_alone():
    network, batch = small_network(), images()
    network[0].weight.requires_grad_(False)
    before = copy.deepcopy(network.state_dict())
    objective = ModuleObjective(network, nn.CrossEntropyLoss())
    assert "0.weight" not in objective.names
    theta = objective.initial + 1
    objective.gradients(theta, batch)
    assert all(torch.equal(value, before[name]) for name, value in network.state_dict().items())
    assert not any(hasattr(parameter, "grad_sample") for parameter in network.parameters())
    assert objective.load(theta) is network
    torch.testing.assert_close(objective.initial, theta, **SINGLE)
    torch.testing.assert_close(network[4].bias, before["4.bias"] + 1)
    assert torch.equal(network[0].weight, before["0.weight"])
    expected = module_by_autograd(network, nn.CrossEntropyLoss(), *batch)
    torch.testing.assert_close(objective.gradients(theta, batch), expected.double(), **SINGLE)


def test_a_wrapped_module_is_taken_for_what_it_wraps_and_keeps_its_hooks():
    network, batch = small_network(), images()
    expected = module_by_autograd(network, nn.CrossEntropyLoss(), *batch)
    wrapped = GradSampleModule(network)
    objective = ModuleObjective(wrapped, nn.CrossEntropyLoss())
    torch.testing.assert_close(
        objective.gradients(objective.initial, batch), expected.double(), **SINGLE
    )
    nn.CrossEntropyLoss()(wrapped(batch[0]), batch[1]).backward()
    assert network[4].weight.grad_sample.shape == (7, 4, 27)
    with pytest.raises(ValueError, match="must not carry Opacus's hooks"):
        ModuleObjective(network, nn.CrossEntropyLoss())


def test_several_inputs_by_position_or_by_name():
    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(3, 1)

        def forward(self, left, right):
            return self.layer(left - right).squeeze(1)

    network, left, right, y = Two(), normal(5, 3), normal(5, 3, seed=1), normal(5, seed=2)
    objective = ModuleObjective(network, nn.MSELoss())
    rows = objective.gradients(objective.initial, ((left, right), y))
    torch.testing.assert_close(
        objective.gradients(objective.initial, ({"right": right, "left": left}, y)), rows
    )
    residual = 2 * (network((left - right).float(), torch.zeros(3)).detach() - y)
    torch.testing.assert_close(rows[:, -1], residual, **SINGLE)


class Noisy(nn.Linear):
    def forward(self, x):
        return super().forward(x) + torch.randn(1)


class Counting(nn.Linear):
    def __init__(self):
        super().__init__(2, 2)
        self.inner = nn.InstanceNorm1d(2, affine=False, track_running_stats=True)

    def forward(self, x):
        return super().forward(self.inner(x[:, :, None].repeat(1, 1, 2)).mean(2))


@pytest.mark.parametrize(
    ("network", "message"),
    [
        (nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)), "per-record gradients"),
        (nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2, affine=False)), "mixes the records"),
        (nn.Sequential(nn.Linear(2, 2), nn.Dropout(0.1)), "random numbers"),
        (nn.Sequential(nn.Linear(2, 2), nn.RReLU()), "module must run under .*rrelu"),
        (Noisy(2, 2), "random"),
        (Counting(), "running_mean|buffers"),
        (nn.Sequential(nn.Linear(2, 2)).requires_grad_(False), "trainable parameter"),
    ],
)
def test_networks_without_a_fixed_loss_per_record_are_refused(network, message):
    def act():
        objective = ModuleObjective(network, nn.CrossEntropyLoss())
        objective.gradients(objective.initial, (torch.randn(4, 2), torch.tensor([0, 1, 1, 0])))

    with pytest.raises(ValueError, match=message):
        act()


def frozen():
    return nn.Sequential(nn.BatchNorm1d(3, affine=False), nn.Linear(3, 3), nn.Dropout(0.5)).eval()


def tied():
    network = nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 3))
    network[2].weight = network[0].weight
    return network


def idle():
    network = nn.Sequential(nn.Linear(3, 3))
    network.unused = nn.Parameter(torch.ones(2))
    return network


@pytest.mark.parametrize(("make", "dimension"), [(frozen, 12), (tied, 15), (idle, 14)])
def test_parameters_may_be_shared_or_unused_and_layers_frozen_in_evaluation_mode(make, dimension):
    network, batch = make(), (normal(5, 3).float(), torch.tensor([0, 1, 2, 0, 1]))
    objective = ModuleObjective(network, nn.CrossEntropyLoss())
    assert objective.dimension == dimension
    expected = module_by_autograd(network, nn.CrossEntropyLoss(), *batch)
    torch.testing.assert_close(
        objective.gradients(objective.initial, batch), expected.double(), **SINGLE
    )


@pytest.mark.parametrize(
    ("act", "message"),
    [
        (lambda: ModuleObjective("network", nn.MSELoss()), "module must be a Module"),
        (lambda: ModuleObjective(nn.Linear(1, 1), None), "criterion must be a callable"),
        (
            lambda: ModuleObjective(nn.Linear(1, 1), nn.MSELoss()).load(torch.zeros(3)),
            r"shape \(2,\)",
        ),
        (
            lambda: ModuleObjective(nn.Linear(1, 1), nn.MSELoss()).load(torch.full((2,), math.nan)),
            "finite",
        ),
        (
            lambda: ModuleObjective(nn.Linear(1, 1), nn.MSELoss()).losses(
                torch.zeros(2), torch.zeros(3, 1)
            ),
            "pair",
        ),
        (
            lambda: ModuleObjective(nn.Linear(1, 2), lambda o, t: o - t).losses(
                torch.zeros(4), (torch.zeros(3, 1), torch.zeros(3, 1))
            ),
            "criterion must return one loss per record",
        ),
    ],
)
def test_bad_arguments_of_modules_are_refused_by_name(act, message):
    with pytest.raises(ValueError, match=message):
        act()


class Mixing(nn.Module):
    """Each output depends on the whole batch."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(2, 2)

    def forward(self, x):
        return self.layer(x) * x.max()


def test_a_module_that_mixes_records_finds_none_to_mix():
    torch.manual_seed(0)
    objective = ModuleObjective(Mixing(), nn.CrossEntropyLoss())
    inputs, targets = normal(5, 2).float(), torch.tensor([0, 1, 1, 0, 1])
    before = objective.losses_and_gradients(objective.initial, (inputs, targets))
    inputs[3] = 100.0
    after = objective.losses_and_gradients(objective.initial, (inputs, targets))
    others = [0, 1, 2, 4]
    assert all(torch.equal(x[others], y[others]) for x, y in zip(before, after, strict=True))
    assert not torch.equal(before[1][3], after[1][3])
