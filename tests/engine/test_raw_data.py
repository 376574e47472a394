"""What leaves by copies and pickles: weights, and nothing of single records."""

from __future__ import annotations

import copy
import gc
import io
import pickle
import weakref

import pytest
import torch
from helpers.toy import make_toy, run_epoch, way_of
from torch import nn

from opacus_shuffle import PrivacyEngine
from opacus_shuffle.engine.pickling import leave_out_records

MODES = ("hooks", "functorch", "ew", "ghost")


def private(name: str = "shuffled_checkin", **keywords):
    engine = PrivacyEngine(accountant=name)
    ways = {} if name in ("rdp", "prv") else way_of(name)
    made = engine.make_private(**make_toy(), noise_multiplier=2.0, **{**ways, **keywords})
    criterion = made[2] if len(made) == 4 else nn.CrossEntropyLoss()
    return made[0], made[1], made[-1], criterion


def dumped(thing: object) -> bytes:
    file = io.BytesIO()
    torch.save(thing, file)
    return file.getvalue()


def leaked(model: nn.Module, x: torch.Tensor, data: bytes) -> list[str]:
    """What of single records is in these bytes."""
    found = ["inputs"] if x[0].numpy().tobytes() in data else []
    for name, parameter in model.named_parameters():
        for kind in ("grad_sample", "summed_grad", "_norm_sample", "grad"):
            tensor = getattr(parameter, kind, None)
            tensors = tensor if isinstance(tensor, list) else [tensor]
            found += [
                f"{kind} of {name}"
                for each in tensors
                if each is not None and each.any() and begin(each) in data
            ]
    return found


def begin(tensor: torch.Tensor) -> bytes:
    return tensor.detach().reshape(-1)[:6].numpy().tobytes()


@pytest.mark.parametrize("name", ["rdp", "shuffled_checkin"])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("shuffle", [False, True])
def test_a_model_saved_before_the_step_holds_no_gradient_of_a_record_and_no_input(
    name, mode, shuffle
):
    model, optimizer, loader, criterion = private(
        name, grad_sample_mode=mode, shuffle_weights=shuffle
    )
    network = model._module
    run_epoch(model, optimizer, loader, criterion)
    optimizer.zero_grad()
    seen = 0
    for x, y in loader:
        if len(x) < 2:
            continue
        criterion(model(x), y).backward()
        assert (
            leaked(
                model, x, b"".join(begin(p.grad) for p in model.parameters() if p.grad is not None)
            )
            or mode == "ew"
        )
        if mode != "ew":  # which runs once a step
            criterion(model(x), y)  # and its inputs wait for a backward pass
        for thing in (model, network, list(network.parameters()), optimizer.original_optimizer):
            if mode == "functorch" and isinstance(thing, nn.Module):
                with pytest.raises(pickle.PicklingError, match=r"functorch.*state_dict\(\)"):
                    pickle.dumps(thing)
                continue
            assert leaked(model, x, pickle.dumps(thing)) == leaked(model, x, dumped(thing)) == []
            seen += 1
        break
    assert seen >= 2


@pytest.mark.parametrize("mode", MODES)
def test_a_copy_in_the_middle_of_a_batch_takes_no_record_along_and_disturbs_nothing(mode):
    model, optimizer, loader, criterion = private(grad_sample_mode=mode)
    for x, y in loader:
        optimizer.zero_grad()
        loss = criterion(model(x), y)
        copies = [copy.deepcopy(model), copy.deepcopy(model._module)]
        if mode != "functorch":
            copies.append(pickle.loads(pickle.dumps(model)))
        loss.backward()
        copies += [copy.deepcopy(model), copy.deepcopy(model._module)]
        for each in copies:
            assert not [part for part in each.modules() if getattr(part, "activations", None)]
            for parameter in each.parameters():
                assert parameter.grad is None
                assert not any(
                    isinstance(value, torch.Tensor) for value in vars(parameter).values()
                )
        optimizer.step()
    assert torch.equal(copies[-1][0].weight, copies[-2]._module[0].weight)
    copies[-2].eval()
    assert copies[-2](x).shape == (len(x), 3)


def test_what_a_layer_keeps_of_its_own_leaves_with_it():
    class Layer(nn.Linear):
        def __init__(self) -> None:
            super().__init__(2, 2)
            self.activations = ["relu", "tanh"]
            self.scratch = 5

        def __getstate__(self):
            return {**self.__dict__, "scratch": None}

    layer = Layer()
    layer.weight.note = "mine"
    leave_out_records(layer)
    copied = copy.deepcopy(layer)
    assert (copied.activations, copied.scratch, layer.scratch) == (["relu", "tanh"], None, 5)
    assert pickle.loads(pickle.dumps(layer.weight)).note == "mine"


def test_without_a_wrapper_the_network_leaves_out_records_too():
    model, optimizer, loader, criterion = private("rdp", wrap_model=False)
    toy = next(iter(loader))
    assert optimizer is not None
    network = model._module if hasattr(model, "_module") else model
    criterion(network(toy[0]), toy[1]).backward()
    for parameter in network.parameters():
        assert parameter.grad_sample is not None
        assert "grad_sample" not in vars(pickle.loads(pickle.dumps(parameter))) or not leaked(
            network, toy[0], pickle.dumps(parameter)
        )


@pytest.mark.parametrize("name", ["rdp", "prv", "shuffled_checkin", "shuffle_gauss"])
@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, pickle.dumps, dumped])
def test_a_private_optimizer_refuses_to_be_copied_and_later_ones_of_its_class_train(name, copied):
    model, optimizer, loader, _ = private(name)
    run_epoch(model, optimizer, loader)
    for thing in (optimizer, (model, optimizer))[: 1 if copied is copy.copy else 2]:
        with pytest.raises(ValueError, match=r"cannot be copied or pickled.*state_dict\(\)"):
            copied(thing)
    run_epoch(model, optimizer, loader)
    run_epoch(*private(name)[:3])
    assert copy.deepcopy(optimizer.state_dict()).keys() == {"state", "param_groups"}
    copy.deepcopy(optimizer.original_optimizer)
    run_epoch(model, optimizer, loader)


@pytest.mark.parametrize("name", ["rdp", "shuffled_checkin"])
@pytest.mark.parametrize(
    "duplicate", [copy.deepcopy, lambda engine: pickle.loads(pickle.dumps(engine)), copy.copy]
)
def test_a_copy_of_an_engine_takes_the_account_along_and_no_data(name, duplicate):
    engine, toy = PrivacyEngine(accountant=name), make_toy()
    made = engine.make_private(**toy, noise_multiplier=2.0, shuffle_weights=True)
    run_epoch(*made)
    copied = duplicate(engine)
    records = toy["data_loader"].dataset.tensors[0]
    assert not any(
        each.numpy().tobytes() in data
        for each in records
        for data in (pickle.dumps(engine), dumped(copied))
    )
    assert copied.get_epsilon(1e-5) == engine.get_epsilon(1e-5) > 0
    run_epoch(*made)
    assert engine.dataset is not None is copied.dataset
    assert engine.shuffler is not None is copied.shuffler
    run_epoch(*copied.make_private(**make_toy(), noise_multiplier=2.0))
    assert sum(steps for *_, steps in copied.accountant.history) == (
        8 if duplicate is not copy.copy else 12
    )


@pytest.mark.parametrize("name", ["rdp", "shuffled_checkin", "shuffle_gauss"])
def test_a_loader_is_copied_but_never_pickled_for_it_holds_the_data(name):
    model, optimizer, loader, _ = private(name)
    for thing in (loader, [model, loader]):
        for pickled in (pickle.dumps, dumped):
            with pytest.raises(ValueError, match="holds the data set"):
                pickled(thing)
    for copied in (copy.copy(loader), copy.deepcopy(loader)):
        assert sum(1 for _ in copied) == len(loader)
    run_epoch(model, optimizer, loader)


@pytest.mark.parametrize("name", ["rdp", "prv", "shuffled_checkin", "shuffle_gauss", "shuffled_fw"])
def test_a_network_that_is_kept_keeps_neither_the_data_nor_the_engine(name):
    engine, toy = PrivacyEngine(accountant=name), make_toy()
    ways = {} if name in ("rdp", "prv") else way_of(name)
    made = engine.make_private(**toy, noise_multiplier=2.0, **ways)
    run_epoch(*made)
    gone = [weakref.ref(each) for each in (engine, toy["data_loader"].dataset, made[-1])]
    model = made[0]
    del engine, toy, made
    gc.collect()
    assert [each() for each in gone] == [None, None, None]
    assert copy.deepcopy(model) is not None


@pytest.mark.parametrize("name", ["rdp", "shuffled_checkin"])
def test_a_run_goes_on_and_is_accounted_when_its_engine_is_forgotten(name):
    engine = PrivacyEngine(accountant=name)
    made = engine.make_private(**make_toy(), noise_multiplier=2.0)
    accountant = engine.accountant
    del engine
    gc.collect()
    run_epoch(*made)
    assert sum(steps for *_, steps in accountant.history) == len(made[-1])
