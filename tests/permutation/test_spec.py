"""What a PermutationSpec says about itself: fractions that move, tables."""

from __future__ import annotations

import pytest
from helpers.zoo import (
    VARIED,
    spec_of,
)


@pytest.mark.parametrize("name", VARIED)
def test_the_two_tables_say_the_same_and_the_description_names_every_group(name):
    spec = spec_of(name)
    forth = {(group, key, axis) for group, axes in spec.perm_to_axes.items() for key, axis in axes}
    back = {
        (group, key, axis)
        for key, axes in spec.axes_to_perm.items()
        for axis, groups in enumerate(axes)
        for group in groups
    }
    assert forth == back
    assert all(group in spec.describe() for group in spec.perm_to_axes)
