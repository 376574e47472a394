"""Plain values: what is read back from a file without running code that the file brings along.

``torch.load(..., weights_only=True)`` reads tensors and these types alone. NumPy's numbers are
others, so they become Python's.

>>> import numpy as np
>>> foreign: set[str] = set()
>>> plain({"rate": np.float64(0.5), "rounds": [np.int64(3)], "when": np.zeros(1)}, foreign)
{'rate': 0.5, 'rounds': [3], 'when': array([0.])}
>>> foreign
{'numpy.ndarray'}
"""

from __future__ import annotations

import copy
from collections import Counter, OrderedDict
from typing import Any

import numpy as np
import torch

_PLAIN = (
    type(None),
    bool,
    int,
    float,
    complex,
    str,
    bytes,
    bytearray,
    set,
    torch.Size,
    torch.dtype,
    torch.device,
)


def plain(value: Any, foreign: set[str]) -> Any:
    """Returns a value with Python's numbers for NumPy's; tensors stay, containers are new.

    Args:
        value: Lists, tuples and dictionaries of anything.
        foreign: Gets the names of the types that would not be read back.
    """
    kind = type(value)
    if isinstance(value, np.generic):
        return value.item()
    if kind in (list, tuple):
        return kind(plain(entry, foreign) for entry in value)
    if kind in (dict, OrderedDict, Counter):
        entries = copy.copy(value)  # and the metadata of a state dict
        for key, entry in value.items():
            entries[key] = plain(entry, foreign)
        return entries
    read = isinstance(value, torch.Tensor) or kind in (
        *_PLAIN,
        *torch.serialization.get_safe_globals(),
    )
    if not read or (kind is bytes and not value):  # which the reader does not know
        foreign.add(f"{kind.__module__}.{kind.__qualname__}")
    return value
