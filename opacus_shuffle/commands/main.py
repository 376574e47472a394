"""``opacus-shuffle``: ε, noise, and private training, from the command line."""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import sys
import warnings
from collections.abc import Sequence

from opacus_shuffle.commands.parser import COMMANDS, NAME, parsers
from opacus_shuffle.core.guarantees import PrivacyAssumptionWarning


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command; returns 0, or 2 with a line on standard error if an argument was wrong."""
    try:
        try:
            with warnings.catch_warnings():
                # What is printed says it already.
                warnings.simplefilter("ignore", PrivacyAssumptionWarning)
                said = "This run is not private|Secure RNG turned off|Full backward hook is firing"
                warnings.filterwarnings("ignore", f"{said}|Optimal order is the largest")
                return _run(sys.argv[1:] if arguments is None else list(arguments))
        finally:
            if sys.stdout is not None:  # as a process started without it has it
                sys.stdout.flush()
    except BrokenPipeError:  # the reader has had enough, as "head -1" does
        _leave_nothing_to_flush()
        return 0
    except OSError as error:
        _leave_nothing_to_flush()
        return _complain(f"the output could not be written: {error.strerror or error}", 2)
    except (ValueError, OverflowError, MemoryError) as error:
        return _complain(str(error) or "too little memory for these numbers: take smaller ones", 2)
    except KeyboardInterrupt:
        return _complain("stopped", 130)


def _run(arguments: list[str]) -> int:
    """Runs one command and prints what it returns."""
    name = next((word for word in arguments if not word.startswith("-")), "")
    everything, jobs = parsers(name)
    options = vars(everything.parse_args(arguments))
    if name not in COMMANDS:
        raise ValueError(
            f"which command? {NAME} compare is the one to begin with; see {NAME} --help"
        )
    as_json = options.pop("json")
    module, function = COMMANDS[name].function.split(".")
    command = getattr(importlib.import_module(f"opacus_shuffle.commands.{module}"), function)
    try:
        values, text, *afterwards = command(options)
    except ValueError as error:
        raise ValueError(jobs[name].with_flags(str(error), arguments)) from error
    # JSON as its standard has it: null where a number is infinite or none.
    standard = json.loads(json.dumps(values), parse_constant=lambda name: None)
    print(json.dumps(standard) if as_json else text)
    for act in afterwards:  # which may fail; what took minutes is printed then
        act()
    return 0


def _leave_nothing_to_flush() -> None:
    """Closes standard output, so that Python's flush at exit cannot fail."""
    sys.stdout = open(os.devnull, "w")  # noqa: SIM115


def _complain(message: str, code: int) -> int:
    """Writes one line to standard error, if it can be written to."""
    line = " ".join(f"{NAME}: {message}".split())
    with contextlib.suppress(OSError):
        print(line, file=sys.stderr or open(os.devnull, "w"))  # noqa: SIM115
    return code
