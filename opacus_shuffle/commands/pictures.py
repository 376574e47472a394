"""Where a command's files go: checked before any work is done."""

from __future__ import annotations

import importlib.util
import os

from opacus_shuffle.core import extras


def check_file(flag: str, path: str, endings: tuple[str, ...]) -> None:
    """Refuses a file that has another ending, or nowhere to go."""
    if not path.endswith(endings) or os.path.isdir(path) or not os.path.isdir(os.path.dirname(path) or "."):
        named = ", ".join(endings)
        raise ValueError(f"{flag} must name a file in a folder that is there and end in one of {named}, got {path!r}")


def check_picture(path: str) -> None:
    """Refuses a picture that cannot be drawn, or has nowhere to go."""
    check_file("--output", path, (".png", ".pdf", ".svg"))
    if importlib.util.find_spec("matplotlib") is None:
        raise ValueError(extras.missing("a picture", "matplotlib", "plots"))
