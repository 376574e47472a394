"""A step without a fresh batch's own ticket is refused: nothing is released, nothing is accounted."""

from __future__ import annotations

import copy
import itertools
import pickle

import pytest
import torch
from helpers.ticket_runs import Toy, every_accountant
from helpers.toy import make_toy
from opacus.utils.batch_memory_manager import BatchMemoryManager
from torch import nn
from torch.utils.data import DataLoader

from opacus_shuffle import PrivacyEngine

pytestmark = pytest.mark.filterwarnings("ignore::opacus_shuffle.PrivacyAssumptionWarning")


@every_accountant
def test_a_batch_of_the_original_loader_is_refused(name):
    run = Toy(name)
    run.backward(next(iter(run.toy["data_loader"])))
    run.refused("no fresh batch: none was drawn")
    run.backward(next(iter(run.toy["data_loader"])))
    run.refused("stepped on already.*iterate over the data loader that make_private returned")


@every_accountant
def test_one_batch_cannot_be_stepped_on_twice(name):
    run = Toy(name)
    batch = next(iter(run.loader))
    run.train([batch])
    run.optimizer.zero_grad()
    run.backward(batch)
    run.refused("no fresh batch")


@pytest.mark.parametrize("mode", ["hooks", "functorch", "ew", "ghost"])
def test_a_cycle_of_batches_trains_one_epoch(mode):
    run = Toy(grad_sample_mode=mode)
    with pytest.raises(ValueError, match=r"fresh batch|drawn before"):
        run.train(itertools.cycle(run.loader))
    assert (run.steps, run.accounted) == (4, 4)


def test_a_copy_of_the_loader_gives_no_tickets():
    run = Toy()
    run.backward(next(iter(copy.deepcopy(run.loader))))
    run.refused("no fresh batch")
    with pytest.raises(ValueError, match="no other process has: pickle neither"):
        pickle.dumps(run.loader)
    stock = DataLoader(run.toy["data_loader"].dataset, batch_sampler=run.loader.batch_sampler)
    run.backward(next(iter(stock)))
    run.refused("no fresh batch")


@pytest.mark.parametrize("name", ["shuffled_checkin", "subsampled_shuffle", "rdp"])
def test_batches_of_another_run_s_loader_are_not_accounted_as_this_run_s_by_being_split(name):
    run, other = Toy(name, records=60, batch_size=6), Toy(name, records=60, batch_size=30)
    elsewhere = DataLoader(other.loader.dataset, batch_sampler=run.loader.batch_sampler)
    for loader in (other.loader, elsewhere, copy.deepcopy(run.loader)):
        with pytest.raises(ValueError, match="data_loader is not the one that make_private returned with this optimizer"):
            BatchMemoryManager(data_loader=loader, max_physical_batch_size=5, optimizer=run.optimizer).__enter__()
    with BatchMemoryManager(data_loader=run.loader, max_physical_batch_size=5, optimizer=run.optimizer) as split:
        run.train(split)
    assert run.steps == run.accounted == 10


def test_signals_that_would_merge_two_draws_are_refused():
    run = Toy("shuffled_checkin", records=60)
    batches = iter(run.loader)
    run.optimizer.signal_skip_step(True)
    run.backward(next(batches))
    run.refused("signal_skip_step would add this whole batch to the next one")


@pytest.mark.parametrize("failed", [0, 1, 2])
@pytest.mark.parametrize("mode", ["hooks", "ghost"])
def test_a_physical_batch_that_failed_never_lets_two_draws_into_one_step(failed, mode):
    run = Toy(grad_sample_mode=mode, records=60)
    refused, number = 0, 0
    with BatchMemoryManager(data_loader=run.loader, max_physical_batch_size=2, optimizer=run.optimizer) as loader:
        for batch in loader:
            number += 1
            run.optimizer.zero_grad()
            try:
                if number % 3 == failed:
                    raise RuntimeError("out of memory")
                run.backward(batch)
                run.optimizer.step()
            except RuntimeError:
                continue
            except ValueError as error:
                refused += "physical batches" in str(error)
    # the last one of a batch (number % 3 == 0) is missing: no step at all
    assert (run.steps, run.accounted, refused) == (0, 0, 0 if failed == 0 else 10)


@pytest.mark.parametrize("name", ["subsampled_shuffle", "shuffled_checkin", "rdp"])
def test_two_backward_passes_without_a_step_are_refused(name):
    run = Toy(name)
    run.backward(next(iter(run.loader)))
    with pytest.raises(ValueError, match="accumulation"):
        run.backward(next(iter(run.loader)))
    assert run.steps == run.accounted == 0


@every_accountant
def test_the_original_optimizer_cannot_step_by_itself(name):
    run = Toy(name)
    run.backward(next(iter(run.loader)))
    run.refused(r"SGD.step\(\) was called on the optimizer inside", run.plain.step)
    run.optimizer.zero_grad()
    run.backward(next(iter(run.loader)))
    run.optimizer.pre_step()  # accounted
    run.optimizer.zero_grad()
    run.backward(next(iter(run.toy["data_loader"])))
    with pytest.raises(ValueError, match="inside of a private one"):
        run.plain.step()


@pytest.mark.parametrize("name", ["shuffled_checkin", "rdp"])
def test_a_grad_scaler_may_not_skip_steps(name):
    run = Toy(name)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**100)
    for x, y in run.loader:
        run.optimizer.zero_grad()
        scaler.scale(run.criterion(run.model(x), y)).backward()
        with pytest.raises(ValueError, match=r"GradScaler.*call optimizer.step\(\) yourself"):
            scaler.step(run.optimizer)
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**100)
    assert run.steps == run.accounted == 0
    run.optimizer.zero_grad()
    run.train(run.loader)
    assert run.steps == run.accounted == 4


@every_accountant
def test_every_record_has_one_gradient(name):
    options = {"loader": {"shuffle": True}, "records": 24}
    run = Toy(name, **options)
    for change in (lambda each: torch.cat([each, each]), lambda each: torch.cat([each, each[:1]])):
        run.backward([change(each) for each in next(iter(run.loader))])
        run.refused("gradients of .* records, this batch has")


@pytest.mark.parametrize("dropped", [1, 3])
@pytest.mark.parametrize("name", ["shuffled_checkin", "subsampled_shuffle", "shuffle_gauss", "shuffled_sums"])
def test_fewer_gradients_than_records_are_refused_where_nothing_covers_drop_outs(name, dropped):
    """The others' noise would hide less than what is accounted; sums that everyone is in count on honest users alone."""
    torch.manual_seed(0)
    run = Toy(name, records=60, batch_size=20)
    run.backward([each[dropped:] for each in next(batch for batch in run.loader if len(batch[0]) > 5)])
    run.refused("gradients of .* records, this batch has")


def test_a_layer_that_turns_a_record_into_several_is_refused():
    class Patches(nn.Module):
        """As networks that see each patch, token or crop by itself; after ``make_private``, which would refuse them."""

        def __init__(self):
            super().__init__()
            self.layer, self.patches = nn.Linear(5, 3), 1

        def forward(self, x):
            return self.layer(x.repeat_interleave(self.patches, 0)).reshape(len(x), self.patches, 3).sum(1)

    for name in ("shuffled_checkin", "rdp"):
        toy = make_toy(records=60)
        toy["module"] = Patches()
        toy["optimizer"] = torch.optim.SGD(toy["module"].parameters(), lr=0.1)
        engine = PrivacyEngine(accountant=name)
        model, optimizer, loader = engine.make_private(**toy, noise_multiplier=1.0)
        toy["module"].patches = 2
        x, y = next((x, y) for x, y in loader if len(x))
        nn.functional.cross_entropy(model(x), y).backward()
        with pytest.raises(ValueError, match=f"gradients of {2 * len(x)} records, this batch has {len(x)}"):
            optimizer.step()
        assert len(engine.accountant) == 0


def test_batches_out_of_order_are_refused():
    run = Toy()
    run.loader.in_order = False
    with pytest.raises(ValueError, match="in_order"):
        iter(run.loader)


def batches_of(run, split):
    """The run's batches, entire or in physical ones of four."""
    if not split:
        return run.loader
    return BatchMemoryManager(data_loader=run.loader, max_physical_batch_size=4, optimizer=run.optimizer).__enter__()


@pytest.mark.parametrize(
    ("name", "what", "value"),
    [("subsampled_shuffle", "batch_size", 24), ("shuffled_checkin", "sample_rate", 1.0), ("rdp", "sample_rate", 1.0)],
)
@pytest.mark.parametrize("split", [True, False])
def test_batches_are_drawn_as_they_are_accounted(name, what, value, split):
    run = Toy(name)
    setattr(run.loader.batch_sampler, what, value)
    with pytest.raises(ValueError, match=rf"was changed \({what} from .* to {value}\)"):
        run.train(batches_of(run, split))
    assert run.steps == run.accounted == 0


@pytest.mark.parametrize("change", [{"records": 10}, {"records": 240}, {"batch_size": 3}, {"drop_last": True}])
@pytest.mark.parametrize("split", [True, False])
def test_a_loader_of_one_s_own_keeps_its_size(change, split):
    """Of 10 records in batches of 6, 4 reports would be accounted as 6."""
    run = Toy("shuffle_gauss", poisson_sampling=False, loader={"shuffle": True})
    own, data = run.toy["data_loader"].batch_sampler, run.toy["data_loader"].dataset
    for name, value in change.items():
        if name == "records":
            data.tensors = tuple(torch.cat([each] * 10)[:value] for each in data.tensors)
        else:
            setattr(own, name, value)
    with pytest.raises(ValueError, match=r"was changed \(.* from .* to .*\), or its data"):
        run.train(batches_of(run, split))
    assert run.steps == run.accounted == 0


@every_accountant
def test_sums_that_model_zero_grad_leaves_are_not_accounted_twice(name):
    run = Toy(name)
    batches = iter(run.loader)
    run.train([next(batches)])
    run.model.zero_grad()
    run.backward(next(batches))
    run.refused(r"optimizer\.zero_grad\(\)")
