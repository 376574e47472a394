"""Secrets of a process are its own: not a forked child's, not a copy's; what a user has seeded stays repeatable."""

from __future__ import annotations

import copy
import multiprocessing
import os
import pickle

import pytest
import torch
from helpers.toy import make_toy

from opacus_shuffle import PrivacyEngine
from opacus_shuffle.core.randomness import KeyChain, secret_generator, seeded_generator

forks = pytest.mark.skipif(not hasattr(os, "fork"), reason="this system does not fork")
on_cuda = pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device"))


def in_child(function):
    """What a function of no arguments returns in a forked child."""
    read, write = os.pipe()
    child = os.fork()
    if not child:  # pragma: no cover
        try:
            os.write(write, pickle.dumps(function()))
        finally:
            os._exit(0)
    os.close(write)
    with os.fdopen(read, "rb") as answer:
        found = pickle.loads(answer.read())
    os.waitpid(child, 0)
    return found


def drawn(generator):
    return torch.randint(2**62, (4,), generator=generator).tolist()


@forks
def test_a_forked_child_has_secrets_of_its_own_and_two_children_differ():
    secret, chain = secret_generator("cpu"), KeyChain()
    draws = [in_child(lambda: (drawn(secret), drawn(chain.next_generator()))) for _ in range(2)]
    draws.append((drawn(secret), drawn(chain.next_generator())))
    for kind in zip(*draws, strict=True):
        assert len({tuple(each) for each in kind}) == 3


@forks
def test_a_key_that_was_loaded_is_renewed_after_a_fork_too():
    chain = KeyChain(bytes(32))
    assert in_child(lambda: drawn(chain.next_generator())) != drawn(chain.next_generator())


@forks
def test_a_fork_leaves_the_generators_of_users_and_of_seeds_alone():
    own, seeded = torch.Generator().manual_seed(3), seeded_generator("cpu", 0, "noise")
    assert in_child(lambda: (drawn(own), drawn(seeded))) == (drawn(own), drawn(seeded))


@forks
def test_the_parent_keeps_its_state_when_it_forks():
    secret = secret_generator("cpu")
    state = secret.get_state()
    in_child(lambda: 0)
    assert torch.equal(secret.get_state(), state)


def _draw_in(queue, generator):
    queue.put(drawn(generator))


@pytest.mark.parametrize("method", [pytest.param("fork", marks=forks), pytest.param("spawn", marks=pytest.mark.slow)])
def test_processes_of_multiprocessing_share_no_secret(method):
    context = multiprocessing.get_context(method)
    secret, queue = secret_generator("cpu"), context.SimpleQueue()
    processes = [context.Process(target=_draw_in, args=(queue, secret)) for _ in range(2)]
    for process in processes:
        process.start()
    draws = [queue.get() for _ in processes] + [drawn(secret)]
    for process in processes:
        process.join()
    assert len(set(map(tuple, draws))) == 3


@forks
@pytest.mark.parametrize("accountant", ["shuffled_checkin", "subsampled_shuffle", "shuffled_sums"])
def test_noise_participation_and_permutations_of_an_engine_differ_after_a_fork(accountant):
    model, optimizer, loader = PrivacyEngine(accountant=accountant).make_private(
        **make_toy(records=640, batch_size=64), noise_multiplier=2.0, shuffle_weights=True
    )
    shuffler = model.shuffler

    def secrets():
        batch = next(iter(loader.batch_sampler))
        return batch, drawn(optimizer.generator), drawn(shuffler._secret.next_generator())

    children = [in_child(secrets) for _ in range(2)]
    for first, second, own in zip(*children, secrets(), strict=True):
        assert first != second != own != first


@forks
@pytest.mark.parametrize("before", [True, False])
def test_after_a_fork_opacus_own_accountants_draw_from_secrets_unless_seeded_anew(before):
    def private():
        return PrivacyEngine(accountant="rdp").make_private(**make_toy(), noise_multiplier=2.0)

    def draws(seed=None):
        if seed is not None:
            torch.manual_seed(seed)
        _, optimizer, loader = made if before else private()
        return drawn(optimizer.generator), drawn(loader.batch_sampler.generator)

    torch.manual_seed(3)
    made = private()
    assert made[1].generator is made[2].batch_sampler.generator is None
    found = {each for _ in range(2) for each in map(tuple, in_child(draws))} | {tuple(drawn(None))}
    assert len(found) == 5
    same = in_child(lambda: draws(5)) == in_child(lambda: draws(5))
    assert same is not before
    assert made[1].generator is None


@pytest.mark.parametrize("device", ["cpu", on_cuda])
@pytest.mark.parametrize("duplicate", [copy.copy, copy.deepcopy, lambda each: pickle.loads(pickle.dumps(each))])
def test_a_copy_of_a_secret_generator_is_another_secret(device, duplicate):
    secret = secret_generator(device)
    other = duplicate(secret)
    assert other.device == secret.device
    assert not torch.equal(torch.randn(4, generator=other, device=device), torch.randn(4, generator=secret, device=device))


@pytest.mark.parametrize("duplicate", [copy.copy, copy.deepcopy, lambda each: pickle.loads(pickle.dumps(each))])
def test_a_copy_of_a_key_chain_has_another_key(duplicate):
    chain = KeyChain()
    assert duplicate(chain).key != chain.key


@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")
@forks
def test_a_generator_on_cuda_has_another_seed_after_a_fork():
    secret = secret_generator("cuda")
    seeds = [in_child(secret.initial_seed) for _ in range(2)] + [secret.initial_seed()]
    assert len(set(seeds)) == 3


@pytest.mark.parametrize("device", ["cpu", on_cuda])
def test_uses_of_one_seed_have_streams_of_their_own(device):
    draws = [
        tuple(torch.randn(4, generator=seeded_generator(device, seed, use), device=device).tolist())
        for seed in (0, 1, 10)
        for use in ("noise", "sampling", "1 noise")
    ]
    assert len(set(draws)) == 9
