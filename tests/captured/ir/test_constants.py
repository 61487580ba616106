"""Every folder gives what TensorFlow's own op gives."""

import random

import numpy as np
import pytest
import tensorflow as tf

from tfpar.ir import Constants, GraphBuilder, Variable
from tfpar.ir.constants import _FOLDERS, _FROM_SHAPE
from tfpar.tf.interop import convert_func_graph

I32, I64 = np.int32, np.int64
M = np.arange(12, dtype=I32).reshape(3, 4)
V = np.array([5, -3, 0, 7], I32)
W = np.array([2, -2, 3, -7], I32)
B = np.array([True, False, True, False])


def i32(*values):
    return np.array(values, I32)


def case(names: str, *values, **attrs) -> dict:
    return {**dict(zip(names.split(), values, strict=True)), **attrs}


def strided(x, begin, end, strides=None, **masks) -> dict:
    strides = strides or [1] * len(begin)
    return case("input begin end strides", x, i32(*begin), i32(*end), i32(*strides), **masks)


def _pairs(x, y):
    return [case("x y", x, y), case("x y", x.reshape(4, 1), y[:3])]


def _reductions(x):
    return [
        case("input axis", x, i32(0)),
        case("input axis", x, I32(-1), keep_dims=True),
        case("input axis", x, i32(1, 0)),
        case("input axis", x, i32()),
        case("input axis", x[0, 0], i32()),
    ]


CASES: dict[str, list[dict]] = {
    "Shape": [
        {"input": np.zeros((2, 3), "f")},
        {"input": np.float32(1)},
        {"input": M, "out_type": tf.int64},
    ],
    "ShapeN": [{"input": [M, M[0]]}],
    "Size": [{"input": np.zeros((2, 3), "f")}, {"input": M, "out_type": tf.int64}],
    "Rank": [{"input": np.zeros((2, 3), "f")}],
    "Identity": [{"input": M}],
    "StopGradient": [{"input": B}],
    "Cast": [
        {"x": M, "DstT": tf.int64},
        {"x": V, "DstT": tf.bool},
        {"x": B, "DstT": tf.int32},
        {"x": i32(300, -1), "DstT": tf.uint8},
        {"x": np.array([1.7, -1.7, 0], "f"), "DstT": tf.int32},
        {"x": np.array([0.2, 0], "f"), "DstT": tf.bool},
    ],
    "EnsureShape": [{"input": M, "shape": [3, None]}],
    "Pack": [
        {"values": [V, W]},
        {"values": [V, W], "axis": 1},
        {"values": [V, W], "axis": -1},
        {"values": [I32(3), I32(4)]},
    ],
    "ConcatV2": [case("values axis", [M, M[:2]], I32(0)), case("values axis", [M, M], I32(-1))],
    "StridedSlice": [
        strided(M, [0], [1], shrink_axis_mask=1),
        strided(M, [-1], [0], shrink_axis_mask=1),
        strided(M, [1, 0], [3, 4], [1, 2]),
        strided(M, [2, 3], [0, 0], [-1, -2]),
        strided(M, [0, 1], [0, 2], end_mask=1),
        strided(M, [5, 0], [9, 9], begin_mask=1),
        strided(M, [0, 0, 1], [0, 0, 2], new_axis_mask=2),
        strided(V, [-1], [-9], [-1]),
        strided(M, [0, 1], [0, 2], ellipsis_mask=1, shrink_axis_mask=2),
        strided(V, [9], [2]),
    ],
    "Slice": [
        case("input begin size", M, i32(1, 0), i32(-1, 2)),
        case("input begin size", M, i32(1, 3), i32(2, -1)),
        case("input begin size", V, i32(4), i32(0)),
    ],
    "GatherV2": [
        case("params indices axis", M, i32(2, 0), I32(0)),
        case("params indices axis", M, np.array([[1, 1]], I64), I32(-1)),
        case("params indices axis", V, I32(2), I32(0)),
        case("params indices axis", M, i32(2, 0, 1)[:, None], I32(1), batch_dims=1),
    ],
    "Reshape": [
        case("tensor shape", M, i32(2, -1)),
        case("tensor shape", M[:1, 0], i32()),
        case("tensor shape", M[:0], np.array([-1, 4], I64)),
    ],
    "ExpandDims": [case("input axis", M, I32(-1)), case("input axis", M, i32(0))],
    "Squeeze": [
        {"input": M[:1]},
        {"input": M[:1, :1], "axis": [0]},
        {"input": V},
        {"input": M[:, :1], "axis": [-1]},
    ],
    "Transpose": [case("x perm", M, i32(1, 0)), case("x perm", M[0, 0], i32())],
    "Range": [
        case("start limit delta", I32(1), I32(9), I32(3)),
        case("start limit delta", I64(3), I64(-3), I64(-2)),
    ],
    "Fill": [case("dims value", i32(2, 3), I32(7)), case("dims value", i32(), np.bool_(True))],
    **{t: _reductions(M - 4) for t in ("Prod", "Sum", "Max", "Min")},
    **{t: _reductions(M % 3 > 0) for t in ("All", "Any")},
    **{
        t: _pairs(V, W)
        for t in (
            "Add",
            "AddV2",
            "Sub",
            "Mul",
            "Maximum",
            "Minimum",
            "Equal",
            "NotEqual",
            "Less",
            "LessEqual",
            "Greater",
            "GreaterEqual",
            "FloorDiv",
            "FloorMod",
        )
    },
    **{
        t: [case("x y", B, B[::-1].copy()), case("x y", B, np.bool_(True))]
        for t in ("LogicalAnd", "LogicalOr")
    },
    "LogicalNot": [{"x": B}],
    "Neg": [{"x": V}],
    "Abs": [{"x": V}],
    "SelectV2": [case("condition t e", B, V, W), case("condition t e", B[:3, None], V, I32(1))],
    "Tile": [case("input multiples", M, i32(2, 3)), case("input multiples", V, i32(0))],
    "BroadcastTo": [case("input shape", V, i32(2, 4)), case("input shape", I32(3), i32(2, 2))],
    "InvertPermutation": [{"x": i32(2, 0, 3, 1)}],
    "BroadcastArgs": [case("s0 s1", i32(3, 1), i32(2, 1, 4)), case("s0 s1", i32(), i32(2))],
    "BroadcastGradientArgs": [case("s0 s1", i32(3, 1), i32(2, 1, 4))],
    "ConcatOffset": [
        case("concat_dim shape", I32(1), [i32(2, 3), i32(2, 5), i32(2, 1)]),
        case("concat_dim shape", I32(-1), [i32(2, 3), i32(2, 5)]),
    ],
    "DynamicStitch": [
        case("indices data", [i32(2, 0), I32(1)], [M[:2], M[2]]),
        case("indices data", [i32(0, 1), i32(1)], [V[:2], W[:1]]),
        case("indices data", [i32()], [i32()]),
    ],
    "ZerosLike": [{"x": M}, {"x": B}],
    "OnesLike": [{"x": M}, {"x": B}],
    "ReverseV2": [case("tensor axis", M, i32(0, -1)), case("tensor axis", M, i32())],
}

# Nothing is known there: the kernel decides.
UNKNOWN = [
    ("GatherV2", 3),
]


def fold(op_type: str, given: dict):
    """(constants as folded, TensorFlow's own) of each output."""

    def traced():
        tensors = {k: _as_tensors(v) for k, v in given.items()}
        return getattr(tf.raw_ops, op_type)(**tensors)

    graph = convert_func_graph(tf.function(traced).get_concrete_function().graph)
    expected = [t.numpy() for t in tf.nest.flatten(getattr(tf.raw_ops, op_type)(**given))]
    constants = Constants(graph)
    return [constants.value(t) for t in graph.outputs], expected


def _as_tensors(value):
    if isinstance(value, list) and value and isinstance(value[0], (np.ndarray, np.generic)):
        return [tf.constant(v) for v in value]
    return tf.constant(value) if isinstance(value, (np.ndarray, np.generic)) else value


def assert_equal(op_type: str, given: dict) -> None:
    got, expected = fold(op_type, given)
    for value, want in zip(got, expected, strict=True):
        assert value is not None, f"{op_type} of {given} was not folded"
        assert value.dtype == want.dtype, given
        np.testing.assert_array_equal(value, want, err_msg=f"{op_type} of {given}", strict=True)


def test_every_folder_has_a_case():
    assert set(_FOLDERS) | set(_FROM_SHAPE) == set(CASES) | {
        "VariableShape",
        "TensorListElementShape",
    }


def test_shapes_of_handles_are_those_of_their_variables():
    build = GraphBuilder()
    handle = build.emit("Placeholder", (), [((2, 3), "resource")]).outputs[0]
    build.graph.variables.append(Variable("w", (2, 3), "float32", True, handle))
    shape = build.one("VariableShape", (handle,), (2,), "int32")
    np.testing.assert_array_equal(Constants(build.graph).value(shape), [2, 3])


def test_element_shape_of_a_list_leaves_out_its_length():
    build = GraphBuilder()
    tensors = build.emit("Placeholder", (), [((7, 2, 3), "variant")]).outputs[0]
    shape = build.one("TensorListElementShape", (tensors,), (2,), "int32")
    np.testing.assert_array_equal(Constants(build.graph).value(shape), [2, 3])


@pytest.mark.slow
@pytest.mark.parametrize("op_type", sorted(CASES))
def test_folder_gives_what_tensorflow_gives(op_type):
    for number, given in enumerate(CASES[op_type]):
        if (op_type, number) in UNKNOWN:
            assert fold(op_type, given)[0] == [None]
        else:
            assert_equal(op_type, given)


def test_division_by_zero_is_left_to_the_kernel():
    @tf.function
    def divide():
        x = tf.constant(V)
        return tf.raw_ops.FloorDiv(x=x, y=x), tf.raw_ops.FloorMod(x=x, y=x)

    graph = convert_func_graph(divide.get_concrete_function().graph)
    constants = Constants(graph)
    assert [constants.value(t) for t in graph.outputs] == [None, None]


def test_random_strided_slices():
    rng = random.Random(0)
    x = np.arange(5 * 4 * 3, dtype=I32).reshape(5, 4, 3)
    for _ in range(60):
        rank = rng.randint(1, 3)
        masks = {
            name: rng.randrange(1 << rank)
            for name in ("begin_mask", "end_mask", "new_axis_mask", "shrink_axis_mask")
        }
        if rng.random() < 0.4:
            masks["ellipsis_mask"] = 1 << rng.randrange(rank)
        masks["new_axis_mask"] &= rng.randrange(1 << rank)
        begin = [rng.randint(-3, 2) for _ in range(rank)]
        end = [rng.randint(-7, 7) for _ in range(rank)]
        strides = [
            1 if masks["shrink_axis_mask"] >> i & 1 else rng.choice((-2, -1, 1, 2))
            for i in range(rank)
        ]
        assert_equal("StridedSlice", strided(x, begin, end, strides, **masks))


def test_random_broadcast_gradient_args():
    rng = random.Random(0)
    for _ in range(80):
        whole = [rng.choice((1, 2, 3)) for _ in range(rng.randint(0, 4))]
        shapes = []
        for _ in range(2):
            kept = whole[rng.randint(0, len(whole)) :]
            shapes.append(i32(*(n if rng.random() < 0.6 else 1 for n in kept)))
        assert_equal("BroadcastGradientArgs", case("s0 s1", *shapes))


def test_shape_arithmetic_of_a_chain():
    """What a flatten traced with dynamic shapes does, at a static shape."""

    @tf.function(input_signature=[tf.TensorSpec((4, 3, 5))])
    def flatten(x):
        shape = tf.raw_ops.Shape(input=x)
        rest = tf.reduce_prod(
            tf.raw_ops.StridedSlice(input=shape, begin=[1], end=[0], strides=[1], end_mask=1)
        )
        first = tf.raw_ops.StridedSlice(
            input=shape, begin=[0], end=[1], strides=[1], shrink_axis_mask=1
        )
        return tf.stack([first, rest]), tf.cast(rest, tf.float32)

    graph = convert_func_graph(flatten.get_concrete_function().graph)
    constants = Constants(graph)
    np.testing.assert_array_equal(constants.value(graph.outputs[0]), [4, 15])
    assert constants.value(graph.outputs[1]) is None  # floats are the kernel's
