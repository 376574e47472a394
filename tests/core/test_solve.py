"""The safe root: the point returned meets its condition, and lies next to where the condition starts to hold."""

from __future__ import annotations

import itertools
import math

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from opacus_shuffle.core.solve import bracket, safe_root

numbers = st.floats(-50.0, 50.0)
widths = st.floats(1e-3, 50.0)


@given(root=numbers, below=widths, above=widths, upwards=st.booleans(), cubic=st.booleans())
def test_the_point_meets_its_condition_and_is_within_the_tolerance(
    root: float, below: float, above: float, upwards: bool, cubic: bool
) -> None:
    low, high = root - below, root + above
    assume(low < root < high)

    def excess(x: float) -> float:
        value = root - x if upwards else x - root
        return value**3 + value if cubic else value

    unsafe, safe = (low, high) if upwards else (high, low)
    found = safe_root(excess, unsafe=unsafe, safe=safe, tolerance=1e-9, step=1e-9)
    assert excess(found) <= 0
    # brentq's own error, one step off it, and the rounding of numbers of this size.
    assert abs(found - root) <= 1e-9 + 3e-9 + 1e-13 * abs(root)


@given(jump=st.floats(0.01, 0.99), height=st.floats(1e-6, 10.0), upwards=st.booleans())
def test_a_jump_is_passed_on_the_safe_side(jump: float, height: float, upwards: bool) -> None:
    def excess(x: float) -> float:
        return height if (x < jump) == upwards else -1e-3

    unsafe, safe = (0.0, 1.0) if upwards else (1.0, 0.0)
    found = safe_root(excess, unsafe=unsafe, safe=safe, tolerance=1e-6, step=1e-6)
    assert excess(found) <= 0
    assert abs(found - jump) <= 5e-6


@given(root=st.floats(0.1, 10.0), noise=st.floats(0.0, 1e-7), seed=st.integers(0, 1000))
def test_rounding_near_the_root_does_not_fool_it(root: float, noise: float, seed: int) -> None:
    def excess(x: float) -> float:
        return root - x + noise * math.sin(1e9 * x + seed)

    found = safe_root(excess, unsafe=0.0, safe=20.0, tolerance=1e-12, step=1e-12)
    assert excess(found) <= 0
    assert abs(found - root) <= 2 * noise + 1e-11 + 4 * noise


@given(root=st.floats(1e-6, 1e6), upwards=st.booleans())
def test_relative_steps_stay_relative(root: float, upwards: bool) -> None:
    unsafe, safe = (root / 7, root * 5) if upwards else (root * 5, root / 7)
    sign = 1 if upwards else -1
    found = safe_root(
        lambda x: sign * (math.log(root) - math.log(x)),
        unsafe=unsafe,
        safe=safe,
        tolerance=1e-13 * root,
        relative_tolerance=1e-12,
    )
    assert sign * (math.log(root) - math.log(found)) <= 0
    assert abs(found / root - 1) < 1e-11


def test_it_never_goes_beyond_the_safe_end() -> None:
    assert (
        safe_root(lambda x: 1.0 if x < 1 else 0.0, unsafe=0.0, safe=1.0, tolerance=0.5, step=0.7)
        == 1.0
    )


@pytest.mark.parametrize("step", [None, 0.0, 1e-9])
def test_a_jump_at_the_unsafe_end_itself_is_left_behind(step: float | None) -> None:
    def excess(x: float) -> float:
        return 1e-5 if x <= 0 else -1.0

    for tolerance in (1e-12, 1e-300):
        found = safe_root(excess, unsafe=0.0, safe=1.0, tolerance=tolerance, step=step)
        assert 0 < found <= 1e-8


def test_an_unsafe_end_that_is_safe_is_the_answer() -> None:
    assert safe_root(lambda x: -1.0, unsafe=3.0, safe=4.0, tolerance=1e-9) == 3.0


@pytest.mark.parametrize("value", [1.0, math.nan])
def test_a_safe_end_that_is_not_safe_is_refused(value: float) -> None:
    with pytest.raises(ValueError, match=r"no safe root.*safe=2\.0"):
        safe_root(lambda x: 1.0 if x < 2 else value, unsafe=1.0, safe=2.0, tolerance=1e-9)


@given(root=st.floats(-20.0, 20.0), upwards=st.booleans())
def test_bracket_ends_on_both_sides(root: float, upwards: bool) -> None:
    sign = 1 if upwards else -1

    def excess(x: float) -> float:
        return sign * (root - x)

    unsafe, safe = bracket(
        excess,
        0.0,
        towards_safe=(sign * 0.5 * k for k in itertools.count(1)),
        towards_unsafe=(-sign * 0.5 * k for k in itertools.count(1)),
    )
    assert unsafe is not None
    assert safe is not None
    assert excess(unsafe) > 0 >= excess(safe)
    assert abs(unsafe - safe) == 0.5


def test_bracket_says_which_side_it_did_not_reach() -> None:
    assert bracket(lambda x: 1.0, 0.0, towards_safe=[1.0, 2.0], towards_unsafe=[]) == (2.0, None)
    assert bracket(lambda x: -1.0, 0.0, towards_safe=[], towards_unsafe=[-1.0, -2.0]) == (
        None,
        -2.0,
    )
