"""A step without a fresh batch's own ticket is refused: nothing is released, nothing is accounted."""

from __future__ import annotations

import copy
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
        with pytest.raises(
            ValueError,
            match="data_loader is not the one that make_private returned with this optimizer",
        ):
            BatchMemoryManager(
                data_loader=loader, max_physical_batch_size=5, optimizer=run.optimizer
            ).__enter__()
    with BatchMemoryManager(
        data_loader=run.loader, max_physical_batch_size=5, optimizer=run.optimizer
    ) as split:
        run.train(split)
    assert run.steps == run.accounted == 10


@every_accountant
def test_every_record_has_one_gradient(name):
    options = {"loader": {"shuffle": True}, "records": 24}
    run = Toy(name, **options)
    for change in (lambda each: torch.cat([each, each]), lambda each: torch.cat([each, each[:1]])):
        run.backward([change(each) for each in next(iter(run.loader))])
        run.refused("gradients of .* records, this batch has")


@pytest.mark.parametrize("dropped", [1, 3])
@pytest.mark.parametrize(
    "name", ["shuffled_checkin", "subsampled_shuffle", "shuffle_gauss", "shuffled_sums"]
)
def test_fewer_gradients_than_records_are_refused_where_nothing_covers_drop_outs(name, dropped):
    """The others' noise would hide less than what is accounted; sums that everyone is in count on honest users alone."""
    torch.manual_seed(0)
    run = Toy(name, records=60, batch_size=20)
    run.backward(
        [each[dropped:] for each in next(batch for batch in run.loader if len(batch[0]) > 5)]
    )
    run.refused("gradients of .* records, this batch has")


def test_two_records_in_one_row_are_no_drop_outs():
    """Opacus adds the rows of two passes, and clips them as one record's."""
    run = Toy("shuffled_sums", records=12, batch_size=12)
    assert run.optimizer.tickets.drop_outs
    x, y = next(iter(run.loader))
    sum(
        nn.functional.cross_entropy(run.model(x[half]), y[half])
        for half in (slice(6), slice(6, 12))
    ).backward()
    run.refused("gradients of 6 records, this batch has 12")


def test_a_layer_that_turns_a_record_into_several_is_refused():
    class Patches(nn.Module):
        """As networks that see each patch, token or crop by itself; after ``make_private``, which would refuse them."""

        def __init__(self):
            super().__init__()
            self.layer, self.patches = nn.Linear(5, 3), 1

        def forward(self, x):
            return (
                self.layer(x.repeat_interleave(self.patches, 0))
                .reshape(len(x), self.patches, 3)
                .sum(1)
            )

    for name in ("shuffled_checkin", "rdp"):
        toy = make_toy(records=60)
        toy["module"] = Patches()
        toy["optimizer"] = torch.optim.SGD(toy["module"].parameters(), lr=0.1)
        engine = PrivacyEngine(accountant=name)
        model, optimizer, loader = engine.make_private(**toy, noise_multiplier=1.0)
        toy["module"].patches = 2
        x, y = next((x, y) for x, y in loader if len(x))
        nn.functional.cross_entropy(model(x), y).backward()
        with pytest.raises(
            ValueError, match=f"gradients of {2 * len(x)} records, this batch has {len(x)}"
        ):
            optimizer.step()
        assert len(engine.accountant) == 0


def batches_of(run, split):
    """The run's batches, entire or in physical ones of four."""
    if not split:
        return run.loader
    return BatchMemoryManager(
        data_loader=run.loader, max_physical_batch_size=4, optimizer=run.optimizer
    ).__enter__()


@pytest.mark.parametrize(
    ("name", "what", "value"),
    [
        ("subsampled_shuffle", "batch_size", 24),
        ("shuffled_checkin", "sample_rate", 1.0),
        ("rdp", "sample_rate", 1.0),
    ],
)
@pytest.mark.parametrize("split", [True, False])
def test_batches_are_drawn_as_they_are_accounted(name, what, value, split):
    run = Toy(name)
    setattr(run.loader.batch_sampler, what, value)
    with pytest.raises(ValueError, match=rf"was changed \({what} from .* to {value}\)"):
        run.train(batches_of(run, split))
    assert run.steps == run.accounted == 0


@pytest.mark.parametrize(
    "change", [{"records": 10}, {"records": 240}, {"batch_size": 3}, {"drop_last": True}]
)
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
