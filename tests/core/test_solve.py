"""The safe root: the point returned meets its condition, next to where that starts to hold."""

import math

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from opacus_shuffle.core.solve import bracket, safe_root

widths = st.floats(1e-3, 50.0)


@given(
    root=st.floats(-50.0, 50.0), below=widths, above=widths, up=st.booleans(), cubic=st.booleans()
)
def test_the_point_meets_its_condition_and_is_within_the_tolerance(root, below, above, up, cubic):
    low, high = root - below, root + above
    assume(low < root < high)

    def excess(x):
        value = root - x if up else x - root
        return value**3 + value if cubic else value

    unsafe, safe = (low, high) if up else (high, low)
    point = safe_root(excess, unsafe=unsafe, safe=safe, tolerance=1e-9, step=1e-9)
    assert excess(point) <= 0
    # brentq's own error, one step off it, and the rounding of numbers of this size.
    assert abs(point - root) <= 1e-9 + 3e-9 + 1e-13 * abs(root)


@given(jump=st.floats(0.01, 0.99), height=st.floats(1e-6, 10.0), up=st.booleans())
def test_a_jump_is_passed_on_the_safe_side(jump, height, up):
    def excess(x):
        return height if (x < jump) == up else -1e-3

    unsafe, safe = (0.0, 1.0) if up else (1.0, 0.0)
    point = safe_root(excess, unsafe=unsafe, safe=safe, tolerance=1e-6, step=1e-6)
    assert excess(point) <= 0
    assert abs(point - jump) <= 5e-6


@pytest.mark.parametrize("step", [None, 0.0, 1e-9])
@pytest.mark.parametrize("tolerance", [1e-12, 1e-300])
def test_a_jump_at_the_unsafe_end_itself_is_left_behind(tolerance, step):
    point = safe_root(
        lambda x: 1e-5 if x <= 0 else -1.0, unsafe=0.0, safe=1.0, tolerance=tolerance, step=step
    )
    assert 0 < point <= 1e-8


def test_the_ends_are_the_answer_where_the_condition_starts_there():
    assert safe_root(lambda x: -1.0, unsafe=3.0, safe=4.0, tolerance=1e-9) == 3.0
    late = safe_root(lambda x: float(x < 1), unsafe=0.0, safe=1.0, tolerance=0.5, step=0.7)
    assert late == 1.0


@pytest.mark.parametrize("value", [1.0, math.nan])
def test_a_safe_end_that_is_not_safe_is_refused(value):
    with pytest.raises(ValueError, match=r"no safe root.*safe=2\.0"):
        safe_root(lambda x: 1.0 if x < 2 else value, unsafe=1.0, safe=2.0, tolerance=1e-9)


@given(root=st.floats(-20.0, 20.0), sign=st.sampled_from([-1, 1]))
def test_bracket_ends_on_both_sides(root, sign):
    def excess(x):
        return sign * (root - x)

    steps = [0.5 * k for k in range(1, 100)]
    unsafe, safe = bracket(
        excess,
        0.0,
        towards_safe=[sign * step for step in steps],
        towards_unsafe=[-sign * step for step in steps],
    )
    assert excess(unsafe) > 0 >= excess(safe)
    assert abs(unsafe - safe) == 0.5
