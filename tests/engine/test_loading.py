"""Loading a file runs no code of it; what was changed after it was saved is refused, or said in report and statement."""

from __future__ import annotations

import copy
import functools
import inspect
import io
import os
import pickle
import warnings
from collections import OrderedDict

import check_in_run
import numpy as np
import opacus
import pytest
import torch
from helpers.changed_files import ACCOUNT, ROUNDS, WEIGHTS, Touching
from helpers.federation import GAUSSIAN
from helpers.toy import make_toy, run_epoch, way_of
from opacus.schedulers import LambdaNoise, StepGradClip
from torch.optim import lr_scheduler

from opacus_shuffle import PrivacyEngine
from opacus_shuffle.federated import Ledger, Shuffler

DELTA = 1e-5
both = pytest.mark.parametrize("name", ["rdp", "shuffled_checkin"])


class Run:
    """A small private run."""

    def __init__(
        self, name: str, *, epochs: int = 1, make=None, noise: float = 2.0, **keywords
    ) -> None:
        toy = make_toy()
        if make is not None:
            toy["optimizer"] = make(toy["module"].parameters())
        self.engine = PrivacyEngine(accountant=name)
        ways = {} if name == "rdp" else way_of(name)
        made = self.engine.make_private(**toy, noise_multiplier=noise, **{**ways, **keywords})
        self.model = made[0] if keywords.get("wrap_model", True) else toy["module"]
        self.optimizer, self.loader = made[1], made[-1]
        self.criterion = made[2] if len(made) > 3 else None
        self.train(epochs)

    def train(self, epochs: int) -> None:
        for _ in range(epochs):
            run_epoch(self.model, self.optimizer, self.loader, self.criterion)

    def file(self, **keywords) -> io.BytesIO:
        file = io.BytesIO()
        self.engine.save_checkpoint(
            path=file, module=self.model, optimizer=self.optimizer, **keywords
        )
        file.seek(0)
        return file

    def saved(self) -> dict:
        return torch.load(self.file(), weights_only=True)

    def load(self, saved: object, **keywords) -> dict:
        file = saved
        if isinstance(saved, dict):
            torch.save(saved, file := io.BytesIO())
            file.seek(0)
        return self.engine.load_checkpoint(
            path=file, module=self.model, optimizer=self.optimizer, **keywords
        )

    def contents(self) -> tuple[str, ...]:
        held = (
            self.model.state_dict(),
            self.optimizer.state_dict(),
            self.engine.accountant.__dict__,
            self.engine.unchecked,
        )
        return tuple(map(repr, held))


@functools.cache
def untrained(name: str) -> Run:
    """One to be shared by tests in which all is refused."""
    return Run(name, epochs=0)


@functools.cache
def two_checkpoints(name: str) -> tuple[dict, dict, Run]:
    """Of one run, and another one that has loaded the later of them."""
    run, other = Run(name), Run(name, epochs=0)
    earlier = run.saved()
    run.train(1)
    other.load(run.file())
    return earlier, run.saved(), other


def hidden(place, saved: dict) -> dict:
    """A checkpoint that is honest but for one object somewhere in it."""
    saved["optimizer_state_dict"]["param_groups"][0]["lr"] = Touching(place)
    return saved


WAYS = {
    "nothing said": {},
    "weights only": {"weights_only": True},
    "not weights only": {"weights_only": False},
    "weights_only=0": {"weights_only": 0},
    "another pickle": {"pickle_module": pickle},
    "memory map": {"mmap": True},
    "an encoding": {"encoding": "latin1"},
}


@both
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("legacy", [False, True])
def test_no_checkpoint_runs_code_whatever_torch_is_told(name, way, legacy, tmp_path, monkeypatch):
    monkeypatch.setenv("TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD", "1")
    run, place, path = untrained(name), tmp_path / "touched", tmp_path / "run.pt"
    before = run.contents()
    for evil in (Touching(place), {"mine": Touching(place)}, hidden(place, run.saved())):
        torch.save(evil, path, _use_new_zipfile_serialization=not legacy)
        for each in (path, str(path), io.BytesIO(path.read_bytes())):
            with pytest.raises(ValueError, match="allow_pickle=True"):
                run.load(each, torch_load_kwargs=WAYS[way])
    path.write_bytes(pickle.dumps(Touching(place)))
    with pytest.raises(ValueError, match="allow_pickle=True"):
        run.load(path, torch_load_kwargs=WAYS[way])
    assert not place.exists()
    assert run.contents() == before


def test_no_other_file_that_is_read_runs_code(tmp_path):
    place, book, kept = tmp_path / "touched", tmp_path / "book.pt", tmp_path / "curve.pt"
    torch.save(
        {"settings": "", "round": 1, "begun": False, "result": Touching(place), "accountant": {}},
        book,
    )
    with pytest.raises(ValueError, match="is no book of rounds"):
        Ledger(GAUSSIAN, Shuffler(GAUSSIAN), delta=DELTA, path=book)
    torch.save({"found": Touching(place)}, kept)
    with pytest.raises(pickle.UnpicklingError):
        check_in_run.main(["--output", str(tmp_path / "curve.json")])
    assert not place.exists()


@both
def test_a_file_that_could_run_code_is_loaded_on_demand_and_named_for_ever(name, tmp_path):
    run, other, place = Run(name), Run(name, epochs=0), tmp_path / "touched"
    with pytest.warns(
        UserWarning,
        match=r"checkpoint holds helpers\.changed_files\.Touching.*allow_pickle=True alone",
    ):
        file = run.file(checkpoint_dict={"mine": Touching(place)})
    for wrong in (
        {"allow_pickle": 1},
        {"allow_pickle": True, "torch_load_kwargs": {"weights_only": True}},
    ):
        with pytest.raises(ValueError, match="allow_pickle"):
            other.load(file, **wrong)
    other.load(file, allow_pickle=True)
    assert place.exists()
    later = Run(name, epochs=0)
    later.load(other.file())
    for each in (other, later):
        report = each.engine.privacy_report(DELTA)
        assert report.best.epsilon == run.engine.privacy_report(DELTA).best.epsilon
        for text in (
            " ".join(str(report).split()),
            report.statement(),
            *report.to_dict()["unchecked"],
        ):
            assert "a file read with allow_pickle=True, which could run code" in text
    assert run.engine.privacy_report(DELTA).to_dict()["unchecked"] == []


def shorter(rounds: list) -> list:
    return [(*each[:-1], 1) for each in rounds]


def of_ours(change):
    """A change of the accountant's state, which keeps its metadata."""

    def edit(saved: dict, _: dict) -> None:
        change(saved[ROUNDS])

    return edit


def louder(state: dict) -> None:
    if "rounds" in state:
        state["rounds"] = [
            ({**fields, "noise_multiplier": 9.0}, steps) for fields, steps in state["rounds"]
        ]
    else:
        state["history"] = [(9.0, rate, steps) for _, rate, steps in state["history"]]


def cut_short(state: dict) -> None:
    key = "rounds" if "rounds" in state else "history"
    state[key] = shorter(state[key])


def emptied(state: dict) -> None:
    state["rounds" if "rounds" in state else "history"] = []


def bare(change):
    """A change of the accountant's state, which loses its metadata."""

    def edit(saved: dict, _: dict) -> None:
        saved[ROUNDS] = OrderedDict(saved[ROUNDS])
        change(saved[ROUNDS])

    return edit


def part_of_an_earlier_one(*keys: str):
    return lambda saved, earlier: saved.update({key: earlier[key] for key in keys})


def weight_by_weight(saved: dict, earlier: dict) -> None:
    earlier[WEIGHTS].update(saved[WEIGHTS])
    saved.update(earlier)


REFUSED = {
    "fewer rounds": of_ours(cut_short),
    "no rounds": of_ours(emptied),
    "more noise": of_ours(louder),
    "no metadata, fewer rounds": bare(cut_short),
    "no metadata, no rounds": bare(emptied),
    "no metadata, more noise": bare(louder),
    "an earlier account": part_of_an_earlier_one(ROUNDS),
    "an earlier account and what is told of it": part_of_an_earlier_one(ROUNDS, ACCOUNT),
    "later weights": weight_by_weight,
    "another optimizer": lambda saved, _: saved["optimizer_state_dict"]["param_groups"][0].update(
        lr=9.0
    ),
    "nothing told": lambda saved, _: saved[ACCOUNT].pop("predictable"),
    "told otherwise": lambda saved, _: saved[ACCOUNT].update(
        predictable=[], poisson=True, unchecked=["nothing"]
    ),
    "told nothing at all": lambda saved, _: saved.update({ACCOUNT: None, "opacus_shuffle": {}}),
}


@both
@pytest.mark.parametrize("edit", REFUSED)
def test_a_checkpoint_that_was_changed_after_it_was_saved_is_refused(name, edit):
    earlier, saved, other = two_checkpoints(name)
    earlier, saved = copy.deepcopy((earlier, saved))
    REFUSED[edit](saved, earlier)
    for each in (other, untrained(name)):
        before = each.contents()
        for allow_rewind in (False, True):
            with pytest.raises(
                ValueError,
                match=r"changed after it was saved|has lost its _metadata|WeightShuffler",
            ):
                each.load(copy.deepcopy(saved), allow_rewind=allow_rewind)
        assert each.contents() == before


def test_metadata_of_ours_cannot_be_left_out():
    run = Run("shuffled_checkin")
    saved = run.saved()
    saved[ROUNDS] = OrderedDict(saved[ROUNDS])
    with pytest.raises(ValueError, match=r"changed after it was saved|_metadata"):
        Run("shuffled_checkin", epochs=0).load(saved)
    del saved[
        ACCOUNT
    ]  # what is left is a checkpoint of Opacus's own engine, whose accountant has metadata too
    with pytest.raises(ValueError, match=r"has lost its _metadata"):
        Run("shuffled_checkin", epochs=0).load(saved)


@both
def test_a_file_that_says_nothing_of_ours_is_named_in_report_and_statement(name):
    stripped, theirs = Run(name).saved(), io.BytesIO()
    del stripped[ACCOUNT]
    stock = opacus.PrivacyEngine(accountant=name)
    model, optimizer, loader = stock.make_private(**make_toy(), noise_multiplier=2.0)
    run_epoch(model, optimizer, loader)
    stock.save_checkpoint(path=theirs, module=model, optimizer=optimizer)
    theirs.seek(0)
    for saved in (stripped, theirs):
        run = Run(name, epochs=0, **({} if name == "rdp" else {"local_noise": saved is stripped}))
        run.load(saved)
        report = run.engine.privacy_report(DELTA)
        for text in (
            " ".join(str(report).split()),
            report.statement(),
            *report.to_dict()["unchecked"],
        ):
            assert "a checkpoint of Opacus's own engine, which says neither how" in text


def names(place) -> dict:
    (place / "empty.pt").write_bytes(b"")
    return {"": "got ''", "\x00": "got '.x00'", None: "got None", place: "got ", str(place): "got ", 3: "got 3",
            place / "empty.pt": "empty.pt"}  # fmt: skip


def test_what_is_no_file_is_named_with_the_remedy_and_nothing_changes(tmp_path):
    run = Run("shuffled_checkin")
    before = run.contents()
    for path, said in names(tmp_path).items():
        with pytest.raises(ValueError, match=rf"path must be .*{said}"):
            run.load(path)
        if path != tmp_path / "empty.pt":
            with pytest.raises(ValueError, match=rf"path must be .*{said}"):
                run.engine.save_checkpoint(path=path, module=run.model)
    for path in (tmp_path / "none.pt", str(tmp_path / "none" / "none.pt")):
        with pytest.raises(
            FileNotFoundError, match=r"engine\.save_checkpoint has written.*none\.pt"
        ):
            run.load(path)
        with pytest.raises(FileNotFoundError, match=r"none\.pt"):
            run.load(path, torch_load_kwargs={"mmap": True})
    assert run.contents() == before
    assert os.listdir(tmp_path) == ["empty.pt"]


@both
@pytest.mark.parametrize("legacy", [False, True])
def test_half_a_file_is_refused_wherever_it_ends(name, legacy, tmp_path):
    run, path = Run(name), tmp_path / "run.pt"
    run.engine.save_checkpoint(
        path=path,
        module=run.model,
        torch_save_kwargs={"_use_new_zipfile_serialization": not legacy},
    )
    whole, other = path.read_bytes(), untrained(name)
    before = other.contents()
    for end in {
        1,
        2,
        10,
        100,
        *(round(share * len(whole)) for share in (0.1, 0.25, 0.5, 0.75, 0.9)),
        len(whole) - 1,
    }:
        path.write_bytes(whole[:end])
        with pytest.raises(
            ValueError, match=r"path must be a checkpoint that .*run\.pt.*load an earlier one"
        ):
            other.load(path)
        assert other.contents() == before
    path.write_bytes(whole)
    run.engine.load_checkpoint(path=path, module=run.model)


MAKERS = {
    "momentum": lambda weights: torch.optim.SGD(
        weights, lr=np.float64(0.05), momentum=np.float32(0.9)
    ),
    "AdamW": lambda weights: torch.optim.AdamW(weights, lr=0.01, amsgrad=True),
}
MODES = {
    "hooks": {}, "functorch": {}, "ew": {}, "ghost": {"grad_sample_mode": "ghost"}, "unwrapped": {"wrap_model": False},
    "shuffled": {"shuffle_weights": True},
}  # fmt: skip
RATES = (
    lambda optimizer: lr_scheduler.OneCycleLR(optimizer, max_lr=0.1, total_steps=20),
    lambda optimizer: lr_scheduler.MultiStepLR(optimizer, milestones=[2, 3]),
    lr_scheduler.ReduceLROnPlateau,
)


@pytest.mark.parametrize(
    ("name", "mode", "maker"),
    [
        ("shuffled_checkin", mode, each)
        for mode, each in zip(MODES, [*MAKERS] * len(MODES), strict=False)
    ]
    + [("rdp", "hooks", "AdamW"), ("rdp", "ghost", "momentum"), ("rdp", "unwrapped", "momentum")],
)
def test_an_honest_checkpoint_comes_back_whole(name, mode, maker):
    options = {"grad_sample_mode": mode} if mode in ("functorch", "ew") else MODES[mode]
    run, again = (
        Run(name, make=MAKERS[maker], noise=np.float64(2.0), epochs=epochs, **options)
        for epochs in (1, 0)
    )
    parts = []
    for each in (run, again):
        noise = LambdaNoise(each.optimizer, noise_lambda=lambda epoch: np.float64(1.0 + epoch / 8))
        clip = StepGradClip(optimizer=each.optimizer, step_size=1, gamma=np.float32(0.5))
        parts.append({"noise_scheduler": noise, "grad_clip_scheduler": clip})
    parts[0]["noise_scheduler"].step()
    run.train(1)
    inner = run.optimizer.original_optimizer
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Detected call of")
        rates = [make(inner) for make in RATES]
    more = {
        "rates": [each.state_dict() for each in rates],
        "best": np.float32(0.5),
        "epoch": np.int64(3),
    }
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="the checkpoint holds")
        warnings.filterwarnings("error", message="weights were loaded")
        found = again.load(run.file(checkpoint_dict=more, **parts[0]), **parts[1])
    assert found["best"] == 0.5
    assert found["rates"] == more["rates"]
    assert parts[1]["noise_scheduler"].last_epoch == 1
    assert parts[1]["noise_scheduler"].noise_lambda is not parts[0]["noise_scheduler"].noise_lambda
    shown, shown_again = run.model.state_dict(), again.model.state_dict()
    assert all(torch.equal(shown[key], shown_again[key]) for key in shown)
    assert repr(run.optimizer.state_dict()["state"]) == repr(again.optimizer.state_dict()["state"])
    assert again.engine.accountant.history == run.engine.accountant.history
    assert again.engine.get_epsilon(DELTA) == run.engine.get_epsilon(DELTA)
    assert again.engine.privacy_report(DELTA).to_dict()["unchecked"] == []
    again.train(1)


def test_the_parts_of_a_checkpoint_are_those_that_opacus_knows():
    for method, own in (
        ("save_checkpoint", set()),
        ("load_checkpoint", {"allow_rewind", "allow_pickle"}),
    ):
        ours, theirs = (
            set(inspect.signature(getattr(each, method)).parameters)
            for each in (PrivacyEngine, opacus.PrivacyEngine)
        )
        assert ours == theirs | own
