"""``opacus-shuffle``: ε, noise, and private training, from the command line."""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
import warnings
from collections.abc import Sequence
from typing import NoReturn

from opacus_shuffle._version import __version__
from opacus_shuffle.commands import audit, compare, epsilon, plan, training
from opacus_shuffle.core.guarantees import PrivacyAssumptionWarning


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command; returns 0 if it worked, 2 with one line on standard error if an argument was wrong."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", PrivacyAssumptionWarning)  # what is printed says it already
            warnings.filterwarnings(
                "ignore", message="Secure RNG turned off|Full backward hook is firing|Optimal order is the largest"
            )
            return _run(arguments)
    except (ValueError, OverflowError, MemoryError) as error:
        return _complain(str(error) or "too little memory for these numbers: take smaller ones", 2)
    except KeyboardInterrupt:
        return _complain("stopped", 130)


def _run(arguments: Sequence[str] | None) -> int:
    """Runs one command, whose output may have nowhere to go."""
    try:
        try:
            options = vars(parser().parse_args(arguments))
            if "command" not in options:
                return _complain("which command? opacus-shuffle compare is the one to begin with; see opacus-shuffle --help", 2)
            options.pop("command")(options)
        finally:
            if sys.stdout is not None:  # as a process started without it has it
                sys.stdout.flush()
    except BrokenPipeError:  # the reader has had enough, as "head -1" does
        _leave_nothing_to_flush()
    except OSError as error:
        _leave_nothing_to_flush()
        return _complain(f"the output could not be written: {error.strerror or error}", 2)
    return 0


def _leave_nothing_to_flush() -> None:
    """Lets Python's own flush at exit succeed."""
    sys.stdout = open(os.devnull, "w")  # noqa: SIM115


def _complain(message: str, code: int) -> int:
    """Says one line on standard error, if that can be written to."""
    line = " ".join(f"opacus-shuffle: {message}".split())
    with contextlib.suppress(OSError):
        print(line, file=sys.stderr or open(os.devnull, "w"))  # noqa: SIM115
    return code


class _Parser(argparse.ArgumentParser):
    """Says in one line what is wrong with an option, without the usage before it."""

    def error(self, message: str) -> NoReturn:
        """Ends with exit status 2."""
        sys.exit(_complain(f"{message}; see {self.prog} --help", 2))


def parser() -> argparse.ArgumentParser:
    """Returns the parser of all commands; each adds its own."""
    everything = _Parser(prog="opacus-shuffle", description="Shuffle-model differential privacy for Opacus.")
    everything.add_argument("--version", action="version", version=f"opacus-shuffle {__version__}")
    commands = everything.add_subparsers(metavar="{compare,train,plan,epsilon,noise,report,plot,audit}")
    for family in (compare, training, plan, epsilon, audit):
        family.add_to(commands)
    return everything


if __name__ == "__main__":
    sys.exit(main())
