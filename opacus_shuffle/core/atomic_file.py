"""Files that are whole at every moment: a process killed while writing leaves what was there before.

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
import stat
from collections.abc import Iterator
from typing import Any


@contextlib.contextmanager
def replacing(path: Any) -> Iterator[Any]:
    """Opens a file that takes the place of ``path`` when all of it is on the disk.

    It is written beside it, as ``.<name>.<random>.tmp``, flushed to the disk and renamed. A failure
    removes it; only a killed process leaves it behind, and it may then be deleted. File objects,
    devices and pipes are written to directly.

    Args:
        path: A path, or a file object.
    """
    target = os.path.realpath(path) if isinstance(path, str | bytes | os.PathLike) else None
    if target is None or (os.path.exists(target) and not os.path.isfile(target)):
        yield path
        return
    target = os.fsdecode(target)
    folder, name = os.path.split(target)
    beside = os.path.join(folder, f".{name[:100]}.{secrets.token_hex(8)}.tmp")
    handle = os.open(
        beside, os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_BINARY", 0), 0o666
    )
    try:
        with os.fdopen(handle, "wb") as file:
            if os.path.exists(target):
                with contextlib.suppress(OSError):  # a file system without permissions
                    os.chmod(beside, stat.S_IMODE(os.stat(target).st_mode))
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(beside, target)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(beside)
        raise
    _sync_folder(folder)


def _sync_folder(folder: str) -> None:
    """Has the rename itself on the disk, where the system can."""
    with contextlib.suppress(OSError):  # Windows opens no folders, and some file systems sync none
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
