"""Flags made from the fields of dataclasses: the mechanisms', and the settings of jobs.

A field's metadata hold ``help``, and where it matters ``metavar``, ``choices`` (or a function that
finds them), ``also`` (other names) and ``instead`` (the default in words). A flag that is not given
is left out of the options, so that defaults are written in one place, the class.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib.util
import os
import re
import typing
from collections.abc import Collection, Iterable
from typing import TYPE_CHECKING, Any

from opacus_shuffle.accountants.bounds.registry import bounds_of
from opacus_shuffle.accountants.mechanisms import MECHANISMS, Mechanism
from opacus_shuffle.analysis.mean_ratio import MAX_ORDER
from opacus_shuffle.core import extras
from opacus_shuffle.core.guarantees import Adjacency
from opacus_shuffle.core.validation import integer

if TYPE_CHECKING:
    import torch


def all_bounds() -> tuple[str, ...]:
    """Returns every bound of every mechanism there is now."""
    return tuple(
        dict.fromkeys(name for mechanism in MECHANISMS.values() for name in bounds_of(mechanism))
    )


def all_fields() -> dict[str, dict[type[Mechanism], dataclasses.Field]]:
    """Maps each field name to the mechanisms that declare it."""
    found: dict[str, dict[type[Mechanism], dataclasses.Field]] = {}
    for mechanism in MECHANISMS.values():
        for field in dataclasses.fields(mechanism):
            found.setdefault(field.name, {})[mechanism] = field
    return found


def setting(default: Any, text: str, **metadata: Any) -> Any:
    """Returns a dataclass field with its default and its line of help."""
    return dataclasses.field(default=default, metadata={"help": text, **metadata})


def flag(name: str) -> str:
    """Returns ``--num-users`` for ``num_users``."""
    return "--" + name.replace("_", "-")


def add_settings(parser: argparse.ArgumentParser, settings: type) -> None:
    """Adds a flag for every field of a class of settings."""
    for field in dataclasses.fields(settings):
        said = field.metadata.get("instead", field.default)
        _add(
            parser,
            field,
            [settings],
            help=field.metadata["help"] + ("" if said is None else f" (default: {said})"),
        )


def add_run_flags(parser: argparse.ArgumentParser, *, without: Collection[str] = ()) -> None:
    """Adds what describes a run: the mechanism, all mechanisms' fields but some, rounds and adjacency."""
    parser.add_argument(
        "--mechanism", "--accountant", required=True, **among(MECHANISMS, "what a round is")
    )
    for name, owners in all_fields().items():
        if name not in without:
            texts: dict[str, list[str]] = {}
            for owner, field in owners.items():
                texts.setdefault(field.metadata.get("help", name), []).append(owner.name)
            shared = len(texts) == 1 and len(owners) == len(MECHANISMS)
            said = "; ".join(
                text if shared else f"{', '.join(names)}: {text}" for text, names in texts.items()
            )
            _add(parser, next(iter(owners.values())), owners, help=said)
    parser.add_argument(
        "--steps", required=True, type=number, metavar="T", help="rounds (training steps)"
    )
    parser.add_argument(
        "--adjacency",
        choices=[adjacency.value for adjacency in Adjacency],
        default=Adjacency.ZERO_OUT.value,
        help="zero_out: a record's report becomes one of zero (the default); replace: the record becomes any other",
    )


def among(choices: Collection[str], text: str) -> dict[str, Any]:
    """Returns how a flag says its choices in its help, whose lines would be as long as all of them together otherwise."""
    return {"choices": choices, "metavar": "NAME", "help": f"{text}; one of {', '.join(choices)}"}


def generator_of(seed: int | None, stream: int) -> torch.Generator | None:
    """Returns repeatable randomness for one use of a ``--seed``, or None for secret."""
    import torch

    return (
        None
        if seed is None
        else torch.Generator().manual_seed(integer("seed", seed, minimum=0) + stream)
    )


def check_file(flag: str, path: str, endings: tuple[str, ...]) -> None:
    """Refuses a file that has another ending, or nowhere to go."""
    if (
        not path.endswith(endings)
        or os.path.isdir(path)
        or not os.path.isdir(os.path.dirname(path) or ".")
    ):
        named = ", ".join(endings)
        raise ValueError(
            f"{flag} must name a file in a folder that is there and end in one of {named}, got "
            f"{path!r}"
        )


def check_picture(path: str) -> None:
    """Refuses a picture that cannot be drawn, or has nowhere to go."""
    check_file("--output", path, (".png", ".pdf", ".svg"))
    if importlib.util.find_spec("matplotlib") is None:
        raise ValueError(extras.missing("a picture", "matplotlib", "plots"))


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
    needed = [field.name for field in known if field.default is dataclasses.MISSING]
    missing = [
        name
        for name in [*needed, *(["sample_rate"] if mechanism.sampling else [])]
        if name not in options
    ]
    if missing:
        raise ValueError(f"{mechanism.name} needs {', '.join(map(flag, missing))}")
    return {field.name: options.pop(field.name) for field in known if field.name in options}


def number(text: str) -> float:
    """Reads ``60000``, ``60,000`` and ``6e4``."""
    try:
        return int(_without_thousands(text))
    except ValueError:
        return float(text)


def _without_thousands(text: str) -> str:
    """The digits of ``60,000``, and any other text as it is."""
    return text.replace(",", "") if re.fullmatch(r"\d{1,3}(,\d{3})+", text) else text


def numbers(text: str) -> float | tuple[float, ...]:
    """Reads ``85.8e6``, or several numbers with commas between; ``10,128`` could be either, and another epsilon."""
    if (one := _without_thousands(text)) != text:
        raise argparse.ArgumentTypeError(
            f"{text!r} is one number or several: write {one}, or '{text.replace(',', ', ')}'"
        )
    try:
        found = tuple(map(number, text.split(",")))
    except ValueError:
        message = f"{text!r} is no number, nor numbers with commas between: for instance 85.8e6"
        raise argparse.ArgumentTypeError(message) from None
    return found[0] if len(found) == 1 else found


def orders(text: str) -> tuple[float, ...]:
    """Reads ``2:30``, the whole Rényi orders from 2 to 30, or several numbers with commas between."""
    first, colon, last = text.partition(":")
    if colon and int(last) > MAX_ORDER:
        raise argparse.ArgumentTypeError(
            f"{text!r} goes beyond the largest order, {MAX_ORDER}: for instance 2:30"
        )
    return tuple(range(int(first), int(last) + 1)) if colon else tuple(map(number, text.split(",")))


def _add(
    parser: argparse.ArgumentParser, field: dataclasses.Field, owners: Iterable[type], *, help: str
) -> None:
    """Adds one flag, of all types that the field has in the classes that own it."""
    hints = [typing.get_type_hints(owner)[field.name] for owner in owners]
    kinds = {
        typing.get_origin(kind) or kind
        for hint in hints
        for kind in typing.get_args(hint) or (hint,)
    }
    options: dict[str, Any] = {"help": help.replace("%", "%%"), "default": argparse.SUPPRESS}
    if bool in kinds:
        options["action"] = argparse.BooleanOptionalAction
    else:
        options["metavar"] = field.metadata.get("metavar")
        if choices := field.metadata.get("choices"):
            options |= among(choices() if callable(choices) else choices, options["help"])
        options["type"] = numbers if tuple in kinds else number if kinds & {int, float} else str
    parser.add_argument(flag(field.name), *field.metadata.get("also", ()), **options)
