"""Per-record gradients against plain autograd, one record at a time; what has none is refused."""

from __future__ import annotations

import copy
import math
import warnings

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from opacus.grad_sample import GradSampleModule
from torch import nn

from opacus_shuffle.sco import losses as builtin
from opacus_shuffle.sco.losses import LINKS, Link, as_link
from opacus_shuffle.sco.module_objective import ModuleObjective
from opacus_shuffle.sco.objective import LinearObjective, Objective, number_of_users, take

CLOSE = {"rtol": 1e-10, "atol": 1e-12}
# Convolutions in single precision: sums of a few hundred products, to 2⁻²⁴ each.
SINGLE = {"rtol": 1e-4, "atol": 1e-5}

BUILTIN = {
    "logistic": builtin.logistic_loss,
    "absolute": builtin.absolute_loss,
    "hinge": builtin.hinge_loss,
    "squared": builtin.squared_loss,
}


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


def normal(*shape, seed=0):
    return torch.randn(*shape, generator=generator(seed), dtype=torch.float64)


def labelled(users, dimension, seed=0):
    return normal(users, dimension, seed=seed), torch.sign(normal(users, seed=seed + 1))


def by_autograd(loss, theta, data):
    """The reference: each record in a batch of its own."""
    rows, values = [], []
    for i in range(number_of_users(data)):
        point = theta.detach().clone().requires_grad_()
        value = loss(point, take(data, [i])).sum()
        rows.append(torch.autograd.grad(value, point)[0])
        values.append(value.detach())
    return torch.stack(values), torch.stack(rows)


def ridge(theta, batch):
    x, y = batch
    return (torch.tanh(x @ theta[:-1] + theta[-1]) - y) ** 2 + 0.1 * (theta**2).sum()


# ---- losses -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("chunk_size", [1, 7, 1024])
def test_gradients_are_those_of_autograd_record_by_record(chunk_size):
    data, theta = (normal(20, 4), normal(20, seed=1)), normal(5, seed=2)
    objective = Objective.from_loss(ridge, dimension=5, chunk_size=chunk_size)
    values, rows = by_autograd(ridge, theta, data)
    torch.testing.assert_close(objective.gradients(theta, data), rows, **CLOSE)
    torch.testing.assert_close(objective.losses(theta, data), values, **CLOSE)
    both = objective.losses_and_gradients(theta, data)
    torch.testing.assert_close(both, (values, rows), **CLOSE)


def test_losses_may_be_written_for_batches_or_for_their_mean():
    data, theta = (normal(6, 3), normal(6, seed=1)), normal(4, seed=2)
    mean = Objective.from_loss(lambda theta, batch: ridge(theta, batch).mean(), dimension=4)
    rows = Objective.from_loss(ridge, dimension=4).gradients(theta, data)
    torch.testing.assert_close(mean.gradients(theta, data), rows, **CLOSE)


def test_every_record_can_have_a_point_of_its_own():
    data, points = (normal(6, 3), normal(6, seed=1)), normal(6, 4, seed=2)
    objective = Objective.from_loss(ridge, dimension=4, chunk_size=4)
    values, rows = objective.losses_and_gradients(points, data)
    for i in range(6):
        value, row = objective.losses_and_gradients(points[i], take(data, [i]))
        torch.testing.assert_close((values[i], rows[i]), (value[0], row[0]), **CLOSE)
    torch.testing.assert_close(objective.losses(points, data), values, **CLOSE)


@pytest.mark.parametrize("own_points", [False, True])
def test_a_loss_that_cannot_be_vectorised_is_computed_record_by_record_with_one_warning(own_points):
    def branching(theta, batch):
        x, y = batch
        residual = x @ theta - y
        return residual**2 / 2 if residual.abs().item() < 1 else residual.abs() - 0.5

    def huber(theta, batch):
        x, y = batch
        return nn.functional.huber_loss((x * theta).sum(1), y, reduction="none")

    data = normal(9, 3), normal(9, seed=1)
    theta = normal(9, 3, seed=2) if own_points else normal(3, seed=2)
    objective = Objective.from_loss(branching, dimension=3, chunk_size=4)
    with pytest.warns(UserWarning, match="cannot be vectorised"):
        rows = objective.gradients(theta, data)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        values, again = objective.losses_and_gradients(theta, data)
    expected = Objective.from_loss(huber, dimension=3).losses_and_gradients(theta, data)
    torch.testing.assert_close((values, rows), expected, **CLOSE)
    assert torch.equal(again, rows)


def test_data_in_single_precision_and_structures_are_fine():
    def loss(theta, batch):
        return ((batch["x"][0] @ theta)[:, None] - batch["x"][1]).square().sum(1) * batch["k"]

    data = {"x": [normal(5, 2).float(), normal(5, 3, seed=1).float()], "k": torch.tensor([1, 2, 3, 4, 0])}
    theta = normal(2, seed=2)
    doubled = {"x": [x.double() for x in data["x"]], "k": data["k"]}
    rows = Objective.from_loss(loss, dimension=2).gradients(theta.float().requires_grad_(), data)
    assert rows.dtype == torch.float64
    assert not rows.requires_grad
    torch.testing.assert_close(rows, by_autograd(loss, theta.float().double(), doubled)[1], **CLOSE)
    assert number_of_users(data) == 5
    assert torch.equal(take(data, torch.tensor([4, 0]))["k"], torch.tensor([0, 1]))


def test_no_records_have_no_gradients():
    objective = Objective.from_loss(ridge, dimension=4)
    assert objective.gradients(torch.zeros(4), (torch.zeros(0, 3), torch.zeros(0))).shape == (0, 4)
    assert objective.losses(torch.zeros(4), (torch.zeros(0, 3), torch.zeros(0))).shape == (0,)
    assert take(torch.zeros(3, 2), []).shape == (0, 2)


def square(theta, x):
    return (x @ theta) ** 2


@pytest.mark.parametrize(
    ("act", "message"),
    [
        (lambda: Objective.from_loss(3, dimension=1), "loss must be a callable"),
        (lambda: Objective.from_loss(square, dimension=0), "dimension"),
        (
            lambda: Objective.from_loss(square, dimension=2).gradients(torch.zeros(3), torch.zeros(4, 2)),
            r"theta must be .*\(2,\)",
        ),
        (lambda: Objective.from_loss(square, dimension=2).losses(torch.tensor([0, 1]), torch.zeros(4, 2)), "int64"),
        (lambda: Objective.from_loss(square, dimension=2).gradients([0.0, 1.0], torch.zeros(4, 2)), "theta must be"),
        (
            lambda: Objective.from_loss(square, dimension=1).losses(torch.tensor([math.nan]), torch.zeros(4, 1)),
            "theta must be finite",
        ),
        (
            lambda: Objective.from_loss(lambda t, x: x @ t.repeat(2, 1).T, dimension=1).losses(
                torch.zeros(1), torch.zeros(3, 1)
            ),
            "one loss",
        ),
        (lambda: Objective.from_loss(lambda t, x: 1.0, dimension=1).gradients(torch.zeros(1), torch.zeros(3, 1)), "got float"),
        (
            lambda: Objective.from_loss(lambda t, x: (x @ t).log(), dimension=1).gradients(
                torch.ones(1), torch.tensor([[1.0], [0.0], [2.0], [0.0]])
            ),
            "NaN or infinity for 2 of 4 records",
        ),
        (
            lambda: Objective.from_loss(lambda t, x: (x + torch.rand(1)) @ t, dimension=1).gradients(
                torch.ones(1), torch.ones(3, 1)
            ),
            "random",
        ),
        (
            lambda: Objective.from_loss(lambda t, x: torch.tensor([float(t.detach().numpy().sum())]), dimension=1).gradients(
                torch.ones(1), torch.ones(3, 1)
            ),
            "depend on theta",
        ),
        (lambda: number_of_users(torch.tensor(1.0)), r"shape \(\)"),
        (lambda: number_of_users((torch.zeros(2), torch.zeros(3))), r"\[2, 3\]"),
        (lambda: number_of_users(()), "no tensor"),
        (lambda: number_of_users([1, 2]), "got int"),
        (lambda: take(torch.zeros(3), [3]), r"\[0, 3\)"),
        (lambda: take(torch.zeros(3), [-1]), r"\[0, 3\)"),
        (lambda: take(torch.zeros(3), [0.5]), "integers"),
        (lambda: take(torch.zeros(3), torch.tensor([True, False, True])), "integers"),
    ],
)
def test_what_cannot_be_is_refused_by_name(act, message):
    with pytest.raises(ValueError, match=message):
        act()


# ---- built-in losses ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", BUILTIN)
def test_a_built_in_loss_is_recognised_and_gives_the_same_as_autograd(name):
    data, theta = labelled(30, 4), normal(4, seed=5)
    objective = Objective.from_loss(BUILTIN[name], dimension=4)
    assert isinstance(objective, LinearObjective)
    expected = by_autograd(BUILTIN[name], theta, data)
    torch.testing.assert_close(objective.losses_and_gradients(theta, data), expected, **CLOSE)
    torch.testing.assert_close(objective.losses(theta, data), expected[0], **CLOSE)
    wrapped = Objective.from_loss(lambda theta, batch: BUILTIN[name](theta, batch), dimension=4)
    torch.testing.assert_close(wrapped.losses_and_gradients(theta, data), expected, **CLOSE)


@given(name=st.sampled_from(list(LINKS)), s=st.floats(-50, 50), t=st.floats(-50, 50), label=st.sampled_from([-1.0, 1.0]))
@settings(max_examples=200, deadline=None)
def test_links_are_convex_with_the_constants_they_claim(name, s, t, label):
    link = LINKS[name]
    ends, y = torch.tensor([s, t], dtype=torch.float64), torch.full((2,), label, dtype=torch.float64)
    values, slopes = link.value(ends, y), link.derivative(ends, y)
    # The tangent at t is below h(s); a few operations on numbers below 51²/2.
    assert float(values[0]) >= float(values[1] + slopes[1] * (s - t)) - 1e-10
    if link.lipschitz is not None:
        assert float(slopes.abs().max()) <= link.lipschitz
    if link.smoothness is not None:
        assert abs(float(slopes[0] - slopes[1])) <= link.smoothness * abs(s - t) + 1e-13


def test_the_logistic_loss_keeps_its_digits_far_out():
    value = builtin.logistic_loss(torch.tensor([30.0], dtype=torch.float64), (torch.ones(1, 1), torch.ones(1)))
    assert float(value) == pytest.approx(math.log1p(math.exp(-30)), rel=1e-12)


@pytest.mark.parametrize("name", ["logistic", "hinge"])
def test_labels_of_zero_and_one_are_refused(name):
    data = torch.ones(2, 1), torch.tensor([0.0, 1.0])
    with pytest.raises(ValueError, match=r"2 \* y - 1"):
        Objective.from_loss(BUILTIN[name], dimension=1).gradients(torch.ones(1), data)


def test_a_link_can_be_a_function_alone():
    link = as_link(lambda s, y: (s - y) ** 4)
    s, y = normal(5), normal(5, seed=1)
    torch.testing.assert_close(link.derivative(s, y), 4 * (s - y) ** 3, **CLOSE)
    assert as_link(link) is link
    assert as_link("hinge") is LINKS["hinge"]


@pytest.mark.parametrize(
    ("act", "message"),
    [
        (lambda: as_link("cauchy"), "link must be one of"),
        (lambda: Link("x", 3), "value must be a callable"),
        (lambda: Link("x", torch.abs, lipschitz=-1.0), "lipschitz must be positive"),
        (lambda: LinearObjective("hinge", dimension=1), "link must be a Link"),
        (lambda: LinearObjective(LINKS["squared"], dimension=2).losses(torch.zeros(2), torch.zeros(3, 2)), "pair"),
        (
            lambda: LinearObjective(LINKS["squared"], dimension=2).losses(torch.zeros(2), (torch.zeros(3, 3), torch.zeros(3))),
            "shape",
        ),
        (
            lambda: LinearObjective(LINKS["squared"], dimension=2).losses(
                torch.zeros(2), (torch.zeros(3, 2), torch.zeros(3, 1))
            ),
            "one value per record",
        ),
        (
            lambda: as_link(lambda s, y: s.sum()).derivative(torch.zeros(3), torch.zeros(3)),
            r"of shape \(1,\) for a batch of one",
        ),
        (
            lambda: Link("x", lambda s, y: s.sum(), elementwise=True).derivative(torch.zeros(3), torch.zeros(3)),
            "as many values",
        ),
        (lambda: Link("x", torch.abs, elementwise="yes"), "elementwise must be True or False"),
        (lambda: Link("x", torch.abs, coefficient=3), "coefficient must be a callable"),
    ],
)
def test_links_that_are_none_are_refused(act, message):
    with pytest.raises(ValueError, match=message):
        act()


# ---- modules ------------------------------------------------------------------------------------------------------------


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
    return normal(users, 1, 8, 8).to(dtype), torch.randint(0, 3, (users,), generator=generator(4))


def module_by_autograd(network, criterion, inputs, targets):
    rows = []
    parameters = [parameter for parameter in network.parameters() if parameter.requires_grad]
    for i in range(len(targets)):
        value = criterion(network(inputs[i : i + 1]), targets[i : i + 1]).sum()
        rows.append(
            torch.cat(
                [g.reshape(-1) for g in torch.autograd.grad(value, parameters, materialize_grads=True, allow_unused=True)]
            )
        )
    return torch.stack(rows)


@pytest.mark.parametrize("grad_sample", ["functorch", "hooks"])
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_module_gradients_are_those_of_autograd(grad_sample, reduction):
    network, (inputs, targets) = small_network(torch.float64), images(dtype=torch.float64)
    criterion = nn.CrossEntropyLoss(reduction=reduction, weight=torch.tensor([1.0, 2.0, 3.0], dtype=torch.float64))
    objective = Objective.from_module(network, criterion, grad_sample=grad_sample, chunk_size=3)
    expected = module_by_autograd(network, criterion, inputs, targets)
    for _ in range(2):  # nothing is left over from a call
        torch.testing.assert_close(objective.gradients(objective.initial, (inputs, targets)), expected, **CLOSE)
    assert objective.dimension == expected.shape[1]


def test_hooks_and_functorch_agree_away_from_the_start_in_single_precision():
    network, batch = small_network(), images()
    one = Objective.from_module(network, nn.CrossEntropyLoss())
    two = Objective.from_module(network, nn.CrossEntropyLoss(), grad_sample="hooks")
    theta = one.initial + 0.1 * normal(one.dimension, seed=9)
    torch.testing.assert_close(one.losses_and_gradients(theta, batch), two.losses_and_gradients(theta, batch), **SINGLE)


@pytest.mark.parametrize("grad_sample", ["functorch", "hooks"])
def test_frozen_parameters_are_no_part_of_theta_and_the_module_changes_by_load_alone(grad_sample):
    network, batch = small_network(), images()
    network[0].weight.requires_grad_(False)
    before = copy.deepcopy(network.state_dict())
    objective = Objective.from_module(network, nn.CrossEntropyLoss(), grad_sample=grad_sample)
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


@pytest.mark.parametrize("grad_sample", ["functorch", "hooks"])
def test_a_wrapped_module_is_taken_for_what_it_wraps_and_keeps_its_hooks(grad_sample):
    network, batch = small_network(), images()
    expected = module_by_autograd(network, nn.CrossEntropyLoss(), *batch)
    wrapped = GradSampleModule(network)
    objective = Objective.from_module(wrapped, nn.CrossEntropyLoss(), grad_sample=grad_sample)
    torch.testing.assert_close(objective.gradients(objective.initial, batch), expected.double(), **SINGLE)
    nn.CrossEntropyLoss()(wrapped(batch[0]), batch[1]).backward()
    assert network[4].weight.grad_sample.shape == (7, 4, 27)
    with pytest.raises(ValueError, match="must not carry Opacus's hooks"):
        Objective.from_module(network, nn.CrossEntropyLoss())


def test_hooks_recover_from_an_error_in_the_middle():
    network, batch = small_network(), images()
    objective = Objective.from_module(network, nn.CrossEntropyLoss(), grad_sample="hooks")
    expected = objective.gradients(objective.initial, batch)
    with pytest.raises(ValueError, match="must run on this batch"):
        objective.gradients(objective.initial, (torch.zeros(4, 1, 20, 20), batch[1][:4]))
    torch.testing.assert_close(objective.gradients(objective.initial, batch), expected)


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
    torch.testing.assert_close(objective.gradients(objective.initial, ({"right": right, "left": left}, y)), rows)
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


@pytest.mark.parametrize("grad_sample", ["functorch", "hooks"])
@pytest.mark.parametrize(
    ("network", "message"),
    [
        (nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)), "per-record gradients"),
        (nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2, affine=False)), "mixes the records"),
        (nn.Sequential(nn.Linear(2, 2), nn.Dropout(0.1)), "random numbers"),
        (nn.Sequential(nn.Linear(2, 2), nn.RReLU()), "random numbers"),
        (Noisy(2, 2), "random"),
        (Counting(), "running_mean|buffers"),
        (nn.Sequential(nn.Linear(2, 2)).requires_grad_(False), "trainable parameter"),
    ],
)
def test_networks_without_a_fixed_loss_per_record_are_refused(grad_sample, network, message):
    def act():
        objective = Objective.from_module(network, nn.CrossEntropyLoss(), grad_sample=grad_sample)
        objective.gradients(objective.initial, (torch.randn(4, 2), torch.tensor([0, 1, 1, 0])))

    with pytest.raises(ValueError, match=message):
        act()


@pytest.mark.parametrize("grad_sample", ["functorch", "hooks"])
def test_dropout_and_frozen_statistics_are_fine_in_evaluation_mode(grad_sample):
    network = nn.Sequential(nn.BatchNorm1d(2, affine=False), nn.Linear(2, 2), nn.Dropout(0.5)).eval()
    batch = normal(5, 2).float(), torch.tensor([0, 1, 1, 0, 1])
    objective = Objective.from_module(network, nn.CrossEntropyLoss(), grad_sample=grad_sample)
    expected = module_by_autograd(network, nn.CrossEntropyLoss(), *batch)
    torch.testing.assert_close(objective.gradients(objective.initial, batch), expected.double(), **SINGLE)
    assert not network.training


def test_tied_parameters_count_once_and_need_functorch():
    network = nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 3))
    network[2].weight = network[0].weight
    batch = normal(4, 3).float(), torch.tensor([0, 1, 2, 0])
    objective = Objective.from_module(network, nn.CrossEntropyLoss())
    assert objective.dimension == 15
    expected = module_by_autograd(network, nn.CrossEntropyLoss(), *batch)
    torch.testing.assert_close(objective.gradients(objective.initial, batch), expected.double(), **SINGLE)
    with pytest.raises(ValueError, match="tied"):
        Objective.from_module(network, nn.CrossEntropyLoss(), grad_sample="hooks")


def test_parameters_without_influence_have_zero_gradients():
    class Idle(nn.Module):
        def __init__(self):
            super().__init__()
            self.used, self.idle = nn.Linear(2, 2), nn.Linear(2, 2)

        def forward(self, x):
            return self.used(x)

    batch = normal(4, 2).float(), torch.tensor([0, 1, 1, 0])
    rows = []
    for mode in ("functorch", "hooks"):
        objective = Objective.from_module(Idle(), nn.CrossEntropyLoss(), grad_sample=mode)
        rows.append(objective.gradients(torch.zeros(objective.dimension), batch))
    torch.testing.assert_close(*rows, **SINGLE)
    assert float(rows[0][:, 6:].abs().max()) == 0


@pytest.mark.parametrize(
    ("act", "message"),
    [
        (lambda: Objective.from_module("network", nn.MSELoss()), "module must be a Module"),
        (lambda: Objective.from_module(nn.Linear(1, 1), None), "criterion must be a callable"),
        (lambda: Objective.from_module(nn.Linear(1, 1), nn.MSELoss(), grad_sample="ghost"), "grad_sample must be one of"),
        (lambda: Objective.from_module(nn.Linear(1, 1), nn.MSELoss()).load(torch.zeros(3)), r"shape \(2,\)"),
        (lambda: Objective.from_module(nn.Linear(1, 1), nn.MSELoss()).load(torch.full((2,), math.nan)), "finite"),
        (lambda: Objective.from_module(nn.Linear(1, 1), nn.MSELoss()).losses(torch.zeros(2), torch.zeros(3, 1)), "pair"),
        (
            lambda: Objective.from_module(nn.Linear(1, 1), nn.MSELoss(), grad_sample="hooks").losses(
                torch.zeros(3, 2), (torch.zeros(3, 1), torch.zeros(3, 1))
            ),
            "functorch",
        ),
        (
            lambda: Objective.from_module(nn.Linear(1, 2), lambda o, t: o - t).losses(
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


@pytest.mark.parametrize("grad_sample", ["functorch", "hooks"])
def test_a_module_that_mixes_records_finds_none_to_mix(grad_sample):
    torch.manual_seed(0)
    objective = Objective.from_module(Mixing(), nn.CrossEntropyLoss(), grad_sample=grad_sample)
    inputs, targets = normal(5, 2).float(), torch.tensor([0, 1, 1, 0, 1])
    before = objective.losses_and_gradients(objective.initial, (inputs, targets))
    inputs[3] = 100.0
    after = objective.losses_and_gradients(objective.initial, (inputs, targets))
    others = [0, 1, 2, 4]
    assert all(torch.equal(x[others], y[others]) for x, y in zip(before, after, strict=True))
    assert not torch.equal(before[1][3], after[1][3])


@pytest.mark.filterwarnings("ignore:link given's")
def test_a_link_that_mixes_records_finds_none_to_mix():
    def mixing(scores, targets):
        return (scores - targets) ** 2 * targets.sum()

    def slow(scores, targets):
        return mixing(scores, targets) if float(targets.sum()) > 0 else -mixing(scores, targets)

    features, targets = normal(5, 2), normal(5, seed=1).abs()
    for link in (Link("given", mixing), Link("given", slow), Link("given", mixing, lambda s, y: s * y.sum())):
        objective, theta = LinearObjective(link, dimension=2), normal(2, seed=3)
        before = objective.losses_and_gradients(theta, (features, targets))
        changed = targets.clone()
        changed[3] = 50.0
        after = objective.losses_and_gradients(theta, (features, changed))
        others = [0, 1, 2, 4]
        assert all(torch.equal(x[others], y[others]) for x, y in zip(before, after, strict=True))
        torch.testing.assert_close(before[0], (features @ theta - targets) ** 2 * targets, **CLOSE)
        assert objective.losses(theta, (features[:0], targets[:0])).shape == (0,)


def test_a_promise_lets_a_link_have_whole_batches():
    sizes = []

    def value(scores, targets):
        sizes.append(len(scores))
        return scores - targets

    for promise, wanted in ((True, [4]), (False, [1])):
        sizes.clear()
        Link("x", value, elementwise=promise).value(torch.zeros(4), torch.zeros(4))
        assert sizes == wanted


def test_a_wrong_dimension_of_a_loss_function_is_named():
    objective = Objective.from_loss(lambda t, batch: (batch[0] @ t - batch[1]) ** 2, dimension=3)
    with pytest.raises(ValueError, match=r"theta of shape \(3,\) and a batch of one of shape \(1, 2\), \(1,\), but"):
        objective.gradients(torch.zeros(3), (torch.zeros(4, 2), torch.zeros(4)))

    def broken(theta, x):
        raise RuntimeError("out of luck")

    with pytest.raises(RuntimeError, match="out of luck"):
        Objective.from_loss(broken, dimension=1).gradients(torch.zeros(1), torch.zeros(4, 1))
