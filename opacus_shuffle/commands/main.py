"""``opacus-shuffle``: ε, noise, and private training, from the command line."""

from __future__ import annotations

import argparse
import contextlib
import importlib
import json
import os
import sys
import warnings
from collections.abc import Sequence
from typing import NoReturn

from opacus_shuffle._version import __version__
from opacus_shuffle.core.guarantees import PrivacyAssumptionWarning

COMMANDS = {
    "compare": ("compare", "train at one proved epsilon, trusting a server, a shuffler or nobody"),
    "train": (
        "train",
        "train a small CNN on real images in the shuffle model; ends with accuracy and a table of "
        "epsilon",
    ),
    "plan": ("plan", "what noise a budget costs, and how many users would do, by who is trusted"),
    "epsilon": ("epsilon", "epsilon of some rounds, and what it covers"),
    "noise": ("epsilon", "the smallest noise within a budget"),
    "report": ("epsilon", "every bound side by side, from no trust to full"),
    "plot": ("epsilon", "a picture of the report: epsilon over rounds"),
    "audit": (
        "audit",
        "attack weight shuffling: at its paper's own setting, and in a small training run",
    ),
}
"""Every command's module, which is imported when the command is given (flags need no PyTorch), and its line of help."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command; returns 0 if it worked, 2 with one line on standard error if an argument was wrong."""
    try:
        try:
            with warnings.catch_warnings():
                warnings.simplefilter(
                    "ignore", PrivacyAssumptionWarning
                )  # what is printed says it already
                warnings.filterwarnings(
                    "ignore",
                    message="Secure RNG turned off|Full backward hook is firing|Optimal order is the largest",
                )
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
    name = next((word for word in arguments if not word.startswith("-")), None)
    namespace, unknown = parser(name).parse_known_args(arguments)
    options = vars(namespace)
    if unknown:
        return _complain(
            f"unrecognized arguments: {' '.join(unknown)}; see opacus-shuffle {name or ''} --help",
            2,
        )
    if "command" not in options:
        return _complain(
            "which command? opacus-shuffle compare is the one to begin with; see opacus-shuffle "
            "--help",
            2,
        )
    as_json = options.pop("json")
    values, text = options.pop("command")(options)
    print(json.dumps(values) if as_json else text)
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


def parser(name: str | None = None) -> argparse.ArgumentParser:
    """Returns the parser of all commands, of which only the one with this name knows its flags."""
    everything = _Parser(
        prog="opacus-shuffle", description="Shuffle-model differential privacy for Opacus."
    )
    everything.add_argument("--version", action="version", version=f"opacus-shuffle {__version__}")
    commands = everything.add_subparsers(metavar=f"{{{','.join(COMMANDS)}}}")
    for command, (module, summary) in COMMANDS.items():
        job = commands.add_parser(command, help=summary)
        if command == name:
            # A command's function takes the options, and returns values for JSON and what to print
            # instead.
            importlib.import_module(f"opacus_shuffle.commands.{module}").add_flags(job, command)
            job.add_argument("--json", action="store_true", help="for machines, unrounded")
    return everything


if __name__ == "__main__":
    sys.exit(main())
