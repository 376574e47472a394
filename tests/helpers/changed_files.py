"""Checkpoints that somebody has changed, and files that run code when they are unpickled."""

import json
import os
from typing import Any

ACCOUNT, WEIGHTS, ROUNDS = (
    "opacus_shuffle_account",
    "module_state_dict",
    "privacy_accountant_state_dict",
)


def through_json(state: Any) -> Any:
    """An accountant's state as JSON keeps it: with lists for tuples."""
    return json.loads(json.dumps(state))


class Touching:
    """Makes a folder when it is unpickled."""

    def __init__(self, place: os.PathLike) -> None:
        self.place = place

    def __reduce__(self) -> Any:
        return os.mkdir, (os.fspath(self.place),)
