"""``opacus-shuffle``: ε, noise, and private training, from the command line."""

from __future__ import annotations

import argparse
import contextlib
import difflib
import importlib
import os
import re
import sys
import warnings
from collections.abc import Sequence
from typing import NoReturn

from opacus_shuffle._version import __version__
from opacus_shuffle.core.guarantees import PrivacyAssumptionWarning

COMMANDS = {
    "compare": ("compare", "train at one proved epsilon, trusting a server, a shuffler or nobody"),
    "train": ("train", "train a small CNN on real images in the shuffle model; ends with accuracy and a table of epsilon"),
    "plan": ("plan", "what noise a budget costs, and how many users would do, by who is trusted"),
    "epsilon": ("epsilon", "epsilon of some rounds, and what it covers"),
    "noise": ("epsilon", "the smallest noise within a budget"),
    "report": ("epsilon", "every bound side by side, from no trust to full"),
    "plot": ("epsilon", "a picture of the report: epsilon over rounds"),
    "audit": ("audit", "attack weight shuffling: at its paper's own setting, and in a small training run"),
}
"""Every command's module, which is imported when the command is given (flags need no PyTorch), and its line of help."""


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
            given = sys.argv[1:] if arguments is None else list(arguments)
            name = next((each for each in given if not each.startswith("-")), None)
            namespace, unknown = parser(name).parse_known_args(given)
            options = vars(namespace)
            if unknown:
                meant = _closest(unknown, name)
                return _complain(
                    f"unrecognized arguments: {' '.join(unknown)}{meant}; see opacus-shuffle {name or ''} --help", 2
                )
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


def _closest(unknown: Sequence[str], name: str | None) -> str:
    """Returns a question with the command's flag that is most like the first unknown one; nothing where none is."""
    job = argparse.ArgumentParser(add_help=False)
    if name in COMMANDS:
        importlib.import_module(f"opacus_shuffle.commands.{COMMANDS[name][0]}").add_flags(job, name)
    flags = re.findall(r"--[\w-]+", job.format_usage())
    found = difflib.get_close_matches(next((each for each in unknown if each.startswith("--")), ""), flags, n=1)
    return f" (did you mean {found[0]}?)" if found else ""


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
    everything = _Parser(prog="opacus-shuffle", description="Shuffle-model differential privacy for Opacus.")
    everything.add_argument("--version", action="version", version=f"opacus-shuffle {__version__}")
    commands = everything.add_subparsers(metavar=f"{{{','.join(COMMANDS)}}}")
    for command, (module, summary) in COMMANDS.items():
        job = commands.add_parser(command, help=summary)
        if command == name:
            importlib.import_module(f"opacus_shuffle.commands.{module}").add_flags(job, command)
    return everything


if __name__ == "__main__":
    sys.exit(main())
