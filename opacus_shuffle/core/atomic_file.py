"""Files that are always complete, readable by their owner only, and not reached through links.

If a process is killed while it writes, the file keeps its old content.

>>> import tempfile
>>> folder = tempfile.TemporaryDirectory()
>>> with atomic_write(os.path.join(folder.name, "notes")) as file:
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
except ImportError:  # On Windows two processes must not use one file at the same time.
    fcntl = None  # type: ignore[assignment]


def open_private(path: Any, flags: int) -> int:
    """Opens a file for its owner only; for ``open(path, mode, opener=open_private)``.

    A new file has mode 0600. A symbolic link is not followed: in a folder that others can write to,
    it may point to any file of this user.
    """
    return os.open(path, flags | getattr(os, "O_NOFOLLOW", 0), 0o600)


def resolve_path(name: str, path: Any) -> Path:
    """Returns the absolute path of a file, for a process that may change its working directory.

    Args:
        name: The name of the argument.
        path: The file, which need not exist. Its folder may be reached through links.

    Raises:
        ValueError: If the folder does not exist, or the file is a symbolic link: one file under two
            names would have two locks.
    """
    file = Path(instance_of(name, path, (str, os.PathLike)))
    resolved = file.parent.resolve() / file.name
    if resolved.is_symlink() or not resolved.parent.is_dir():
        raise ValueError(
            f"{name}={str(path)!r} must be a file in an existing folder, and no symbolic link: "
            "make the folder, or name the file itself"
        )
    return resolved


@contextlib.contextmanager
def file_lock(path: Path) -> Iterator[None]:
    """Holds the lock ``<path>.lock``; other processes wait for it."""
    # Append mode does not change an existing file of this name.
    with open(f"{path}.lock", "ab", opener=open_private) as lock:
        if fcntl is not None:
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield


@contextlib.contextmanager
def atomic_write(path: Any) -> Iterator[Any]:
    """Opens a file that replaces ``path`` once all of it is on the disk.

    It is written in the same folder as ``.<name>.<random>.tmp``, flushed to the disk and renamed.
    It has mode 0600. If ``path`` is a symbolic link, the link is replaced and not its target. The
    temporary file is removed if an error occurs. If the process is killed, it remains, and may be
    deleted. File objects, devices and pipes are written to directly.

    Args:
        path: A path, or a file object.
    """
    if not isinstance(path, str | bytes | os.PathLike) or (
        os.path.exists(path) and not os.path.isfile(path)
    ):
        yield path
        return
    target = Path(os.fsdecode(path)).absolute()
    temporary = target.with_name(f".{target.name[:100]}.{secrets.token_hex(8)}.tmp")
    # Outside of the try block: if this fails, there is no file to remove.
    file = open(temporary, "xb", opener=open_private)  # noqa: SIM115
    try:
        with file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, target)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        raise
    # The renaming should be on the disk as well. Windows opens no folders, and some file systems
    # cannot sync them.
    with contextlib.suppress(OSError):
        handle = os.open(target.parent, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
