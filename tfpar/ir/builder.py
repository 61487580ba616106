"""Building graphs op by op, with the shapes and attributes that TensorFlow needs.

Used for decompositions, local ops and reshards: a small set of well-known ops, each with
its static result shape.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from tfpar.ir.graph import DType, Graph, Op, Shape, Tensor

_COMPARISONS = frozenset(
    {"Less", "LessEqual", "Greater", "GreaterEqual", "Equal", "NotEqual", "LogicalAnd", "LogicalOr"}
)


class GraphBuilder:
    """Appends ops to `graph`, under unique names below the scope given to each call.

    `name` is the scope that new ops are put under; set it before emitting.

    Args:
        rank: where shapes differ between ranks, the one whose shapes those of tensors are.
    """

    def __init__(self, graph: Graph | None = None, name: str = "op", rank: int = 0) -> None:
        self.graph = graph if graph is not None else Graph()
        self.name = name
        self.rank = rank
        self._used: dict[str, int] = {}

    def unique_name(self, base: str) -> str:
        name, count = base, self._used.get(base, 0)
        while name in self._used:
            name = f"{base}_{count}"
            count += 1
        self._used[base] = max(count, 1)
        self._used.setdefault(name, 1)
        return name

    def emit(
        self,
        op_type: str,
        inputs: Sequence[Tensor],
        outputs: Sequence[tuple[tuple[int, ...], str]],
        attrs: dict[str, Any] | None = None,
        name: str | None = None,
        control: Sequence[Op] = (),
        stateful: bool = False,
    ) -> Op:
        """Append an op; `outputs` are (shape, dtype) pairs."""
        base = name if name is not None else f"{self.name}/{op_type}"
        op = Op(self.unique_name(base), op_type, inputs, attrs, control, stateful)
        for shape, dtype in outputs:
            op.add_output(None if shape is None else tuple(shape), dtype)
        self.graph.ops.append(op)
        return op

    def one(
        self,
        op_type: str,
        inputs: Sequence[Tensor],
        shape: Shape,
        dtype: str,
        attrs: dict[str, Any] | None = None,
    ) -> Tensor:
        """Emit an op with one output; see `emit`."""
        return self.emit(op_type, inputs, [(shape, dtype)], attrs).outputs[0]

    # --- sources -----------------------------------------------------------------

    def placeholder(self, like: Tensor, name: str) -> Tensor:
        """Add an input of the graph with the shape and dtype of `like`."""
        attrs = {"dtype": DType(like.dtype)}
        op = self.emit("Placeholder", (), [(like.shape, like.dtype)], attrs, name=name)
        self.graph.inputs.append(op.outputs[0])
        return op.outputs[0]

    def const(self, value: Any, dtype: str | None = None) -> Tensor:
        array = np.asarray(value) if dtype is None else np.asarray(value, numpy_dtype(dtype))
        name = dtype or array.dtype.name
        attrs = {"value": array, "dtype": DType(name)}
        return self.one("Const", (), array.shape, name, attrs)

    def per_rank(self, values: Sequence[np.ndarray], dtype: str | None = None) -> Tensor:
        """Emit a constant that differs between ranks; plain where it does not."""
        arrays = [np.asarray(v) for v in values]
        if all(np.array_equal(a, arrays[0]) for a in arrays[1:]):
            return self.const(arrays[0], dtype)
        name = dtype or arrays[0].dtype.name
        attrs = {"values": arrays, "dtype": DType(name)}
        return self.one("RankConst", (), arrays[self.rank].shape, name, attrs)

    # --- layout ------------------------------------------------------------------

    def shape_const(self, shape: Sequence[int]) -> Tensor:
        return self.const(np.array(shape, np.int32))

    def fill(self, shape: Sequence[int], value: Tensor) -> Tensor:
        """Emit a tensor with the scalar `value` everywhere."""
        attrs = {"T": DType(value.dtype), "index_type": DType("int32")}
        return self.one("Fill", (self.shape_const(shape), value), shape, value.dtype, attrs)

    def reshape(self, x: Tensor, shape: Sequence[int | None]) -> Tensor:
        if tuple(shape) == x.shape:
            return x
        attrs = {"T": DType(x.dtype), "Tshape": DType("int32")}
        sizes = self.shape_const([-1 if n is None else n for n in shape])
        return self.one("Reshape", (x, sizes), shape, x.dtype, attrs)

    def transpose(self, x: Tensor, perm: Sequence[int]) -> Tensor:
        shape = [x.shape[p] for p in perm]
        attrs = {"T": DType(x.dtype), "Tperm": DType("int32")}
        return self.one("Transpose", (x, self.shape_const(perm)), shape, x.dtype, attrs)

    def slice(self, x: Tensor, begin: Tensor | Sequence[int], size: Sequence[int]) -> Tensor:
        if not isinstance(begin, Tensor):
            begin = self.shape_const(begin)
        attrs = {"T": DType(x.dtype), "Index": DType("int32")}
        sizes = self.shape_const([-1 if n is None else n for n in size])
        return self.one("Slice", (x, begin, sizes), size, x.dtype, attrs)

    def pad(
        self, x: Tensor, after: Sequence[int], value: Any = None, before: Sequence[int] = ()
    ) -> Tensor:
        """Pad at the end of each dimension, with zeros unless `value` is given.

        Args:
            before: pad at its start too.
        """
        rows = [*zip(before or [0] * len(after), after, strict=True)]
        if not any(map(any, rows)):
            return x
        shape = [n + sum(row) for n, row in zip(x.shape, rows, strict=True)]
        paddings = self.const(np.array(rows, np.int32))
        attrs = {"T": DType(x.dtype), "Tpaddings": DType("int32")}
        if value is None and x.dtype != "bool":
            return self.one("Pad", (x, paddings), shape, x.dtype, attrs)
        fill = self.const(False if value is None else value, x.dtype)
        return self.one("PadV2", (x, paddings, fill), shape, x.dtype, attrs)

    def take(self, x: Tensor, index: Tensor, dim: int) -> Tensor:
        """Emit the entries of `x` along `dim` at `index`, a vector."""
        shape = list(x.shape)
        shape[dim] = index.shape[0]
        attrs = {
            "Tparams": DType(x.dtype),
            "Tindices": DType(index.dtype),
            "Taxis": DType("int32"),
            "batch_dims": 0,
        }
        inputs = (x, index, self.const(dim, "int32"))
        return self.one("GatherV2", inputs, shape, x.dtype, attrs)

    def concat(self, parts: Sequence[Tensor], dim: int) -> Tensor:
        if len(parts) == 1:
            return parts[0]
        shape = list(parts[0].shape)
        shape[dim] = sum(p.shape[dim] for p in parts)
        attrs = {"T": DType(parts[0].dtype), "N": len(parts), "Tidx": DType("int32")}
        inputs = (*parts, self.const(np.int32(dim)))
        return self.one("ConcatV2", inputs, shape, parts[0].dtype, attrs)

    def expand_dims(self, x: Tensor, dim: int) -> Tensor:
        shape = list(x.shape)
        shape.insert(dim if dim >= 0 else dim + len(shape) + 1, 1)
        return self.reshape(x, shape)

    # --- arithmetic --------------------------------------------------------------

    def cast(self, x: Tensor, dtype: str) -> Tensor:
        if x.dtype == dtype:
            return x
        attrs = {"SrcT": DType(x.dtype), "DstT": DType(dtype), "Truncate": False}
        return self.one("Cast", (x,), x.shape, dtype, attrs)

    def unary(self, op_type: str, x: Tensor) -> Tensor:
        attrs = {} if op_type == "LogicalNot" else {"T": DType(x.dtype)}
        return self.one(op_type, (x,), x.shape, x.dtype, attrs)

    def binary(self, op_type: str, x: Tensor, y: Tensor) -> Tensor:
        """Emit a broadcasting op (`AddV2`, `Mul`, `Less`, ...); comparisons give bool."""
        shape = _broadcast(x.shape, y.shape)
        logical = op_type in ("LogicalAnd", "LogicalOr")
        attrs: dict[str, Any] = {} if logical else {"T": DType(x.dtype)}
        if op_type in ("Equal", "NotEqual"):
            attrs["incompatible_shape_error"] = True
        dtype = "bool" if op_type in _COMPARISONS else x.dtype
        return self.one(op_type, (x, y), shape, dtype, attrs)

    def select(self, condition: Tensor, x: Tensor, y: Tensor) -> Tensor:
        shape = _broadcast(condition.shape, x.shape, y.shape)
        return self.one("SelectV2", (condition, x, y), shape, x.dtype, {"T": DType(x.dtype)})

    def reduce(
        self, op_type: str, x: Tensor, dims: Sequence[int], keep_dims: bool = False
    ) -> Tensor:
        """Emit `Sum`, `Max`, `Min`, `Prod`, `Mean`, `Any` or `All` over `dims`."""
        at = {d % len(x.shape) for d in dims}
        shape = [1 if d in at else n for d, n in enumerate(x.shape) if keep_dims or d not in at]
        attrs: dict[str, Any] = {"Tidx": DType("int32"), "keep_dims": keep_dims}
        if op_type not in ("Any", "All"):
            attrs["T"] = DType(x.dtype)
        return self.one(op_type, (x, self.shape_const(sorted(at))), shape, x.dtype, attrs)

    def mask(self, x: Tensor, keep: Tensor, dim: int, fill: Any) -> Tensor:
        """Emit `x` where the boolean vector `keep` along `dim` holds, else `fill`."""
        shape = [1] * len(x.shape)
        shape[dim] = -1
        shape[dim] = keep.shape[0]
        return self.select(self.reshape(keep, shape), x, self.const(fill, x.dtype))


def numpy_dtype(dtype: str) -> np.dtype:
    """Return the numpy dtype of a TensorFlow dtype name; bfloat16 needs `ml_dtypes`."""
    if dtype in ("bfloat16", "float8_e5m2", "float8_e4m3fn"):
        import ml_dtypes

        narrow: np.dtype = np.dtype(getattr(ml_dtypes, dtype))
        return narrow
    return np.dtype({"half": "float16", "string": "object"}.get(dtype, dtype))


def neutral(reduction: str, dtype: str) -> Any:
    """Return the value that leaves `reduction` unchanged."""
    if reduction in ("sum", "any"):
        return 0
    if reduction in ("prod", "all"):
        return 1
    kind = numpy_dtype(dtype)
    lowest = reduction == "max"
    if kind.kind in "iu":
        info = np.iinfo(kind)
        return info.min if lowest else info.max
    return -np.inf if lowest else np.inf


def _broadcast(*shapes: Shape) -> tuple[Any, ...]:
    """The shape of broadcast operands; scalars go with dims of unknown size."""
    ranked = [s for s in shapes if s]
    if len(set(ranked)) == 1:
        return ranked[0]
    return np.broadcast_shapes(*shapes)
