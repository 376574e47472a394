"""What leaves by copies and pickles: weights, nothing of single records, and no data kept alive."""

from __future__ import annotations

import copy
import gc
import io
import itertools
import pickle
import weakref

import pytest
import torch
from helpers.private_runs import MODES, Run
from torch import nn

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")
both = pytest.mark.parametrize("name", ["gdp", "shuffled_checkin"])


def dumped(thing):
    torch.save(thing, file := io.BytesIO())
    return file.getvalue()


def begin(tensor):
    return tensor.detach().reshape(-1)[:6].cpu().numpy().tobytes()


def leaked(network, x, data):
    """What of single records is in these bytes."""
    attributes = ("grad_sample", "summed_grad", "_norm_sample", "grad")
    tensors = {"inputs": x[0]} | {
        f"{attribute} of {name}": getattr(parameter, attribute, None)
        for name, parameter in network.named_parameters()
        for attribute in attributes
    }
    return [
        name
        for name, tensor in tensors.items()
        if tensor is not None and tensor.any() and begin(tensor) in data
    ]


@pytest.mark.parametrize(
    ("name", "mode"),
    [("rdp", "hooks"), *(("shuffled_checkin", mode) for mode in MODES if mode != "ew")],
)
@pytest.mark.parametrize("shuffle", [False, "paper"])
def test_what_is_saved_in_the_middle_of_a_batch_holds_no_gradient_of_a_record_and_no_input(
    name, mode, shuffle
):
    run = Run(name, mode, shuffle_weights=shuffle).train()
    run.optimizer.zero_grad()
    x, y = run.batch(3)
    run.backward((x, y))
    run.criterion(run.model(x), y)  # whose inputs wait for a backward pass
    for thing in (run.model, run.network, list(run.network.parameters()), run.plain):
        if mode == "functorch" and isinstance(thing, nn.Module):
            continue  # whose functions nothing can pickle
        for data in (pickle.dumps(thing), dumped(thing)):
            assert leaked(run.network, x, data) == []


@pytest.mark.parametrize("mode", MODES[:4])
def test_a_copy_in_the_middle_of_a_batch_takes_no_record_along_and_disturbs_nothing(mode):
    run = Run(mode=mode)
    for x, y in run.loader:
        run.optimizer.zero_grad()
        loss = run.criterion(run.model(x), y)
        copies = [copy.deepcopy(run.model), copy.deepcopy(run.network)]
        loss.backward()
        copies += [copy.deepcopy(run.model), copy.deepcopy(run.network)]
        run.optimizer.step()
    for part in itertools.chain(*(copied.modules() for copied in copies)):
        assert not getattr(part, "activations", None)
    for parameter in itertools.chain(*(copied.parameters() for copied in copies)):
        tensors = [value for value in vars(parameter).values() if torch.is_tensor(value)]
        assert (parameter.grad, tensors) == (None, [])
    assert run.accounted == 4


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, pickle.dumps, dumped])
def test_a_private_optimizer_refuses_to_be_copied_and_goes_on(copied):
    run = Run("shuffled_checkin").train()
    with pytest.raises(ValueError, match=r"cannot be copied or pickled.*state_dict\(\)"):
        copied(run.optimizer)
    assert copy.deepcopy(run.optimizer.state_dict()).keys() == {"state", "param_groups"}
    assert run.train().accounted == 8


@both
@pytest.mark.parametrize("shared", [False, True])
def test_a_copy_of_an_engine_takes_the_account_along_and_no_data(name, shared):
    run = Run(name, shuffle_weights="paper").train()
    copied = copy.copy(run.engine) if shared else pickle.loads(pickle.dumps(run.engine))
    records = run.toy["data_loader"].dataset.tensors[0]
    assert not any(record.cpu().numpy().tobytes() in dumped(run.engine) for record in records)
    assert copied.get_epsilon(1e-5) == run.engine.get_epsilon(1e-5) > 0
    run.train()
    assert run.engine.dataset is not None is copied.dataset
    assert run.engine.shuffler is not None is copied.shuffler
    assert Run(name, engine=copied).train().accounted == (12 if shared else 8)


@both
@pytest.mark.parametrize(
    "copied", [copy.deepcopy, lambda loader: pickle.loads(pickle.dumps(loader))]
)
def test_a_copy_of_the_loader_gives_no_right_to_step_on_its_batches(name, copied):
    run = Run(name)
    batches = list(copied(run.loader))
    assert len(batches) == len(run.loader)
    with run.refused("no fresh batch"):
        run.step(next(batch for batch in batches if len(batch[0])))


@pytest.mark.parametrize("name", ["shuffled_fw", "shuffled_sums", "rdp"])
def test_a_network_that_is_kept_keeps_neither_data_nor_engine_and_goes_on_accounted(name):
    run = Run(name, shuffle_weights="paper" if name == "shuffled_fw" else False).train()
    model, accountant, made = run.model, run.engine.accountant, run.made
    held = run.engine, run.toy["data_loader"].dataset, run.loader
    gone = [weakref.ref(thing) for thing in held]
    del run, held
    gc.collect()
    assert gone[0]() is None
    for x, y in made[-1]:
        made[1].zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        made[1].step()
    assert sum(steps for *_, steps in accountant.history) == 8
    del made, x, y
    gc.collect()
    assert [reference() for reference in gone] == [None] * 3
    assert copy.deepcopy(model) is not None
