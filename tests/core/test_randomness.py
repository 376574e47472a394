"""Secrets of a process are its own, not a forked child's or a copy's; seeds repeat."""

import concurrent.futures
import copy
import hashlib
import math
import multiprocessing
import os
import pickle
import sys

import numpy as np
import pytest
import torch
from helpers.toy import make_toy
from scipy import stats

from opacus_shuffle import PrivacyEngine
from opacus_shuffle.core import randomness
from opacus_shuffle.core.gaussian_noise import draw_noise
from opacus_shuffle.core.randomness import (
    SecretGenerator,
    is_secret,
    seeded_generator,
    stream_of,
)

forks = pytest.mark.skipif(not hasattr(os, "fork"), reason="this system does not fork")
on_cuda = pytest.param(
    "cuda",
    marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device"),
)


def in_child(function):
    """What a function of no arguments returns in a forked child."""
    context = multiprocessing.get_context("fork")
    answers = context.SimpleQueue()
    child = context.Process(target=lambda: answers.put(function()))
    child.start()
    child.join()
    assert child.exitcode == 0
    return answers.get()


def drawn(generator):
    """Numbers that hide people, of a stream of ours; else PyTorch's."""
    if isinstance(generator, SecretGenerator):
        return [*generator.words(4).tolist(), *generator.normals(4).tolist()]
    return torch.randint(2**62, (4,), generator=generator).tolist()


@forks
def test_a_forked_child_has_secrets_of_its_own_and_two_children_differ():
    # Also where the key was loaded from a file.
    secrets = [SecretGenerator(), SecretGenerator(key=bytes(32), secret=True)]

    def draws():
        return [drawn(secret) for secret in secrets]

    for kind in zip(in_child(draws), in_child(draws), draws(), strict=True):
        assert len(set(map(tuple, kind))) == 3


@forks
def test_a_fork_leaves_the_generators_of_users_and_of_seeds_alone():
    streams = torch.Generator().manual_seed(3), seeded_generator("cpu", 0, "noise")
    assert in_child(lambda: list(map(drawn, streams))) == list(map(drawn, streams))


@forks
@pytest.mark.parametrize("accountant", ["shuffled_checkin", "subsampled_shuffle", "shuffled_sums"])
def test_noise_participation_and_permutations_of_an_engine_differ_after_a_fork(accountant):
    model, optimizer, loader = PrivacyEngine(accountant=accountant).make_private(
        **make_toy(records=640, batch_size=64), noise_multiplier=2.0, shuffle_weights=True
    )
    shuffler, batches = model.shuffler, iter(loader.batch_sampler)
    next(batches)  # in the middle of an epoch

    def secrets():
        return next(batches), drawn(optimizer.generator), shuffler.state_dict()["key"]

    children = [in_child(secrets) for _ in range(2)]
    for first, second, own in zip(*children, secrets(), strict=True):
        assert first != second != own != first


@forks
def test_after_a_fork_a_run_of_opacus_own_accountants_draws_from_secrets():
    def draws():
        _, optimizer, loader = made
        return drawn(optimizer.generator), drawn(loader.batch_sampler.generator)

    torch.manual_seed(3)
    toy = make_toy()
    toy["module"].cpu()  # for nothing can be drawn on a GPU after a fork
    made = PrivacyEngine(accountant="rdp").make_private(**toy, noise_multiplier=2.0)
    assert made[1].generator is made[2].batch_sampler.generator is None
    numbers = {stream for _ in range(2) for stream in map(tuple, in_child(draws))} | {
        tuple(drawn(None))
    }
    assert len(numbers) == 5
    assert made[1].generator is None


@pytest.mark.parametrize("device", ["cpu", on_cuda])
@pytest.mark.parametrize(
    "duplicate", [copy.copy, copy.deepcopy, lambda secret: pickle.loads(pickle.dumps(secret))]
)
def test_a_copy_of_a_secret_is_another_secret(device, duplicate):
    secret = SecretGenerator(device, secure=True)
    other = duplicate(secret)
    assert (other.device, other.secure, other.secret) == (secret.device, True, True)
    # The seed is the key of the noise on a GPU.
    for stream in (drawn, lambda made: made.of_pytorch.initial_seed(), lambda made: made.key):
        assert stream(other) != stream(secret)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")
@forks
def test_a_generator_on_cuda_draws_nothing_there_after_a_fork_and_has_a_key_of_its_own():
    """CUDA refuses to work in a fork of a process that uses it, even to take another seed."""
    secret = SecretGenerator("cuda")

    def draws():
        try:
            noise = draw_noise(1.0, torch.zeros(4, device="cuda"), secret).tolist()
        except RuntimeError:
            noise = None
        return tuple(drawn(secret)), noise

    streams, noises = zip(draws(), in_child(draws), in_child(draws), strict=True)
    assert len(set(streams)) == 3
    assert noises[0] is not None
    assert noises[1:] == (None, None)


def test_uses_of_one_seed_have_streams_of_their_own():
    uses = [(seed, use) for seed in (0, 1, 10) for use in ("noise", "sampling", "1 noise")]
    assert len({tuple(drawn(seeded_generator("cpu", *stream))) for stream in uses}) == 9


def test_the_stream_is_that_of_aes_256_in_counter_mode():
    """The known answer of FIPS 197's cipher for a key and a block of zeros."""
    block = bytes.fromhex("dc95c078a2408989ad48a21492842087")
    generator = SecretGenerator(key=bytes(32), secret=False)
    assert generator.of_pytorch.initial_seed() == int.from_bytes(block[:8], "little")
    assert generator.words(1).tobytes() == block[8:]


def test_a_key_is_replaced_by_its_hash_before_it_has_served_too_long(monkeypatch):
    monkeypatch.setattr(randomness, "BYTES_PER_KEY", 64)
    key = bytes(range(32))
    generator = SecretGenerator(key=key, secret=False)
    first = generator.words(7).tolist()  # with PyTorch's seed, all of its 64 bytes
    after = SecretGenerator(key=hashlib.sha256(b"next" + key).digest(), secret=False).words(2)
    assert generator.words(2).tolist() == after.tolist()
    monkeypatch.undo()
    assert SecretGenerator(key=key, secret=False).words(7).tolist() == first


@pytest.mark.parametrize("draw", ["normals", "precise_normals"])
def test_numbers_are_independent_and_normal_to_their_fourth_moment(draw):
    generator = SecretGenerator()
    x = torch.cat(
        [getattr(generator, draw)(count) for count in (3, 2**16, 2**16 - 3, 10**5)]
    ).double()
    assert stats.kstest(x.numpy(), "norm").pvalue > 1e-7
    for values in (x, (x**2 - 1) / 2**0.5):
        for lag in (1, 2**15):  # by seven standard errors: neighbours, and both numbers of a pair
            assert abs(float((values[lag:] * values[:-lag]).mean())) < 7 * len(x) ** -0.5


def test_signed_uniform_numbers_are_uniform_and_keep_their_digits_near_zero(monkeypatch):
    """A Kolmogorov-Smirnov test, refused by chance once in 10⁹; and words of which one is 0."""
    drawn_numbers = SecretGenerator().signed_uniforms(100_000).numpy()
    assert stats.kstest(drawn_numbers, stats.uniform(-1, 2).cdf).pvalue > 1e-9
    last = 2**64 - 2
    words = np.array([0, 0, 2**63, last, 0, 3 << 11, 1, last + 1], np.uint64)
    monkeypatch.setattr(SecretGenerator, "words", lambda *_: words)
    expected = [2.0**-107, 3.5 * 2.0**-106, 0.5, 1.0]  # the lowest bit of the second is the sign
    assert SecretGenerator().signed_uniforms(4).tolist() == [*expected[:2], -0.5, -1.0]


class ConstantCipher:
    """Encrypts everything to the same 64 bits."""

    def __init__(self, bits):
        self.bits = bits.to_bytes(8, "little")

    def encryptor(self):
        return self

    def update_into(self, data, buffer):
        buffer[: len(data)] = self.bits * (len(data) // 8)


@pytest.fixture
def constant_words(monkeypatch):
    """Makes ciphers that repeat 64 bits."""
    place = "cryptography.hazmat.primitives.ciphers.Cipher"
    return lambda bits: monkeypatch.setattr(place, lambda *_: ConstantCipher(bits))


@pytest.mark.parametrize("bits", [2**64 - 1, 2**31, 2**63 | 2**31, 1])
def test_extreme_words_give_finite_numbers(bits, constant_words):
    constant_words(bits)
    generator = SecretGenerator()
    for numbers in (generator.normals(8), generator.precise_normals(8)):
        assert bool(torch.isfinite(numbers).all())
        assert float(numbers.abs().max()) < 24  # two radii of √(2 ln 2⁹⁷)


@pytest.mark.parametrize(
    ("draw", "pairs", "rarest", "frequent"),
    [("normals", 2**15, 2047, 2048), ("precise_normals", 2**11, 4095, 4096)],
)
def test_normal_numbers_have_their_whole_tail(
    draw, pairs, rarest, frequent, constant_words, monkeypatch
):
    """If 32 bits say u < 2⁻²⁰, e^(−r²/2) is uniform below that, with 64 bits and more."""
    uniforms = (np.arange(pairs) + 0.5) / pairs
    words, one = (uniforms * 2.0**64).astype(np.uint64), float(draw == "normals")
    radii = np.sqrt(-2 * np.log(2.0**-20 * uniforms))
    for bits in (0, rarest):
        constant_words(bits << 32 | bits)
        monkeypatch.setattr(SecretGenerator, "words", lambda self, count: words[:count])
        # A precise number is half the sum of four radii, which point in nearly one direction here.
        lengths = torch.hypot(*getattr(SecretGenerator(), draw)(2 * pairs).view(2, -1).double())
        np.testing.assert_allclose(lengths, (2 - one) * radii, rtol=1e-6)
    # The lowest cell of 64 bits has a tail of its own.
    answers = iter([words * 0, *[words] * 4])
    monkeypatch.setattr(SecretGenerator, "words", lambda self, count: next(answers))
    constant_words(0)
    longest = torch.hypot(*getattr(SecretGenerator(), draw)(2 * pairs).view(2, -1).double())
    deeper = np.sqrt(radii**2 + 128 * math.log(2))
    np.testing.assert_allclose(longest, (deeper + (1 - one) * 3 * radii) / (2 - one), rtol=1e-6)
    # The next cell is not redrawn, and joins the tail: the distribution has no gap.
    monkeypatch.setattr(SecretGenerator, "words", None)
    constant_words(frequent << 32 | frequent)
    number = torch.hypot(*getattr(SecretGenerator(), draw)(2 * pairs).view(2, -1).double())
    joined = math.sqrt(-2 * math.log((frequent + 0.5) * 2.0 ** (one - 32)))
    np.testing.assert_allclose(number, (2 - one) * joined, rtol=1e-6)


@pytest.mark.parametrize(
    "choose",
    [
        lambda stream: stream.manual_seed(0),
        lambda stream: stream.set_state(stream.get_state() * 0 + 1),
    ],
)
def test_a_seed_or_a_state_makes_the_stream_repeatable_and_no_secret(choose):
    streams = [SecretGenerator(), SecretGenerator()]
    for stream in streams:
        assert is_secret(stream)
        stream.normals(5)  # the rest of this block is discarded
        choose(stream)
        assert not is_secret(stream)
    assert drawn(streams[0]) == drawn(streams[1])


def test_a_stream_of_somebody_s_generator_is_no_secret_and_another_one_each_time():
    own, same = (torch.Generator().manual_seed(0) for _ in range(2))
    first, second = stream_of(own), stream_of(own)
    assert drawn(first) != drawn(second)
    assert drawn(stream_of(same)) == drawn(stream_of(torch.Generator().manual_seed(0)))
    secret = SecretGenerator()
    assert stream_of(secret) is secret
    assert is_secret(secret)
    assert is_secret(stream_of(None))
    assert not any(map(is_secret, (None, own, first, SecretGenerator(key=bytes(32)))))


@pytest.mark.parametrize("device", ["cpu", on_cuda])
def test_pytorch_draws_nothing_by_a_secret_generator(device):
    place = torch.empty(2, device=device)
    for draw in (
        place.exponential_,
        place.normal_,
        lambda generator: torch.rand(2, out=place, generator=generator),
    ):
        with pytest.raises(TypeError, match="SecretGenerator"):
            draw(generator=SecretGenerator(device))


def test_numbers_that_are_saved_hold_none_of_those_that_come_next():
    generator = SecretGenerator()
    first = generator.normals(10)
    assert first.untyped_storage().nbytes() == 40
    first.zero_()
    assert bool((generator.normals(10) != 0).all())


def test_threads_get_numbers_of_their_own():
    generator, interval = SecretGenerator(), sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        with concurrent.futures.ThreadPoolExecutor(4) as threads:
            triples = list(threads.map(lambda _: generator.normals(3), range(20_000)))
    finally:
        sys.setswitchinterval(interval)
    assert len(torch.stack(triples).unique(dim=0)) == 20_000
