"""All commands of ``opacus-shuffle``, and one parser that says what was meant by a misspelt word.

>>> parsers("epsilon")[1]["epsilon"].parse_known_args(["--mechansim", "shuffle_gauss"])
Traceback (most recent call last):
...
ValueError: unrecognized arguments: --mechansim (did you mean --mechanism?); see opacus-shuffle ...
"""

from __future__ import annotations

import argparse
import dataclasses
import difflib
import re
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NoReturn

from opacus_shuffle._version import __version__
from opacus_shuffle.core.tables import paragraph

NAME = "opacus-shuffle"


@dataclasses.dataclass(frozen=True)
class Command:
    """A command: what it is for, where its function is, and how it is called.

    Attributes:
        function: ``module.function`` in this folder, imported when the command runs. It takes the
            options, and returns values for JSON, what to print instead, and what to do afterwards.
        summary: Its line of help.
        examples: Command lines that run as they stand, without the program's name.
    """

    function: str
    summary: str
    examples: tuple[str, ...]


GAUSSIAN = "--mechanism shuffle_gauss --num-users 60000 --steps 1000 --noise-multiplier 3"
SUMS = "--mechanism shuffled_sums --num-users 4000 --dimension 6800 --sample-rate 0.5 --steps 60"

COMMANDS = {
    "compare": Command(
        "compare.run_comparison",
        "train at one proved epsilon, trusting a server, a shuffler or nobody",
        ("compare", "compare --epsilon 2 --runs 1 -o trust.png"),
    ),
    "train": Command(
        "train.run_training",
        "train a small CNN on real images in the shuffle model; ends with accuracy and a table of "
        "epsilon",
        (
            "train --mechanism shuffled_sums --target-epsilon 2",
            "train --mechanism secret_checkin --target-epsilon 8 --epochs 20",
        ),
    ),
    "plan": Command(
        "epsilon.print_plan",
        "what noise a budget costs, and how many users would do, by who is trusted",
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
        "every bound side by side, from no trust to full",
        (f"report {GAUSSIAN} --delta 1e-5", f"report {SUMS} --noise-multiplier 30 --delta 1e-5"),
    ),
    "plot": Command(
        "epsilon.draw_report",
        "a picture of the report: epsilon over rounds",
        (
            f"plot {GAUSSIAN} --delta 1e-5 -o epsilon.png",
            f"plot {SUMS} --noise-multiplier 30 --delta 1e-5 -o sums.svg",
        ),
    ),
    "audit": Command(
        "audit.run_audits",
        "attack weight shuffling: at its paper's own setting, and in a small training run",
        ("audit --kind published --trials 100000", "audit --kind training"),
    ),
}
"""Every command by its name."""

PURPOSES = {
    "training": ("compare", "train"),
    "numbers before training": ("plan", "epsilon", "noise", "report", "plot"),
    "checks": ("audit",),
}
"""The headings of the list of commands, and what stands under them."""


def likely(word: str, known: Mapping[str, str]) -> str:
    """Returns what was probably meant, as a question; empty if no known word is like this one.

    Args:
        word: What was typed.
        known: What to write for each word that may have been meant.
    """
    # Two thirds of the letters, in their order: "users" is like "num-users".
    close = difflib.get_close_matches(word.strip("-").lower(), known, 1, 0.67)
    return f" (did you mean {known[close[0]]}?)" if close else ""


class OneLineParser(argparse.ArgumentParser):
    """A parser whose errors are a ``ValueError`` of one line that says what was meant."""

    def error(self, message: str) -> NoReturn:
        """Raises the error, with the choice that was probably meant."""
        choice = re.search(r"invalid choice: '(.*)' \(choose from (.*)\)", message)
        if choice:
            message += likely(choice[1], {name: name for name in re.findall(r"[\w-]+", choice[2])})
        raise ValueError(f"{message}; see {self.prog} --help")


class Parser(OneLineParser):
    """The parser of one command's flags."""

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Parses a command's words, if all that look like flags are known.

        They are looked at first: argparse would complain of the flag that is missing, and not of
        the one that was misspelt.
        """
        known = self._option_string_actions
        # Without dashes in front, which any two flags have in common; and who types "--sigma" for
        # "--noise-multiplier" has read it beside that flag.
        names = {
            str(name).strip("-").lower(): flag
            for flag, action in reversed(known.items())  # the first flag of a letter is left
            for name in (action.metavar, flag)
        }
        for word in args:
            name = word.partition("=")[0]
            # "--num" may stand for "--num-users", and "-otrust.png" for "-o trust.png".
            begins = name if name.startswith("--") else name[:2]
            if re.match("-+[A-Za-z]", name) and not any(f.startswith(begins) for f in known):
                self.error(f"unrecognized arguments: {name}{likely(name, names)}")
        return super().parse_known_args(args, namespace)

    def with_flags(self, message: str, words: Sequence[str]) -> str:
        """Returns a message with flags, as they were typed, in the place of arguments of Python."""
        typed = [word.partition("=")[0] for word in words]
        # What is said of a table speaks of its columns.
        for action in [] if message.startswith("--rounds") else self._actions:
            for name in sorted(action.option_strings, key=lambda flag: flag not in typed)[:1]:
                # "delta" is a word of English, too: only where it is an argument's name.
                follows = "" if "_" in action.dest else "(?= must |=)"
                message = re.sub(rf"(?<![\w-]){action.dest}(?![\w-]){follows}", name, message)
        return message


class Overview(OneLineParser):
    """The parser of the first words, whose help has all commands by their purposes."""

    def format_help(self) -> str:
        """Returns the commands and two examples."""
        lines = [f"usage: {NAME} COMMAND [flags]", ""]
        lines += paragraph(
            "Shuffle-model differential privacy for Opacus: epsilon, noise and private training. "
            f"Begin with {NAME} compare."
        )
        for purpose, names in PURPOSES.items():
            lines += ["", f"{purpose}:"]
            for name in names:
                lines += paragraph(COMMANDS[name].summary, term=f"  {name}", indent=14)
        lines += [
            "",
            f"{NAME} COMMAND --help has a command's flags; --version is one, too.",
            "",
            "",
        ]
        return "\n".join(lines) + examples(["compare", COMMANDS["epsilon"].examples[0]])


def examples(lines: Iterable[str]) -> str:
    """Returns command lines for a help text, to be copied into a shell."""
    shown = [
        " \\\n      ".join(textwrap.wrap(f"{NAME} {line}", 72, break_on_hyphens=False))
        for line in lines
    ]
    return "\n  ".join(["examples:", *shown]) + "\n"


def parsers(*names: str) -> tuple[argparse.ArgumentParser, Mapping[str, Parser]]:
    """Returns the parser of all commands, and each command's own; those named here have flags.

    Flags are made of all mechanisms, whose import takes a second.
    """
    everything = Overview(prog=NAME)
    everything.add_argument("--version", action="version", version=f"{NAME} {__version__}")
    commands = everything.add_subparsers(metavar="COMMAND", parser_class=Parser)
    for name, command in COMMANDS.items():
        job = commands.add_parser(
            name,
            help=command.summary,
            description="\n".join(paragraph(f"{command.summary}.")),
            epilog=examples(command.examples),
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        if name in names:
            from opacus_shuffle.commands.flags import add_flags  # which imports all mechanisms

            add_flags(job, name)
    return everything, commands.choices
