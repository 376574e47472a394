"""The secrets by which clients and the server show the shuffler who they are."""

from __future__ import annotations

import hashlib
from typing import Any

from opacus_shuffle.core.validation import instance_of

LOOPBACK = ("127.0.0.1", "localhost")
"""Hosts that other machines cannot reach, so that a connection to them needs no TLS."""
SHORTEST_SECRET = 16
"""Characters of a secret, at least."""


def checked_secret(name: str, secret: Any) -> str:
    """Returns a secret without white space around it, or refuses it without showing it."""
    stripped: str = instance_of(name, secret, (str,)).strip()
    if (
        len(stripped) < SHORTEST_SECRET
        or not stripped.isascii()
        or not stripped.isprintable()
        or " " in stripped
    ):
        raise ValueError(
            f"{name} must be a secret of {SHORTEST_SECRET} letters and digits at least, in one "
            "line: make it with "
            "python -c 'import secrets; print(secrets.token_hex())'"
        )
    return stripped


def hash_of(secret: bytes) -> bytes:
    """Returns what a party is looked up by.

    How long a look-up takes tells something of this hash alone, and nothing of a secret.
    """
    return hashlib.sha256(secret).digest()
