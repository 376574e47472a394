"""Secret randomness for everything that protects privacy: AES-256 in counter mode.

PyTorch's generator on a CPU is a Mersenne Twister, whose output reveals its state: from 25,600
numbers of noise without data (coordinates in which every gradient is zero) the state follows by
linear algebra, and with it all other noise and the participation. So noise, participation,
permutations, shuffling and bits are drawn from :class:`SecretGenerator`. No part of its output
reveals anything about the rest, as long as AES is secure.

A fork copies the memory of a process, and parent and child would draw the same noise. So every
secret stream gets a new key in the child, and so does every copy and every unpickled one. A stream
that a user has seeded stays repeatable, and is marked as not secret.

>>> stream = SecretGenerator()
>>> stream.secret, round(float(stream.normals(100_000).std()), 1)
(True, 1.0)
>>> seeded_generator("cpu", 0, "noise").words(1) == seeded_generator("cpu", 0, "noise").words(1)
array([ True])
>>> seeded_generator("cpu", 0, "noise").secret
False
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import math
import os
import threading
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch

from opacus_shuffle.core.validation import instance_of

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.ciphers import CipherContext

KEY_BYTES = 32
"""AES-256."""
_BLOCK_BYTES = 16
BYTES_PER_KEY = 2**32 * _BLOCK_BYTES
"""A key is replaced after so many bytes: many more blocks would differ from random ones."""
_ZEROS = memoryview(bytes(2**18))
"""The plaintext: the cipher adds its stream to it."""
_NUMBERS = 2**16
"""Normal numbers per block, which fit into a processor's cache.

NumPy computes them: PyTorch would start threads for so many, and a forked process would wait for
these threads forever.
"""
_SHARED = {np.float32: _NUMBERS, np.float64: 2**12}
"""Normal numbers per block that small tensors share.

Precise ones are the most expensive, and a client's report, whose stream ends with it, discards the
rest of its block.
"""
_RADIANS = 2 * math.pi * 2.0**-32
_DRAWS, _TURNS = 4, 2**12
_LOG_WORDS = 32 * math.log(2)
_RARE = -20 * math.log(2)
"""Uniform numbers below 2⁻²⁰ (with a logarithm below this) are drawn again, with 64 bits."""
_ANGLES = np.arange(_TURNS) * (2 * math.pi / _TURNS)
_COARSE = np.cos(_ANGLES), np.sin(_ANGLES)
_SCALE = (2 / _DRAWS) ** 0.5  # of half the sum, and of radii without their factor √2
_FINE = _SCALE * np.cos(_ANGLES / _TURNS), _SCALE * np.sin(_ANGLES / _TURNS)


_FORK_SENSITIVE: weakref.WeakSet[Any] = weakref.WeakSet()
"""Objects that must not be the same in two processes: ``renew()`` draws a new secret for each."""


def _renew_all() -> None:
    """Reseeds every secret generator after a fork."""
    for secret in list(_FORK_SENSITIVE):
        # If the parent has used CUDA, a forked process cannot use it, and cannot even seed a
        # generator there. By then the AES stream has its new key, and nothing can be drawn on CUDA.
        with contextlib.suppress(Exception):
            secret.renew()


def renew_after_fork(secret: Any) -> None:
    """Calls the object's ``renew`` in every forked process, as long as the object exists."""
    _FORK_SENSITIVE.add(secret)


if hasattr(os, "register_at_fork"):  # Windows has no fork
    os.register_at_fork(after_in_child=_renew_all)


class SecretGenerator(torch.Generator if TYPE_CHECKING else object):  # type: ignore[misc]
    """A stream of AES-256 in counter mode, accepted wherever this package takes a generator.

    Forked processes, copies and pickles get a fresh key from the operating system; a key is
    replaced by its hash every 2³² blocks and at every :meth:`next_key`, so a key reveals nothing
    that was drawn with earlier keys. It is not a ``torch.Generator``: PyTorch's functions raise a
    TypeError for it, instead of drawing from a Mersenne Twister. Use its own methods.

    ``of_pytorch`` is a ``torch.Generator`` with a seed from the stream. On a CPU it draws only
    numbers that protect nobody (seeds of workers, for example). On a GPU, the seed is the 64-bit
    key of PyTorch's Philox generator, which draws the noise there and is not a cipher. If the
    parent of a fork has used CUDA, that seed is not renewed in the child, where CUDA refuses to
    draw anything. The AES stream is renewed there as well.

    Args:
        device: The device of ``of_pytorch``.
        key: 32 bytes; by default from the operating system.
        secret: Whether the key is unknown to everyone; by default True only without ``key``.
        secure: Whether noise is the sum of four draws in double precision, on a grid
            (``secure_mode``).

    Attributes:
        device: The device of ``of_pytorch``.
        of_pytorch: PyTorch's generator, which is described above.
        key: The key of the next numbers. Anyone who knows it can compute these numbers.
        secret: Whether nobody else knows the key. ``manual_seed`` and ``set_state``
            make the stream repeatable and set this to False.
        secure: As the argument.
    """

    def __init__(
        self,
        device: torch.device | str = "cpu",
        *,
        key: bytes | None = None,
        secret: bool | None = None,
        secure: bool = False,
    ) -> None:
        self.secret, self.secure = key is None if secret is None else secret, secure
        self.device, self.of_pytorch = torch.device(device), torch.Generator(device)
        self._lock = threading.RLock()  # two threads must not get the same numbers
        self._start(os.urandom(KEY_BYTES) if key is None else key)
        renew_after_fork(self)

    @functools.cached_property
    def _buffer(self) -> bytearray:
        """Memory for random words."""
        return bytearray(4 * _NUMBERS + _BLOCK_BYTES)

    @functools.cached_property
    def _workspace(self) -> npt.NDArray[np.float64]:
        """Memory for intermediate results; to allocate it each time costs more than to compute."""
        return np.empty((4, _NUMBERS // 2))

    def _start(self, key: bytes) -> None:
        """Starts the stream of a key."""
        # Imported here so that importing the engine takes less time.
        from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes

        self.key = key
        # GCM's keystream would also be authenticated, which takes twice the time (OpenSSL 4, VAES).
        self._stream: CipherContext = Cipher(
            algorithms.AES(key), modes.CTR(bytes(_BLOCK_BYTES))
        ).encryptor()
        self._bytes_left = BYTES_PER_KEY
        self._unused: dict[type[np.floating], npt.NDArray] = {}  # normal numbers already computed
        seed = bytearray(8 + _BLOCK_BYTES)
        self._draw_into(seed, 8)
        self.of_pytorch.manual_seed(int.from_bytes(seed[:8], "little"))

    def renew(self) -> None:
        """Takes a new key from the operating system, unless a user has seeded the stream."""
        self._lock = threading.RLock()  # a thread of the parent may hold the old one
        if self.secret:
            self._start(os.urandom(KEY_BYTES))

    def next_key(self) -> None:
        """Replaces the key by its hash, so that earlier numbers cannot be drawn again from it."""
        unused = self._unused  # these were not returned to anyone
        self._start(hashlib.sha256(b"next" + self.key).digest())
        self._unused = unused

    def manual_seed(self, seed: int) -> SecretGenerator:
        """Seeds the stream, which is then repeatable and no longer secret."""
        return self._reseed(b"seed %d" % int(seed))

    def get_state(self) -> torch.Tensor:
        """Returns the state of ``of_pytorch``, which reveals nothing about the stream."""
        return self.of_pytorch.get_state()

    def set_state(self, new_state: torch.Tensor) -> SecretGenerator:  # type: ignore[override]
        """Makes the stream a function of this state; it is then no longer secret."""
        return self._reseed(b"state" + new_state.cpu().numpy().tobytes())

    def _reseed(self, seed: bytes) -> SecretGenerator:
        self.secret = False
        self._start(hashlib.sha256(seed).digest())
        return self

    def _draw_into(self, buffer: bytearray, count: int) -> None:
        """Writes the next bytes of the stream into a buffer that is at least one block longer."""
        with self._lock:
            if count > self._bytes_left:
                self.next_key()
            self._bytes_left -= count
            room = memoryview(buffer)
            for start in range(0, count, len(_ZEROS)):
                self._stream.update_into(_ZEROS[: count - start], room[start:])

    def words(self, count: int, room: bytearray | None = None) -> npt.NDArray[np.uint64]:
        """Draws random words of 64 bits: shape (count,).

        Args:
            count: The number of words.
            room: Memory for at least so many words, from :func:`room_for`. The words are
                overwritten when it is used again. By default new memory, which costs more time than
                the words.
        """
        drawn = room_for(count) if room is None else room
        self._draw_into(drawn, 8 * count)
        return np.frombuffer(drawn, np.uint64, count)

    def uniforms(self, count: int) -> torch.Tensor:
        """Draws multiples of 2⁻⁵³ in [0, 1), all equally likely: float64, shape (count,)."""
        return torch.from_numpy((self.words(count) >> np.uint64(11)).astype(np.float64) * 2.0**-53)

    def signed_uniforms(self, count: int) -> torch.Tensor:
        """Draws from (−1, 1) by 107 bits, so that numbers near 0 have all of their digits.

        Rare events need such precision. No number is 0: float64, shape (count,).
        """
        first, second = self.words(2 * count).reshape(2, count)
        lower = ((second >> np.uint64(11)) + 0.5) * 2.0**-106
        size = (first >> np.uint64(11)) * 2.0**-53 + lower
        return torch.from_numpy(np.where(second & np.uint64(1), -size, size))

    def normals(self, count: int) -> torch.Tensor:
        """Draws standard normal numbers by Box and Muller's transform: float32, shape (count,).

        A word w of 32 bits represents the uniform number abs(w + ½)·2⁻³¹, the middle of a cell.
        Single precision keeps all of its bits if it is small. If it is below 2⁻²⁰ (a radius above
        5.26), it is drawn again with 64 bits, and with 64 more if these are all 0. So the normal
        numbers have no largest value. Above 2⁻²⁰, the width of a cell is at most 1/2048 of its
        uniform number.
        """
        return self._take(count, np.float32, self._fill)

    def precise_normals(self, count: int) -> torch.Tensor:
        """Draws standard normal numbers, each half a sum of four draws: float64, shape (count,).

        A single draw is one of only 2⁶⁴ numbers, which an adversary could enumerate (Holohan and
        Braghin, "Secure random sampling in differential privacy", section 5.1). Directions come
        from tables: each of the four points of a pair has one of 4096 directions, and their sum is
        rotated by one of 4096 finer steps between two of these. This makes 2²⁴ directions. The only
        trace of the steps is the 2²⁴th harmonic, a Bessel function of that order of a number below
        10⁴, which is zero for all purposes.
        """
        return self._take(count, np.float64, self._fill_precisely)

    def _take(
        self, count: int, dtype: type[np.floating], fill: Callable[[npt.NDArray], None]
    ) -> torch.Tensor:
        """Returns numbers from a block, each of them once; small tensors share a block."""
        with self._lock:
            unused = self._unused.get(dtype, np.empty(0))
            if count > len(unused):
                unused = np.empty(max(count, _SHARED[dtype]), dtype)
                for start in range(0, len(unused), _NUMBERS):
                    fill(unused[start : start + _NUMBERS])
            self._unused[dtype] = unused[count:]
            # A copy if some remain: a saved tensor must not contain the numbers that come next.
            return torch.from_numpy(unused[:count].copy() if count < len(unused) else unused)

    def _fill(self, block: npt.NDArray[np.float32]) -> None:
        """Fills at most ``_NUMBERS`` entries with normal numbers of one draw each."""
        half = -(-len(block) // 2)
        rest = len(block) - half
        bits, (radius, angle) = self._bits(2 * half), self._workspace.view(np.float32)[:2, :half]
        np.copyto(radius, bits[:half], casting="unsafe")
        np.abs(np.add(radius, np.float32(0.5), out=radius), out=radius)
        np.log(np.multiply(radius, np.float32(2.0**-31), out=radius), out=radius)
        np.sqrt(np.multiply(self._with_tail(radius, _RARE), np.float32(-2), out=radius), out=radius)
        np.copyto(angle, bits[half:], casting="unsafe")
        angle *= np.float32(_RADIANS)
        np.multiply(np.cos(angle, out=block[:half]), radius, out=block[:half])
        np.multiply(np.sin(angle[:rest], out=block[half:]), radius[:rest], out=block[half:])

    def _fill_precisely(self, block: npt.NDArray[np.float64]) -> None:
        """Fills at most ``_NUMBERS`` entries with halved sums of four draws."""
        half = -(-len(block) // 2)
        rest = len(block) - half
        radius, turned, x, y = self._workspace[:, :half]
        for draw in range(_DRAWS):
            bits = self._bits(2 * half)
            np.log(np.add(bits[:half].view(np.uint32), 0.5, out=radius), out=radius)
            np.sqrt(
                np.subtract(_LOG_WORDS, self._with_tail(radius, _RARE + _LOG_WORDS), out=radius),
                out=radius,
            )
            directions = np.bitwise_and(bits[half:], _TURNS - 1, out=bits[half:])
            for sums, table in ((x, _COARSE[0]), (y, _COARSE[1])):
                np.take(table, directions, out=turned, mode="clip")
                if draw:
                    sums += np.multiply(turned, radius, out=turned)
                else:
                    np.multiply(turned, radius, out=sums)
        steps = np.bitwise_and(self._bits(half), _TURNS - 1)
        cosine, sine = (np.take(table, steps, mode="clip") for table in _FINE)
        first, second = block[:half], block[half:]
        np.multiply(x, cosine, out=first)
        first -= np.multiply(y, sine, out=turned)
        np.multiply(x[:rest], sine[:rest], out=second)
        second += np.multiply(y[:rest], cosine[:rest], out=turned[:rest])

    def _with_tail(self, logs: npt.NDArray[Any], end: float) -> npt.NDArray[Any]:
        """Replaces logarithms of uniform numbers below ``end`` by new draws from (0, e^end).

        The cells below ``end`` are equally likely. A new draw has 2⁶⁴ cells, of which only the
        lowest one is drawn again, and so on.
        """
        while logs.min() < end:
            (rare,) = np.nonzero(logs < end)
            logs[rare] = end - 2 * _LOG_WORDS + np.log(self.words(len(rare)) + 0.5)
            end -= 2 * _LOG_WORDS
        return logs

    def _bits(self, count: int) -> npt.NDArray[np.int32]:
        """Draws random words of 32 bits into reused memory."""
        self._draw_into(self._buffer, 4 * count)
        return np.frombuffer(self._buffer, np.int32, count)

    def __reduce__(self) -> tuple[Any, ...]:
        """Gives copies and unpickled generators a fresh key."""
        return functools.partial(SecretGenerator, secure=self.secure), (str(self.device),)


def room_for(words: int) -> bytearray:
    """Returns reusable memory for so many words of 64 bits (see :meth:`SecretGenerator.words`)."""
    return bytearray(8 * words + _BLOCK_BYTES)


def seeded_generator(device: torch.device | str, seed: int, use: str) -> SecretGenerator:
    """Returns a repeatable generator that is not secret; one seed gives a different one per use."""
    key = hashlib.sha256(f"{use} of seed {seed}".encode()).digest()
    return SecretGenerator(device, key=key, secret=False)


def check_generator(name: str, generator: Any) -> None:
    """Checks an argument that is None or a generator on the CPU.

    Raises:
        ValueError: If it is neither.
    """
    if generator is not None:
        instance_of(name, generator, (torch.Generator, SecretGenerator))
        if generator.device.type != "cpu":
            raise ValueError(f"{name} must live on the CPU, got one on {generator.device}")


def stream_of(generator: torch.Generator | None) -> SecretGenerator:
    """Returns the stream to draw from for a caller's generator; the package has no other rule.

    Args:
        generator: On the CPU. None gives a fresh secret stream, and a :class:`SecretGenerator`
            itself. Any other generator gives a stream that is not secret, with a key of 256 bits
            drawn from it at every call.

    Raises:
        ValueError: If it is not a generator, or on another device than the CPU.
    """
    check_generator("generator", generator)
    if generator is None or isinstance(generator, SecretGenerator):
        return SecretGenerator() if generator is None else generator
    # device= is needed because of torch.set_default_device.
    key = torch.randint(
        0, 256, (KEY_BYTES,), generator=generator, dtype=torch.uint8, device=generator.device
    )
    return SecretGenerator(key=key.numpy().tobytes(), secret=False)


def for_pytorch(generator: Any) -> Any:
    """Returns a generator for PyTorch's functions: on a GPU, or for draws that protect nobody."""
    return generator.of_pytorch if isinstance(generator, SecretGenerator) else generator


def is_secret(generator: torch.Generator | None) -> bool:
    """Tells whether nobody can draw a generator's numbers again; None is PyTorch's global one."""
    return isinstance(generator, SecretGenerator) and generator.secret
