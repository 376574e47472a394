"""Ghost clipping clips, whatever its losses look like and whatever happens in its backward passes."""

from __future__ import annotations

import math

import pytest
import torch
from helpers.toy import make_toy
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from opacus_shuffle import PrivacyEngine


def private(
    criterion, *, accountant="subsampled_shuffle", module=None, data=None, engine=None, **options
):
    """What make_private returns for 8 records in one batch with ghost clipping, and the engine."""
    torch.manual_seed(0)
    toy = make_toy(records=8, batch_size=8)
    if module is not None:
        toy |= {"module": module, "optimizer": torch.optim.SGD(module.parameters(), lr=1.0)}
    if data is not None:
        toy["data_loader"] = DataLoader(TensorDataset(*data), batch_size=8)
    engine = engine or PrivacyEngine(accountant=accountant)
    made = engine.make_private(
        **toy,
        criterion=criterion,
        noise_multiplier=1.0,
        grad_sample_mode="ghost",
        loss_reduction="sum",
        **options,
    )
    return *made, engine


def norm_of_sums(optimizer):
    return math.hypot(*(float(each.summed_grad.norm()) for each in optimizer.params))


class Scalar(nn.Module):
    """Ignores its reduction."""

    reduction = "sum"

    def forward(self, found, wanted):
        return F.cross_entropy(found, wanted, reduction="sum")


@pytest.mark.parametrize("accountant", ["subsampled_shuffle", "rdp"])
@pytest.mark.parametrize("shape", ["column", "scalar", "fewer"])
def test_losses_that_are_not_one_per_record_are_refused_before_any_backward_pass(accountant, shape):
    network, ones = nn.Linear(8, 1), torch.ones(8, 1)
    criterion = nn.BCEWithLogitsLoss(reduction="sum")
    if shape == "scalar":
        network, ones, criterion = nn.Linear(8, 3), torch.ones(8, dtype=torch.long), Scalar()
    model, optimizer, criterion, loader, engine = private(
        criterion, accountant=accountant, module=network, data=(1000 * torch.randn(8, 8), ones)
    )
    before = [each.detach().clone() for each in optimizer.params]
    while True:  # Poisson batches may be empty
        x, y = next(iter(loader))
        if len(x) > 2:
            break
    out = model(x)
    loss = criterion(out[:-1, 0], y[:-1, 0]) if shape == "fewer" else criterion(out, y)
    with pytest.raises(
        ValueError, match=r"criterion must give one loss per record, of shape \(\d,\)"
    ):
        loss.backward()
    assert all(each.grad is None or not each.grad.any() for each in optimizer.params)
    with pytest.raises(ValueError, match="not clipped"):
        optimizer.step()
    assert not len(engine.accountant)
    assert all(torch.equal(one, other) for one, other in zip(before, optimizer.params, strict=True))


class Explosive(torch.autograd.Function):
    """Fails in a backward pass when it is told to."""

    countdown = 0

    @staticmethod
    def forward(context, x):
        return x.clone()

    @staticmethod
    def backward(context, gradient):
        Explosive.countdown -= 1
        if Explosive.countdown == 0:
            raise RuntimeError("out of memory")
        return gradient


class Fragile(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(5, 7), nn.Linear(7, 3)

    def forward(self, x):
        return self.second(Explosive.apply(self.first(x)))


@pytest.mark.parametrize("which", [1, 2], ids=["first", "second"])
def test_after_an_exception_in_a_backward_pass_the_next_batch_is_clipped_by_its_own_norms(which):
    model, optimizer, criterion, loader, engine = private(
        nn.CrossEntropyLoss(reduction="sum"), module=Fragile()
    )
    x, y = next(iter(loader))
    Explosive.countdown = which
    with pytest.raises(RuntimeError, match="out of memory"):
        criterion(model(x), y).backward()
    with pytest.raises(ValueError, match="not clipped"):
        optimizer.step()
    Explosive.countdown = 0
    x, y = next(iter(loader))
    optimizer.zero_grad()
    criterion(model(1e4 * x), y).backward()
    optimizer.step()
    assert 1 < norm_of_sums(optimizer) <= 8.001
    assert len(engine.accountant) == 1


def test_a_plain_loss_beside_the_criterion_s_is_refused():
    model, optimizer, criterion, loader, engine = private(nn.CrossEntropyLoss(reduction="sum"))
    x, y = next(iter(loader))
    out = model(x)
    criterion(out, y).backward()
    (1000 * optimizer.params[0].sum()).backward()
    with pytest.raises(ValueError, match="gradients were changed between"):
        optimizer.step()
    optimizer.zero_grad()
    out = model(x)
    for term in (
        lambda _: optimizer.params[0].sum(),
        lambda out: out[:, 0] * out[0, 0],
    ):  # one number per record is no proof
        with pytest.raises(ValueError, match="requires a gradient, which nobody would clip"):
            criterion(out, y) + term(out)
    assert not len(engine.accountant)


def test_losses_of_the_same_records_add_up():
    model, optimizer, criterion, loader, _ = private(nn.CrossEntropyLoss(reduction="sum"))
    x, y = next(iter(loader))
    out = model(100 * x)
    (1 + criterion(out, y) / 2 - 3 * criterion(-out, y)).backward()
    optimizer.step()
    assert norm_of_sums(optimizer) <= 8.001


def test_embeddings_take_empty_batches():
    network = nn.Sequential(nn.Embedding(9, 4), nn.Flatten(), nn.Linear(8, 3))
    data = (torch.randint(9, (40, 2)), torch.randint(3, (40,)))
    torch.manual_seed(0)
    model, optimizer, criterion, loader, engine = private(
        nn.CrossEntropyLoss(reduction="sum"),
        accountant="shuffled_checkin",
        module=network,
        data=data,
    )
    sampler = loader.batch_sampler
    made = type(sampler)(
        num_samples=40, sample_rate=1e-9, steps=len(sampler), generator=sampler.generator
    )
    vars(sampler).update(vars(made))
    sizes = []
    for x, y in loader:
        optimizer.zero_grad()
        criterion(model(x), y).backward()
        optimizer.step()
        sizes.append(len(x))
    assert 0 in sizes
    assert len(engine.accountant) == len(sizes)


def test_evaluation_mode_is_named():
    model, _, criterion, loader, _ = private(nn.CrossEntropyLoss(reduction="sum"))
    x, y = next(iter(loader))
    model.eval()
    assert criterion(model(x), y).item() > 0
    with pytest.raises(ValueError, match=r"evaluation mode; call model.train\(\)"):
        criterion(model(x), y).backward()


def test_a_parameter_that_takes_no_part_is_named():
    class Network(nn.Module):
        def __init__(self):
            super().__init__()
            self.used, self.spare = nn.Linear(5, 3), nn.Linear(5, 3)

        def forward(self, x):
            return self.used(x)

    model, _, criterion, loader, _ = private(nn.CrossEntropyLoss(reduction="sum"), module=Network())
    x, y = next(iter(loader))
    with pytest.raises(ValueError, match=r"parameters spare.weight, spare.bias took no part"):
        criterion(model(x), y).backward()


class Mixing(nn.Module):
    """One loss per record that depends on the others'."""

    reduction = "sum"

    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, found, wanted):
        return self.function(F.cross_entropy(found, wanted, reduction="none"))


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
    model, _, criterion, loader, engine = private(Mixing(function))
    x, y = next(iter(loader))
    with pytest.raises(ValueError, match="criterion mixes records"):
        criterion(model(x), y)
    assert criterion.criterion.reduction == "sum"
    assert not len(engine.accountant)


@pytest.mark.parametrize("kind", [nn.BCELoss, nn.MSELoss])
def test_losses_of_one_record_each_are_trained_on(kind):
    network = nn.Sequential(nn.Linear(8, 1), nn.Sigmoid(), nn.Flatten(0))
    model, optimizer, criterion, loader, engine = private(
        kind(reduction="sum"), module=network, data=(torch.randn(8, 8), torch.rand(8).round())
    )
    x, y = next(iter(loader))
    criterion(model(x), y).backward()
    optimizer.step()
    assert criterion.looked_at
    assert len(engine.accountant) == 1


@pytest.mark.parametrize("register", ["register_hook", "register_post_accumulate_grad_hook"])
def test_hooks_that_change_the_gradients_of_parameters_are_refused(register):
    model, optimizer, criterion, loader, engine = private(nn.CrossEntropyLoss(reduction="sum"))
    hooks = {
        "register_hook": lambda gradient: 1000 * gradient,
        "register_post_accumulate_grad_hook": lambda parameter: setattr(
            parameter, "grad", 1000 * parameter.grad
        ),
    }
    handle = getattr(optimizer.params[0], register)(hooks[register])
    x, y = next(iter(loader))
    with pytest.raises(ValueError, match="have gradient hooks of their own"):
        criterion(model(x), y).backward()
    assert len(engine.accountant) == 0
    handle.remove()
    x, y = next(iter(loader))
    criterion(model(x), y).backward()
    optimizer.step()
    assert norm_of_sums(optimizer) <= 8
    assert len(engine.accountant) == 1
