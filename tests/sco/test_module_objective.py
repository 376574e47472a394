"""Per-record gradients of networks against autograd; networks without such are refused."""

from __future__ import annotations

import copy

import pytest
import torch
from helpers.convex_problems import normal, seeded
from torch import nn

from opacus_shuffle.sco.module_objective import ModuleObjective

CLOSE = {"rtol": 1e-10, "atol": 1e-12}
# Convolutions in single precision: sums of a few hundred products, to 2⁻²⁴ each.
SINGLE = {"rtol": 1e-4, "atol": 1e-5}
LOSS = nn.CrossEntropyLoss()


def images(users=7, dtype=torch.float32):
    return normal(users, 1, 8, 8).to(dtype), torch.randint(0, 3, (users,), generator=seeded(4))


def rows():
    return normal(5, 3).float(), torch.tensor([0, 1, 2, 0, 1])


def convolutional(dtype=torch.float32):
    return nn.Sequential(
        nn.Conv2d(1, 3, 3, stride=2),
        nn.GroupNorm(3, 3),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(27, 4),
        nn.Tanh(),
        nn.Linear(4, 3),
    ).to(dtype)


def in_evaluation_mode():
    return nn.Sequential(nn.BatchNorm1d(3), nn.Linear(3, 3), nn.Dropout(0.5)).eval()


def tied():
    network = nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 3))
    network[2].weight = network[0].weight
    return network


def idle():
    network = nn.Sequential(nn.Linear(3, 3))
    network.unused = nn.Parameter(torch.ones(2))
    return network


def with_frozen_weights():
    network = convolutional()
    network[0].weight.requires_grad_(False)
    return network


def by_autograd(network, criterion, inputs, targets):
    parameters = [parameter for parameter in network.parameters() if parameter.requires_grad]
    rows = []
    for i in range(len(targets)):
        loss = criterion(network(inputs[i : i + 1]), targets[i : i + 1]).sum()
        gradients = torch.autograd.grad(loss, parameters, allow_unused=True, materialize_grads=True)
        rows.append(torch.cat([gradient.reshape(-1) for gradient in gradients]).double())
    return torch.stack(rows)


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_gradients_are_those_of_autograd_whatever_the_reduction(reduction):
    network, batch = convolutional(torch.float64), images(dtype=torch.float64)
    weight = torch.tensor([1.0, 2.0, 3.0], dtype=torch.float64)
    criterion = nn.CrossEntropyLoss(reduction=reduction, weight=weight)
    objective = ModuleObjective(network, criterion)
    objective.chunk_size = 3
    expected = by_autograd(network, criterion, *batch)
    for _ in range(2):  # nothing is left over from a call
        gradients = objective.gradients(objective.initial, batch)
        torch.testing.assert_close(gradients, expected, **CLOSE)


@pytest.mark.parametrize(
    ("make", "batch", "dimension"),
    [
        (in_evaluation_mode, rows, 18),
        (tied, rows, 15),
        (idle, rows, 14),
        (with_frozen_weights, images, 136),
    ],
)
def test_parameters_may_be_shared_unused_or_frozen_and_change_by_load_alone(make, batch, dimension):
    network, batch = make(), batch()
    before = copy.deepcopy(network.state_dict())
    objective = ModuleObjective(network, LOSS)
    assert objective.dimension == dimension
    gradients = objective.gradients(objective.initial, batch)
    torch.testing.assert_close(gradients, by_autograd(network, LOSS, *batch), **SINGLE)
    theta = objective.initial + 1
    moved = objective.gradients(theta, batch)
    assert all(torch.equal(value, before[name]) for name, value in network.state_dict().items())
    assert objective.load(theta) is network
    torch.testing.assert_close(objective.initial, theta, **SINGLE)
    torch.testing.assert_close(moved, by_autograd(network, LOSS, *batch), **SINGLE)
    frozen = set(before) - set(objective.names) - {"2.weight"}  # a tied name
    assert all(torch.equal(network.state_dict()[name], before[name]) for name in frozen)


@pytest.mark.filterwarnings("ignore:There is a performance drop")
def test_several_inputs_by_position_or_by_name():
    network, y, (left, right) = nn.Bilinear(3, 3, 1), normal(5, 1, seed=2), normal(2, 5, 3)
    objective = ModuleObjective(network, nn.MSELoss())
    residual = 2 * (network(left.float(), right.float()).detach() - y)
    for inputs in ((left, right), [left, right], {"input2": right, "input1": left}):
        gradients = objective.gradients(objective.initial, (inputs, y))
        torch.testing.assert_close(gradients[:, -1:], residual, **SINGLE)


class Mixing(nn.Linear):
    """Each output depends on the whole batch, and on what the module has seen before."""

    def __init__(self):
        super().__init__(2, 2)
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x):
        self.seen = self.seen + x.max()
        return super().forward(x) * self.seen


def test_a_module_that_mixes_records_finds_none_to_mix():
    objective = ModuleObjective(Mixing(), LOSS)
    inputs, targets = normal(5, 2).float(), torch.tensor([0, 1, 1, 0, 1])
    before = objective.losses_and_gradients(objective.initial, (inputs, targets))
    changed = inputs.clone()
    changed[3] = 100.0
    after = objective.losses_and_gradients(objective.initial, (changed, targets))
    others = [0, 1, 2, 4]
    assert all(torch.equal(x[others], y[others]) for x, y in zip(before, after, strict=True))
    assert not torch.equal(before[1][3], after[1][3])
    again = objective.losses_and_gradients(objective.initial, (inputs, targets))
    assert all(torch.equal(x, y) for x, y in zip(before, again, strict=True))
