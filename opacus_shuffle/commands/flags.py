"""Flags made from the fields of dataclasses: the mechanisms', and the settings of jobs.

A field's metadata hold ``help``, and where it matters ``metavar``, ``choices``, ``also`` (other names) and ``instead`` (the
default in words). A flag that is not given is left out of the options, so that defaults are written in one
place, the class.

>>> parser = argparse.ArgumentParser()
>>> add_mechanism_flags(parser)
>>> options = vars(parser.parse_args(["--mechanism", "shuffled_checkin", "--num-users", "6e4", "--sample-rate", "0.1"]))
>>> fields_of_mechanism(options, without=("noise_multiplier",))
{'num_users': 60000.0, 'sample_rate': 0.1}
"""

from __future__ import annotations

import argparse
import dataclasses
import typing
from collections.abc import Collection, Iterable
from typing import Any

from opacus_shuffle.accountants.bounds.registry import bounds_of
from opacus_shuffle.accountants.mechanisms import MECHANISMS, Mechanism
from opacus_shuffle.core.guarantees import Adjacency

BOUNDS = tuple(dict.fromkeys(name for mechanism in MECHANISMS.values() for name in bounds_of(mechanism)))
"""Every bound of every mechanism."""


def setting(default: Any, text: str, **metadata: Any) -> Any:
    """Returns a dataclass field with its default and its line of help."""
    return dataclasses.field(default=default, metadata={"help": text, **metadata})


def noise_is_local(mechanism: type[Mechanism]) -> bool:
    """Whether σ is that of each report."""
    return getattr(mechanism, "noise_is_local", mechanism.name not in ("shuffled_fw", "shuffled_sums"))


def flag(name: str) -> str:
    """Returns ``--num-users`` for ``num_users``."""
    return "--" + name.replace("_", "-")


def add_settings(parser: argparse.ArgumentParser, settings: type) -> None:
    """Adds a flag for every field of a class of settings."""
    hints = typing.get_type_hints(settings)
    for field in dataclasses.fields(settings):
        _add(parser, field, hints[field.name], help=field.metadata["help"] + _default(field))


def add_mechanism_flags(parser: argparse.ArgumentParser, *, without: Collection[str] = ()) -> None:
    """Adds ``--mechanism`` and a flag for every field of every mechanism, but for some."""
    parser.add_argument("--mechanism", "--accountant", required=True, choices=MECHANISMS, help="what a round is")
    everyone = {field.name for field in dataclasses.fields(Mechanism)}
    owners: dict[str, list[type[Mechanism]]] = {}
    for mechanism in MECHANISMS.values():
        for field in dataclasses.fields(mechanism):
            owners.setdefault(field.name, []).append(mechanism)
    for name, mechanisms in owners.items():
        if name in without or name in ("epsilon", "delta"):
            continue
        field = next(each for each in dataclasses.fields(mechanisms[0]) if each.name == name)
        texts: dict[str, list[str]] = {}
        for mechanism in mechanisms:
            its = next(each for each in dataclasses.fields(mechanism) if each.name == name)
            texts.setdefault(its.metadata.get("help", name), []).append(mechanism.name)
        said = [text if name in everyone and len(texts) == 1 else f"{', '.join(who)}: {text}" for text, who in texts.items()]
        _add(parser, field, typing.get_type_hints(mechanisms[0])[name], help="; ".join(said))


def fields_of_mechanism(options: dict[str, Any], *, without: Collection[str] = ()) -> dict[str, Any]:
    """Takes the mechanism's fields out of the options.

    Raises:
        ValueError: If one is missing (a rate too, where users are sampled: without one ε would be much larger), or another
            mechanism's is given.
    """
    mechanism = MECHANISMS[options["mechanism"]]
    known = {field.name: field for field in dataclasses.fields(mechanism) if field.name not in without}
    given = {name: options.pop(name) for name in [*options] if name in known}
    foreign = [name for name in _all_fields() if name in options]
    if foreign:
        raise ValueError(f"{mechanism.name} has no {', '.join(map(flag, foreign))}: leave it out, or take another mechanism")
    needed = [name for name, field in known.items() if field.default is dataclasses.MISSING]
    if mechanism.sampling is not None:
        needed.append("sample_rate")
    missing = [name for name in needed if name not in given]
    if missing:
        raise ValueError(f"{mechanism.name} needs {', '.join(map(flag, missing))}")
    return given


def _all_fields() -> Iterable[str]:
    """The names of all mechanisms' fields."""
    return {field.name for mechanism in MECHANISMS.values() for field in dataclasses.fields(mechanism)} - {"epsilon", "delta"}


def add_bound_flag(parser: argparse.ArgumentParser) -> None:
    """Adds ``--bound``."""
    text = "which formula; only certified is proved for every data set, whatever the mechanism (default: certified)"
    parser.add_argument("--bound", choices=BOUNDS, default="certified", help=text)


def add_adjacency_flag(parser: argparse.ArgumentParser) -> None:
    """Adds ``--adjacency``."""
    parser.add_argument(
        "--adjacency",
        choices=[each.value for each in Adjacency],
        default=Adjacency.ZERO_OUT.value,
        help="zero_out: a record's report becomes one of zero (the default); replace: the record becomes any other",
    )


def add_json_flag(parser: argparse.ArgumentParser) -> None:
    """Adds ``--json``."""
    parser.add_argument("--json", action="store_true", help="for machines, unrounded")


def number(text: str) -> float:
    """Reads ``60000`` and ``6e4``."""
    try:
        return int(text)
    except ValueError:
        return float(text)


def numbers(text: str) -> float | tuple[float, ...]:
    """Reads ``85.8e6``, or several numbers with commas between."""
    try:
        found = tuple(map(number, text.split(",")))
    except ValueError:
        message = f"{text!r} is no number, nor numbers with commas between: for instance 85.8e6"
        raise argparse.ArgumentTypeError(message) from None
    return found[0] if len(found) == 1 else found


def _add(parser: argparse.ArgumentParser, field: dataclasses.Field, hint: Any, *, help: str) -> None:
    """Adds one flag, of the type that the field has."""
    kinds = {typing.get_origin(each) or each for each in typing.get_args(hint) or (hint,)}
    options: dict[str, Any] = {"help": help.replace("%", "%%"), "default": argparse.SUPPRESS}
    if bool in kinds:
        parser.add_argument(flag(field.name), action=argparse.BooleanOptionalAction, **options)
        return
    if "choices" in field.metadata:
        options["choices"] = field.metadata["choices"]
    elif kinds & {int, float, tuple}:
        options["type"] = numbers if tuple in kinds else number
    also = field.metadata.get("also", ())
    parser.add_argument(flag(field.name), *also, metavar=field.metadata.get("metavar"), **options)


def _default(field: dataclasses.Field) -> str:
    """What happens without the flag, in words."""
    said = field.metadata.get("instead", field.default)
    return "" if said is None else f" (default: {said})"
