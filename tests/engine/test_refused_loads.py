"""A checkpoint is loaded as a whole or not at all, and written as a whole or not at all."""

from __future__ import annotations

import copy
import io
import os
import signal

import opacus
import pytest
import torch
from helpers.changed_files import signed
from helpers.toy import make_toy, run_epoch, way_of
from torch import nn

from opacus_shuffle import PrivacyEngine
from opacus_shuffle.engine.weights.weight_shuffling import WeightShuffling
from opacus_shuffle.networks.rollback import rolled_back_if_refused


def network(width: int = 40, *, counts: bool = False) -> nn.Module:
    made = nn.Sequential(nn.Linear(5, width), nn.ReLU(), nn.Linear(width, 3))
    if counts:
        made.register_buffer("scale", torch.ones(3))
    return made


class Run:
    """A run with everything that a checkpoint may hold."""

    def __init__(
        self, name: str, *, width: int = 40, groups: int = 1, counts: bool = False, **keywords
    ) -> None:
        self.name, toy = name, make_toy()
        toy["module"] = network(width, counts=counts)
        parameters = list(toy["module"].parameters())
        parts = [parameters] if groups == 1 else [parameters[:2], parameters[2:]]
        toy["optimizer"] = torch.optim.Adam([{"params": part} for part in parts], lr=0.01)
        self.engine = PrivacyEngine(accountant=name)
        ways = {} if name == "rdp" else way_of(name)
        self.model, self.optimizer, self.loader = self.engine.make_private(
            **toy, noise_multiplier=2.0, **{**ways, **keywords}
        )
        self.noise = opacus.schedulers.StepNoise(optimizer=self.optimizer, step_size=1, gamma=0.9)
        self.clip = opacus.schedulers.StepGradClip(optimizer=self.optimizer, step_size=1, gamma=1.0)
        run_epoch(self.model, self.optimizer, self.loader)

    @property
    def parts(self) -> dict:
        return {
            "module": self.model,
            "optimizer": self.optimizer,
            "noise_scheduler": self.noise,
            "grad_clip_scheduler": self.clip,
        }

    def saved(self) -> dict:
        file = io.BytesIO()
        self.engine.save_checkpoint(path=file, **self.parts)
        file.seek(0)
        return torch.load(file, weights_only=False)

    def load(self, checkpoint: object, **keywords) -> None:
        file = io.BytesIO()
        torch.save(checkpoint, file)
        file.seek(0)
        self.engine.load_checkpoint(path=file, **self.parts, **keywords)

    def contents(self) -> dict:
        shuffler = self.engine.shuffler
        network = self.model._module
        return copy.deepcopy(
            {
                "weights": [each.detach() for each in [*network.parameters(), *network.buffers()]],
                "state": [
                    list(each.values()) for each in self.optimizer.original_optimizer.state.values()
                ],
                "groups": [
                    {k: v for k, v in each.items() if k != "params"}
                    for each in self.optimizer.param_groups
                ],
                "schedulers": [
                    {k: v for k, v in each.__dict__.items() if k != "optimizer"}
                    for each in (self.noise, self.clip)
                ],
                "accountant": self.engine.accountant.__dict__,
                "shuffler": None if shuffler is None else shuffler.state_dict(),
            }
        )


def equal(one: object, other: object) -> bool:
    if isinstance(one, torch.Tensor):
        return isinstance(other, torch.Tensor) and torch.equal(one, other)
    if isinstance(one, dict):
        return (
            isinstance(other, dict)
            and one.keys() == other.keys()
            and all(equal(one[key], other[key]) for key in one)
        )
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(equal, one, other))
    return one == other


def without(name: str):
    return lambda saved: {key: value for key, value in saved.items() if key != name}


def with_history(change):
    def spoil(saved: dict) -> dict:
        state = saved["privacy_accountant_state_dict"]
        state["history" if "history" in state else "rounds"] = change(
            state["history" if "history" in state else "rounds"]
        )
        return saved

    return spoil


def with_parameters_of(name: str, place: str, value: object):
    def spoil(saved: dict) -> dict:
        saved[name][place] = value
        return saved

    return spoil


def with_lineage(lineage: dict):
    def spoil(saved: dict) -> dict:
        if saved["opacus_shuffle_account"]["lineage"] is None:
            saved["privacy_accountant_state_dict"]._metadata = lineage
        else:
            saved["opacus_shuffle_account"]["lineage"] = lineage
        return saved

    return spoil


SPOILT = {
    "no weights": without("module_state_dict"),
    "no accounting": without("privacy_accountant_state_dict"),
    "no dictionary": lambda saved: 3,
    "shorter history": with_history(lambda rounds: [(*rounds[0][:-1], 1)]),
    "empty history": with_history(lambda rounds: []),
    "no history": with_history(lambda rounds: None),
    "more noise": with_history(
        lambda rounds: [(5.0, 0.25, 4)] if len(rounds[0]) == 3 else [({"noise_multiplier": 9.0}, 4)]
    ),
    "a lineage that is none": with_lineage({"rounds": [("a", 4, 4)], "digest": ""}),
    "a weight of another shape": with_parameters_of(
        "module_state_dict", "_module.2.bias", torch.zeros(7)
    ),
    "a weight too many": with_parameters_of("module_state_dict", "_module.9.bias", torch.zeros(7)),
    "no optimizer's groups": with_parameters_of("optimizer_state_dict", "param_groups", []),
    "no optimizer's state": with_parameters_of("optimizer_state_dict", "state", 3),
    "no scheduler": lambda saved: {**saved, "grad_clip_scheduler_state_dict": [3]},
}


@pytest.mark.parametrize("name", ["rdp", "shuffled_checkin"])
@pytest.mark.parametrize("damage", SPOILT)
def test_a_spoilt_checkpoint_changes_nothing(name, damage):
    saved, other = SPOILT[damage](Run(name).saved()), Run(name)
    before = other.contents()
    with pytest.raises(Exception):  # noqa: B017, PT011 - PyTorch's own words for half of these
        other.load(signed(saved), allow_rewind=True)
    assert equal(before, other.contents())
    run_epoch(other.model, other.optimizer, other.loader)


@pytest.mark.parametrize("change", [{"width": 30}, {"groups": 2}, {"counts": True}])
@pytest.mark.parametrize("name", ["rdp", "shuffled_checkin"])
def test_a_checkpoint_of_another_network_or_optimizer_changes_nothing(name, change):
    other = Run(name)
    before = other.contents()
    with pytest.raises((ValueError, RuntimeError)):
        other.load(Run(name, **change).saved(), allow_rewind=True)
    assert equal(before, other.contents())


@pytest.mark.parametrize(
    ("ours", "theirs"), [("rdp", "shuffled_checkin"), ("shuffled_checkin", "rdp"), ("prv", "rdp")]
)
@pytest.mark.filterwarnings("ignore:the checkpoint holds")
def test_a_checkpoint_of_another_accountant_changes_nothing(ours, theirs):
    keywords = {"local_noise": False} if ours == "prv" else {}
    other = Run(ours, **keywords)
    before = other.contents()
    for allow_rewind in (False, True):
        with pytest.raises(ValueError, match=r"mechanism|state_dict|history"):
            other.load(Run(theirs).saved(), allow_rewind=allow_rewind)
        assert equal(before, other.contents())


@pytest.mark.parametrize("generator", [None, torch.Generator()], ids=["secret", "own"])
def test_a_refused_load_keeps_what_is_shuffled_and_what_it_is_drawn_from(generator):
    options = {"shuffle_weights": WeightShuffling(generator=generator)}
    saved, other = Run("shuffled_checkin", **options).saved(), Run("shuffled_checkin", **options)
    saved["module_state_dict"]["_module.2.bias"] = torch.zeros(7)
    before, secret = other.contents(), repr(other.engine.shuffler.state_dict())
    with pytest.raises(RuntimeError, match="size mismatch"):
        other.load(signed(saved), allow_rewind=True)
    assert equal(before, other.contents())
    assert repr(other.engine.shuffler.state_dict()) == secret


def test_what_a_module_keeps_beside_its_tensors_is_put_back_too():
    class Counting(nn.Linear):
        count = 1

        def get_extra_state(self):
            return self.count

        def set_extra_state(self, state):
            self.count = state

    class Other:
        value = 1

    layer, thing = Counting(2, 2), Other()
    weight, bias = layer.weight, layer.bias.detach().clone()

    def spoil() -> None:
        layer.count = thing.value = 5
        layer.weight = nn.Parameter(torch.zeros(2, 2))
        with torch.no_grad():
            layer.bias.zero_()
        raise KeyError

    with pytest.raises(KeyError), rolled_back_if_refused(layer, None, thing):
        spoil()
    assert (layer.count, thing.value) == (1, 1)
    assert layer.weight is weight
    assert torch.equal(layer.bias, bias)


class Fatal:
    def __reduce__(self):
        os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system does not fork")
def test_a_process_killed_while_saving_leaves_the_earlier_checkpoint(tmp_path):
    def private():
        engine = PrivacyEngine(accountant="shuffled_checkin")
        model, optimizer, loader = engine.make_private(
            **make_toy(), noise_multiplier=2.0, local_noise=True
        )
        return (
            engine,
            loader,
            {"path": tmp_path / "run.pt", "module": model, "optimizer": optimizer},
        )

    engine, loader, parts = private()
    run_epoch(parts["module"], parts["optimizer"], loader)
    engine.save_checkpoint(**parts)
    if not (child := os.fork()):  # pragma: no cover
        try:
            torch.set_num_threads(1)
            run_epoch(parts["module"], parts["optimizer"], loader)
            weights = torch.zeros(1000, 1000)  # which are written before the end
            engine.save_checkpoint(**parts, checkpoint_dict={"a": weights, "b": Fatal()})
        finally:
            os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
    engine, _, parts = private()
    engine.load_checkpoint(**parts)
    assert len(engine.accountant) == 4
    engine.save_checkpoint(**parts)  # what the killed one left is in nobody's way
    engine.load_checkpoint(**parts, torch_load_kwargs={"mmap": True})


def test_a_checkpoint_that_cannot_be_written_leaves_the_earlier_one(tmp_path):
    run, path = Run("rdp"), tmp_path / "run.pt"
    run.engine.save_checkpoint(path=path, **run.parts)
    before = path.read_bytes()
    with pytest.raises(Exception, match=r"pickle|local"):
        run.engine.save_checkpoint(
            path=path, **run.parts, checkpoint_dict={"function": lambda: None}
        )
    assert path.read_bytes() == before
    assert os.listdir(tmp_path) == ["run.pt"]
