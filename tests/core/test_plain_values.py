"""What is said to be plain is read back as it was without running code; the rest is named."""

import io
import math
from collections import Counter, OrderedDict

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from opacus_shuffle.core.plain_values import plain

NUMPY = [np.float64, np.float32, np.int64, np.int8, np.uint64, np.bool_, np.float16]
plain_ones = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(), st.text(), st.binary(),
    st.complex_numbers(),
    st.sampled_from(
        [torch.float64, torch.device("cpu"), torch.Size([2, 3]), Counter("abca"), {1, 2},
         bytearray(b"x")]
    ),
    st.builds(lambda kind, number: kind(number), st.sampled_from(NUMPY), st.integers(0, 100)),
    st.builds(lambda *shape: torch.zeros(shape), st.integers(0, 2), st.integers(0, 2)),
)  # fmt: skip
values = st.recursive(
    plain_ones,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.lists(inner, max_size=3).map(tuple),
        st.dictionaries(st.text() | st.integers(), inner, max_size=3),
        st.dictionaries(st.text(), inner, max_size=3).map(OrderedDict),
    ),
    max_leaves=8,
)


def again(value: object) -> object:
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


@settings(max_examples=20)
@given(values)
def test_plain_values_come_back_as_they_were(value):
    foreign: set[str] = set()
    made = plain(value, foreign)
    with np.printoptions(legacy="1.25"):  # NumPy's numbers are written as Python's
        expected = repr(value)
    assert repr(made) == expected
    if foreign:
        assert foreign == {"builtins.bytes"}  # the empty ones, which PyTorch's reader does not know
        return
    assert repr(again(made)) == expected


def test_metadata_of_a_state_dict_stays():
    state = torch.nn.Linear(2, 1).state_dict()
    assert plain(state, set())._metadata == state._metadata


@pytest.mark.parametrize(
    "value",
    [np.zeros(2), math.sin, object(), Counter, frozenset([1])],
    ids=lambda value: type(value).__name__,
)
def test_what_is_not_read_back_is_named(value):
    foreign: set[str] = set()
    plain({"mine": [value]}, foreign)
    assert foreign == {f"{type(value).__module__}.{type(value).__qualname__}"}
