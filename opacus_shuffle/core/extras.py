"""What is said where an optional package is not installed."""

from __future__ import annotations


def missing(what: str, package: str, extra: str) -> str:
    """Returns a sentence that says what cannot be done, which package it needs and how to get it.

    Args:
        what: What was asked for, such as ``"plot"``.
        package: The package that could not be imported.
        extra: The extra of ``setup.cfg`` that brings it.
    """
    command = f"pip install '.[{extra}]'"
    return f"{what} needs the package {package}: run {command} in your clone of opacus_shuffle"
