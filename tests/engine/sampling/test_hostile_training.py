"""However a network is trained, every change of its weights is one accounted round of one whole batch, or there is none."""

from __future__ import annotations

import itertools

import pytest
import torch
from helpers.ticket_runs import Toy
from opacus.utils.batch_memory_manager import BatchMemoryManager

pytestmark = [
    pytest.mark.filterwarnings("ignore::opacus_shuffle.PrivacyAssumptionWarning"),
    pytest.mark.filterwarnings("ignore:GDP accounting"),
    pytest.mark.filterwarnings("ignore:.*pin_memory"),
]
ACCOUNTANTS = (
    "shuffle_gauss",
    "subsampled_shuffle",
    "shuffled_checkin",
    "shuffled_sums",
    "shuffled_fw",
    "rdp",
    "prv",
    "gdp",
)
MODES = ("hooks", "ghost", "ew", "functorch")
COMBINATIONS = [
    each for each in itertools.product(ACCOUNTANTS, MODES) if each != ("shuffled_sums", "ghost")
]


class Watched(Toy):
    """A run that looks at its weights before and after each step, and at the tickets that are released."""

    def __init__(self, name, mode, **options):
        options |= {
            "shuffled_fw": {"shuffle_weights": "paper"},
            "shuffled_checkin": {"local_noise": True},
        }.get(name, {})
        super().__init__(name, grad_sample_mode=mode, records=96, batch_size=24, **options)
        self.changes, self.seen, self.tickets = 0, self.weights(), []
        self.plain.register_step_pre_hook(self._before)
        self.plain.register_step_post_hook(self._after)
        self._release, self.optimizer.tickets.release = (
            self.optimizer.tickets.release,
            self._released,
        )

    def weights(self):
        return [each.detach().clone() for each in self.toy["module"].parameters()]

    def unchanged(self):
        # sorted, for they may have been shuffled
        pairs = zip(self.seen, self.weights(), strict=True)
        return all(
            torch.equal(one.flatten().sort()[0], other.flatten().sort()[0]) for one, other in pairs
        )

    def _before(self, *_):
        assert self.unchanged()
        assert self.accounted > self.changes  # before the weights change

    def _after(self, *_):
        self.changes += not self.unchanged()
        self.seen = self.weights()

    def _released(self):
        (ticket,) = {self.optimizer.tickets.latest.ticket}
        assert ticket.summed == set(range(ticket.parts))
        assert getattr(self.optimizer, "num_records", ticket.records) == ticket.records
        self.tickets.append(ticket)
        self._release()

    def check(self, steps):
        assert self.unchanged()
        assert (
            self.changes
            == self.steps
            == self.accounted
            == len(self.tickets)
            == len(set(map(id, self.tickets)))
            == steps
        )

    def split(self, size=4):  # no Poisson batch is as small
        return BatchMemoryManager(
            data_loader=self.loader, max_physical_batch_size=size, optimizer=self.optimizer
        )

    def each(self, train, loader=None):
        for batch in self.loader if loader is None else loader:
            self.optimizer.zero_grad()
            train(batch)


def nested(run):
    for batch in run.loader:
        run.train([batch])
        run.train(itertools.islice(run.loader, 2))


def two_passes_at_once(run):
    run.train(late for _, late in zip(run.loader, run.loader, strict=True))


def the_earlier_of_two_passes(run):
    run.train(early for early, _ in zip(run.loader, run.loader, strict=True))


def merged_by_signals(run):
    for number, batch in enumerate(run.loader):
        run.optimizer.signal_skip_step(number % 2 == 0)
        run.train([batch])


def signals_that_nobody_took_back(run):
    run.optimizer.signal_skip_step(True)
    run.train(run.loader)


def physical_batches(run):
    with run.split() as loader:
        run.train(loader)


def physical_batches_left_early(run):
    for _ in range(2):
        with run.split() as loader:
            run.train(itertools.islice(loader, 1))
    run.train(run.loader)


def physical_batches_cleared_before_and_after(run):
    with run.split() as loader:
        for batch in loader:
            run.train([batch])
            run.optimizer.zero_grad()
            run.optimizer.zero_grad(set_to_none=True)


def physical_batches_split_again(run):
    with run.split() as loader:
        BatchMemoryManager(
            data_loader=loader, max_physical_batch_size=2, optimizer=run.optimizer
        ).__enter__()


def physical_batches_with_signals(run):
    with run.split() as loader:
        run.optimizer.signal_skip_step(True)
        run.train(loader)


def physical_batches_that_fail(run):
    """A part of every batch is lost, and nobody looks."""
    with run.split() as loader:
        for batch in loader:
            run.optimizer.zero_grad()
            try:
                if (
                    run.optimizer.tickets.latest.index
                    == 0
                    < run.optimizer.tickets.latest.ticket.parts - 1
                ):
                    raise RuntimeError("out of memory")
                run.backward(batch)
                run.optimizer.step()
            except (RuntimeError, ValueError):
                continue


def closures(run):
    for batch in run.loader:
        run.optimizer.step(lambda batch=batch: (run.optimizer.zero_grad(), run.backward(batch)))


def closures_that_step(run):
    for batch in run.loader:
        run.optimizer.step(lambda batch=batch: run.train([batch]))


def two_steps_on_a_batch(run):
    run.each(lambda batch: (run.backward(batch), run.optimizer.step(), run.optimizer.step()))


def no_clearing(run):
    for batch in run.loader:
        run.backward(batch)
        run.optimizer.step()


def clearing_by_the_model(run):
    for batch in run.loader:
        run.model.zero_grad()
        run.backward(batch)
        run.optimizer.step()


def clearing_before_the_step(run):
    run.each(lambda batch: (run.backward(batch), run.optimizer.zero_grad(), run.optimizer.step()))


def the_optimizer_inside(run):
    run.each(lambda batch: (run.backward(batch), run.optimizer.original_optimizer.step()))


def released_for_the_optimizer_inside(run):
    run.each(lambda batch: (run.backward(batch), run.optimizer.pre_step(), run.plain.step()))


def noise_by_hand(run):
    run.each(lambda batch: (run.backward(batch), run.optimizer.add_noise(), run.plain.step()))


def another_optimizer(run):
    other = torch.optim.SGD(run.model.parameters(), lr=0.1)
    run.each(lambda batch: (run.backward(batch), other.step()))


def no_hooks(run):
    run.optimizer.attach_step_hook(None)
    run.train(run.loader)
    run.optimizer.step_hook = None
    run.train(run.loader)


def a_grad_scaler(run):
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
    run.each(
        lambda batch: (
            run.backward(batch),
            scaler.scale(torch.ones(())),
            scaler.step(run.optimizer),
        )
    )


def early_breaks(run):
    for _ in range(2):
        run.train(itertools.islice(run.loader, 2))
        run.train(run.loader)


def drop_outs(run):
    run.train(batch for number, batch in enumerate(run.loader) if number % 2)


def another_order(run):
    run.each(lambda batch: (run.backward([each.flip(0) for each in batch]), run.optimizer.step()))


def one_batch_late(run):
    batches = iter(run.loader)
    run.train(batch for batch, _ in itertools.pairwise(batches))


def a_list(run):
    run.train(list(run.loader))


def a_cycle(run):
    run.train(itertools.cycle(run.loader))


def the_original_loader(run):
    run.train(run.toy["data_loader"])


def a_sum_of_losses(run):
    sum(run.model(x).sum() for x, _ in run.loader).backward()


STALE, TWICE = "drawn before the last one", "stepped on already"
WAYS = [  # how it is trained, the steps that are released, and why no more
    (nested, 12, None),
    (two_passes_at_once, 4, None),
    (the_earlier_of_two_passes, 0, STALE),
    (merged_by_signals, 0, "signal_skip_step would add this whole batch"),
    (signals_that_nobody_took_back, 0, "signal_skip_step would add this whole batch"),
    (physical_batches, 4, None),
    (physical_batches_left_early, 4, None),
    (physical_batches_cleared_before_and_after, 4, None),
    (physical_batches_split_again, 0, "split already"),
    (physical_batches_with_signals, 4, None),
    (physical_batches_that_fail, 0, None),
    (closures, 4, None),
    (closures_that_step, 1, TWICE),
    (two_steps_on_a_batch, 1, TWICE),
    (no_clearing, {"ghost": 4, "others": 1}, "accumulat"),
    (clearing_by_the_model, {"ghost": 4, "others": 1}, r"optimizer\.zero_grad\(\)"),
    (another_optimizer, 0, "would move parameters of a private run"),
    (clearing_before_the_step, 0, "no gradients of records|not clipped"),
    (the_optimizer_inside, 0, "inside of a private one"),
    (released_for_the_optimizer_inside, 4, None),
    (noise_by_hand, 0, "called by itself"),
    (no_hooks, 8, None),
    (a_grad_scaler, 0, "GradScaler"),
    (early_breaks, 12, None),
    (drop_outs, 2, None),
    (another_order, 4, None),
    (one_batch_late, 0, STALE),
    (a_list, 0, STALE),
    (a_cycle, 4, STALE),
    (the_original_loader, 0, "none was drawn"),
    (a_sum_of_losses, 0, "a batch before the last one"),
]


def rotated():
    """Every way with one combination, so that each of both is there; all with all are slow."""
    for (number, way), (turn, combination) in itertools.product(
        enumerate(WAYS), enumerate(COMBINATIONS)
    ):
        rest = (number - turn) % len(COMBINATIONS)
        name = f"{way[0].__name__}-{'-'.join(combination)}"
        yield pytest.param(*way, *combination, id=name, marks=pytest.mark.slow if rest else ())


@pytest.mark.parametrize(("way", "steps", "refusal", "name", "mode"), list(rotated()))
def test_every_change_of_the_weights_is_one_accounted_round_of_one_whole_batch(
    way, steps, refusal, name, mode
):
    run = Watched(name, mode)
    if isinstance(steps, dict):
        steps, refusal = steps.get(mode, steps["others"]), None if mode in steps else refusal
    if refusal is None:
        way(run)
    else:
        with pytest.raises((ValueError, RuntimeError), match=refusal):
            way(run)
    run.check(steps)
    run.optimizer.zero_grad()
    run.optimizer.attach_step_hook(None)
    run.optimizer.tickets.void()
    run.train(run.loader)
    run.check(steps + 4)


def stacked(rows):
    return (
        [torch.stack(each) for each in zip(*rows, strict=True)]
        if rows
        else [torch.zeros(0, 5), torch.zeros(0).long()]
    )


LOADERS = [
    *({"drop_last": True}, {"pin_memory": True}, {"collate_fn": stacked}, {"shuffle": True}),
    *(
        {"num_workers": 2},
        {"num_workers": 1, "timeout": 60},
        {"num_workers": 2, "prefetch_factor": 4},
    ),
    {"num_workers": 2, "persistent_workers": True},
]


@pytest.mark.parametrize("name", ACCOUNTANTS[:6])
@pytest.mark.parametrize(
    "loader",
    [
        pytest.param(
            each, id="-".join(each), marks=pytest.mark.slow if "num_workers" in each else ()
        )
        for each in LOADERS
    ],
)
def test_loaders_of_every_kind_issue_tickets(name, loader):
    run = Watched(name, "hooks", loader=loader)
    for way in (early_breaks, physical_batches, physical_batches_left_early):
        way(run)
    run.check(20)
