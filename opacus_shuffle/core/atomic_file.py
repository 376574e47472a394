"""Files that are complete at every moment, private to their owner, and not reached by links.

A process that is killed while writing leaves the file as it was.

>>> import tempfile
>>> folder = tempfile.TemporaryDirectory()
>>> with replacing(os.path.join(folder.name, "notes")) as file:
...     _ = file.write(b"all of it")
>>> os.listdir(folder.name)
['notes']
>>> folder.cleanup()
"""

from __future__ import annotations

import contextlib
import os
import secrets
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from opacus_shuffle.core.validation import instance_of

try:
    import fcntl
except ImportError:  # Windows: there two processes must not use one file at once
    fcntl = None  # type: ignore[assignment]


def private(path: Any, flags: int) -> int:
    """Opens a file for its owner alone; for ``open(path, mode, opener=private)``.

    A new file has mode 0600. A symbolic link is not followed: in a folder that others can write to,
    it may lead to any file of this user.
    """
    return os.open(path, flags | getattr(os, "O_NOFOLLOW", 0), 0o600)


def own_path(name: str, path: Any) -> Path:
    """Returns the absolute path of a file, for a process that may change its working directory.

    Args:
        name: What the argument is called.
        path: The file, which need not exist. Its folder may be reached through links.

    Raises:
        ValueError: If the folder does not exist, or the file is a symbolic link: two names of one
            file have two locks.
    """
    real = (file := Path(instance_of(name, path, (str, os.PathLike)))).parent.resolve() / file.name
    if real.is_symlink() or not real.parent.is_dir():
        raise ValueError(
            f"{name}={str(path)!r} must be a file in an existing folder, and no symbolic link: "
            "make the folder, or name the file itself"
        )
    return real


@contextlib.contextmanager
def locked(path: Path) -> Iterator[None]:
    """Holds the lock ``<path>.lock``, for which other processes wait."""
    # Opening it for appending keeps the content of an existing file of this name.
    with open(f"{path}.lock", "ab", opener=private) as lock:
        if fcntl is not None:
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield


@contextlib.contextmanager
def replacing(path: Any) -> Iterator[Any]:
    """Opens a file that takes the place of ``path`` when all of it is on the disk.

    It is written in the same folder as ``.<name>.<random>.tmp``, flushed to the disk and renamed.
    It has mode 0600. If ``path`` is a symbolic link, it replaces the link and not its target. A
    failure removes it; only a killed process leaves it behind, and it may then be deleted. File
    objects, devices and pipes are written to directly.

    Args:
        path: A path, or a file object.
    """
    if not isinstance(path, str | bytes | os.PathLike) or (
        os.path.exists(path) and not os.path.isfile(path)
    ):
        yield path
        return
    target = Path(os.fsdecode(path)).absolute()
    beside = target.with_name(f".{target.name[:100]}.{secrets.token_hex(8)}.tmp")
    # A failure to open it is not caught: then there is nothing of ours to remove.
    file = open(beside, "xb", opener=private)  # noqa: SIM115
    try:
        with file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(beside, target)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(beside)
        raise
    # The rename itself is to be on the disk, too, where the system can: Windows opens no folders,
    # and some file systems sync none.
    with contextlib.suppress(OSError):
        handle = os.open(target.parent, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
