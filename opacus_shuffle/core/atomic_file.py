"""Files that are whole at every moment: a process killed while writing leaves the file as it was.

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
import shutil
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
    folder, name = os.path.split(os.fsdecode(target))
    beside = os.path.join(folder, f".{name[:100]}.{secrets.token_hex(8)}.tmp")
    # A failure to open it is not caught: then there is nothing of ours to remove.
    file = open(beside, "xb")  # noqa: SIM115
    try:
        with file:
            if os.path.exists(target):
                with contextlib.suppress(OSError):  # a file system without permissions
                    shutil.copymode(target, beside)
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
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
