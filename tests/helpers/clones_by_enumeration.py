"""The pair that clones hide user 1 in, by enumeration, without our bounds."""

from __future__ import annotations

import mpmath


def exact_delta(epsilon, local_epsilon, users, probability=None):
    """δ(ε) of the pair of Theorem 3.2, both ways round.

    By enumeration of (C, A, D) in 50 digits.
    """
    with mpmath.workdps(50):
        ratio = mpmath.exp(mpmath.mpf(epsilon))
        p = (
            mpmath.exp(-mpmath.mpf(local_epsilon))
            if probability is None
            else mpmath.mpf(probability)
        )
        coin = 1 / (1 + mpmath.exp(-mpmath.mpf(local_epsilon)))
        first, second = {}, {}
        for c in range(users):
            for a in range(c + 1):
                mass = (
                    mpmath.binomial(users - 1, c)
                    * p**c
                    * (1 - p) ** (users - 1 - c)
                    * mpmath.binomial(c, a)
                    / 2**c
                )
                for d, chance in ((1, coin), (0, 1 - coin)):
                    for distribution, view in (
                        (first, (a + d, c - a + 1 - d)),
                        (second, (a + 1 - d, c - a + d)),
                    ):
                        distribution[view] = distribution.get(view, 0) + mass * chance
        views = first.keys() | second.keys()
        there = sum(max(first.get(v, 0) - ratio * second.get(v, 0), 0) for v in views)
        back = sum(max(second.get(v, 0) - ratio * first.get(v, 0), 0) for v in views)
        return max(there, back)
