"""Compiles loops over millions of numbers, if Numba (the extra ``fast``) is installed.

Compiled code is not cached on disk: the package's folder may be read-only, and a cache elsewhere
could be tampered with. So every process compiles again, and only if the work is large enough.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

WORTH_COMPILING = 10**6
"""Arrays of at least this size are worth the two seconds that compiling takes, once per process."""


def worth_compiling(numbers: int) -> bool:
    """Tells whether an array of so many numbers is large enough for a compiled loop."""
    return numbers >= WORTH_COMPILING


@functools.cache
def jitted(function: Callable[..., Any]) -> Callable[..., Any] | None:
    """Returns the function, compiled on its first call; None without Numba.

    Args:
        function: A function of arrays and numbers, with loops, that Numba supports.
    """
    try:
        import numba
    except ImportError:
        return None
    return numba.njit(function)  # type: ignore[no-any-return]
