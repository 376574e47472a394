"""A run that is killed at any moment goes on from its checkpoint with every release that its weights contain accounted."""

from __future__ import annotations

import os
import random
import signal
import sys
import threading
import time
import warnings

import pytest
import torch
from helpers.toy import make_toy, run_epoch, way_of

from opacus_shuffle import PrivacyEngine
from opacus_shuffle.core.guarantees import PrivacyAssumptionWarning

forks = pytest.mark.skipif(not hasattr(os, "fork"), reason="this system does not fork")


class Run:
    """A run whose weights know how many releases they contain."""

    def __init__(self, name: str, path: os.PathLike) -> None:
        toy = make_toy()
        toy["module"].register_buffer("releases", torch.zeros((), dtype=torch.int64))
        self.path, self.engine = path, PrivacyEngine(accountant=name)
        ways = {} if name in ("rdp", "gdp") else way_of(name)
        self.model, self.optimizer, self.loader = self.engine.make_private(
            **toy, noise_multiplier=2.0, **ways
        )
        self.releases = toy["module"].releases
        self.optimizer.original_optimizer.register_step_post_hook(lambda *_: self.releases.add_(1))

    def save(self) -> None:
        self.engine.save_checkpoint(path=self.path, module=self.model, optimizer=self.optimizer)

    def load(self) -> Run:
        self.engine.load_checkpoint(path=self.path, module=self.model, optimizer=self.optimizer)
        return self

    @property
    def rounds(self) -> int:
        return sum(steps for *_, steps in self.engine.accountant.history)

    def train(self) -> Run:
        run_epoch(self.model, self.optimizer, self.loader)
        return self

    def train_for_ever(self, moments: random.Random) -> None:
        while True:
            for x, y in self.loader:
                self.optimizer.zero_grad()
                torch.nn.functional.cross_entropy(self.model(x), y).backward()
                if not moments.randrange(5):  # in the middle of a batch, too
                    self.save()
                self.optimizer.step()
                if not moments.randrange(3):
                    self.save()


def written(path) -> int | None:
    return path.stat().st_ino if path.exists() else None


def killed(run: Run, seed: int) -> None:
    """Has a forked child train the run and save it, and kills it after a while."""
    child = os.fork()
    if not child:  # pragma: no cover
        try:
            torch.set_num_threads(1)
            run.train_for_ever(random.Random(seed))
        finally:
            os._exit(1)
    before = written(run.path)
    while written(run.path) == before:
        assert os.waitpid(child, os.WNOHANG) == (0, 0)
        time.sleep(1e-3)
    time.sleep(random.Random(seed).random() * 0.03)
    os.kill(child, signal.SIGKILL)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL


@forks
@pytest.mark.parametrize(
    "name", ["rdp", "shuffled_checkin", pytest.param("shuffled_fw", marks=pytest.mark.zoo)]
)
def test_a_run_that_is_killed_while_it_trains_and_saves_loses_no_accounting(name, tmp_path):
    path, contained = tmp_path / "run.pt", 0
    for seed in range(5):
        killed(Run(name, path).load() if seed else Run(name, path), seed)
        resumed = Run(name, path).load()
        releases = int(resumed.releases)
        assert resumed.rounds == releases >= contained
        contained = releases
    assert contained


def interrupted(function, number: int) -> bool:
    """Whether there were so many lines of accounting in a call; it ends there, as by Ctrl-C."""
    lines = 0

    def trace(frame, event, _):
        nonlocal lines
        if frame.f_code.co_filename.endswith(
            ("accountants/rdp.py", "accountants/history.py", "lineage.py")
        ):
            lines += event == "line"
            if lines == number:
                sys.settrace(None)
                raise KeyboardInterrupt
            return trace
        return None

    sys.settrace(trace)
    try:
        function()
    except KeyboardInterrupt:
        return True
    finally:
        sys.settrace(None)
    return False


@pytest.mark.parametrize("name", ["rdp", "shuffled_checkin"])
def test_an_interrupt_between_any_two_lines_of_accounting_loses_no_round(name, tmp_path):
    run = Run(name, tmp_path / "run.pt").train()
    lines = 0
    while interrupted(run.train, lines + 1):
        lines += 1
        assert run.rounds >= int(run.releases)
    assert lines > 20
    run.save()
    resumed = Run(name, run.path).load()
    assert resumed.rounds == run.rounds >= int(run.releases) > lines
    with warnings.catch_warnings():
        warnings.simplefilter("error", PrivacyAssumptionWarning)
        resumed.engine.get_epsilon(1e-5)


@pytest.mark.parametrize("name", ["rdp", "shuffled_checkin"])
def test_a_checkpoint_is_not_kept_if_training_went_on_while_it_was_written(name, tmp_path):
    run = Run(name, tmp_path / "run.pt").train()
    run.save()
    before = run.path.read_bytes()

    class Late:
        def __reduce__(self):  # while it is pickled
            thread = threading.Thread(target=run.train)
            thread.start()
            thread.join()
            return int, ()

    with pytest.raises(ValueError, match="step was taken while the checkpoint was written"):
        run.engine.save_checkpoint(
            path=run.path,
            module=run.model,
            optimizer=run.optimizer,
            checkpoint_dict={"mine": Late()},
        )
    assert run.path.read_bytes() == before
    run.save()
    assert Run(name, run.path).load().rounds == 8


@forks
@pytest.mark.parametrize("name", ["rdp", "gdp", "shuffled_checkin"])
@pytest.mark.filterwarnings("ignore:the checkpoint holds", "ignore:GDP accounting")
def test_forked_processes_that_train_on_have_parted_and_no_account_holds_both(name, tmp_path):
    run = Run(name, tmp_path / "parent.pt").train()
    children = []
    for child in ("one.pt", "two.pt"):
        run.path = tmp_path / child
        if not (process := os.fork()):  # pragma: no cover
            try:
                torch.set_num_threads(1)
                run.train().save()
            finally:
                os._exit(0)
        children.append(process)
    for process in children:
        os.waitpid(process, 0)
    run.train()
    alone = [Run(name, tmp_path / child).load() for child in ("one.pt", "two.pt")]
    assert [each.rounds for each in alone] == [8, 8]
    one, two, own = (
        torch.cat([each.flatten() for each in run.model.parameters()]) for run in (*alone, run)
    )
    assert not any(
        torch.equal(*pair) for pair in ((one, two), (one, own), (two, own))
    )  # their noise is their own
    for path in (tmp_path / "one.pt", tmp_path / "two.pt"):
        for other in (run, *alone[(path.name == "one.pt") :][:1]):
            other.path = path
            with pytest.raises(
                ValueError,
                match=r"another run than the 8 rounds .* or has parted from them at a fork",
            ):
                other.load()
            assert other.rounds == 8


@pytest.mark.parametrize("name", ["rdp", "shuffled_checkin"])
def test_a_load_accounts_before_the_weights_are_there(name, tmp_path):
    saved = Run(name, tmp_path / "run.pt").train()
    saved.save()
    run, found = Run(name, saved.path), []
    accountant = run.engine.accountant
    run.model.register_load_state_dict_post_hook(
        lambda *_: found.append(sum(each[2] for each in accountant.history))
    )
    run.load()
    assert found == [int(run.releases)] == [4]


@forks
@pytest.mark.parametrize("name", ["rdp", "shuffled_checkin"])
def test_of_two_processes_only_the_one_that_has_drawn_a_batch_may_step_on_it(name, tmp_path):
    run = Run(name, tmp_path / "run.pt")
    batches = iter(run.loader)

    def backward():
        x, y = next(batches)
        run.optimizer.zero_grad()
        torch.nn.functional.cross_entropy(run.model(x), y).backward()

    backward()
    if not (process := os.fork()):  # pragma: no cover
        code = 1
        try:
            torch.set_num_threads(1)
            with pytest.raises(ValueError, match="or the process forked"):
                run.optimizer.step()
            backward()
            run.optimizer.step()
            code = 0 if run.rounds == 1 else 2
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]) == 0
    run.optimizer.step()
    assert run.rounds == 1
