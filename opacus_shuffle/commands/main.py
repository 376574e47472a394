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
    "compare": (
        "compare.run_comparison",
        "train at one proved epsilon, trusting a server, a shuffler or nobody",
    ),
    "train": (
        "train.run_training",
        "train a small CNN on real images in the shuffle model; ends with accuracy and a table of "
        "epsilon",
    ),
    "plan": (
        "plan.print_plan",
        "what noise a budget costs, and how many users would do, by who is trusted",
    ),
    "epsilon": ("epsilon.print_epsilon", "epsilon of some rounds, and what it covers"),
    "noise": ("epsilon.print_noise", "the smallest noise within a budget"),
    "report": ("epsilon.print_report", "every bound side by side, from no trust to full"),
    "plot": ("epsilon.draw_report", "a picture of the report: epsilon over rounds"),
    "audit": (
        "audit.run_audits",
        "attack weight shuffling: at its paper's own setting, and in a small training run",
    ),
}
"""Every command's function, whose module is imported when it runs, and its line of help.

It takes the options, and returns values for JSON, what to print instead, and what to do afterwards.
"""


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
    namespace, unknown = parser(name).parse_known_args(arguments)
    options = vars(namespace)
    if unknown:
        return _complain(
            f"unrecognized arguments: {' '.join(unknown)}; see opacus-shuffle {name} --help", 2
        )
    if name not in COMMANDS:
        return _complain(
            "which command? opacus-shuffle compare is the one to begin with; see opacus-shuffle "
            "--help",
            2,
        )
    as_json = options.pop("json")
    module, function = COMMANDS[name][0].split(".")
    command = getattr(importlib.import_module(f"opacus_shuffle.commands.{module}"), function)
    values, text, *afterwards = command(options)
    print(json.dumps(values) if as_json else text)
    for act in afterwards:  # which may fail; what took minutes is printed then
        act()
    return 0


def _leave_nothing_to_flush() -> None:
    """Closes standard output, so that Python's flush at exit cannot fail."""
    sys.stdout = open(os.devnull, "w")  # noqa: SIM115


def _complain(message: str, code: int) -> int:
    """Writes one line to standard error, if it can be written to."""
    line = " ".join(f"opacus-shuffle: {message}".split())
    with contextlib.suppress(OSError):
        print(line, file=sys.stderr or open(os.devnull, "w"))  # noqa: SIM115
    return code


class _Parser(argparse.ArgumentParser):
    """An argument parser that says in one line what is wrong."""

    def error(self, message: str) -> NoReturn:
        """Ends with exit status 2."""
        sys.exit(_complain(f"{message}; see {self.prog} --help", 2))


def parser(name: str = "") -> argparse.ArgumentParser:
    """Returns the parser of all commands, with the flags of the one with this name."""
    everything = _Parser(
        prog="opacus-shuffle", description="Shuffle-model differential privacy for Opacus."
    )
    everything.add_argument("--version", action="version", version=f"opacus-shuffle {__version__}")
    commands = everything.add_subparsers(metavar=f"{{{','.join(COMMANDS)}}}")
    for command, (_, summary) in COMMANDS.items():
        job = commands.add_parser(command, help=summary)
        if command == name:
            from opacus_shuffle.commands.flags import add_flags  # which imports all mechanisms

            add_flags(job, command)
            job.add_argument("--json", action="store_true", help="for machines, unrounded")
    return everything


if __name__ == "__main__":
    sys.exit(main())
