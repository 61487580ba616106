"""Tensor lists and optionals in a straight line, by the ops that Python wrappers seldom make."""

import numpy as np
import pytest
import tensorflow as tf

from tests.partitioned import sweep, was_split

raw = tf.raw_ops
rng = np.random.default_rng(0)


def f(*shape):
    return rng.normal(size=shape).astype("float32")


def listed(x):
    """The rows of `x` as a list."""
    return raw.TensorListFromTensor(tensor=x, element_shape=x.shape[1:])


def stacked(handle, element, length):
    return raw.TensorListStack(
        input_handle=handle, element_shape=element, element_dtype=tf.float32, num_elements=length
    )


@pytest.mark.slow
def test_lists_joined_and_resized():
    def function(x, y):
        element = x.shape[1:]
        both = raw.TensorListConcatLists(
            input_a=listed(x), input_b=listed(y), element_dtype=tf.float32
        )
        longer = raw.TensorListResize(input_handle=listed(x), size=4)
        shorter = raw.TensorListResize(input_handle=both, size=3)
        longer = raw.TensorListSetItem(input_handle=longer, index=3, item=y[0])
        return [
            stacked(both, element, 5),
            stacked(longer, element, 4),
            stacked(shorter, element, 3),
            *(raw.TensorListLength(input_handle=h) for h in (both, longer, shorter)),
        ]

    runs = sweep(function, [f(2, 5, 4), f(3, 5, 4)], trials=3)
    for op_type in ("TensorListConcatLists", "TensorListResize"):
        assert was_split(runs, op_type, "d0") and was_split(runs, op_type, "d1"), op_type


def test_lists_filled_at_indices():
    def function(x, y):
        element, at = x.shape[1:], tf.constant([2, 0, 3])
        old = raw.TensorListScatter(tensor=x, indices=at, element_shape=element)
        new = raw.TensorListScatterV2(tensor=x, indices=at, element_shape=element, num_elements=5)
        into = raw.TensorListScatterIntoExistingList(input_handle=listed(y), tensor=x, indices=at)
        return [stacked(h, element, n) for h, n in ((old, 4), (new, 5), (into, 4))]

    runs = sweep(function, [f(3, 5, 4), f(4, 5, 4)], trials=3)
    for kind in ("", "V2", "IntoExistingList"):
        op_type = "TensorListScatter" + kind
        assert was_split(runs, op_type, "d0") and was_split(runs, op_type, "d1"), op_type


def test_what_a_list_and_an_optional_say_of_themselves():
    def function(x):
        handle, held = listed(x), raw.OptionalFromValue(components=[x])
        value = raw.OptionalGetValue(
            optional=held, output_types=[tf.float32], output_shapes=[x.shape]
        )[0]
        there = raw.OptionalHasValue(optional=held)
        return [
            raw.TensorListElementShape(input_handle=handle, shape_type=tf.int32),
            raw.TensorListLength(input_handle=handle),
            stacked(handle, x.shape[1:], 3),
            there,
            raw.OptionalHasValue(optional=raw.OptionalNone()),
            value * tf.cast(there, x.dtype),
        ]

    runs = sweep(function, [f(3, 5, 4)], trials=3)
    assert all(was_split(runs, "OptionalHasValue", f"d{d}") for d in range(3))


def test_a_list_of_lists_is_one_of_scalars():
    """Unlike that of a list of tensors, its element shape is not known beforehand."""
    scalar = np.zeros(0, "int32")

    def function(x):
        outer = raw.TensorListReserve(
            element_shape=scalar, num_elements=2, element_dtype=tf.variant
        )
        outer = raw.TensorListSetItem(input_handle=outer, index=1, item=listed(x))
        shape = raw.TensorListElementShape(input_handle=outer, shape_type=tf.int32)
        other = raw.TensorListReserve(element_shape=shape, num_elements=2, element_dtype=tf.variant)
        other = raw.TensorListSetItem(input_handle=other, index=0, item=listed(x))
        held = raw.TensorListGetItem(
            input_handle=other, index=0, element_shape=scalar, element_dtype=tf.variant
        )
        return shape, stacked(held, x.shape[1:], 3)

    runs = sweep(function, [f(3, 5, 4)], trials=3)
    assert was_split(runs, "TensorListElementShape", "d1")


def test_loops_over_lists_that_grow():
    def function(x):
        handle = raw.TensorListConcatLists(
            input_a=listed(x), input_b=listed(x), element_dtype=tf.float32
        )

        def body(i, handle):
            row = raw.TensorListGetItem(
                input_handle=handle, index=i, element_shape=x.shape[1:], element_dtype=tf.float32
            )
            handle = raw.TensorListResize(input_handle=handle, size=i + 7)
            return i + 1, raw.TensorListSetItem(input_handle=handle, index=i + 6, item=2 * row)

        _, handle = tf.while_loop(lambda i, _: i < 2, body, (0, handle))
        return stacked(handle, x.shape[1:], 8)

    sweep(function, [f(3, 5, 4)], trials=2)
