"""Ghost clipping clips, whatever its losses are and whatever happens in its two backward passes."""

from __future__ import annotations

import math

import pytest
import torch
from helpers.model_zoo import Wired
from helpers.private_runs import Run
from helpers.toy import here
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")
CROSS_ENTROPY = nn.CrossEntropyLoss(reduction="sum")
NAMES = ("subsampled_shuffle", "rdp", "shuffled_sums")


def private(
    criterion=CROSS_ENTROPY,
    *,
    name="subsampled_shuffle",
    module=None,
    data=None,
    reduction="sum",
):
    """A run of ghost clipping on eight records in one batch, by default with losses summed."""
    x, y = here((torch.randn(8, 5), torch.randint(3, (8,))) if data is None else data)
    toy = {"data_loader": DataLoader(TensorDataset(x, y), batch_size=8)}
    if module is not None:
        toy["module"] = module
    return Run(name, "ghost", sigma=1.0, toy=toy, criterion=criterion, loss_reduction=reduction)


def norm_of_sums(run):
    return math.hypot(*(float(tensor.summed_grad.norm()) for tensor in run.optimizer.params))


class PerRecord(nn.Module):
    """Ignores its reduction: a function of one loss per record, which may mix them."""

    reduction = "sum"

    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, logits, labels):
        return self.function(functional.cross_entropy(logits, labels, reduction="none"))


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("shape", ["scalar", "fewer"])
def test_losses_that_are_not_one_per_record_are_refused_before_any_backward_pass(name, shape):
    module, y, criterion = nn.Linear(5, 1), torch.ones(8, 1), nn.BCEWithLogitsLoss(reduction="sum")
    if shape == "scalar":
        module, y, criterion = nn.Linear(5, 3), torch.ones(8).long(), PerRecord(torch.sum)
    run = private(criterion, name=name, module=module, data=(1000 * torch.randn(8, 5), y))
    x, y = run.batch(3)
    out = run.model(x)
    loss = run.criterion(out[:-1, 0], y[:-1, 0]) if shape == "fewer" else run.criterion(out, y)
    with pytest.raises(ValueError, match=r"must give one loss per record, of shape \(\d,"):
        loss.backward()
    assert all(parameter.grad is None for parameter in run.optimizer.params)
    with pytest.raises(ValueError, match="not clipped"):
        run.optimizer.step()
    assert (run.accounted, run.updates) == (0, 0)


@pytest.mark.parametrize("outputs", [1, 3])
@pytest.mark.parametrize("reduction", ["sum", "mean"])
@pytest.mark.parametrize("loss", [nn.MSELoss, nn.BCEWithLogitsLoss])
def test_losses_of_every_output_are_reduced_to_losses_of_records(loss, reduction, outputs):
    """The clipped sum is the one that per-sample gradients give, with norms above and below C."""
    network, x, y = nn.Linear(5, outputs), torch.randn(8, 5), torch.rand(8, outputs)
    x *= 10 ** torch.arange(-4.0, 4)[:, None]
    expected = torch.zeros(outputs, 5)
    for record, target in zip(x, y, strict=True):
        network.zero_grad()
        loss(reduction=reduction)(network(record), target).backward()
        norm = math.hypot(*(float(p.grad.norm()) for p in network.parameters()))
        expected += network.weight.grad * min(1, 1 / norm)
    run = private(loss(reduction=reduction), module=network, data=(x, y), reduction=reduction)
    x, y = run.batch()
    run.criterion(run.model(x), y).backward()
    found = run.optimizer.params[0].grad
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    "function",
    [
        lambda losses: losses.cumsum(0),
        lambda losses: losses.roll(1),
        lambda losses: losses.sort()[0],
        lambda losses: losses / losses.mean(),
        lambda losses: losses.sum().expand(len(losses)),
    ],
)
def test_a_criterion_that_mixes_records_is_refused_before_any_backward_pass(function):
    run = private(PerRecord(function))
    x, y = run.batch()
    with pytest.raises(ValueError, match="criterion mixes records"):
        run.criterion(run.model(x), y)
    assert run.criterion.criterion.reduction == "sum"
    assert run.accounted == 0


def penalised(run, x, y):
    penalty = sum(parameter.square().sum() for parameter in run.network.parameters())
    run.criterion.criterion = PerRecord(lambda losses: losses + penalty)
    return run.criterion(run.model(x), y)


OUTSIDE = {
    "losses in another order": lambda run, x, y: run.criterion(run.model(x).flip(0), y.flip(0)),
    "a penalty in the criterion": penalised,
    "a weight used by the loop": lambda run, x, y: run.criterion(
        run.model(x) + x @ run.network[0].weight.T @ run.network[2].weight.T, y
    ),
}


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("way", OUTSIDE)
def test_losses_whose_gradients_are_not_those_of_the_rows_are_refused(way, name):
    """Their factors would clip other records, or nothing."""
    run = private(name=name)
    x, y = run.batch()
    with pytest.raises(ValueError, match="not those of the network's rows in the same"):
        OUTSIDE[way](run, x, y).backward()
    assert all(parameter.grad is None for parameter in run.optimizer.params)
    assert run.accounted == 0
    run.criterion.criterion = CROSS_ENTROPY
    run.step()
    assert run.accounted == 1


@pytest.mark.parametrize("reduction", ["sum", "mean"])
def test_a_record_of_long_rows_whose_gradient_cancels_is_clipped(reduction):
    """Two rows near 10⁴ whose gradients nearly cancel: single precision finds a norm of 0."""

    for seed in range(5):
        x, y = torch.zeros(8, 2, 3), torch.zeros(8, 2, 1)  # the others' gradients are 0
        x[0] = 1e4 + torch.randn(2, 3, generator=torch.Generator().manual_seed(seed))
        y[0, 0], y[0, 1] = 200.0, -200.0
        layer = nn.Linear(3, 1)
        layer.load_state_dict({"weight": torch.zeros(1, 3), "bias": torch.zeros(1)})
        criterion = nn.MSELoss(reduction=reduction)
        run = private(criterion, module=layer, data=(x, y), reduction=reduction)
        run.backward()
        run.optimizer.pre_step()
        assert norm_of_sums(run) <= 1 + 1e-4


def test_parameters_of_the_network_itself_are_trained_beside_its_layers():
    """As those of adapters are: Opacus computes their gradients by functorch, on a copy."""

    parts = {"base": nn.Linear(5, 3), "low": torch.zeros(5, 3)}
    run = private(module=Wired(lambda net, x: net.base(x) + x @ net.low, **parts)).train()
    assert run.accounted == 1
    assert run.network.low.any()


@pytest.mark.parametrize("which", [1, 2])
def test_after_an_exception_in_a_backward_pass_the_next_batch_is_clipped_by_its_own_norms(which):
    run, passes = private(), ["in the check"] * 2

    def fail(_):
        passes.append("another")
        if len(passes) == which:
            raise RuntimeError("out of memory")

    handle = run.network[0].register_forward_hook(
        lambda *call: call[2].register_hook(fail) and None
    )
    run.model(run.batch()[0])  # a new hook has the network checked again
    passes.clear()
    with pytest.raises(RuntimeError, match="out of memory"):
        run.backward()
    handle.remove()
    assert all(parameter.grad is None for parameter in run.optimizer.params)
    with pytest.raises(ValueError, match="not clipped"):
        run.optimizer.step()
    x, y = run.batch()
    run.step((1e4 * x, y))
    assert 1 < norm_of_sums(run) <= 8.001
    assert run.accounted == 1


def test_a_plain_loss_is_refused_beside_the_criterion_s_or_in_its_place():
    run = private()
    weight, (x, y) = run.optimizer.params[0], run.batch()
    out = run.model(x)
    for term in (weight.sum(), out[:, 0] * out[0, 0]):  # one number per record is no proof
        with pytest.raises(ValueError, match="requires a gradient and would not be clipped"):
            run.criterion(out, y) + term
    run.optimizer.zero_grad()
    with run.refused("gradients were changed between"):
        run.backward()
        (1000 * weight.sum()).backward()
        run.optimizer.step()
    run.optimizer.zero_grad()
    with run.refused("not clipped"):
        x, y = run.batch()
        (1e6 * CROSS_ENTROPY(run.model(x), y)).backward()
        run.optimizer.step()


def test_losses_of_the_same_records_add_up_and_are_clipped_as_one():
    """Of a single layer: the factor of each record is 1/max(1, norm of its own gradient)."""
    run = private(module=nn.Linear(5, 3, bias=False))
    x, y = run.batch()
    out = run.model(x)
    (1 + run.criterion(out, y) / 2 - 3 * run.criterion(-out, y)).backward()
    run.optimizer.step()
    labels = functional.one_hot(y, 3).float()
    error = (out.softmax(1) - labels) / 2 + 3 * ((-out).softmax(1) - labels)
    gradients = error.detach()[:, :, None] * x[:, None, :]
    clipped = gradients / gradients.flatten(1).norm(dim=1).clamp(min=1)[:, None, None]
    assert float(gradients.flatten(1).norm(dim=1).max()) > 1
    torch.testing.assert_close(
        run.optimizer.params[0].summed_grad, clipped.sum(0), rtol=1e-4, atol=1e-5
    )


WRONG = {
    "a parameter that takes no part": r"does not depend on parameters spare.weight, spare.bias",
    "a keyword": "takes no retain_graph",
    "a gradient hook": "have gradient hooks of their own",
}


@pytest.mark.parametrize("what", WRONG)
def test_what_would_not_be_clipped_is_named_before_it_is_added_up(what):
    spare = Wired(lambda net, x: net.used(x), used=nn.Linear(5, 3), spare=nn.Linear(5, 3))
    run = private(module=spare if "no part" in what else None)
    if what == "a gradient hook":
        run.optimizer.params[0].register_hook(lambda gradient: 1000 * gradient)
    x, y = run.batch()
    loss = run.criterion(run.model(x), y)
    with pytest.raises(ValueError, match=WRONG[what]):
        loss.backward(**({"retain_graph": True} if what == "a keyword" else {}))
    assert run.accounted == 0
