"""``opacus-shuffle``: ε, noise, and private training on the command line."""

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
    """Runs one command; returns 0, or 2 with one line on standard error if an argument is wrong."""
    try:
        try:
            with warnings.catch_warnings():
                # The printed result states what these warnings say.
                warnings.simplefilter("ignore", PrivacyAssumptionWarning)
                expected = (
                    "This run is not private|Secure RNG turned off|Full backward hook is firing",
                    "Optimal order is the largest|make_private_with_epsilon calibrated the noise",
                )
                warnings.filterwarnings("ignore", "|".join(expected))
                return _run(sys.argv[1:] if arguments is None else list(arguments))
        finally:
            if sys.stdout is not None:  # A process can start without standard output.
                sys.stdout.flush()
    except BrokenPipeError:  # The reader has closed the pipe, as "head -1" does.
        _discard_output()
        return 0
    except OSError as error:
        _discard_output()
        return _print_error(f"the output could not be written: {error.strerror or error}", 2)
    except (ValueError, OverflowError, MemoryError) as error:
        return _print_error(str(error) or "out of memory; reduce the problem size", 2)
    except KeyboardInterrupt:
        return _print_error("stopped", 130)


def _run(arguments: list[str]) -> int:
    """Runs one command and prints its result."""
    name = next((word for word in arguments if not word.startswith("-")), "")
    top_level, command_parsers = parsers(name)
    options = vars(top_level.parse_args(arguments))
    if name not in COMMANDS:
        raise ValueError(f"no command given: start with {NAME} compare, or see {NAME} --help")
    as_json = options.pop("json")
    # Before PyTorch is imported: on small networks, threads cost more time than they save.
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    module, function = COMMANDS[name].function.split(".")
    command = getattr(importlib.import_module(f"opacus_shuffle.commands.{module}"), function)
    try:
        values, text, *writers = command(options)
    except ValueError as error:
        raise ValueError(command_parsers[name].with_flags(str(error), arguments)) from error
    # Standard JSON has no infinity and no NaN; they become null.
    standard = json.loads(json.dumps(values), parse_constant=lambda name: None)
    print(json.dumps(standard) if as_json else text)
    for write in writers:  # Writing may fail, so results that took minutes are printed first.
        write()
    return 0


def _discard_output() -> None:
    """Redirects standard output to the null device, so that the flush at exit cannot fail."""
    sys.stdout = open(os.devnull, "w")  # noqa: SIM115


def _print_error(message: str, code: int) -> int:
    """Writes one line to standard error if possible, and returns the exit code."""
    line = " ".join(f"{NAME}: {message}".split())
    with contextlib.suppress(OSError):
        print(line, file=sys.stderr or open(os.devnull, "w"))  # noqa: SIM115
    return code
