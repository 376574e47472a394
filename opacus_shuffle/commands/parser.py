"""All commands of ``opacus-shuffle``, and a parser that suggests corrections of misspelt words.

>>> parsers("epsilon")[1]["epsilon"].parse_known_args(["--mechansim", "shuffle_gauss"])
Traceback (most recent call last):
...
ValueError: unrecognized arguments: --mechansim (did you mean --mechanism?); see opacus-shuffle ...
"""

from __future__ import annotations

import argparse
import dataclasses
import re
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NoReturn

from opacus_shuffle._version import __version__
from opacus_shuffle.core.tables import did_you_mean, paragraph

NAME = "opacus-shuffle"
_SIMILARITY = 0.67
"""With this ratio of matching letters "num-users" is suggested for "users"."""


@dataclasses.dataclass(frozen=True)
class Command:
    """One command: its function, its help and examples of its use.

    Attributes:
        function: ``module.function`` in this folder, imported when the command runs. It takes the
            options, and returns the values for JSON, the text to print, and optionally functions to
            call after printing.
        summary: The line of help.
        examples: Complete command lines without the name of the program.
    """

    function: str
    summary: str
    examples: tuple[str, ...]


GAUSSIAN = "--mechanism shuffle_gauss --num-users 60000 --steps 1000 --noise-multiplier 3"
SUMS = "--mechanism shuffled_sums --num-users 4000 --dimension 6800 --sample-rate 0.5 --steps 60"

COMMANDS = {
    "compare": Command(
        "compare.run_comparison",
        "train with the same proved epsilon in four trust models, and compare accuracy",
        ("compare", "compare --epsilon 2 --runs 1 -o trust.png"),
    ),
    "plan": Command(
        "epsilon.print_plan",
        "noise and number of users that a budget needs, for each trust model",
        (
            "plan --num-users 4000 --steps 60 --epsilon 1 --delta 1e-5",
            "plan --num-users 60000 --steps 1000 --sample-rate 0.01 --dimension 25000 "
            "--epsilon 1 --delta 1e-6",
        ),
    ),
    "epsilon": Command(
        "epsilon.print_epsilon",
        "epsilon of some rounds, and what it covers",
        (
            f"epsilon {GAUSSIAN} --delta 1e-5",
            "epsilon --mechanism random_allocation --num-batches 1000 --steps 5000 "
            "--noise-multiplier 1 --delta 1e-5 --json",
        ),
    ),
    "noise": Command(
        "epsilon.print_noise",
        "the smallest noise within a budget",
        (
            "noise --mechanism shuffle_gauss --steps 10 --num-users 4000 --epsilon 1 --delta 1e-5",
            f"noise {SUMS} --epsilon 1 --delta 1e-5",
        ),
    ),
    "report": Command(
        "epsilon.print_report",
        "all bounds in one table, from no trust to full trust",
        (f"report {GAUSSIAN} --delta 1e-5", f"report {SUMS} --noise-multiplier 30 --delta 1e-5"),
    ),
    "plot": Command(
        "epsilon.draw_report",
        "plot of the report: epsilon over rounds",
        (
            f"plot {GAUSSIAN} --delta 1e-5 -o epsilon.png",
            f"plot {SUMS} --noise-multiplier 30 --delta 1e-5 -o sums.svg",
        ),
    ),
    "audit": Command(
        "audit.run_audit",
        "lower bound on epsilon from an attack on a small training run",
        ("audit", "audit --noise-multiplier 1 --steps 10000 --json"),
    ),
}
"""All commands by name."""

PURPOSES = {
    "training": ("compare",),
    "numbers before training": ("plan", "epsilon", "noise", "report", "plot"),
    "checks": ("audit",),
}
"""The headings in the list of commands, and the commands below each."""


class OneLineParser(argparse.ArgumentParser):
    """A parser that raises a ``ValueError`` of one line with a suggestion, instead of exiting."""

    def error(self, message: str) -> NoReturn:
        """Raises the error, with a suggestion for an invalid choice."""
        choice = re.search(r"invalid choice: '(.*)' \(choose from (.*)\)", message)
        if choice:
            choices = {name: name for name in re.findall(r"[\w-]+", choice[2])}
            message += did_you_mean(choice[1].strip("-"), choices, similarity=_SIMILARITY)
        raise ValueError(f"{message}; see {self.prog} --help")


class CommandParser(OneLineParser):
    """The parser of the flags of one command."""

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Parses the words of a command, and refuses unknown flags first.

        Otherwise argparse would complain about a missing flag instead of the misspelt one.
        """
        actions = self._option_string_actions
        # Without the leading dashes, which all flags have in common. The metavar is a correction
        # too: "--sigma" stands for "--noise-multiplier", whose help shows SIGMA.
        corrections = {
            str(name).strip("-").lower(): flag
            for flag, action in reversed(actions.items())  # The first flag wins.
            for name in (action.metavar, flag)
        }
        for word in args:
            name = word.partition("=")[0]
            # "--num" may abbreviate "--num-users", and "-otrust.png" means "-o trust.png".
            prefix = name if name.startswith("--") else name[:2]
            is_flag = re.match("-+[A-Za-z]", name)
            if is_flag and not any(flag.startswith(prefix) for flag in actions):
                suggestion = did_you_mean(name.strip("-"), corrections, similarity=_SIMILARITY)
                self.error(f"unrecognized arguments: {name}{suggestion}")
        return super().parse_known_args(args, namespace)

    def with_flags(self, message: str, words: Sequence[str]) -> str:
        """Returns a message in which flags, as they were typed, replace names of arguments."""
        typed = [word.partition("=")[0] for word in words]
        # A message about a table of rounds names columns, not flags.
        for action in [] if message.startswith("--rounds") else self._actions:
            for name in sorted(action.option_strings, key=lambda flag: flag not in typed)[:1]:
                # "delta" is also an English word; it is replaced only as the name of an argument.
                follows = "" if "_" in action.dest else "(?= must |=)"
                message = re.sub(rf"(?<![\w-]){action.dest}(?![\w-]){follows}", name, message)
        return message


class TopLevelParser(OneLineParser):
    """The parser of the command's name, whose help lists all commands by purpose."""

    def format_help(self) -> str:
        """Returns the commands and two examples."""
        lines = [f"usage: {NAME} COMMAND [flags]", ""]
        lines += paragraph(
            "Shuffle-model differential privacy for Opacus: epsilon, noise and private training. "
            f"Start with {NAME} compare."
        )
        for purpose, names in PURPOSES.items():
            lines += ["", f"{purpose}:"]
            for name in names:
                lines += paragraph(COMMANDS[name].summary, term=f"  {name}", indent=14)
        lines += ["", f"{NAME} COMMAND --help shows the flags of a command.", "", ""]
        return "\n".join(lines) + examples(["compare", COMMANDS["epsilon"].examples[0]])


def examples(lines: Iterable[str]) -> str:
    """Returns command lines for a help text, which can be copied into a shell."""
    shown = [
        " \\\n      ".join(textwrap.wrap(f"{NAME} {line}", 72, break_on_hyphens=False))
        for line in lines
    ]
    return "\n  ".join(["examples:", *shown]) + "\n"


def parsers(*names: str) -> tuple[argparse.ArgumentParser, Mapping[str, CommandParser]]:
    """Returns the top-level parser and the parsers of all commands; those named here have flags.

    The flags come from all mechanisms, whose import takes a second.
    """
    top_level = TopLevelParser(prog=NAME)
    top_level.add_argument("--version", action="version", version=f"{NAME} {__version__}")
    commands = top_level.add_subparsers(metavar="COMMAND", parser_class=CommandParser)
    for name, command in COMMANDS.items():
        parser = commands.add_parser(
            name,
            help=command.summary,
            description="\n".join(paragraph(f"{command.summary}.")),
            epilog=examples(command.examples),
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        if name in names:
            from opacus_shuffle.commands.flags import add_flags  # Imports all mechanisms.

            add_flags(parser, name)
    return top_level, commands.choices
