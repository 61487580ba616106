"""Values that are known without running anything: constants and shape arithmetic.

Only integers and booleans are folded: shape arithmetic is exact there, while
folding floats in numpy could differ from the kernel by a rounding.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from tfpar.ir.graph import Graph, Op, Shape, Tensor

_MAX_ELEMENTS = 1 << 16
_FOLDABLE = frozenset({"int32", "int64", "bool", "int8", "int16", "uint8"})

_Folder = Callable[[list[np.ndarray], dict[str, Any]], Any]
"""From the values of an op's inputs and its attributes to the value of its output, or a list of
those of several; None where it cannot be told."""

_OfTwo = Callable[[np.ndarray, np.ndarray], Any]


class Constants:
    """Memoised constant evaluation over one graph.

    Args:
        known: values of tensors (arguments of a function body) that the graph does not tell.
    """

    def __init__(self, graph: Graph, known: Mapping[Tensor, np.ndarray] | None = None) -> None:
        self._shapes = {v.handle: v.shape for v in graph.variables}
        self._values: dict[Tensor, np.ndarray | None] = dict(known or {})

    def value(self, tensor: Tensor) -> np.ndarray | None:
        """Return the constant value of `tensor`, or None. Large constants come back too."""
        if tensor.op.type == "Const":
            value: np.ndarray = tensor.op.attrs["value"]
            return value
        if tensor.dtype not in _FOLDABLE or tensor.num_elements > _MAX_ELEMENTS:
            return None
        if tensor not in self._values:
            self._evaluate(tensor.op)
        return self._values[tensor]

    def _evaluate(self, op: Op) -> None:
        # Iterative: shape arithmetic can be a long chain.
        stack = [op]
        while stack:
            top = stack[-1]
            if all(t in self._values for t in top.outputs):
                stack.pop()
                continue
            pending = [
                t.op
                for t in top.inputs
                if _is_folder(top)
                and t.dtype in _FOLDABLE
                and t.num_elements <= _MAX_ELEMENTS
                and t.op.type != "Const"
                and t not in self._values
            ]
            if pending:
                stack.extend(pending)
                continue
            stack.pop()
            values = self._fold(top)
            for tensor, value in zip(top.outputs, values, strict=True):
                self._values[tensor] = value

    def _fold(self, op: Op) -> list[np.ndarray | None]:
        unknown: list[np.ndarray | None] = [None] * len(op.outputs)
        if op.type in _FROM_SHAPE:
            shapes = [self._shapes.get(t, t.shape) for t in op.inputs]
            if op.type == "TensorListElementShape" and shapes[0] is not None:
                shapes[0] = shapes[0][1:]
            if any(s is None or None in s for s in shapes):
                return unknown
            results = _FROM_SHAPE[op.type](shapes)
        elif op.type in _FOLDERS:
            inputs: list[Any] = [
                t.op.attrs["value"] if t.op.type == "Const" else self._values.get(t)
                for t in op.inputs
            ]
            if any(v is None for v in inputs):
                return unknown
            results = _FOLDERS[op.type](inputs, op.attrs)
        else:
            return unknown
        if not isinstance(results, list):
            results = [results]
        return [
            np.asarray(r, dtype=_numpy_dtype(t.dtype))
            if r is not None and t.dtype in _FOLDABLE
            else None
            for r, t in zip(results, op.outputs, strict=True)
        ]


def _is_folder(op: Op) -> bool:
    return op.type in _FOLDERS


def _numpy_dtype(dtype: str) -> np.dtype:
    return np.dtype("bool" if dtype == "bool" else dtype)


_FROM_SHAPE: dict[str, Callable[[list[Shape]], Any]] = {
    "Shape": lambda s: np.array(s[0]),
    "ShapeN": lambda s: [np.array(x) for x in s],
    "Size": lambda s: np.prod(s[0], dtype=np.int64),
    "Rank": lambda s: len(s[0]),
    "VariableShape": lambda s: np.array(s[0]),
    "TensorListElementShape": lambda s: np.array(s[0]),
}


def _strided_slice(v: list[np.ndarray], attrs: dict[str, Any]) -> np.ndarray:
    x, begin, end, strides = v
    spec: list[Any] = []
    for i in range(len(begin)):
        bit = 1 << i
        if attrs.get("ellipsis_mask", 0) & bit:
            spec.append(Ellipsis)
        elif attrs.get("new_axis_mask", 0) & bit:
            spec.append(np.newaxis)
        elif attrs.get("shrink_axis_mask", 0) & bit:
            spec.append(int(begin[i]))
        else:
            lo = None if attrs.get("begin_mask", 0) & bit else int(begin[i])
            hi = None if attrs.get("end_mask", 0) & bit else int(end[i])
            spec.append(slice(lo, hi, int(strides[i])))
    part: np.ndarray = x[tuple(spec)]
    return part


def _reduce(function: Callable[..., Any]) -> _Folder:
    def fold(v: list[np.ndarray], attrs: dict[str, Any]) -> np.ndarray:
        axes = tuple(int(a) for a in np.atleast_1d(v[1]))
        if v[0].ndim == 0:
            return v[0]
        reduced: np.ndarray = function(v[0], axis=axes, keepdims=attrs.get("keep_dims", False))
        return reduced

    return fold


def _gather(v: list[np.ndarray], attrs: dict[str, Any]) -> np.ndarray | None:
    if attrs.get("batch_dims", 0):
        return None
    return np.take(v[0], v[1], axis=int(v[2]) if len(v) > 2 else 0)


def broadcast_gradient_args(v: list[np.ndarray], _: dict[str, Any]) -> list[np.ndarray]:
    """Return the axes over which each side of a broadcasting op sums its gradient."""
    a, b = (list(map(int, x)) for x in v)
    if a == b:
        return [np.array([], np.int64)] * 2
    rank = max(len(a), len(b))
    a, b = [1] * (rank - len(a)) + a, [1] * (rank - len(b)) + b
    # TensorFlow lists a dimension of size 1 on both sides for both.
    ra = [i for i in range(rank) if a[i] == 1 and (b[i] != 1 or len(v[0]) < rank - i)]
    rb = [i for i in range(rank) if b[i] == 1 and (a[i] != 1 or len(v[1]) < rank - i)]
    both = [i for i in range(rank) if a[i] == 1 and b[i] == 1]
    return [np.array(sorted({*ra, *both})), np.array(sorted({*rb, *both}))]


def _concat_offset(v: list[np.ndarray], _: dict[str, Any]) -> list[np.ndarray]:
    axis, shapes = int(v[0]), v[1:]
    out, total = [], 0
    for shape in shapes:
        offset = np.zeros_like(shape)
        offset[axis] = total
        total += int(shape[axis])
        out.append(offset)
    return out


def _dynamic_stitch(v: list[np.ndarray], _: dict[str, Any]) -> np.ndarray:
    half = len(v) // 2
    size = max((int(i.max()) for i in v[:half] if i.size), default=-1) + 1
    out = np.zeros((size, *v[half].shape[v[0].ndim :]), v[half].dtype)
    for index, data in zip(v[:half], v[half:], strict=True):
        out[index] = data
    return out


def _binary(function: _OfTwo) -> _Folder:
    return lambda v, _: function(v[0], v[1])


def _guarded(function: _OfTwo) -> _Folder:
    """Integer division that leaves a zero divisor to the kernel (which raises)."""
    return lambda v, _: function(v[0], v[1]) if np.all(v[1] != 0) else None


_FOLDERS: dict[str, _Folder] = {
    "Identity": lambda v, _: v[0],
    "StopGradient": lambda v, _: v[0],
    "Cast": lambda v, _: v[0],
    "EnsureShape": lambda v, _: v[0],
    "Pack": lambda v, a: np.stack(v, axis=a.get("axis", 0)),
    "ConcatV2": lambda v, _: np.concatenate(v[:-1], axis=int(v[-1])),
    "StridedSlice": _strided_slice,
    "Slice": lambda v, _: v[0][
        tuple(
            slice(int(b), None if s == -1 else int(b + s)) for b, s in zip(v[1], v[2], strict=True)
        )
    ],
    "GatherV2": _gather,
    "Reshape": lambda v, _: v[0].reshape(v[1]),
    "ExpandDims": lambda v, _: np.expand_dims(v[0], int(v[1].reshape(()))),
    "Squeeze": lambda v, a: np.squeeze(v[0], axis=tuple(a.get("squeeze_dims") or ()) or None),
    "Transpose": lambda v, _: np.transpose(v[0], v[1]),
    "Range": lambda v, _: np.arange(*map(int, v)),
    "Fill": lambda v, _: np.full(v[0], v[1]),
    "Prod": _reduce(np.prod),
    "Sum": _reduce(np.sum),
    "Max": _reduce(np.max),
    "Min": _reduce(np.min),
    "All": _reduce(np.all),
    "Any": _reduce(np.any),
    "Add": _binary(np.add),
    "AddV2": _binary(np.add),
    "Sub": _binary(np.subtract),
    "Mul": _binary(np.multiply),
    "Maximum": _binary(np.maximum),
    "Minimum": _binary(np.minimum),
    "FloorDiv": _guarded(np.floor_divide),
    "FloorMod": _guarded(np.mod),
    "Equal": _binary(np.equal),
    "NotEqual": _binary(np.not_equal),
    "Less": _binary(np.less),
    "LessEqual": _binary(np.less_equal),
    "Greater": _binary(np.greater),
    "GreaterEqual": _binary(np.greater_equal),
    "LogicalAnd": _binary(np.logical_and),
    "LogicalOr": _binary(np.logical_or),
    "LogicalNot": lambda v, _: np.logical_not(v[0]),
    "Neg": lambda v, _: -v[0],
    "Abs": lambda v, _: np.abs(v[0]),
    "SelectV2": lambda v, _: np.where(*v),
    "Tile": lambda v, _: np.tile(v[0], v[1]),
    "BroadcastTo": lambda v, _: np.broadcast_to(v[0], v[1]),
    "InvertPermutation": lambda v, _: np.argsort(v[0]),
    "BroadcastArgs": lambda v, _: np.array(np.broadcast_shapes(tuple(v[0]), tuple(v[1]))),
    "BroadcastGradientArgs": broadcast_gradient_args,
    "ConcatOffset": _concat_offset,
    "DynamicStitch": _dynamic_stitch,
    "ZerosLike": lambda v, _: np.zeros_like(v[0]),
    "OnesLike": lambda v, _: np.ones_like(v[0]),
    "ReverseV2": lambda v, _: np.flip(v[0], tuple(map(int, v[1]))),
}
