"""Attribute values as text: exact for whatever an attribute may hold."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from tests.ir.text.same import same_value
from tfpar.ir.graph import DType, FunctionRef, ShapeAttr, UnknownShape
from tfpar.ir.text.line import LineCursor
from tfpar.ir.text.values import MOST_INLINE, value_text

sizes = st.integers(-1, 2**40)
plain = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(2**63), 2**64),
    st.floats(),
    st.binary(max_size=8),
    st.text(max_size=8),
    st.sampled_from(["float32", "half", "float8_e4m3fn", "resource"]).map(DType),
    st.lists(sizes, max_size=4).map(ShapeAttr),
    st.just(UnknownShape()),
    st.sampled_from(["", "body#2", "while/cond_body_3", "odd name", 'a"b']).map(FunctionRef),
    arrays.arrays(
        st.one_of(
            arrays.boolean_dtypes(),
            arrays.integer_dtypes(endianness="<"),
            arrays.unsigned_integer_dtypes(endianness="<"),
            arrays.floating_dtypes(endianness="<", sizes=(16, 32, 64)),
            arrays.complex_number_dtypes(endianness="<"),
        ),
        arrays.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=4),
    ),
)
values = st.one_of(plain, st.lists(plain, max_size=3), st.lists(plain, max_size=3).map(tuple))


def read(text: str):
    line = LineCursor(text, 1)
    value = line.value()
    line.end()
    return value


@pytest.mark.slow
@settings(max_examples=400, deadline=None)
@given(values)
def test_a_value_reads_back(value):
    text = value_text(value)
    assert "\n" not in text
    assert same_value(read(text), value), text


@pytest.mark.parametrize(
    "value",
    [
        np.array([0.1, -0.0, np.inf], ml_dtypes.bfloat16),
        np.full((4, 5), 0.3, ml_dtypes.float8_e4m3fn),
        np.array([[b"a b", b"\xff>"], [b"", b'"']], object),
        np.array(["a", "long"]),
        np.array([b"a", b"long"]),
        np.int64(3),
        np.float32(0.1),
        np.bool_(True),
        np.frombuffer(b"\x01\x00\xc0\x7f", np.float32),  # a NaN that no decimal stands for
    ],
)
def test_values_of_rare_types_read_back(value):
    assert same_value(read(value_text(value)), value), value_text(value)


def test_small_arrays_are_legible_and_large_ones_compact():
    assert value_text(np.array([1, 2], np.int32)) == "dense<int32[2]: 1 2>"
    assert value_text(np.zeros((64, 64), np.float32)) == "dense<float32[64,64]: all 0.0>"
    mask = np.tril(np.ones((64, 64), bool))
    assert mask.size > MOST_INLINE
    assert len(value_text(mask)) < 300


def test_what_no_attribute_holds_is_refused():
    with pytest.raises(TypeError, match="object"):
        value_text(object())
