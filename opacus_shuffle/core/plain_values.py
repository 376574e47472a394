"""Plain values, which can be read from a file without running code from that file.

``torch.load(..., weights_only=True)`` reads tensors and these types only. NumPy's numbers are not
among them, so they are converted to Python's.

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
    """Returns a copy of a value with NumPy's numbers converted to Python's; tensors are shared.

    Args:
        value: Lists, tuples and dictionaries of anything.
        foreign: The names of types that could not be read back are added to this set.
    """
    kind = type(value)
    if isinstance(value, np.generic):
        return value.item()
    if kind in (list, tuple):
        return kind(plain(entry, foreign) for entry in value)
    if kind in (dict, OrderedDict, Counter):
        entries = copy.copy(value)  # keeps the metadata of a state dict
        for key, entry in value.items():
            entries[key] = plain(entry, foreign)
        return entries
    read = isinstance(value, torch.Tensor) or kind in (
        *_PLAIN,
        *torch.serialization.get_safe_globals(),
    )
    if not read or (kind is bytes and not value):  # empty bytes cannot be read back
        foreign.add(f"{kind.__module__}.{kind.__qualname__}")
    return value
