"""Every released step takes the one ticket of the batch that was drawn last, and is accounted by it; all else is refused."""

from __future__ import annotations

import copy
import itertools
import pickle

import opacus
import pytest
import torch
from helpers.toy import make_toy
from opacus.utils.batch_memory_manager import BatchMemoryManager
from torch import nn
from torch.utils.data import DataLoader

from opacus_shuffle import PrivacyEngine

pytestmark = pytest.mark.filterwarnings("ignore::opacus_shuffle.PrivacyAssumptionWarning")
ACCOUNTANTS = ("shuffle_gauss", "subsampled_shuffle", "shuffled_checkin", "shuffled_sums", "rdp")
every_accountant = pytest.mark.parametrize("name", ACCOUNTANTS)


class Toy:
    """A short private run, whose released steps are counted by the weights that they change."""

    def __init__(self, name="subsampled_shuffle", *, records=24, batch_size=6, loader=None, **options):
        self.toy = make_toy(records=records, batch_size=batch_size, **(loader or {}))
        self.engine = PrivacyEngine(accountant=name)
        self.criterion = nn.CrossEntropyLoss()
        made = self.engine.make_private(**self.toy, noise_multiplier=2.0, **options)
        self.model, self.optimizer, self.loader = made[0], made[1], made[-1]
        if len(made) == 4:
            self.criterion = made[2]
        self.plain = self.toy["optimizer"]
        self.steps = 0
        self.plain.register_step_post_hook(self._count)

    def _count(self, *_):
        self.steps += 1

    def backward(self, batch):
        x, y = batch
        self.criterion(self.model(x), y).backward()

    def train(self, batches):
        for batch in batches:
            self.optimizer.zero_grad()
            self.backward(batch)
            self.optimizer.step()

    @property
    def accounted(self):
        return sum(steps for *_, steps in self.engine.accountant.history)

    def refused(self, match, step=None):
        """The step is refused, nothing is released or accounted, and the next batch trains as usual."""
        steps, accounted, before = self.steps, self.accounted, [p.detach().clone() for p in self.optimizer.params]
        with pytest.raises(ValueError, match=match):
            (step or self.optimizer.step)()
        assert (self.steps, self.accounted) == (steps, accounted)
        assert all(torch.equal(one, other) for one, other in zip(before, self.optimizer.params, strict=True))
        self.optimizer.zero_grad()
        self.train([next(iter(self.loader))])
        assert (self.steps, self.accounted) == (steps + 1, accounted + 1)
        self.optimizer.zero_grad()


# --- what is refused ----------------------------------------------------------------------------------------------------------


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
    for copied in (copy.deepcopy(run.loader), pickle.loads(pickle.dumps(run.loader))):
        run.backward(next(iter(copied)))
        run.refused("no fresh batch")
    stock = DataLoader(run.toy["data_loader"].dataset, batch_sampler=run.loader.batch_sampler)
    run.backward(next(iter(stock)))
    run.refused("no fresh batch")


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
def test_two_backward_passes_without_a_step_are_an_error_of_opacus(name):
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


@every_accountant
def test_without_its_step_hook_a_step_is_accounted_all_the_same(name):
    run = Toy(name)
    run.optimizer.step_hook = None
    run.train(run.loader)
    run.optimizer.step_hook = lambda _: None
    run.train(run.loader)
    assert run.steps == run.accounted == 8


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


def test_a_layer_that_turns_a_record_into_several_is_refused():
    class Patches(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(2, 3)

        def forward(self, x):  # (B, 5) to (2B, 2), as networks do that see each patch, token or crop by itself
            return self.layer(x[:, :4].reshape(-1, 2)).reshape(len(x), 2, 3).sum(1)

    toy = make_toy()
    toy["module"] = Patches()
    toy["optimizer"] = torch.optim.SGD(toy["module"].parameters(), lr=0.1)
    for name in ("shuffled_checkin", "rdp"):
        toy = make_toy(records=60)
        toy["module"] = Patches()
        toy["optimizer"] = torch.optim.SGD(toy["module"].parameters(), lr=0.1)
        engine = PrivacyEngine(accountant=name)
        model, optimizer, loader = engine.make_private(**toy, noise_multiplier=1.0)
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


# --- what tickets express -----------------------------------------------------------------------------------------------------


@every_accountant
@pytest.mark.parametrize("workers", [0, 2])
def test_epochs_breaks_and_drop_outs_are_accounted_by_their_steps(name, workers):
    if workers and name != "subsampled_shuffle":
        pytest.skip("workers are asked for once")
    run = Toy(name, loader={"num_workers": workers, "persistent_workers": workers > 0})
    assert isinstance(run.loader, opacus.data_loader.DPDataLoader) == (name in ("shuffled_checkin", "rdp"))
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
    if workers:  # which a later pass has taken over
        earlier, _ = iter(run.loader), iter(run.loader)
        run.optimizer.zero_grad()
        run.backward(next(earlier))
        run.refused("no fresh batch")


def test_a_closure_takes_the_ticket():
    run = Toy()
    for batch in run.loader:

        def closure(batch=batch):
            run.optimizer.zero_grad()
            run.backward(batch)

        run.optimizer.step(closure)
    assert run.steps == run.accounted == 4


@pytest.mark.parametrize("name", ["subsampled_shuffle", "shuffled_checkin", "shuffled_sums", "rdp"])
@pytest.mark.parametrize("workers", [0, 2])
def test_physical_batches_make_one_step_of_each_ticket(name, workers):
    if workers and name != "shuffled_checkin":
        pytest.skip("workers are asked for once")
    run = Toy(name, records=40, batch_size=8, loader={"num_workers": workers})
    manager = BatchMemoryManager(data_loader=run.loader, max_physical_batch_size=3, optimizer=run.optimizer)
    with manager as loader:
        run.train(itertools.islice(loader, 4))  # leaves half a batch behind
        left = run.steps
        run.train(loader)
    run.train(run.loader)
    assert run.steps == run.accounted == left + 10


def test_empty_batches_have_tickets():
    for options in ({}, {"rand_on_empty": True}):
        run = Toy("shuffled_checkin", records=6, batch_size=1, **options)
        run.train(itertools.chain.from_iterable(itertools.repeat(run.loader, 4)))
        assert run.steps == run.accounted == 24


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


# --- fresh inputs -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["hooks", "functorch", "ew", "ghost"])
def test_a_batch_that_was_kept_is_refused_under_the_ticket_of_another(mode):
    run = Toy(grad_sample_mode=mode)
    batches = list(run.loader)
    for kept in (batches[0], [each[:6] for each in batches[1]], [each.view_as(each) for each in batches[2]]):
        next(iter(run.loader))
        with pytest.raises(ValueError, match="drawn before the last one"):
            run.backward(kept)
    with torch.no_grad():
        run.model(batches[0][0])
    run.model.eval()
    run.model(batches[0][0])
    run.model.train()
    run.optimizer.zero_grad()
    run.train(run.loader)
    assert run.steps == run.accounted == 4


@pytest.mark.parametrize("mode", ["hooks", "functorch", "ew", "ghost"])
def test_a_batch_that_nobody_steps_on_leaves_nothing_to_the_next_one(mode):
    """Opacus would add the rows of later batches, one record's gradient to another's."""
    torch.manual_seed(0)
    run = Toy("rdp", grad_sample_mode=mode)
    seen = []
    run.optimizer.attach_step_hook(lambda o: seen.append([p.summed_grad.clone() for p in o.params]))
    for number, (x, y) in enumerate(run.loader):
        run.optimizer.zero_grad()
        if number == 1:
            with pytest.raises(RuntimeError, match="half way"):
                _breaking(run.model(x))
            continue
        loss = run.criterion(run.model(x), y)
        if number == 2:
            continue
        before = [p.detach().clone() for p in run.optimizer.params]
        loss.backward()
        run.optimizer.step()
    alone = Toy("rdp", grad_sample_mode=mode, poisson_sampling=False)
    with torch.no_grad():
        for parameter, value in zip(alone.optimizer.params, before, strict=True):
            parameter.copy_(value)
    alone.optimizer.attach_step_hook(lambda o: seen.append([p.summed_grad.clone() for p in o.params]))
    alone.train([(x, y)])
    assert run.steps == run.accounted == 2
    torch.testing.assert_close(seen[1], seen[2])


def _breaking(output):
    """A backward pass that raises when it has gone through half of the layers."""

    def stop(_):
        raise RuntimeError("half way")

    output.register_hook(stop)
    output.sum().backward()


@pytest.mark.parametrize("mode", ["hooks", "functorch", "ew", "ghost"])
@pytest.mark.parametrize("added", [True, False])
def test_two_draws_never_meet_in_one_backward_pass(mode, added):
    """Else one ticket would pay for the records of both, as their gradients are added row by row."""
    run = Toy(grad_sample_mode=mode)
    batches = iter(run.loader)
    loss, late = (run.criterion(run.model(x), y) for x, y in itertools.islice(batches, 2))
    run.refused("a batch before the last one", lambda: (loss + late if added else loss).backward())
    run.optimizer.zero_grad()
    run.train(run.loader)
    assert run.steps == run.accounted == 5


@pytest.mark.parametrize(
    ("name", "what", "value"),
    [("subsampled_shuffle", "batch_size", 24), ("shuffled_checkin", "sample_rate", 1.0), ("rdp", "sample_rate", 1.0)],
)
@pytest.mark.parametrize("split", [True, False])
def test_batches_are_drawn_as_they_are_accounted(name, what, value, split):
    run = Toy(name)
    setattr(run.loader.batch_sampler, what, value)
    batches = run.loader
    if split:
        batches = BatchMemoryManager(data_loader=batches, max_physical_batch_size=4, optimizer=run.optimizer).__enter__()
    with pytest.raises(ValueError, match=rf"was changed \({what} from .* to {value}\)"):
        run.train(batches)
    assert run.steps == run.accounted == 0


@pytest.mark.parametrize("mode", ["hooks", "functorch"])
def test_two_draws_never_meet_by_calls_of_single_layers(mode):
    run = Toy(grad_sample_mode=mode)
    layers, batches = run.toy["module"], iter(run.loader)
    first, second = (run.criterion(layers[2](layers[1](layers[0](x))), y) for x, y in itertools.islice(batches, 2))
    with pytest.raises(IndexError):
        (first + second).backward()
    run.optimizer.zero_grad()
    run.train(run.loader)
    assert run.steps == run.accounted == 4


@pytest.mark.parametrize("mode", ["hooks", "functorch", "ew", "ghost"])
def test_compiled_networks_are_watched_too(mode):
    run = Toy(grad_sample_mode=mode)
    run.model = torch.compile(run.model, backend="eager")
    kept = next(iter(run.loader))
    run.train(run.loader)
    assert run.steps == run.accounted == 4
    run.optimizer.zero_grad()
    with pytest.raises(ValueError, match="drawn before the last one"):
        run.backward(kept)


def test_copies_and_released_networks_are_not_watched():
    run = Toy()
    batches = list(run.loader)
    hooks = run.toy["module"]._forward_pre_hooks
    for copied in (copy.deepcopy(hooks), pickle.loads(pickle.dumps(hooks))):
        for hook in copied.values():
            hook(run.toy["module"], (batches[0][0],), {})
    run.model.to_standard_module().train()(batches[0][0])
