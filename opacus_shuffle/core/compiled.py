"""Compiles loops over millions of numbers, where Numba (the extra ``fast``) is installed.

Nothing is kept on disk: a package need not be where one may write, and code that is kept elsewhere
can be exchanged. So every process compiles anew, and only for work that is worth it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

WORTH_COMPILING = 10**6
"""Numbers from which on work is compiled, which takes a process two seconds, once."""


def worth_compiling(numbers: int) -> bool:
    """Tells whether an array of so many numbers is large enough that compiling its loop pays."""
    return numbers >= WORTH_COMPILING


@functools.cache
def jitted(function: Callable[..., Any], *, reorders: bool = False) -> Callable[..., Any] | None:
    """Returns the function, to be compiled when it is first called; None without Numba.

    Args:
        function: Of arrays and numbers, with loops, as Numba takes them.
        reorders: Floating-point sums may be taken in any order, as processors do it by fours. What
            is not finite stays so.
    """
    try:
        import numba
    except ImportError:
        return None
    compiler: Callable[..., Any] = numba.njit(fastmath={"reassoc"} if reorders else False)
    return compiler(function)
