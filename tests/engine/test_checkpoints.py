"""A checkpoint is written and loaded whole or not at all, runs no code, and forgets no release."""

from __future__ import annotations

import functools
import io
import itertools
import os
import pickle
import warnings

import numpy as np
import opacus
import pytest
import torch
from helpers.changed_files import ACCOUNT, ROUNDS, WEIGHTS, Touching
from helpers.federation import GAUSSIAN
from helpers.private_runs import Run, private, same
from helpers.shuffled_runs import SeededRun, distance, spec_of
from opacus.schedulers import LambdaNoise, StepGradClip, StepNoise
from torch import nn
from torch.optim import lr_scheduler

from opacus_shuffle import WeightShuffling, find_permutations
from opacus_shuffle.accountants.report import UNCHECKED
from opacus_shuffle.core.randomness import is_secret
from opacus_shuffle.federated import Ledger, Shuffler

pytestmark = [
    pytest.mark.filterwarnings("ignore:GDP accounting", "ignore:the checkpoint holds"),
    pytest.mark.filterwarnings("ignore:Secure RNG", "ignore:shuffle_weights moves"),
    pytest.mark.filterwarnings("ignore:This run is not private", "ignore:poisson_sampling=False"),
]
DELTA = 1e-5
STEPS = 4  # of an epoch
both = pytest.mark.parametrize("name", ["gdp", "shuffled_checkin"])


def saved(run, **options):
    """What is in a checkpoint of the run."""
    return torch.load(run.saved(**options), weights_only=True)


def contents(run, *more):
    """All that a refused load must leave as it is."""
    shuffler = run.engine.shuffler
    groups = [{**group, "params": None} for group in run.optimizer.param_groups]
    return repr(
        (
            run.model.state_dict(),
            run.optimizer.state_dict()["state"],
            groups,
            run.engine.accountant.__dict__,
            run.engine.accountant.unchecked,
            None if shuffler is None else shuffler.state_dict(),
            [{**vars(schedule), "optimizer": None} for schedule in more],
        )
    )


# ---- what is saved comes back ---------------------------------------------------------------

HONEST = [
    ("rdp", "ew", {}),
    ("shuffled_checkin", "no wrapper", {}),
    ("shuffled_checkin", "hooks", {"shuffle_weights": True}),
    ("rdp", "ghost", {}),
    *(
        pytest.param("shuffled_checkin", mode, {}, marks=pytest.mark.zoo)
        for mode in ("hooks", "functorch", "ghost")
    ),
]


def momentum(parameters):
    """NumPy's numbers, as sweeps over them give."""
    return torch.optim.SGD(parameters, lr=np.float64(0.05), momentum=np.float32(0.9))


def amsgrad(parameters):
    return torch.optim.AdamW(parameters, lr=0.01, amsgrad=True)


@pytest.mark.filterwarnings("ignore:Detected call of")
@pytest.mark.parametrize(("name", "mode", "options"), HONEST)
def test_an_honest_checkpoint_comes_back_whole_with_what_the_user_adds(name, mode, options):
    maker, parts = amsgrad if mode == "ew" else momentum, []
    run, again = (
        private(name, mode, optimizer=maker, sigma=np.float64(2.0), **options) for _ in range(2)
    )
    for trained in (run.train(), again):
        noise = LambdaNoise(trained.optimizer, noise_lambda=lambda epoch: np.float64(1 + epoch / 8))
        clip = StepGradClip(optimizer=trained.optimizer, step_size=1, gamma=np.float32(0.5))
        parts.append({"noise_scheduler": noise, "grad_clip_scheduler": clip})
    parts[0]["noise_scheduler"].step()
    run.train()
    rate = lr_scheduler.OneCycleLR(run.plain, max_lr=0.1, total_steps=20).state_dict()
    more = {"rate": rate, "best": np.float32(0.5), "epoch": np.int64(3)}
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="the checkpoint holds")
        warnings.filterwarnings("error", message="weights were loaded")
        file = run.saved(checkpoint_dict=more, **parts[0])
        again.load(file, **parts[1])
    content = torch.load(io.BytesIO(file.getvalue()), weights_only=True)
    assert (content["best"], content["rate"]) == (0.5, rate)
    assert parts[1]["noise_scheduler"].last_epoch == 1
    assert same(run.model.state_dict(), again.model.state_dict())
    assert repr(run.optimizer.state_dict()["state"]) == repr(again.optimizer.state_dict()["state"])
    assert again.engine.accountant.history == run.engine.accountant.history
    assert again.engine.get_epsilon(DELTA) == run.engine.get_epsilon(DELTA)
    assert again.engine.privacy_report(DELTA).to_dict()["unchecked"] == []
    again.train()


@pytest.mark.parametrize(("name", "own_generator"), [("rdp", True), ("shuffled_fw", False)])
def test_a_resumed_run_is_the_one_that_went_on_permutations_and_all(name, own_generator):
    options = {"shuffle": spec_of("mlp"), "own_generator": own_generator, "optimizer": "Adam"}
    options |= {"accountant": name, "sigma": 1.5}
    quiet, run, again = (SeededRun(**options) for _ in range(3))
    quiet.fit(2)
    run.fit(1, after=run.saved)  # saving, in the middle of a batch too, disturbs nothing
    again.load(run.saved())
    assert distance(run.weights(), again.weights()) == 0
    # The secrets of noise and participation are in no checkpoint.
    for resumed in (again, run):
        resumed.optimizer.generator.set_state(run.optimizer.generator.get_state())
        drawing = run.loader.batch_sampler.generator
        resumed.loader.batch_sampler.generator.set_state(drawing.get_state())
        resumed.fit(1)
    assert distance(run.contents(), again.contents()) == 0
    assert run.shuffler.shuffles == again.shuffler.shuffles == 8
    if own_generator:
        assert distance(quiet.contents(), run.contents()) == 0
    assert again.engine.accountant.state_dict() == run.engine.accountant.state_dict()


def test_a_checkpoint_shows_permutations_to_come_but_none_that_were():
    keys, run = [], SeededRun(shuffle=spec_of("mlp"), own_generator=False)
    run.fit(1, after=lambda: keys.append(saved(run)["opacus_shuffle"]["key"]))
    assert len(set(keys)) == STEPS
    file, before = run.saved(), run.weights()
    run.shuffler.shuffle_()
    other = SeededRun(shuffle=spec_of("mlp"), own_generator=False).load(file)
    assert distance(before, other.weights()) == 0
    other.shuffler.shuffle_()
    assert distance(run.weights(), other.weights()) == 0  # the next one is known


# ---- whole or not at all --------------------------------------------------------------------


@functools.cache
def units(width=40):
    """Permutations of the complete run's network."""
    network = nn.Sequential(nn.Linear(5, width), nn.ReLU(), nn.Linear(width, 3))
    return find_permutations(network, torch.zeros(2, 5))


def complete(name="shuffled_checkin", *, width=40, groups=1, counts=False, generator=None):
    """A run with everything that a checkpoint may hold, and its schedulers."""
    network = nn.Sequential(nn.Linear(5, width), nn.ReLU(), nn.Linear(width, 3))
    if counts:
        network.register_buffer("scale", torch.ones(3))
    parameters = list(network.parameters())
    parts = [parameters] if groups == 1 else [parameters[:2], parameters[2:]]
    adam = torch.optim.Adam([{"params": part} for part in parts], lr=0.01)
    toy = {"module": network, "optimizer": adam}
    shuffling = WeightShuffling(groups=units(width), generator=generator)
    run = private(name, toy=toy, shuffle_weights=shuffling)
    noise = StepNoise(optimizer=run.optimizer, step_size=1, gamma=0.9)
    clip = StepGradClip(optimizer=run.optimizer, step_size=1, gamma=1.0)
    return run.train(), {"noise_scheduler": noise, "grad_clip_scheduler": clip}


def put(value, *path):
    """A change of one entry somewhere in a checkpoint."""

    def spoil(content):
        *inner, last = path
        functools.reduce(lambda held, key: held[key], inner, content)[last] = value

    return spoil


ROUND = (2.0, 0.25)
SPOILT = {
    "no weights": lambda content: content.pop(WEIGHTS),
    "no accounting": lambda content: content.pop(ROUNDS),
    "no history": put(None, ROUNDS, "rounds"),
    "a round without its steps": put([ROUND], ROUNDS, "rounds"),
    "half a round": put([(*ROUND, 0.5)], ROUNDS, "rounds"),
    "a key that is too short": put(b"x", "opacus_shuffle", "key"),
    "a key that is text": put("x" * 32, "opacus_shuffle", "key"),
    "steps below zero": put(-1, "opacus_shuffle", "steps"),
    "no number of shuffles": put(None, "opacus_shuffle", "shuffles"),
    "a generator's state that is none": put(3, "opacus_shuffle", "generator"),
    "a generator's state in the place of a key": {"generator": torch.Generator()},
    "no account": put(None, ACCOUNT),
    "an account of other values": put(3, ACCOUNT, "unchecked"),
    "rounds that were not replaced": put(-1, ACCOUNT, "rewound"),
    "a weight of another shape": put(torch.zeros(7), WEIGHTS, "_module.2.bias"),
    "a weight too many": put(torch.zeros(7), WEIGHTS, "_module.9.bias"),
    "no optimizer's groups": put([], "optimizer_state_dict", "param_groups"),
    "no optimizer's state": put(3, "optimizer_state_dict", "state"),
    "no scheduler": put([3], "grad_clip_scheduler_state_dict"),
    "another width": {"width": 30},
    "other groups": {"groups": 2},
    "a buffer more": {"counts": True},
    "another accountant": {"name": "shuffle_gauss"},
}


@pytest.mark.parametrize("damage", SPOILT)
def test_a_spoilt_or_another_run_s_checkpoint_changes_nothing(damage):
    spoil = SPOILT[damage]
    (run, parts), (source, theirs) = complete(), complete(**spoil if type(spoil) is dict else {})
    content = saved(source, **theirs)
    if callable(spoil):
        spoil(content)
    before = contents(run, *parts.values())
    with pytest.raises((ValueError, RuntimeError, TypeError, KeyError, AttributeError)):
        run.load(content, allow_rewind=True, **parts)
    assert contents(run, *parts.values()) == before
    run.train()
    assert is_secret(run.optimizer.generator)


def test_a_checkpoint_that_cannot_be_written_leaves_the_earlier_one(tmp_path):
    run, path = private("rdp"), tmp_path / "run.pt"
    parts = {"path": path, "module": run.model, "optimizer": run.optimizer}
    run.engine.save_checkpoint(**parts)
    before = path.read_bytes()
    with pytest.raises(Exception, match=r"pickle|local"):
        run.engine.save_checkpoint(**parts, checkpoint_dict={"function": lambda: None})
    assert path.read_bytes() == before
    assert os.listdir(tmp_path) == ["run.pt"]
    run.engine.load_checkpoint(path=str(path), module=run.model, torch_load_kwargs={"mmap": True})
    run.engine.save_checkpoint(path=path, module=run.model)
    with pytest.warns(UserWarning, match="optimizer_state_dict has 0 items"):
        run.load(path)


def test_what_is_no_file_is_named_with_the_remedy_and_nothing_changes(tmp_path):
    run = private()
    before, none = contents(run), tmp_path / "none" / "none.pt"
    save = functools.partial(run.engine.save_checkpoint, module=run.model)
    load = functools.partial(run.engine.load_checkpoint, module=run.model)
    for path, said in (("", "''"), ("\0", "'.x00'"), (None, "None"), (tmp_path, "")):
        for work in (save, load):
            with pytest.raises(ValueError, match=rf"path must be .*got {said}"):
                work(path=path)
    with pytest.raises(FileNotFoundError, match=r"engine\.save_checkpoint has written.*none\.pt"):
        run.load(none)
    assert contents(run) == before
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("legacy", [False, True])
def test_half_a_file_is_refused_wherever_it_ends(legacy, tmp_path):
    run, other, path = private().train(), private(), tmp_path / "run.pt"
    options = {"_use_new_zipfile_serialization": not legacy}
    run.engine.save_checkpoint(path=path, module=run.model, torch_save_kwargs=options)
    whole, before = path.read_bytes(), contents(other)
    for end in (0, 1, 2, 10, 100, len(whole) // 10, len(whole) // 2, len(whole) - 1):
        path.write_bytes(whole[:end])
        with pytest.raises(ValueError, match=r"path must be a checkpoint.*run\.pt.*an earlier one"):
            other.load(path)
        assert contents(other) == before


# ---- loading runs no code -------------------------------------------------------------------

TOLD = [
    {},
    {"weights_only": True},
    {"weights_only": False},
    {"weights_only": 0},
    {"pickle_module": pickle},
    {"mmap": True},
    {"encoding": "latin1"},
]


def test_no_checkpoint_runs_code_whatever_torch_is_told(tmp_path, monkeypatch):
    monkeypatch.setenv("TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD", "1")
    run, place, path = private(), tmp_path / "touched", tmp_path / "run.pt"
    before, hidden = contents(run), saved(run)
    hidden["optimizer_state_dict"]["param_groups"][0]["lr"] = Touching(place)
    files = [pickle.dumps(Touching(place))]
    for content, zipped in itertools.product((Touching(place), hidden), (True, False)):
        torch.save(content, file := io.BytesIO(), _use_new_zipfile_serialization=zipped)
        files.append(file.getvalue())
    for content, told in itertools.product(files, TOLD):
        path.write_bytes(content)
        for file in (path, str(path), io.BytesIO(content)):
            with pytest.raises(ValueError, match="allow_pickle=True"):
                run.load(file, torch_load_kwargs=told)
    assert not place.exists()
    assert contents(run) == before


def test_a_book_of_rounds_runs_no_code(tmp_path):
    place, book = tmp_path / "touched", tmp_path / "book.pt"
    evil = {"settings": "", "round": 1, "begun": False, "result": Touching(place), "accountant": {}}
    torch.save(evil, book)
    with pytest.raises(ValueError, match="is damaged, or not a book of rounds"):
        Ledger(GAUSSIAN, Shuffler(GAUSSIAN), delta=DELTA, path=book)
    assert not place.exists()


def says(run, name):
    """Whether report and statement have an assumption's sentence, and the dictionary its name."""
    report = run.engine.privacy_report(DELTA)
    texts = " ".join(str(report).split()), report.statement()
    return name in report.to_dict()["unchecked"] and all(UNCHECKED[name] in text for text in texts)


@both
def test_a_file_that_could_run_code_is_loaded_on_demand_and_named_for_ever(name, tmp_path):
    run, other, later = (private(name) for _ in range(3))
    mine = {"mine": Touching(tmp_path / "touched")}
    with pytest.warns(
        UserWarning, match=r"checkpoint holds helpers\..*only with allow_pickle=True"
    ):
        file = run.train().saved(checkpoint_dict=mine)
    told = {"torch_load_kwargs": {"weights_only": True}}
    for wrong in ({"allow_pickle": 1}, {"allow_pickle": True, **told}):
        with pytest.raises(ValueError, match="allow_pickle"):
            other.load(file, **wrong)
    other.load(file, allow_pickle=True)
    assert (tmp_path / "touched").exists()
    later.load(other.saved())
    for loaded in (other, later):
        assert says(loaded, "pickled_file")
        assert loaded.engine.get_epsilon(DELTA) == run.engine.get_epsilon(DELTA)
    assert run.engine.privacy_report(DELTA).to_dict()["unchecked"] == []


@both
def test_a_file_that_says_nothing_of_ours_is_named_in_report_and_statement(name):
    stock = Run(engine=opacus.PrivacyEngine(accountant=name)).train()
    stripped = saved(private(name).train())
    del stripped[ACCOUNT]
    for content, options in ((stripped, {"local_noise": name != "gdp"}), (stock.saved(), {})):
        run = Run(name, **options).load(content)
        assert says(run, "stock_checkpoint")
