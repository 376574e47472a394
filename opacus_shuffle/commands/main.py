"""``opacus-shuffle``: ε, noise, and private training, from the command line."""

from __future__ import annotations

import argparse
import os
import sys
import warnings
from collections.abc import Sequence

from opacus_shuffle._version import __version__
from opacus_shuffle.commands import audit, epsilon, training
from opacus_shuffle.core.guarantees import PrivacyAssumptionWarning


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command; returns 0 if it worked, 2 with one line on standard error if an argument was wrong."""
    options = vars(parser().parse_args(arguments))
    command = options.pop("command")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", PrivacyAssumptionWarning)  # what is printed says it already
            warnings.filterwarnings("ignore", message="Secure RNG turned off|Full backward hook is firing")
            command(options)
            sys.stdout.flush()
    except ValueError as error:
        print(f"opacus-shuffle: {error}", file=sys.stderr)
        return 2
    except BrokenPipeError:  # the reader has had enough, as "head -1" does: leave nothing for Python to flush at exit
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115
    except KeyboardInterrupt:
        print("opacus-shuffle: stopped", file=sys.stderr)
        return 130
    return 0


def parser() -> argparse.ArgumentParser:
    """Returns the parser of all commands; each adds its own."""
    everything = argparse.ArgumentParser(prog="opacus-shuffle", description="Shuffle-model differential privacy for Opacus.")
    everything.add_argument("--version", action="version", version=f"opacus-shuffle {__version__}")
    commands = everything.add_subparsers(required=True, metavar="{epsilon,noise,report,plot,train,audit}")
    for family in (epsilon, training, audit):
        family.add_to(commands)
    return everything


if __name__ == "__main__":
    sys.exit(main())
