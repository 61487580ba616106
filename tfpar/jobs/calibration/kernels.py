"""Kernels to time by themselves: single ops whose time does not follow from FLOPs and bytes.

A CPU's reductions, selections and transposes are some times slower than the memory that feeds them;
a GPU's mostly are not. What an op takes beyond what its device lets expect becomes a rate of its
type (`Device.entries_per_s`); those that take no longer have none.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import Any

from tfpar.ir.builder import GraphBuilder
from tfpar.ir.graph import DType, Op, Tensor, itemsize
from tfpar.jobs.calibration.programs import Emit, elementwise, product

FUNCTIONS = ("Exp", "Tanh", "Log", "Sigmoid")
"""Whose rate is `Device.functions_per_s`."""

_COLUMNS = 256
_HEADS, _LENGTH, _DEPTH = 4, 64, 64  # of attention

Shapes = Sequence[tuple[int, ...]]


@dataclasses.dataclass(frozen=True)
class Kernel:
    """An op to be timed.

    Attributes:
        op_type: the type that its rate is listed under.
        emit: appends it.
        shapes, dtypes: of its operands.
        result: the shape of what it makes.
        counted: how many entries its rate is about (`cost.op_compute.entries`); 0: the most that an
            operand or the result has.
        without: what it would be without what is slow in it, and the operands of that; None: as
            fast as memory.
    """

    op_type: str
    emit: Emit
    shapes: Shapes
    result: tuple[int, ...]
    dtypes: Sequence[str] = ()
    counted: int = 0
    without: tuple[Emit, Shapes] | None = None

    @property
    def all_dtypes(self) -> Sequence[str]:
        return self.dtypes or ["float32"] * len(self.shapes)

    @property
    def entries(self) -> int:
        return self.counted or max(map(math.prod, (*self.shapes, self.result)))

    @property
    def moved_bytes(self) -> int:
        """Bytes that the kernel reads and writes."""
        operands = zip(self.shapes, self.all_dtypes, strict=True)
        read = sum(math.prod(shape) * itemsize(dtype) for shape, dtype in operands)
        return read + math.prod(self.result) * itemsize("float32")


def kernels_of(count: int, side: int) -> list[Kernel]:
    """List all kernels that are measured.

    Args:
        count: entries of operands, about.
        side: of the longer sides of a matrix product.
    """
    rows = count // _COLUMNS
    whole, row, column = (rows, _COLUMNS), (1, _COLUMNS), (rows, 1)
    unary = (*FUNCTIONS, "Erfc", "Softmax")
    return [
        *(Kernel(op_type, elementwise(op_type), [whole], whole) for op_type in unary),
        Kernel("Sum", _with("Sum", row, 0, "Tidx", keep_dims=True), [whole], row),
        Kernel("Sum", _with("Sum", column, 1, "Tidx", keep_dims=True), [whole], column),
        Kernel("BiasAddGrad", _made("BiasAddGrad", row[1:], data_format="NHWC"), [whole], row[1:]),
        Kernel("Tile", _with("Tile", whole, row, "Tmultiples"), [column], whole),
        Kernel("Transpose", _with("Transpose", whole[::-1], (1, 0), "Tperm"), [whole], whole[::-1]),
        Kernel(
            "SelectV2",
            _made("SelectV2", whole),
            [whole] * 3,
            whole,
            ["bool", "float32", "float32"],
        ),
        Kernel("GatherV2", _gather, [whole, (rows,)], whole, ["float32", "int32"]),
        Kernel(
            "UnsortedSegmentSum",
            _with("UnsortedSegmentSum", whole, rows, "Tnumsegments", Tindices=DType("int32")),
            [whole, (rows,)],
            whole,
            ["float32", "int32"],
        ),
        *(_transposed_product(side // 8, depth, side) for depth in (side, 4 * side)),
        _attention(count),
    ]


def _transposed_product(rows: int, depth: int, columns: int) -> Kernel:
    """Make the product of a thin batch's gradient with the transposed kernel of its layer."""
    return Kernel(
        "MatMul",
        functools.partial(product, transposed=True),
        [(rows, depth), (columns, depth)],
        (rows, columns),
        counted=columns * depth,
        without=(product, [(rows, depth), (depth, columns)]),
    )


def _attention(count: int) -> Kernel:
    """Make the einsum of queries and keys of several heads, which permutes operands and result."""
    batch = max(1, count // (_HEADS * _LENGTH * _DEPTH))
    given = (batch, _LENGTH, _HEADS, _DEPTH)
    made = (batch, _HEADS, _LENGTH, _LENGTH)
    plain = (batch * _HEADS, _LENGTH, _DEPTH), (batch * _HEADS, _DEPTH, _LENGTH)
    return Kernel(
        "Einsum",
        _made("Einsum", made, N=2, equation="aecd,abcd->acbe"),
        [given] * 2,
        made,
        counted=2 * math.prod(given) + math.prod(made),
        without=(_made("BatchMatMulV2", (batch * _HEADS, _LENGTH, _LENGTH)), plain),
    )


def _made(op_type: str, result: tuple[int, ...], **attrs: Any) -> Emit:
    """Return an emitter of an op that has no operands but those given."""

    def emit(build: GraphBuilder, operands: Sequence[Tensor], after: Sequence[Op]) -> Op:
        types = {"T": DType("float32"), **attrs}
        return build.emit(op_type, operands, [(result, "float32")], types, control=after)

    return emit


def _with(op_type: str, result: tuple[int, ...], constant: Any, type_of: str, **attrs: Any) -> Emit:
    """Return an emitter of an op whose last operand is a constant of int32, typed by `type_of`."""
    emit_made = _made(op_type, result, **{type_of: DType("int32")}, **attrs)

    def emit(build: GraphBuilder, operands: Sequence[Tensor], after: Sequence[Op]) -> Op:
        return emit_made(build, [*operands, build.const(constant, "int32")], after)

    return emit


def _gather(build: GraphBuilder, operands: Sequence[Tensor], after: Sequence[Op]) -> Op:
    params, rows = operands
    attrs = {
        "Tparams": DType("float32"),
        "Tindices": DType("int32"),
        "Taxis": DType("int32"),
        "batch_dims": 0,
    }
    result = (*rows.shape, *params.shape[1:])
    axis = build.const(0, "int32")
    return build.emit("GatherV2", [params, rows, axis], [(result, "float32")], attrs, control=after)
