"""Checkpoints of shuffled runs: what they hold, and that a run goes on from them."""

from __future__ import annotations

import io

import pytest
import torch
from helpers.changed_files import signed
from helpers.shuffled_runs import (
    BATCH,
    EXACT,
    RECORDS,
    contents,
    distance,
    in_order,
    prepare,
    records,
    unshuffle,
    weights,
)
from torch.utils.data import DataLoader, TensorDataset

from opacus_shuffle import PrivacyEngine
from opacus_shuffle.core.randomness import KeyChain


def checkpoint(run) -> io.BytesIO:
    file = io.BytesIO()
    run.engine.save_checkpoint(path=file, module=run.model, optimizer=run.optimizer)
    file.seek(0)
    return file


def resume(run, file) -> None:
    file.seek(0)
    run.engine.load_checkpoint(path=file, module=run.model, optimizer=run.optimizer)


@pytest.mark.parametrize("own_generator", [False, True])
def test_a_resumed_run_is_the_one_that_went_on(own_generator):
    options = {"shuffle": True, "own_generator": own_generator, "optimizer": "Adam", **in_order}
    run = prepare(**options).train(1)
    file = checkpoint(run)
    again = prepare(**options)
    resume(again, file)
    assert distance(weights(run.network), weights(again.network)) == 0
    for each in (run, again):
        each.train(1)
    assert distance(contents(run), contents(again)) == 0
    assert (again.shuffler.steps, again.shuffler.shuffles) == (
        run.shuffler.steps,
        run.shuffler.shuffles,
    )
    assert again.engine.accountant.history == run.engine.accountant.history


def test_a_checkpoint_written_in_the_middle_of_a_batch_disturbs_nothing():
    quiet, run = (prepare(shuffle=True) for _ in range(2))
    quiet.train()
    run.train(before=lambda: checkpoint(run))
    assert run.shuffler.shuffles == run.shuffler.steps == 2 * RECORDS // BATCH
    assert distance(contents(quiet), contents(run)) == 0


def test_a_run_that_loads_its_own_checkpoint_goes_on_from_there():
    run = prepare(shuffle=True, optimizer="Adam", **in_order).train(1)
    file = checkpoint(run)
    expected = contents(run.train(1))
    resume(run, file)
    run.train(1)
    assert distance(expected, contents(run)) == 0


def test_without_the_secret_a_resumed_run_goes_other_ways_to_the_same_function():
    options = {"shuffle": True, "own_generator": False, **in_order}
    run = prepare(**options).train(1)
    file = checkpoint(run)
    saved = torch.load(file, weights_only=False)
    del saved["opacus_shuffle"]
    file = io.BytesIO()
    torch.save(signed(saved), file)
    again = prepare(**options)
    resume(again, file)
    run.train(1)
    again.train(1)
    assert distance(weights(run.network), weights(again.network)) > 1e-3
    x = records("mlp")[:5][0]
    assert float((run.network(x) - again.network(x)).detach().abs().max()) <= EXACT


def test_checkpoints_of_plain_and_shuffled_runs_can_be_exchanged():
    plain, run = prepare(**in_order).train(1), prepare(shuffle=True, **in_order).train(1)
    to_shuffle, to_plain = prepare(shuffle=True, **in_order), prepare(**in_order)
    resume(to_shuffle, checkpoint(plain))
    resume(to_plain, checkpoint(run))
    assert "opacus_shuffle" not in torch.load(checkpoint(plain), weights_only=False)
    for each in (plain, to_shuffle, to_plain, run):
        each.train(1)
    unshuffle(to_shuffle)
    assert distance(contents(plain), contents(to_shuffle)) <= EXACT


def test_a_checkpoint_keeps_what_the_caller_puts_into_it():
    run, file = prepare(shuffle=True).train(1), io.BytesIO()
    run.engine.save_checkpoint(path=file, module=run.model, checkpoint_dict={"mine": 5})
    file.seek(0)
    with pytest.warns(UserWarning, match="optimizer_state_dict"):
        found = run.engine.load_checkpoint(path=file, module=run.model, optimizer=run.optimizer)
    assert found["mine"] == 5


def test_a_checkpoint_shows_permutations_to_come_but_none_that_were():
    run = prepare(shuffle=True, own_generator=False)
    first = run.shuffler.state_dict()["key"]
    run.train(1)
    state = torch.load(checkpoint(run), weights_only=False)["opacus_shuffle"]
    assert state["generator"] is None
    # the saved key is the one that as many draws lead to, and leads to the next ones
    chain = KeyChain(first)
    keys = [first] + [(chain.next_generator(), chain.key)[1] for _ in range(run.shuffler.shuffles)]
    assert keys[-1] == state["key"]
    assert len(set(keys)) == len(keys)
    chain, again = KeyChain(state["key"]), KeyChain(state["key"])
    for _ in range(3):
        assert torch.equal(
            torch.randperm(50, generator=chain.next_generator()),
            torch.randperm(50, generator=again.next_generator()),
        )
    before = weights(run.network)
    expected = run.shuffler.spec.sample(KeyChain(state["key"]).next_generator())
    run.shuffler.shuffle_()
    run.shuffler.spec.apply_(run.network, run.shuffler.spec.invert(expected))
    assert distance(before, weights(run.network)) == 0


def test_two_draws_of_a_chain_have_nothing_in_common_and_two_chains_differ():
    chain = KeyChain()
    draws = [torch.randint(2**62, (4,), generator=chain.next_generator()) for _ in range(5)]
    draws.append(torch.randint(2**62, (4,), generator=KeyChain().next_generator()))
    assert len({int(number) for draw in draws for number in draw}) == 24
    assert len(KeyChain().key) == 32


@pytest.mark.parametrize("own_generator", [False, True])
def test_a_secret_of_another_kind_is_refused_and_nothing_loaded(own_generator):
    run = prepare(shuffle=True, own_generator=own_generator).train(1)
    again = prepare(shuffle=True, own_generator=not own_generator)
    before = contents(again)
    with pytest.raises(ValueError, match="generator of your own"):
        resume(again, checkpoint(run))
    assert distance(before, contents(again)) == 0
    assert again.engine.accountant.history == []


@pytest.mark.parametrize("state", [None, {}, {"key": b""}])
def test_what_is_no_state_is_refused(state):
    with pytest.raises(ValueError, match="WeightShuffler"):
        prepare(shuffle=True).shuffler.load_state_dict(state)


@pytest.mark.parametrize(
    "damage",
    [
        {"key": b"x"},
        {"key": "x" * 32},
        {"steps": -1},
        {"shuffles": None},
        {"generator": torch.zeros(3)},
        {"generator": 3},
        None,
    ],
)
def test_a_damaged_secret_is_refused_before_anything_is_loaded(damage):
    own_generator = damage is not None and "generator" in damage
    run, again = (prepare(shuffle=True, own_generator=own_generator) for _ in range(2))
    file = checkpoint(run.train(1))
    saved = torch.load(file, weights_only=False)
    saved["opacus_shuffle"] = None if damage is None else {**saved["opacus_shuffle"], **damage}
    spoilt = io.BytesIO()
    torch.save(saved, spoilt)
    spoilt.seek(0)
    before = contents(again)
    with pytest.raises(ValueError, match="state"):
        resume(again, spoilt)
    assert distance(before, contents(again)) == 0
    assert again.engine.accountant.history == []


def test_a_checkpoint_without_a_module_is_refused_as_opacus_does(tmp_path):
    run = prepare(shuffle=True)
    with pytest.raises(TypeError, match="'module'"):
        run.engine.save_checkpoint(path=tmp_path / "checkpoint.pt")
    assert not any(tmp_path.iterdir())


@pytest.mark.parametrize("share", [0.0, 0.5, None])
def test_a_file_that_is_no_checkpoint_is_refused_in_words(tmp_path, share):
    model = torch.nn.Linear(4, 2)
    engine = PrivacyEngine(accountant="shuffled_checkin")
    data = DataLoader(TensorDataset(torch.zeros(40, 4)), batch_size=4)
    model, *_ = engine.make_private(
        module=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        data_loader=data,
        noise_multiplier=1.0,
        max_grad_norm=1.0,
        local_noise=True,
    )
    path = tmp_path / "run.pt"
    engine.save_checkpoint(path=path, module=model)
    whole = path.read_bytes()
    path.write_bytes(b"no checkpoint" if share is None else whole[: int(share * len(whole))])
    with pytest.raises(ValueError, match="path must be a checkpoint that"):
        engine.load_checkpoint(path=path, module=model)
