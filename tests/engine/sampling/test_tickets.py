"""Every released step takes the one ticket of the batch that was drawn last, and is accounted by it."""

from __future__ import annotations

import itertools

import opacus
import pytest
import torch
from helpers.ticket_runs import ACCOUNTANTS, Toy, every_accountant
from helpers.toy import make_toy
from torch import nn
from torch.utils.data import DataLoader

from opacus_shuffle import PrivacyEngine

pytestmark = pytest.mark.filterwarnings("ignore::opacus_shuffle.PrivacyAssumptionWarning")


@pytest.mark.parametrize(
    ("name", "workers"), [*((name, 0) for name in ACCOUNTANTS), ("subsampled_shuffle", 2)]
)
def test_epochs_breaks_and_drop_outs_are_accounted_by_their_steps(name, workers):
    run = Toy(name, loader={"num_workers": workers, "persistent_workers": workers > 0})
    assert isinstance(run.loader, opacus.data_loader.DPDataLoader) == (
        name in ("shuffled_checkin", "shuffled_sums", "rdp")
    )
    run.train(run.loader)
    run.train(itertools.islice(run.loader, 2))  # an early break
    for number, batch in enumerate(run.loader):
        run.optimizer.zero_grad()
        run.backward(batch)
        if number % 2:
            continue  # nobody steps
        run.optimizer.step()
    run.train(run.loader)
    assert run.steps == run.accounted == 4 + 2 + 2 + 4
    if workers:  # which a later pass takes over
        earlier, later = iter(run.loader), iter(run.loader)
        with pytest.raises(
            ValueError, match=r"ended when a later one began.*end one pass before the next"
        ):
            next(earlier)
        run.train(later)
        assert run.steps == run.accounted == 16


@pytest.mark.parametrize("error", [ValueError, MemoryError, KeyboardInterrupt])
@every_accountant
def test_a_step_whose_accounting_fails_releases_nothing_and_its_batch_may_be_stepped_on_again(
    name, error
):
    run = Toy(name)
    recorder = type(run.engine.accountant)
    method = "step" if name == "rdp" else "record"
    batch = next(iter(run.loader))
    before = [parameter.detach().clone() for parameter in run.optimizer.params]
    noise = []

    def fails(*arguments, **keywords):
        raise error("no accounting today")

    for _ in range(2):
        run.optimizer.zero_grad()
        run.backward(batch)
        raw = [parameter.grad.clone() for parameter in run.optimizer.params]
        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(recorder, method, fails)
            with pytest.raises(error, match="no accounting today"):
                run.optimizer.step()
        noise += [
            parameter
            for parameter, each in zip(run.optimizer.params, raw, strict=True)
            if parameter.grad is not None and not torch.equal(parameter.grad, each)
        ]
        assert (run.steps, run.accounted, noise) == (0, 0, [])
        assert all(
            each.summed_grad is None and each.grad_sample is None for each in run.optimizer.params
        )
        assert all(
            torch.equal(old, new) for old, new in zip(before, run.optimizer.params, strict=True)
        )
    run.train([batch])
    assert (run.steps, run.accounted) == (1, 1)
    run.optimizer.zero_grad()
    run.backward(batch)
    run.refused("stepped on already")


def test_one_batch_may_be_stepped_on_in_pieces():
    run = Toy()
    for x, y in run.loader:
        for piece in (slice(0, 2), slice(2, 6)):
            run.optimizer.zero_grad()
            run.optimizer.signal_skip_step(piece.stop < 6)
            run.backward((x[piece], y[piece]))
            run.optimizer.step()
    assert run.steps == run.accounted == 4


def test_a_loader_of_one_s_own_is_copied_with_tickets():
    run = Toy("shuffle_gauss", poisson_sampling=False)
    run.train(run.loader)
    assert run.steps == run.accounted == 4
    run.optimizer.zero_grad()
    run.backward(next(iter(run.toy["data_loader"])))
    run.refused("no fresh batch")


def test_workers_that_the_original_loader_has_begun_stay_its_own():
    toy = make_toy(num_workers=1, persistent_workers=True, in_order=False)
    next(iter(toy["data_loader"]))
    engine = PrivacyEngine(accountant="shuffle_gauss")
    model, optimizer, loader = engine.make_private(
        **toy, noise_multiplier=2.0, poisson_sampling=False
    )
    for x, y in loader:
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert len(engine.accountant) == 4
    assert not toy["data_loader"].in_order


def test_a_failed_dataset_item_costs_its_own_batch():
    class Fails(torch.utils.data.TensorDataset):
        def __getitem__(self, index):
            if self.fails:
                raise OSError("unreadable")
            return super().__getitem__(index)

    toy = make_toy()
    data = Fails(*toy["data_loader"].dataset.tensors)
    data.fails = False
    toy["data_loader"] = DataLoader(data, batch_size=6)
    engine = PrivacyEngine(accountant="shuffled_checkin")
    model, optimizer, loader = engine.make_private(**toy, noise_multiplier=2.0)
    batches = iter(loader)
    next(batches)
    data.fails = True
    with pytest.raises(OSError, match="unreadable"):
        list(batches)
    data.fails = False
    batches = iter(loader)
    for x, y in batches:
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
    assert len(engine.accountant) == 4


@every_accountant
def test_without_its_step_hook_a_step_is_accounted_all_the_same(name):
    run = Toy(name)
    run.optimizer.step_hook = None
    run.train(run.loader)
    run.optimizer.step_hook = lambda _: None
    run.train(run.loader)
    seen = []
    run.optimizer.attach_step_hook(seen.append)
    run.train(run.loader)
    run.optimizer.attach_step_hook(None)
    run.train(run.loader)
    assert run.steps == run.accounted == 16
    assert len(seen) == 4


def test_opacus_s_accountants_without_poisson_sampling_keep_opacus_s_freedom():
    run = Toy("rdp", poisson_sampling=False)
    assert run.loader is run.toy["data_loader"]
    batches = list(run.loader)
    run.train(batches + batches)
    run.optimizer.zero_grad()
    run.backward(batches[0])
    run.backward(batches[1])
    run.optimizer.step()  # accumulated
    assert run.steps == run.accounted == 9
    run.refused("inside of a private one", run.plain.step)
