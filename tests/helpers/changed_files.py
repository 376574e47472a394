"""Checkpoints that somebody has changed, and files that run code when they are unpickled."""

from __future__ import annotations

import json
import os
from collections import OrderedDict
from typing import Any

from opacus_shuffle.core.plain_values import fingerprint

ACCOUNT, WEIGHTS, ROUNDS = (
    "opacus_shuffle_account",
    "module_state_dict",
    "privacy_accountant_state_dict",
)


def signed(saved: Any) -> Any:
    """A changed checkpoint with a new digest, as someone writes it who knows how."""
    if isinstance(saved, dict) and {ACCOUNT, WEIGHTS, ROUNDS} <= saved.keys():
        told = {key: value for key, value in saved[ACCOUNT].items() if key != "digest"}
        names = (
            WEIGHTS,
            ROUNDS,
            "opacus_shuffle",
            "optimizer_state_dict",
            "noise_scheduler_state_dict",
            "grad_clip_scheduler_state_dict",
        )
        parts = [(name, saved[name]) for name in names if name in saved]
        saved[ACCOUNT] = {**told, "digest": fingerprint(parts, told)}
    return saved


def through_json(state: Any) -> Any:
    """An accountant's state with its metadata, as JSON keeps it: with lists for tuples."""
    kept = OrderedDict(json.loads(json.dumps(state)))
    kept._metadata = json.loads(json.dumps(state._metadata))
    return kept


class Touching:
    """Makes a folder when it is unpickled."""

    def __init__(self, place: os.PathLike) -> None:
        self.place = place

    def __reduce__(self) -> Any:
        return os.mkdir, (os.fspath(self.place),)
