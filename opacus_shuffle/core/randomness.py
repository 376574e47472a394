"""Secret randomness for all that hides people: AES-256 in counter mode.

PyTorch's generator on a CPU is a Mersenne Twister, which gives its state away: from 25,600 numbers
of noise that are seen alone (coordinates in which every gradient is zero) its state follows by
linear algebra, and with it all other noise and who took part. So noise, participation,
permutations, shuffling and bits are drawn from :class:`SecretGenerator`, whose output tells
nothing of the rest of it as long as AES holds.

A process that forks copies its memory, and parent and child would draw the same noise, which is
then no secret of either. So every secret stream is keyed anew in the child, and so is every copy
and every unpickled one. What a user has seeded stays repeatable, and says that it is no secret.

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
"""After so many bytes a key is replaced: far more blocks of one would differ from random ones."""
_ZEROS = memoryview(bytes(2**18))
"""What is encrypted: the cipher adds its stream to it."""
_NUMBERS = 2**16
"""Normal numbers that are made at a time, by NumPy, in what a processor's cache holds.

PyTorch would start threads for so many, for which a forked process waits for ever.
"""
_SHARED = {np.float32: _NUMBERS, np.float64: 2**12}
"""Normal numbers of a block that small tensors share.

Precise ones cost the most, and a client's report, whose stream ends with it, throws the rest away.
"""
_RADIANS = 2 * math.pi * 2.0**-32
_DRAWS, _TURNS = 4, 2**12
_LOG_WORDS = 32 * math.log(2)
_RARE = -20 * math.log(2)
"""Uniform numbers below 2⁻²⁰, whose logarithm is below this, are drawn again by 64 bits."""
_ANGLES = np.arange(_TURNS) * (2 * math.pi / _TURNS)
_COARSE = np.cos(_ANGLES), np.sin(_ANGLES)
_SCALE = (2 / _DRAWS) ** 0.5  # of half the sum, and of radii that lack their root of two
_FINE = _SCALE * np.cos(_ANGLES / _TURNS), _SCALE * np.sin(_ANGLES / _TURNS)


_LIVE: weakref.WeakSet[Any] = weakref.WeakSet()
"""What must not be the same in two processes: ``renew()`` draws a new secret for each."""


def _renew_all() -> None:
    """Reseeds every secret generator after a fork."""
    for secret in list(_LIVE):
        # A forked process cannot use the CUDA that its parent has used: a generator there cannot
        # even be seeded. Its own stream has a fresh key by then, and nothing can be drawn there.
        with contextlib.suppress(Exception):
            secret.renew()


def renew_after_fork(secret: Any) -> None:
    """Calls the secret's ``renew`` in every forked process, as long as the secret lives."""
    _LIVE.add(secret)


if hasattr(os, "register_at_fork"):  # not on Windows, which does not fork
    os.register_at_fork(after_in_child=_renew_all)


class SecretGenerator(torch.Generator if TYPE_CHECKING else object):  # type: ignore[misc]
    """A stream of AES-256 in counter mode, accepted wherever this package takes a generator.

    Forked processes, copies and pickles get a fresh key from the operating system; a key is
    replaced by its hash every 2³² blocks and at every :meth:`next_key`, so that a key tells nothing
    that was drawn by the keys before it. It is no ``torch.Generator``: PyTorch's functions raise a
    TypeError for it, instead of drawing from a Mersenne Twister. Draw by the methods here.

    ``of_pytorch`` is a ``torch.Generator`` with a seed from the stream. On a CPU, numbers drawn by
    it (seeds of workers, say) hide nobody. On a GPU, the seed is the 64-bit key of PyTorch's Philox
    generator, which draws the noise there and is no cipher. If a fork's parent has used CUDA, that
    seed is not renewed in the child, where CUDA refuses to draw anything. The stream of AES is
    renewed there, too.

    Args:
        device: Where it lives.
        key: 32 bytes; by default from the operating system.
        secret: Whether the key is nobody's choice; by default only without one.
        secure: Noise is the sum of four draws in double precision, on a grid (``secure_mode``).

    Attributes:
        device: Where it lives.
        of_pytorch: As above.
        key: The key of the numbers that come next, a secret as they are.
        secret: Whether nobody can draw the same numbers again. ``manual_seed`` and ``set_state``
            make the stream repeatable, and this False.
        secure: As above.
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
        self._lock = threading.RLock()  # no two threads get the same numbers
        self._start(os.urandom(KEY_BYTES) if key is None else key)
        renew_after_fork(self)

    @functools.cached_property
    def _buffer(self) -> bytearray:
        """Memory that random words are drawn into."""
        return bytearray(4 * _NUMBERS + _BLOCK_BYTES)

    @functools.cached_property
    def _room(self) -> npt.NDArray[np.float64]:
        """Memory to work on numbers in: asking for it each time costs more than the work."""
        return np.empty((4, _NUMBERS // 2))

    def _start(self, key: bytes) -> None:
        """Begins the stream of a key."""
        # Imported when the first stream begins: whoever only imports the engine waits less.
        from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes

        self.key = key
        self._stream: CipherContext = Cipher(
            algorithms.AES(key), modes.CTR(bytes(_BLOCK_BYTES))
        ).encryptor()
        self._left = BYTES_PER_KEY
        self._ready: dict[type[np.floating], npt.NDArray] = {}  # normal numbers that nobody has had
        seed = bytearray(8 + _BLOCK_BYTES)
        self._draw_into(seed, 8)
        self.of_pytorch.manual_seed(int.from_bytes(seed[:8], "little"))

    def renew(self) -> None:
        """Takes a key from the operating system, unless a user has seeded the stream."""
        self._lock = threading.RLock()  # another thread of the parent's may have held the old one
        if self.secret:
            self._start(os.urandom(KEY_BYTES))

    def next_key(self) -> None:
        """Replaces the key by its hash: what was drawn so far cannot be drawn again from here."""
        ready = self._ready  # nobody has had these
        self._start(hashlib.sha256(b"next" + self.key).digest())
        self._ready = ready

    def manual_seed(self, seed: int) -> SecretGenerator:
        """Makes the stream repeatable, and no secret any more; as in PyTorch otherwise."""
        return self._choose(b"seed %d" % int(seed))

    def get_state(self) -> torch.Tensor:
        """Returns the state of ``of_pytorch``, which reveals nothing of the stream."""
        return self.of_pytorch.get_state()

    def set_state(self, new_state: torch.Tensor) -> SecretGenerator:  # type: ignore[override]
        """Makes the stream a function of this state, and no secret any more."""
        return self._choose(b"state" + new_state.cpu().numpy().tobytes())

    def _choose(self, what: bytes) -> SecretGenerator:
        self.secret = False
        self._start(hashlib.sha256(what).digest())
        return self

    def _draw_into(self, buffer: bytearray, count: int) -> None:
        """Writes the next bytes of the stream into a buffer that is a block longer at least."""
        with self._lock:
            if count > self._left:
                self.next_key()
            self._left -= count
            room = memoryview(buffer)
            for start in range(0, count, len(_ZEROS)):
                self._stream.update_into(_ZEROS[: count - start], room[start:])

    def words(self, count: int, room: bytearray | None = None) -> npt.NDArray[np.uint64]:
        """Draws so many times 64 random bits.

        Args:
            count: How many words.
            room: What :func:`room_for` gave, for as many words at least, to be drawn into: they are
                gone when it is drawn into again. Fresh memory costs more than the words.
        """
        drawn = room_for(count) if room is None else room
        self._draw_into(drawn, 8 * count)
        return np.frombuffer(drawn, np.uint64, count)

    def uniforms(self, count: int) -> torch.Tensor:
        """Draws multiples of 2⁻⁵³ in [0, 1), all equally likely: float64, shape (count,)."""
        return torch.from_numpy((self.words(count) >> np.uint64(11)).astype(np.float64) * 2.0**-53)

    def signed_uniforms(self, count: int) -> torch.Tensor:
        """Draws from (−1, 1) by 107 bits, so that numbers near 0 have all of their digits.

        Such are the chances of what lies far out. No number is 0: float64, shape (count,).
        """
        first, second = self.words(2 * count).reshape(2, count)
        lower = ((second >> np.uint64(11)) + 0.5) * 2.0**-106
        size = (first >> np.uint64(11)) * 2.0**-53 + lower
        return torch.from_numpy(np.where(second & np.uint64(1), -size, size))

    def normals(self, count: int) -> torch.Tensor:
        """Draws standard normal numbers by Box and Muller's transform: float32, shape (count,).

        A word w of 32 bits stands for the uniform number abs(w + ½)·2⁻³¹, the middle of a cell.
        Single precision holds all of its bits if it is small. If it is below 2⁻²⁰, so that the
        radius is above 5.26, it is drawn again with 64 bits, and with 64 more if these are all 0.
        Thus the normal numbers have no largest value. Above 2⁻²⁰, the width of a cell is at most
        1/2048 of its uniform number.
        """
        return self._handed_out(count, np.float32, self._fill)

    def precise_normals(self, count: int) -> torch.Tensor:
        """Draws standard normal numbers, each half a sum of four draws: float64, shape (count,).

        One draw alone can only be one of 2⁶⁴ numbers, through which an adversary could go (Holohan
        and Braghin, "Secure random sampling in differential privacy", section 5.1). Directions come
        from tables: each of the four points of a pair has one of 4096, and their sum is turned by
        one of 4096 finer steps between two of these. In all there are 2²⁴, and what is left of the
        steps is the 2²⁴th harmonic, a Bessel function of that order of a number below 10⁴: nothing.
        """
        return self._handed_out(count, np.float64, self._fill_precisely)

    def _handed_out(
        self, count: int, kind: type[np.floating], fill: Callable[[npt.NDArray], None]
    ) -> torch.Tensor:
        """Takes numbers from those that are ready, each once; small tensors share a block."""
        with self._lock:
            ready = self._ready.get(kind, np.empty(0))
            if count > len(ready):
                ready = np.empty(max(count, _SHARED[kind]), kind)
                for start in range(0, len(ready), _NUMBERS):
                    fill(ready[start : start + _NUMBERS])
            self._ready[kind] = ready[count:]
            # A copy where some stay: what is saved with these must not hold those that come next.
            return torch.from_numpy(ready[:count].copy() if count < len(ready) else ready)

    def _fill(self, block: npt.NDArray[np.float32]) -> None:
        """Fills at most ``_NUMBERS`` entries with normal numbers of one draw each."""
        half = -(-len(block) // 2)
        rest = len(block) - half
        bits, (radius, angle) = self._bits(2 * half), self._room.view(np.float32)[:2, :half]
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
        radius, turned, x, y = self._room[:, :half]
        for draw in range(_DRAWS):
            bits = self._bits(2 * half)
            np.log(np.add(bits[:half].view(np.uint32), 0.5, out=radius), out=radius)
            np.sqrt(
                np.subtract(_LOG_WORDS, self._with_tail(radius, _RARE + _LOG_WORDS), out=radius),
                out=radius,
            )
            place = np.bitwise_and(bits[half:], _TURNS - 1, out=bits[half:])
            for sums, table in ((x, _COARSE[0]), (y, _COARSE[1])):
                np.take(table, place, out=turned, mode="clip")
                if draw:
                    sums += np.multiply(turned, radius, out=turned)
                else:
                    np.multiply(turned, radius, out=sums)
        place = np.bitwise_and(self._bits(half), _TURNS - 1)
        cosine, sine = (np.take(table, place, mode="clip") for table in _FINE)
        first, second = block[:half], block[half:]
        np.multiply(x, cosine, out=first)
        first -= np.multiply(y, sine, out=turned)
        np.multiply(x[:rest], sine[:rest], out=second)
        second += np.multiply(y[:rest], cosine[:rest], out=turned[:rest])

    def _with_tail(self, logs: npt.NDArray[Any], end: float) -> npt.NDArray[Any]:
        """Draws logarithms of uniform numbers again if they are below ``end``, from (0, e^end).

        A whole number of equally likely cells lies below ``end``. A new draw has 2⁶⁴ cells, of
        which only the lowest one is drawn again, and so on.
        """
        while logs.min() < end:
            (rare,) = np.nonzero(logs < end)
            logs[rare] = end - 2 * _LOG_WORDS + np.log(self.words(len(rare)) + 0.5)
            end -= 2 * _LOG_WORDS
        return logs

    def _bits(self, count: int) -> npt.NDArray[np.int32]:
        """Draws random words of 32 bits, in memory that is kept for them."""
        self._draw_into(self._buffer, 4 * count)
        return np.frombuffer(self._buffer, np.int32, count)

    def __reduce__(self) -> tuple[Any, ...]:
        """Has copies and pickles become generators with a fresh key."""
        return functools.partial(SecretGenerator, secure=self.secure), (str(self.device),)


def room_for(words: int) -> bytearray:
    """Returns memory that so many words of 64 bits can be drawn into, one time after another."""
    return bytearray(8 * words + _BLOCK_BYTES)


def seeded_generator(device: torch.device | str, seed: int, use: str) -> SecretGenerator:
    """Makes a repeatable generator of its own for each use of one seed: no secret of anyone's."""
    key = hashlib.sha256(f"{use} of seed {seed}".encode()).digest()
    return SecretGenerator(device, key=key, secret=False)


def check_generator(name: str, generator: Any) -> None:
    """Refuses what no stream can be made of; None is fine.

    Raises:
        ValueError: If it is no generator, or one on another device than the CPU.
    """
    if generator is not None:
        instance_of(name, generator, (torch.Generator, SecretGenerator))
        if generator.device.type != "cpu":
            raise ValueError(f"{name} must live on the CPU, got one on {generator.device}")


def stream_of(generator: torch.Generator | None) -> SecretGenerator:
    """Returns the stream to draw from for a caller's generator: one rule for all of the package.

    Args:
        generator: On the CPU. None is a fresh secret; a :class:`SecretGenerator` is itself; any
            other one gives 256 bits of its own at every call, which key a stream that is no secret.

    Raises:
        ValueError: If it is no generator, or one on another device than the CPU.
    """
    check_generator("generator", generator)
    if generator is None or isinstance(generator, SecretGenerator):
        return SecretGenerator() if generator is None else generator
    # torch.set_default_device would have the numbers elsewhere than the generator.
    key = torch.randint(
        0, 256, (KEY_BYTES,), generator=generator, dtype=torch.uint8, device=generator.device
    )
    return SecretGenerator(key=key.numpy().tobytes(), secret=False)


def for_pytorch(generator: Any) -> Any:
    """Returns the generator for PyTorch's functions, on a GPU or for draws that hide nobody."""
    return generator.of_pytorch if isinstance(generator, SecretGenerator) else generator


def is_secret(generator: torch.Generator | None) -> bool:
    """Tells whether nobody can draw a generator's numbers again; PyTorch's own is None."""
    return isinstance(generator, SecretGenerator) and generator.secret
