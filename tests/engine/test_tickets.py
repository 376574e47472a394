"""Every change of the weights is one accounted round of the whole batch that was drawn last.

What is refused is refused before anything is released or accounted, and the next batch trains as
usual.
"""

from __future__ import annotations

import contextlib
import copy
import itertools

import pytest
import torch
from helpers.private_runs import MODES, OURS, Run
from opacus.data_loader import DPDataLoader
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from opacus_shuffle.core.guarantees import PrivacyAssumptionWarning

pytestmark = [pytest.mark.filterwarnings("ignore::UserWarning")]
NAMES = (*OURS, "rdp", "prv", "gdp")
COMBINATIONS = [
    (name, mode)
    for name, mode in itertools.product(NAMES, MODES[:4])
    if mode != "ew" or name not in OURS
]
FLAGS = {"shuffled_fw": {"shuffle_weights": "paper"}, "shuffled_checkin": {"local_noise": True}}
wrapped = pytest.mark.parametrize("mode", MODES[:4])
slow = pytest.mark.slow


class Watched(Run):
    """A run that looks at its weights and its account before and after each update."""

    def __init__(self, name, mode="hooks", **options):
        flags = {"records": 96, "batch_size": 24, **FLAGS.get(name, {})}
        super().__init__(name, mode, **{**flags, **options})
        self.changes, self.seen = 0, self.sorted()
        self.plain.register_step_pre_hook(self.before)
        self.plain.register_step_post_hook(self.after)

    def sorted(self):
        """The weights, whose units may have been permuted."""
        return torch.cat([value.flatten().sort()[0] for value in self.weights().values()])

    def before(self, *_):
        assert torch.equal(self.seen, self.sorted())
        assert self.accounted > self.changes  # accounted before the weights change

    def after(self, *_):
        self.changes += not torch.equal(self.seen, self.sorted())
        self.seen = self.sorted()

    def check(self, steps):
        assert torch.equal(self.seen, self.sorted())
        assert self.changes == self.updates == steps
        assert self.accounted >= steps if self.by_epochs else self.accounted == steps


def early_breaks(run):
    for _ in range(2):
        run.train(itertools.islice(run.loader, 2))
        run.train()


def physical_batches(run):
    with run.split(4) as loader:  # no Poisson batch is as small
        run.train(loader)


# ---- ways of training -----------------------------------------------------------------------


def physical_batches_left_early(run):
    for _ in range(2):
        with run.split(4) as loader:
            run.train(itertools.islice(loader, 1))
    run.train()


def physical_batches_cleared_before_and_after(run):
    with run.split(4) as loader:
        for batch in loader:
            run.train([batch])
            run.optimizer.zero_grad(set_to_none=True)


def physical_batches_that_fail(run):
    """Every third part of the batches is lost, so of each batch one, and nobody looks."""
    with run.split(4) as loader:
        for number, batch in enumerate(loader):
            if number % 3:
                with contextlib.suppress(ValueError):
                    run.step(batch)


def a_physical_batch_twice(run):
    with run.split(4) as loader:
        run.train(batch for batch in loader for _ in range(2))


def closures(run):
    for batch in run.loader:
        run.optimizer.step(lambda batch=batch: (run.optimizer.zero_grad(), run.backward(batch)))


def without_clearing(run, clear=lambda: None):
    """An epoch in which gradients are cleared in this way alone."""
    for batch in run.loader:
        clear()
        run.backward(batch)
        run.optimizer.step()


def a_grad_scaler(run):
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
    run.backward()
    scaler.scale(torch.ones(()))
    scaler.step(run.optimizer)


def released_for_the_optimizer_inside(run):
    for batch in run.loader:
        run.optimizer.zero_grad()
        run.backward(batch)
        run.optimizer.pre_step()
        run.plain.step()


def batches_that_nobody_steps_on(run):
    for number, batch in enumerate(run.loader):
        run.optimizer.zero_grad()
        run.backward(batch)
        if number % 2:
            run.optimizer.step()


def a_stock_loader(run):
    return DataLoader(run.loader.dataset, batch_sampler=run.loader.batch_sampler)


def split_again(run):
    with run.split(4) as run.loader:
        run.split(2).__enter__()


STALE, TWICE = "drawn before the last one", "stepped on already"
WAYS = {  # how it is trained, the steps that are released, and why no more
    "two passes at once": (
        lambda run: run.train(late for _, late in zip(run.loader, run.loader, strict=True)),
        4,
        None,
    ),
    "the earlier of two": (
        lambda run: run.train(early for early, _ in zip(run.loader, run.loader, strict=True)),
        0,
        STALE,
    ),
    "signals": (
        lambda run: (run.optimizer.signal_skip_step(True), run.train()),
        0,
        r"signal_skip_step\(\) is not for",
    ),
    "physical batches": (physical_batches, 4, None),
    "left early": (physical_batches_left_early, 4, None),
    "cleared before and after": (physical_batches_cleared_before_and_after, 4, None),
    "split again": (split_again, 0, "or is split already"),
    "physical batches that fail": (physical_batches_that_fail, 0, None),
    "a physical batch twice": (a_physical_batch_twice, 0, TWICE),
    "closures": (closures, 4, None),
    "closures that step": (
        lambda run: [run.optimizer.step(lambda b=batch: run.step(b)) for batch in run.loader],
        1,
        TWICE,
    ),
    "two steps on a batch": (lambda run: (run.step(), run.optimizer.step()), 1, TWICE),
    "no clearing": (without_clearing, {"ghost": 4, "others": 1}, "accumulat"),
    "clearing by the model": (
        lambda run: without_clearing(run, run.model.zero_grad),
        {"ghost": 4, "others": 1},
        r"optimizer\.zero_grad\(\)",
    ),
    "cleared before the step": (
        lambda run: (run.backward(), run.optimizer.zero_grad(), run.optimizer.step()),
        0,
        "no gradients of records|not clipped",
    ),
    "the optimizer inside": (
        lambda run: (run.backward(), run.plain.step()),
        0,
        "neither clipped, noised nor accounted",
    ),
    "released for the one inside": (released_for_the_optimizer_inside, 4, None),
    "noise by hand": (
        lambda run: (
            run.backward(),
            run.optimizer.clip_and_accumulate(),
            run.optimizer.add_noise(),
            run.plain.step(),
        ),
        0,
        "neither clipped, noised nor accounted",
    ),
    # Else each record of the batch could be in the sum twice.
    "clipping by hand": (
        lambda run: (run.backward(), run.optimizer.clip_and_accumulate(), run.optimizer.step()),
        0,
        "Gradients haven't been cleared|not clipped",
    ),
    "a GradScaler": (a_grad_scaler, 0, "GradScaler"),
    "early breaks": (early_breaks, 12, None),
    "batches that nobody steps on": (batches_that_nobody_steps_on, 2, None),
    "another order": (
        lambda run: run.train([part.flip(0) for part in batch] for batch in run.loader),
        4,
        None,
    ),
    "one batch late": (
        lambda run: run.train(batch for batch, _ in itertools.pairwise(iter(run.loader))),
        0,
        STALE,
    ),
    "a list": (lambda run: run.train(list(run.loader)), 0, STALE),
    "a cycle": (lambda run: run.train(itertools.cycle(run.loader)), 4, STALE),
    "the original loader": (lambda run: run.train(run.toy["data_loader"]), 0, "none was drawn"),
    "a copy of the loader": (lambda run: run.train(copy.deepcopy(run.loader)), 0, "no fresh batch"),
    "a stock loader with our sampler": (
        lambda run: run.train(a_stock_loader(run)),
        0,
        "no fresh batch",
    ),
    "a sum of losses": (
        lambda run: sum(run.model(x).sum() for x, _ in run.loader).backward(),
        0,
        "a batch before the last one",
    ),
}


def rotated():
    """Every way with one combination, so that each of both is there; all with all are slow."""
    rows = itertools.product(enumerate(WAYS), enumerate(COMBINATIONS))
    for (number, way), (turn, combination) in rows:
        rest = (number - turn) % len(COMBINATIONS)
        yield pytest.param(way, *combination, marks=pytest.mark.slow if rest else ())


@pytest.mark.parametrize(("way", "name", "mode"), list(rotated()))
def test_every_change_of_the_weights_is_one_accounted_round_of_one_whole_batch(way, name, mode):
    run = Watched(name, mode)
    original, (train, steps, refusal) = run.loader, WAYS[way]
    if isinstance(steps, dict):
        steps, refusal = steps.get(mode, steps["others"]), None if mode in steps else refusal
    said = (ValueError, RuntimeError)
    with pytest.raises(said, match=refusal) if refusal else contextlib.nullcontext():
        train(run)
    run.check(steps)
    run.loader = original
    run.train()
    run.check(steps + 4)


# ---- loaders --------------------------------------------------------------------------------


def stacked(rows):
    if not rows:
        return [torch.zeros(0, 5), torch.zeros(0).long()]
    return [torch.stack(column) for column in zip(*rows, strict=True)]


LOADERS = [
    {"drop_last": True, "shuffle": True},
    {"pin_memory": True, "collate_fn": stacked},
    {"num_workers": 2, "persistent_workers": True},
]


@pytest.mark.parametrize("loader", LOADERS, ids=["in order", "pinned", "workers"])
@pytest.mark.parametrize(
    "name", ["subsampled_shuffle", "rdp", *(pytest.param(name, marks=slow) for name in OURS)]
)
def test_loaders_of_every_kind_issue_tickets(name, loader):
    run = Watched(name, loader=loader)
    poisson = name not in ("shuffle_gauss", "subsampled_shuffle")
    assert isinstance(run.loader, DPDataLoader) == poisson
    run.train(itertools.islice(run.loader, 2))
    physical_batches(run)
    physical_batches_left_early(run)
    run.check(10)
    if "persistent_workers" in loader:  # which a later pass takes over
        earlier, later = iter(run.loader), iter(run.loader)
        with pytest.raises(ValueError, match=r"ended when a later one began.*end one pass before"):
            next(earlier)
        run.train(later)
        run.check(14)


def test_a_record_that_cannot_be_read_costs_its_own_batch(monkeypatch):
    run = Run()
    batches = iter(run.loader)
    kept = next(batches)
    run.train([kept])
    run.optimizer.zero_grad()
    with monkeypatch.context() as patch:
        patch.setattr(TensorDataset, "__getitem__", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            next(batches)
    with run.refused("no fresh batch"):
        run.step([part.clone() for part in kept])
    assert run.train().updates == run.accounted == 6


@pytest.mark.parametrize(
    "change", [{"records": 10}, {"records": 240}, {"batch_size": 3}, {"drop_last": True}]
)
def test_batches_of_one_s_own_are_those_that_are_accounted(change):
    """Of 10 records in batches of 6 the last batch's 4 reports would be accounted as 6."""
    run = Run("shuffle_gauss", loader={"shuffle": True}, poisson_sampling=False)
    sampler, data = run.toy["data_loader"].batch_sampler, run.toy["data_loader"].dataset
    for key, value in change.items():
        if key == "records":
            data.tensors = tuple(torch.cat([part] * 10)[:value] for part in data.tensors)
        else:
            setattr(sampler, key, value)
    with pytest.raises(ValueError, match=r"was changed after make_private: .*are"):
        run.train(run.split(4).__enter__() if "records" in change else None)
    assert run.updates == run.accounted == 0


@pytest.mark.parametrize("name", ["shuffled_checkin", "rdp"])
def test_batches_of_another_run_s_loader_are_not_accounted_as_this_run_s_by_being_split(name):
    run, other = Run(name, records=60), Run(name, records=60, batch_size=30)
    elsewhere = DataLoader(other.loader.dataset, batch_sampler=run.loader.batch_sampler)
    own = run.loader
    for run.loader in (other.loader, elsewhere, copy.deepcopy(own)):
        with pytest.raises(ValueError, match="data_loader is not the one that make_private"):
            run.split(5).__enter__()
    run.loader = own
    with run.split(5) as batches:
        run.train(batches)
    assert run.updates == run.accounted == 10


# ---- one gradient for each record -----------------------------------------------------------

ROWS = {
    "each record twice": lambda part: torch.cat([part, part]),
    "one record twice": lambda part: torch.cat([part, part[:1]]),
    "one record fewer": lambda part: part[1:],
}


@pytest.mark.parametrize(
    ("name", "mode", "rows"),
    [
        *(("subsampled_shuffle", "hooks", rows) for rows in ROWS),
        ("shuffle_gauss", "functorch", "one record twice"),
        ("shuffled_checkin", "functorch", "one record fewer"),
        ("shuffled_fw", "ghost", "one record fewer"),
        ("shuffled_fw", "ghost", "each record twice"),
        ("shuffled_sums", "hooks", "one record fewer"),
        ("rdp", "hooks", "one record twice"),
    ],
)
def test_every_record_of_the_batch_has_one_gradient(name, mode, rows):
    """Fewer ones' noise would hide less than is accounted, and rows of two draws would be added."""
    run = Run(name, mode, records=60, batch_size=20)
    with run.refused("gradients of a different number of records than this batch", goes_on=False):
        run.step([ROWS[rows](part) for part in run.batch(5)])
    assert all(parameter.grad is None for parameter in run.optimizer.params)  # which is raw
    assert run.train().accounted == 3


def test_opacus_s_accountants_warn_of_fewer_gradients_as_opacus_s_own_tests_have_them():
    run = Run("rdp", records=60, batch_size=20)
    with pytest.warns(UserWarning, match="got gradients of fewer records than this batch"):
        run.step([part[2:] for part in run.batch(5)])
    shuffled = Run("rdp", records=60, batch_size=20, shuffle_weights="paper")
    with shuffled.refused("got gradients of a different number of records than this batch:"):
        shuffled.step([part[2:] for part in shuffled.batch(5)])


@pytest.mark.parametrize("by_layers", [False, True])
def test_the_rows_of_two_halves_do_not_count_as_one_another_s(by_layers):
    """Opacus adds the rows of two passes, and clips them as one record's."""
    run = Run("shuffled_sums", records=12, batch_size=12, poisson_sampling=False)
    called = nn.Sequential(*run.network) if by_layers else run.model
    x, y = run.batch()
    halves = [run.criterion(called(x[half]), y[half]) for half in (slice(6), slice(6, 12))]
    with run.refused("gradients of a different number of records than this batch:"):
        sum(halves).backward()
        run.optimizer.step()


# ---- what the network sees ------------------------------------------------------------------


@wrapped
def test_a_batch_that_was_kept_is_refused_under_the_ticket_of_another(mode):
    run = Run(mode=mode)
    (x, y), again, (last, _) = itertools.islice(run.loader, 3)
    for kept in ((x, y), [part[:6] for part in again], [part.view_as(part) for part in again]):
        next(iter(run.loader))
        with run.refused(STALE):
            run.backward(kept)
    with torch.no_grad():
        run.model(x)
    run.model.eval()
    if mode == "ew":  # which has gradients of records in evaluation mode, too
        with run.refused("a batch before the last one"):
            run.backward((x, y))
    run.model(x)
    run.model.train()
    if mode != "ew":
        for layer in (run.network[0], nn.Sequential(nn.Identity(), *run.network)):
            with run.refused(STALE):
                layer(last)
        run.private.to_standard_module().train()(x)  # is no private run's any more


@pytest.mark.zoo
def test_a_compiled_network_refuses_a_batch_that_was_kept():
    run = Run()
    kept, run.model = run.batch(), torch.compile(run.model, backend="eager")
    run.train()
    run.optimizer.zero_grad()
    with run.refused(STALE):
        run.backward(kept)


@wrapped
@pytest.mark.parametrize("way", ["added", "alone", "by layers"])
def test_two_draws_never_meet_in_one_backward_pass(mode, way):
    """Else one ticket would pay for the records of both: gradients are added row by row."""
    run = Run(mode=mode)
    layers = (mode in ("hooks", "functorch")) and way == "by layers"
    model = nn.Sequential(*run.network) if layers else run.model
    first, second = (run.criterion(model(x), y) for x, y in itertools.islice(run.loader, 2))
    with run.refused("a loss of an earlier batch" if layers else "a batch before the last one"):
        (first if way == "alone" else first + second).backward()
    run.train()
    assert run.updates == run.accounted == 5


@wrapped
def test_a_batch_that_nobody_steps_on_leaves_nothing_to_the_next_one(mode):
    """Opacus would add the rows of later batches, one record's gradient to another's."""
    run, alone = (Run("rdp", mode, poisson_sampling=sampled) for sampled in (True, False))
    batches = iter(run.loader)
    output = run.model(next(batches)[0])
    output.register_hook(lambda _: 1 / 0)  # a backward pass that fails
    with pytest.raises(ZeroDivisionError):
        output.sum().backward()
    run.optimizer.zero_grad()
    x, y = next(batches)
    run.criterion(run.model(x), y)
    batch = next(batches)
    alone.network.load_state_dict(run.network.state_dict())
    for trained in (run, alone):
        trained.step(batch)
    for one, other in zip(run.optimizer.params, alone.optimizer.params, strict=True):
        torch.testing.assert_close(one.summed_grad, other.summed_grad)
    assert run.accounted == 1


@pytest.mark.parametrize("mode", ["hooks", "functorch", "ew"])
def test_updates_by_hand_are_refused_at_the_next_batch(mode):
    """A batch without a step is not refused, nor are weights that are loaded after a bad loss."""
    run = Run(mode=mode).train()
    run.optimizer.zero_grad()
    for number, (x, y) in enumerate(run.loader):
        loss = run.criterion(run.model(x), y)
        if number:
            run.network.load_state_dict(run.network.state_dict())
        else:
            loss.backward()
            run.optimizer.zero_grad()
    run.train()
    run.optimizer.zero_grad()

    def by_hand(write):
        for x, y in run.loader:
            run.criterion(run.model(x), y).backward()
            for parameter in run.network.parameters():
                write(parameter, parameter.grad_sample.sum(0))
            run.optimizer.zero_grad()

    with pytest.warns(PrivacyAssumptionWarning, match="backward passes, and no optimizer.step"):
        by_hand(lambda parameter, gradient: parameter.data.sub_(gradient))
    with pytest.raises(ValueError, match="changed on the last batch without"):
        by_hand(lambda parameter, gradient: parameter.detach().sub_(gradient))
