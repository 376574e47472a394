"""What is noted of runs that were watched, and of those that break only while they are."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from torch import nn

from opacus_shuffle.networks.rollback import rolled_back
from opacus_shuffle.networks.running import without_graph
from opacus_shuffle.networks.sample_input import Call
from opacus_shuffle.permutation.finding.paths import Answer, Paths, Place
from opacus_shuffle.permutation.finding.trace import Tracer

LOOKED_AT = (
    "It runs where it is not looked at: meanwhile sizes of tensors, and numbers read out of them, are of subclasses of int and "
    "float that notice what they are compared with; where forward asks type(size) is int, have it ask isinstance(size, int)"
)
"""What to say of a network that breaks only while it is looked at."""

Answers = Mapping[Place, Answer]


@dataclasses.dataclass(frozen=True)
class Watched:
    """A run that is to be labelled, and what the network kept of earlier ones when it began."""

    tracer: Tracer
    paths: Paths
    draws_in_python: bool
    began: Mapping[tuple[int, Any], Any]


@dataclasses.dataclass(frozen=True)
class Meeting:
    """Where a place was met first: on what, in which mode, after which answers elsewhere; and what it answered."""

    call: Call
    training: bool
    answers: Answers
    answer: Answer | None


def runs_plainly(network: nn.Module, call: Call) -> bool:
    """Returns whether a network runs where nobody looks, in the mode that it is in."""
    args, kwargs = call
    try:
        with rolled_back(network):
            without_graph(lambda: network(*args, **kwargs))
    except Exception:
        return False
    return True
