"""Collectives on any dim and dtype, and transfers of any dtype, of what a transport can carry.

A transport joins and splits along dim 0 and knows a few dtypes: other dims are brought to the
front, other dtypes travel as one that holds their values exactly. Several operands travel as one
matrix: row i is what rank i gets, or gives, of all of them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from tfpar.compile.local.transfers import Channel
from tfpar.ir.builder import numpy_dtype
from tfpar.ir.graph import DType
from tfpar.spec import TfparError
from tfpar.tf.runtime.backends.transport import Transport
from tfpar.tf.runtime.function_def import FunctionWriter, const_attrs, serialize_attrs

_CAST = {
    "bool": "int32",
    "int8": "int32",
    "uint8": "int32",
    "int16": "int32",
    "uint16": "int32",
    "bfloat16": "float32",
}
_BITS = {"uint32": "int32", "uint64": "int64"}  # sums wrap alike
_PARTS = {"complex64": "float32", "complex128": "float64"}  # real and imaginary, in a last dim
_LOGICAL = {"any": "max", "all": "min"}
_BINARY = {"prod": "Mul", "max": "Maximum", "min": "Minimum"}

MOVED = {"bfloat16": "float16"}
"""Dtypes that transports move, as the bits of another one, and do not add up."""

Group = tuple[int, ...]
Shape = tuple[int, ...]


class WireOperand(NamedTuple):
    """A tensor that a collective moves, with its shape on this rank."""

    edge: str
    shape: Shape


class Wire:
    """Writer of the collectives of one rank into a function.

    Args:
        writer: of the function.
        transport: carries them.
    """

    def __init__(self, writer: FunctionWriter, transport: Transport) -> None:
        self._writer = writer
        self._transport = transport

    def all_reduce(
        self, name: str, edges: Sequence[str], dtype: str, reduction: str, group: Group
    ) -> list[str]:
        """Reduce each tensor over the group."""
        if len(group) == 1:
            return list(edges)
        self._check(name, dtype, reduction)
        packed = [self._pack(f"{name}/{i}", e, dtype) for i, e in enumerate(edges)]
        done = self._transport.all_reduce(
            self._writer, name, packed, carrier(dtype), _LOGICAL.get(reduction, reduction), group
        )
        return [self._unpack(f"{name}/{i}", e, dtype) for i, e in enumerate(done)]

    def all_gather(self, name: str, edge: str, dtype: str, dim: int, group: Group) -> str:
        """The tensors of the group joined along `dim`."""
        if len(group) == 1:
            return edge
        moved = mover(dtype)
        packed = self._convert(f"{name}/packed", edge, dtype, moved)
        if dim:
            packed = self._expand(f"{name}/stacked", packed, moved)
        gathered = self._transport.all_gather(self._writer, name, packed, moved, group)
        if dim:
            gathered = self._join(name, gathered, moved, dim, len(group))
        return self._convert(f"{name}/unpacked", gathered, moved, dtype)

    def reduce_scatter(
        self, name: str, edge: str, dtype: str, reduction: str, dim: int, group: Group
    ) -> str:
        """Return this rank's block along `dim` of the reduced tensor; blocks are equal in size."""
        if len(group) == 1:
            return edge
        self._check(name, dtype, reduction)
        arithmetic, wire_dtype = _LOGICAL.get(reduction, reduction), carrier(dtype)
        if arithmetic not in self._transport.reductions or dtype in MOVED:
            # Each block to its owner, who reduces: as many bytes as a ring moves.
            moved = self._convert(f"{name}/moved", edge, dtype, mover(dtype))
            stacked = self._stack(name, moved, mover(dtype), dim, len(group))
            blocks = self._transport.all_to_all(self._writer, name, stacked, mover(dtype), group)
            values = self._convert(f"{name}/values", blocks, mover(dtype), dtype)
            packed = self._pack(name, values, dtype)
            done = self._combine(name, packed, wire_dtype, arithmetic, len(group))
            return self._unpack(name, done, dtype)
        packed = self._pack(name, edge, dtype)
        if dim:
            packed = self._stack(name, packed, wire_dtype, dim, len(group))
        done = self._transport.reduce_scatter(
            self._writer, name, packed, wire_dtype, arithmetic, group
        )
        if dim:
            attrs = {"T": DType(wire_dtype), "squeeze_dims": [0]}
            done = self._node(f"{name}/block", "Squeeze", [done], attrs, "output")
        return self._unpack(name, done, dtype)

    def all_to_all(
        self, name: str, edge: str, dtype: str, split_dim: int, concat_dim: int, group: Group
    ) -> str:
        """Send block i along `split_dim` to rank i of the group, and join what comes."""
        if len(group) == 1:
            return edge
        moved = mover(dtype)
        packed = self._convert(f"{name}/packed", edge, dtype, moved)
        stacked = self._stack(name, packed, moved, split_dim, len(group))
        done = self._transport.all_to_all(self._writer, name, stacked, moved, group)
        joined = self._join(name, done, moved, concat_dim, len(group))
        return self._convert(f"{name}/unpacked", joined, moved, dtype)

    def broadcast(self, name: str, edge: str, dtype: str, group: Group) -> str:
        """The tensor of the group's first rank; those of the others have its shape."""
        if len(group) == 1:
            return edge
        moved = mover(dtype)
        packed = self._convert(f"{name}/packed", edge, dtype, moved)
        done = self._transport.broadcast(self._writer, name, packed, moved, group)
        return self._convert(f"{name}/unpacked", done, moved, dtype)

    # --- transfers -----------------------------------------------------------------

    def send(
        self, operand: WireOperand, dtype: str, channel: Channel, control: Sequence[str] = ()
    ) -> str:
        """The node that sends a tensor, which begins after the nodes `control`."""
        edge, empty = operand.edge, 0 in operand.shape
        if control or empty:
            name = channel.name if empty else f"{channel.name}/ready"
            attrs = serialize_attrs({"T": DType(dtype)})
            self._writer.node(name, "Identity", [edge], attrs, self._transport.device, control)
            edge = f"{name}:output:0"
        if empty:  # nothing travels, of which TensorFlow's transport would crash
            return channel.name
        moved = mover(dtype)
        packed = self._convert(f"{channel.name}/packed", edge, dtype, moved)
        return self._transport.send(self._writer, packed, moved, channel)

    def recv(self, shape: Shape, dtype: str, channel: Channel, control: Sequence[str] = ()) -> str:
        """The tensor of that shape which comes, asked for after the nodes `control`."""
        if 0 in shape:
            return self._const(channel.name, np.zeros(shape, numpy_dtype(dtype)), dtype, control)
        moved = mover(dtype)
        sizes = np.array((*shape, 2) if dtype in _PARTS else shape, np.int32)
        wanted = self._const(f"{channel.name}/shape", sizes, "int32", control)
        done = self._transport.recv(self._writer, wanted, moved, channel)
        return self._convert(f"{channel.name}/unpacked", done, moved, dtype)

    def permute(
        self,
        operand: WireOperand,
        dtype: str,
        sent: Channel | None,
        received: Channel | None,
        control: Sequence[str] = (),
    ) -> str:
        """The tensor that comes in the place of one that goes to another rank.

        Args:
            sent, received: the channels of both; None if this rank keeps it.
            control: the nodes after which it begins.
        """
        if sent is None or received is None:
            return operand.edge
        self._writer.effect(self.send(operand, dtype, sent, control))
        return self.recv(operand.shape, dtype, received, control)

    # --- several operands as one -------------------------------------------------

    def all_gathers(
        self,
        name: str,
        operands: Sequence[WireOperand],
        dtype: str,
        dims: Sequence[int],
        group: Group,
    ) -> list[str]:
        """`all_gather` of each operand along its dim, in one."""
        if len(operands) == 1:
            return [self.all_gather(name, operands[0].edge, dtype, dims[0], group)]
        parts = len(group)
        rows = [o._replace(shape=(1, *o.shape)) for o in operands]
        gathered = self.all_gather(name, self._beside(name, rows, dtype), dtype, 0, group)
        shapes = [(parts, *o.shape) for o in operands]
        return self._joined(name, gathered, shapes, dtype, dims)

    def reduce_scatters(
        self,
        name: str,
        operands: Sequence[WireOperand],
        dtype: str,
        reduction: str,
        dims: Sequence[int],
        group: Group,
    ) -> list[str]:
        """`reduce_scatter` of each operand along its dim, in one."""
        if len(operands) == 1:
            return [self.reduce_scatter(name, operands[0].edge, dtype, reduction, dims[0], group)]
        blocks = self._blocks(name, operands, dtype, dims, len(group))
        packed = self._beside(name, blocks, dtype)
        done = self.reduce_scatter(name, packed, dtype, reduction, 0, group)
        return self._apart(name, done, [shape[1:] for _, shape in blocks], dtype, 1)

    def all_to_alls(
        self,
        name: str,
        operands: Sequence[WireOperand],
        dtype: str,
        split_dims: Sequence[int],
        concat_dims: Sequence[int],
        group: Group,
    ) -> list[str]:
        """`all_to_all` of each operand along its dims, in one."""
        if len(operands) == 1:
            dims = split_dims[0], concat_dims[0]
            return [self.all_to_all(name, operands[0].edge, dtype, *dims, group)]
        blocks = self._blocks(name, operands, dtype, split_dims, len(group))
        done = self.all_to_all(name, self._beside(name, blocks, dtype), dtype, 0, 0, group)
        return self._joined(name, done, [shape for _, shape in blocks], dtype, concat_dims)

    def _blocks(
        self,
        name: str,
        operands: Sequence[WireOperand],
        dtype: str,
        dims: Sequence[int],
        parts: int,
    ) -> list[WireOperand]:
        """Split each operand into blocks along its dim, stacked in a new leading dim."""
        found = []
        for i, (operand, dim) in enumerate(zip(operands, dims, strict=True)):
            edge = self._stack(f"{name}/{i}", operand.edge, dtype, dim, parts)
            block = list(operand.shape)
            block[dim] //= parts
            found.append(WireOperand(edge, (parts, *block)))
        return found

    def _joined(
        self, name: str, edge: str, shapes: Sequence[Shape], dtype: str, dims: Sequence[int]
    ) -> list[str]:
        """Split operands that lie side by side, and join the blocks of each along its dim."""
        stacked = self._apart(name, edge, shapes, dtype, shapes[0][0])
        return [
            self._join(f"{name}/{i}", e, dtype, dim, shape[0])
            for i, (e, dim, shape) in enumerate(zip(stacked, dims, shapes, strict=True))
        ]

    def _beside(self, name: str, operands: Sequence[WireOperand], dtype: str) -> str:
        """Operands of as many rows side by side, each as a matrix: row i is for, or of, rank i."""
        flat = [
            self._reshape(f"{name}/{i}/flat", edge, (shape[0], math.prod(shape[1:])), dtype)
            for i, (edge, shape) in enumerate(operands)
        ]
        attrs = {"T": DType(dtype), "N": len(flat), "Tidx": DType("int32")}
        inputs = [*flat, self._int(f"{name}/beside_dim", 1)]
        return self._node(f"{name}/beside", "ConcatV2", inputs, attrs, "output")

    def _apart(
        self, name: str, edge: str, shapes: Sequence[Shape], dtype: str, rows: int
    ) -> list[str]:
        """The inverse of `_beside`: the columns of each, in its shape."""
        widths = np.array([math.prod(shape) // rows for shape in shapes], np.int64)
        attrs = {"T": DType(dtype), "num_split": len(shapes), "Tlen": DType("int64")}
        sizes = self._const(f"{name}/widths", widths, "int64")
        inputs = [edge, sizes, self._int(f"{name}/apart_dim", 1)]
        self._emit(f"{name}/apart", "SplitV", inputs, attrs)
        return [
            self._reshape(f"{name}/{i}/shaped", f"{name}/apart:output:{i}", shape, dtype)
            for i, shape in enumerate(shapes)
        ]

    def _reshape(self, name: str, edge: str, shape: Shape, dtype: str) -> str:
        attrs = {"T": DType(dtype), "Tshape": DType("int32")}
        inputs = [edge, self._const(f"{name}/dims", np.array(shape, np.int32), "int32")]
        return self._node(name, "Reshape", inputs, attrs, "output")

    def _check(self, name: str, dtype: str, reduction: str) -> None:
        if dtype in _PARTS and reduction != "sum" or dtype in _BITS and reduction in ("max", "min"):
            raise TfparError(f"No reduction {reduction!r} of {dtype} between processes ({name}).")

    # --- dims --------------------------------------------------------------------

    def _stack(self, name: str, edge: str, dtype: str, dim: int, parts: int) -> str:
        """Blocks along `dim`, stacked in a new leading dim."""
        attrs = {"T": DType(dtype), "num_split": parts}
        axis = self._int(f"{name}/split_dim", dim)
        self._emit(f"{name}/split", "Split", [axis, edge], attrs)
        blocks = [f"{name}/split:output:{i}" for i in range(parts)]
        attrs = {"T": DType(dtype), "N": parts, "axis": 0}
        return self._node(f"{name}/stack", "Pack", blocks, attrs, "output")

    def _join(self, name: str, edge: str, dtype: str, dim: int, parts: int) -> str:
        """Blocks of the leading dim joined along `dim` of what is left."""
        self._emit(
            f"{name}/unstack", "Unpack", [edge], {"T": DType(dtype), "num": parts, "axis": 0}
        )
        blocks = [f"{name}/unstack:output:{i}" for i in range(parts)]
        attrs = {"T": DType(dtype), "N": parts, "Tidx": DType("int32")}
        inputs = [*blocks, self._int(f"{name}/join_dim", dim)]
        return self._node(f"{name}/join", "ConcatV2", inputs, attrs, "output")

    def _combine(self, name: str, edge: str, dtype: str, reduction: str, parts: int) -> str:
        """The blocks of the leading dim reduced to one."""
        attrs = {"T": DType(dtype), "num": parts, "axis": 0}
        self._emit(f"{name}/unstack", "Unpack", [edge], attrs)
        first, *others = (f"{name}/unstack:output:{i}" for i in range(parts))
        if reduction == "sum":
            attrs = {"T": DType(dtype), "N": parts}
            return self._node(f"{name}/sum", "AddN", [first, *others], attrs, "sum")
        for i, other in enumerate(others):
            op_type, attrs = _BINARY[reduction], {"T": DType(dtype)}
            first = self._node(f"{name}/{reduction}_{i}", op_type, [first, other], attrs, "z")
        return first

    def _expand(self, name: str, edge: str, dtype: str) -> str:
        attrs = {"T": DType(dtype), "Tdim": DType("int32")}
        return self._node(name, "ExpandDims", [edge, self._int(f"{name}/dim", 0)], attrs, "output")

    # --- dtypes ------------------------------------------------------------------

    def _pack(self, name: str, edge: str, dtype: str) -> str:
        return self._convert(f"{name}/packed", edge, dtype, carrier(dtype))

    def _unpack(self, name: str, edge: str, dtype: str) -> str:
        return self._convert(f"{name}/unpacked", edge, carrier(dtype), dtype)

    def _convert(self, name: str, edge: str, source: str, target: str) -> str:
        if source == target:
            return edge
        if _CAST.get(source) == target or _CAST.get(target) == source:
            attrs = {"SrcT": DType(source), "DstT": DType(target), "Truncate": False}
            return self._node(name, "Cast", [edge], attrs, "y")
        attrs = {"T": DType(source), "type": DType(target)}
        return self._node(name, "Bitcast", [edge], attrs, "output")

    # --- nodes -------------------------------------------------------------------

    def _node(self, name: str, op_type: str, inputs: list[str], attrs: dict, output: str) -> str:
        self._emit(name, op_type, inputs, attrs)
        return f"{name}:{output}:0"

    def _emit(self, name: str, op_type: str, inputs: list[str], attrs: dict) -> None:
        self._writer.node(name, op_type, inputs, serialize_attrs(attrs), self._transport.device)

    def _int(self, name: str, value: int) -> str:
        return self._const(name, np.int32(value), "int32")

    def _const(
        self,
        name: str,
        value: np.ndarray | np.generic,
        dtype: str,
        control: Sequence[str] = (),
    ) -> str:
        attrs = const_attrs(value, dtype)
        self._writer.node(name, "Const", (), attrs, self._transport.device, control)
        return f"{name}:output:0"


def carrier(dtype: str) -> str:
    """The dtype in which values of `dtype` are reduced."""
    return _CAST.get(dtype) or _BITS.get(dtype) or _PARTS.get(dtype) or dtype


def mover(dtype: str) -> str:
    """The dtype in which values of `dtype` are moved."""
    return MOVED.get(dtype) or carrier(dtype)
