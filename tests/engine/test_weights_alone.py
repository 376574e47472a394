"""Weights of another run that are loaded without their account are told of; a run's own come back without a word."""

from __future__ import annotations

import copy
import io
import pickle
import warnings

import opacus
import pytest
import torch
from helpers.toy import make_toy, run_epoch, way_of

from opacus_shuffle import PrivacyAssumptionWarning, PrivacyEngine

MODES = {
    "hooks": {},
    "ghost": {"grad_sample_mode": "ghost"},
    "unwrapped": {"wrap_model": False},
    "shuffled": {"shuffle_weights": True},
}
every_run = pytest.mark.parametrize(
    ("name", "mode"),
    [("shuffled_checkin", mode) for mode in MODES] + [("rdp", "hooks"), ("rdp", "unwrapped")],
)


class Run:
    """A small private run."""

    def __init__(self, name: str, mode: str, *, epochs: int = 1) -> None:
        toy = make_toy()
        self.network, self.engine = toy["module"], PrivacyEngine(accountant=name)
        ways = {} if name == "rdp" else {"local_noise": True}
        made = self.engine.make_private(**toy, noise_multiplier=2.0, **{**ways, **MODES[mode]})
        self.optimizer, self.loader = made[1], made[-1]
        self.model = self.network if mode == "unwrapped" else made[0]
        self.criterion = made[2] if len(made) > 3 else None
        self.train(epochs)

    def train(self, epochs: int) -> None:
        for _ in range(epochs):
            run_epoch(self.model, self.optimizer, self.loader, self.criterion)

    def file(self) -> io.BytesIO:
        self.engine.save_checkpoint(
            path=(file := io.BytesIO()), module=self.model, optimizer=self.optimizer
        )
        file.seek(0)
        return file


def through_a_file(state: dict) -> dict:
    torch.save(state, file := io.BytesIO())
    file.seek(0)
    return torch.load(file, weights_only=True)


WAYS = {
    "as it is": lambda run: run.model.state_dict(),
    "a file": lambda run: through_a_file(run.model.state_dict()),
    "a checkpoint's": lambda run: torch.load(run.file(), weights_only=True)["module_state_dict"],
    "by hand": lambda run: {key: value.clone() for key, value in run.model.state_dict().items()},
}


@every_run
@pytest.mark.parametrize("way", WAYS)
def test_weights_of_another_private_run_are_told_of(name, mode, way):
    theirs, run = Run(name, mode), Run(name, mode, epochs=0)
    state = WAYS[way](theirs)
    with pytest.warns(
        PrivacyAssumptionWarning,
        match=r"without their account.*own privacy loss.*engine\.load_checkpoint",
    ):
        run.model.load_state_dict(state)
    with pytest.warns(PrivacyAssumptionWarning, match="without their account"):
        run.network.load_state_dict(theirs.network.state_dict())


@every_run
def test_a_run_s_own_weights_and_those_of_its_account_come_without_a_word(name, mode):
    run, again = Run(name, mode), Run(name, mode, epochs=0)
    first = copy.deepcopy(run.model.state_dict())
    file = run.file()
    run.train(1)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="weights were loaded")
        run.model.load_state_dict(through_a_file(first))
        again.engine.load_checkpoint(path=file, module=again.model, optimizer=again.optimizer)
        again.model.load_state_dict(first)
        again.network.load_state_dict(again.network.state_dict())
        begun = Run(name, mode, epochs=0)
        begun.model.load_state_dict(begun.model.state_dict())
    later = run.model.state_dict()
    with pytest.warns(PrivacyAssumptionWarning, match="without their account"):
        again.model.load_state_dict(later)  # of rounds that this account does not hold


@pytest.mark.parametrize("name", ["rdp", "shuffled_checkin"])
def test_neither_opacus_s_checkpoints_nor_refused_ones_nor_copies_are_doubted(name, tmp_path):
    stock, path = opacus.PrivacyEngine(accountant=name), tmp_path / "run.pt"
    model, optimizer, loader = stock.make_private(**make_toy(), noise_multiplier=2.0)
    run_epoch(model, optimizer, loader)
    stock.save_checkpoint(path=path, module=model, optimizer=optimizer)
    toy, engine = make_toy(), PrivacyEngine(accountant=name)
    network = toy["module"]
    own, optimizer, _ = engine.make_private(**toy, noise_multiplier=2.0)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="weights were loaded")
        engine.load_checkpoint(path=path, module=own, optimizer=optimizer)
        other = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1)
        with pytest.raises(ValueError, match="group"):
            engine.load_checkpoint(path=path, module=own, optimizer=other)
        for each in (copy.deepcopy(network), pickle.loads(pickle.dumps(network))):
            each.load_state_dict(model._module.state_dict())
    with pytest.warns(PrivacyAssumptionWarning, match="without their account"):
        own.load_state_dict(model.state_dict())


def test_a_network_that_is_made_private_again_is_watched_once_by_the_last_engine():
    toy, engines = make_toy(), [PrivacyEngine(accountant="shuffled_checkin") for _ in range(2)]
    for engine in engines:
        model, *_ = engine.make_private(**toy, noise_multiplier=2.0, **way_of("shuffled_checkin"))
        toy.update(module=model.to_standard_module())
        model.cleanup()
        toy["optimizer"] = torch.optim.SGD(toy["module"].parameters(), lr=0.1)
    foreign = {key: value.clone() for key, value in toy["module"].state_dict().items()}
    with warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter("always")
        toy["module"].load_state_dict(foreign)
    assert len([each for each in heard if "without their account" in str(each.message)]) == 1
