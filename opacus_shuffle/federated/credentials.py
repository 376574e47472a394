"""Checks the secrets by which clients and the server authenticate to a shuffler."""

from __future__ import annotations

import hashlib
from typing import Any

from opacus_shuffle.core.validation import instance_of

LOOPBACK = ("127.0.0.1", "localhost")
"""Hosts that other machines cannot reach, so a connection to them needs no TLS."""
SHORTEST_SECRET = 16
"""The smallest number of characters of a secret."""


def checked_secret(name: str, secret: Any) -> str:
    """Returns a secret without surrounding white space.

    Raises:
        ValueError: If it is too short or has other characters; the message does not contain it.
    """
    stripped: str = instance_of(name, secret, (str,)).strip()
    printable = stripped.isascii() and stripped.isprintable() and " " not in stripped
    if len(stripped) < SHORTEST_SECRET or not printable:
        raise ValueError(
            f"{name} must be a secret of at least {SHORTEST_SECRET} letters and digits in one "
            "line: generate it with python -c 'import secrets; print(secrets.token_hex())'"
        )
    return stripped


def hash_of(secret: bytes) -> bytes:
    """Hashes a secret for the look-up of its party.

    The time of a look-up may reveal something about the hash, but nothing about the secret.
    """
    return hashlib.sha256(secret).digest()
