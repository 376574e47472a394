"""``opacus-shuffle completion``: a script with which a shell completes what is typed."""

from __future__ import annotations

from typing import Any

from opacus_shuffle.commands.parser import COMMANDS, parsers
from opacus_shuffle.core import extras


def print_completion(options: dict[str, Any]) -> tuple[dict[str, Any], str]:
    """Returns the script for one shell, which knows every command, flag and choice.

    Raises:
        ValueError: If ``shtab``, which writes it, is not installed.
    """
    try:
        import shtab  # type: ignore[import-not-found, import-untyped, unused-ignore]
    except ImportError:
        raise ValueError(extras.missing("completion", "shtab", "completion")) from None
    everything, jobs = parsers(*COMMANDS)
    places = {"output": shtab.FILE, "statement": shtab.FILE, "data_root": shtab.DIRECTORY}
    for job in jobs.values():
        for action in job._actions:
            if action.dest in places:
                action.complete = places[action.dest]  # type: ignore[attr-defined]
    script = shtab.complete(everything, options["shell"])
    return {"script": script}, script
