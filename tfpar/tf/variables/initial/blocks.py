"""Making an initial value one block of rows at a time.

The callable is traced, and its graph partitioned over as many virtual ranks as there are
blocks, by the same rules as any step: a rank makes its rows alone, with the numbers that the whole
would have there (`rules.random`). What is not made entry by entry is left to be made whole.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

import tfpar.rules  # noqa: F401 - registers the rules
from tfpar.compile.local.local_graph import build_local_program
from tfpar.ir.graph import DType, Graph, Op, Tensor, UnknownShape, Variable
from tfpar.ir.traits import KEYED_DRAWS, SOURCES, VIEWS
from tfpar.propagation.engine import propagate
from tfpar.propagation.partitioned_graph import Anchors
from tfpar.propagation.prepared_graph import prepare
from tfpar.spec import Mesh, Replicate, Shard
from tfpar.tf.interop.convert import convert_func_graph
from tfpar.tf.interop.graphs import trace
from tfpar.tf.interop.runtime import run_op
from tfpar.tf.variables.initial.shard_map import row_dim

_SHAPED = KEYED_DRAWS | {"Fill"}
"""Ops whose first input is the shape of what they make, in row-major order."""

_POINTWISE = frozenset(
    {
        "Identity",
        "Cast",
        "Add",
        "AddV2",
        "Sub",
        "Mul",
        "RealDiv",
        "Neg",
        "Abs",
        "Square",
        "Maximum",
        "Minimum",
        "Sign",
        "Floor",
        "FloorMod",
        "ZerosLike",
        "OnesLike",
        "Less",
        "LessEqual",
        "Greater",
        "GreaterEqual",
        "Equal",
        "NotEqual",
        "LogicalAnd",
        "LogicalOr",
        "LogicalNot",
        "SelectV2",
    }
)
"""Entry by entry, and rounded the one right way: the same bits wherever an entry stands among
others (an exponential may differ in its last bit between the vector and the scalar kernel)."""

_BLOCKWISE = (
    _SHAPED
    | _POINTWISE
    | {
        "Const",
        "Placeholder",
        "StatelessRandomGetKeyCounter",
        "StatelessRandomGetAlg",
        "StatelessRandomGetKeyCounterAlg",
        "Reshape",
        "ExpandDims",
        "Squeeze",
        "Slice",
        "StridedSlice",
        "ConcatV2",
        "Pack",
        "Transpose",
        "BroadcastTo",
        "Tile",
        "GatherV2",
        "OneHot",
        "Range",
        "Shape",
        "Pad",
        "PadV2",
    }
)
"""What a value that is made in blocks may be computed with: nothing with a state, no sums."""

_SLACK = 64
"""Entries that a tensor of a block may have more than the block (a draw starts at a group)."""


class BlockProgram:
    """An initial value, a block of rows at a time.

    The value is seen as `[rows, ...]`, the dimensions up to `dim` joined.

    Attributes:
        dim: the last of the dimensions that are joined.
        rows: how many rows there are; block_rows: how many a block has.
    """

    def __init__(self, program: EagerProgram, dim: int, rows: int, block_rows: int) -> None:
        self._program = program
        self.dim, self.rows, self.block_rows = dim, rows, block_rows

    @property
    def num_blocks(self) -> int:
        return math.ceil(self.rows / self.block_rows)

    def block(self, index: int) -> tf.Tensor:
        """Rows from `index * block_rows` on; what the last block has beyond the value is idle."""
        return self._program(index)


def block_program(
    initial: Callable[[], Any], shape: Sequence[int], dtype: tf.DType, limit_bytes: int
) -> BlockProgram | None:
    """A program that makes `initial()`, cast to `dtype`, in blocks of at most `limit_bytes`.

    A block is at least one row of the leading dimension where the dimensions cannot be joined.
    None if the value can only be made whole: it has a state (a generator without a key), sums over
    entries, or is not made in rows (a matrix that is orthogonal). Traces `initial`, runs nothing.
    """
    shape = tuple(shape)
    traced = trace("initial", lambda: tf.cast(initial(), dtype))
    (result,) = traced.outputs
    if result.shape != shape or not _is_pure(traced, limit_bytes):
        return None
    graph = convert_func_graph(traced)
    (output,) = graph.outputs
    if not all(_is_blockwise(op) for op in needed_ops(output)):
        return None
    dim = row_dim(shape, dtype.size, limit_bytes)
    if dim and not _join_dims(graph, output, shape, dim):
        dim = 0
    rows = math.prod(shape[: dim + 1])
    row_bytes = math.prod(shape[dim + 1 :]) * dtype.size
    num_blocks = math.ceil(rows / max(1, limit_bytes // row_bytes))
    if num_blocks < 2:
        return None
    externals = [
        (tf.convert_to_tensor(external), tensor)
        for (external, _), tensor in zip(traced.captures, graph.inputs, strict=True)
        if tensor.op.type == "Placeholder"
    ]
    graph.inputs = [tensor for _, tensor in externals]
    block, inputs = _block_of(graph, output, num_blocks)
    if not _is_local(block):
        return None
    feeds = {tensor: value for (value, _), tensor in zip(externals, inputs, strict=True)}
    return BlockProgram(EagerProgram(block, feeds), dim, rows, math.ceil(rows / num_blocks))


def _is_pure(traced: tf.Graph, limit_bytes: int) -> bool:
    """Whether the traced value hangs on nothing that changes, and holds no large constant.

    Such a constant is whole in any case; reading it into the IR would copy it.
    """
    return not any(
        op.op_def.is_stateful
        and op.type != "Placeholder"
        or any(t.dtype == tf.resource for t in op.outputs)
        or (op.type == "Const" and _num_bytes(op.outputs[0]) > limit_bytes)
        for op in traced.get_operations()
    )


def _is_blockwise(op: Op) -> bool:
    """Whether `op` gives a block the bits that it gives the whole; a scalar is never cut."""
    return op.type in _BLOCKWISE or all(t.shape == () for t in _ends(op))


def _num_bytes(tensor: tf.Tensor) -> int:
    return (tensor.shape.num_elements() or 0) * tensor.dtype.size


def _join_dims(graph: Graph, output: Tensor, shape: tuple[int, ...], dim: int) -> bool:
    """Join the dimensions up to `dim` of every tensor of `shape`; False where it cannot be."""
    joined = (math.prod(shape[: dim + 1]), *shape[dim + 1 :])
    ops = [op for op in needed_ops(output) if any(t.shape == shape for t in _ends(op))]
    if not all(_joins(op, shape) for op in ops):
        return False
    for op in ops:
        op.outputs[0].shape = joined
        if op.type in _SHAPED:
            name = op.inputs[0].dtype
            attrs = {"value": np.array(joined, name), "dtype": DType(name)}
            operand = Op(f"{op.name}/joined", "Const", attrs=attrs)
            op.inputs[0] = operand.add_output((len(joined),), name)
            graph.ops.insert(graph.ops.index(op), operand)
    return True


def _ends(op: Op) -> list[Tensor]:
    return [*op.inputs, *op.outputs]


def _joins(op: Op, shape: tuple[int, ...]) -> bool:
    """Whether `op` makes a tensor of `shape` entry by entry, in row-major order."""
    if op.type in _SHAPED:
        return op.outputs[0].shape == shape
    return op.type in _POINTWISE and all(t.shape in ((), shape) for t in _ends(op))


def _block_of(graph: Graph, output: Tensor, num_blocks: int) -> tuple[Tensor, list[Tensor]]:
    """The local tensor that is each rank's block of `output`, and the local inputs.

    `output` is assigned to a variable that is cut into the blocks: the rest is propagation.
    """
    ops, graph.ops = graph.ops, []
    for op in ops:
        graph.ops.append(op)
        if op.type in KEYED_DRAWS and op.outputs[0].shape[:1] == output.shape[:1]:
            # A draw is made as its first reader wants it.
            _assign(graph, op.outputs[0])
    assign = _assign(graph, output)
    graph.outputs = []
    anchors = Anchors(
        {v.name: (Shard(0),) for v in graph.variables},
        inputs=[(Replicate(),)] * len(graph.inputs),
    )
    partitioned = propagate(prepare(graph), Mesh.of([num_blocks]), anchors)
    local = build_local_program(partitioned).graph
    (block,) = (op.inputs[1] for op in local.ops if op.name == assign.name)
    return block, local.inputs


def _assign(graph: Graph, tensor: Tensor) -> Op:
    """Append ops that assign `tensor` to a new variable."""
    name = f"variable{len(graph.variables)}"
    handle = Op(name, "Placeholder", attrs={"dtype": DType("resource")})
    handle.add_output(tensor.shape, "resource")
    variable = Variable(name, tensor.shape, tensor.dtype, False, handle.outputs[0])
    attrs = {"dtype": DType(tensor.dtype)}
    inputs = (variable.handle, tensor)
    assign = Op(f"{name}/assign", "AssignVariableOp", inputs, attrs, stateful=True)
    graph.variables.append(variable)
    graph.ops += [handle, assign]
    graph.effects.append(assign)
    return assign


def _is_local(block: Tensor) -> bool:
    """Whether a rank makes its block alone, and nothing larger on the way."""
    most = block.num_elements + _SLACK
    return all(
        op.type in SOURCES
        or (_is_blockwise(op) and all(t.num_elements <= most for t in op.outputs))
        or (op.type in VIEWS and op.inputs[0].op.type in (*SOURCES, *VIEWS))
        for op in needed_ops(block)
    )


# --- Running the ops of a local program one by one, for one rank ---
#
# An initial value is a few ops run for many blocks: linking and optimising a function for them
# would cost more than it saves, and its rewrites need not give the same bits.


class EagerProgram:
    """The ops that make `output`.

    Args:
        feeds: the values of placeholders, the same for every rank.
    """

    def __init__(self, output: Tensor, feeds: Mapping[Tensor, tf.Tensor]) -> None:
        self.output = output
        self.ops = needed_ops(output)
        self._constants = {
            op.outputs[0]: tf.constant(op.attrs["value"], op.outputs[0].dtype)
            for op in self.ops
            if op.type == "Const"
        } | dict(feeds)
        self._run = [op for op in self.ops if op.outputs[0] not in self._constants]
        self._attrs = {op: _eager_attrs(op) for op in self._run}
        last = {t: op for op in self._run for t in op.inputs}
        self._dead: dict[Op, list[Tensor]] = {}
        for tensor, op in last.items():
            if tensor not in self._constants:
                self._dead.setdefault(op, []).append(tensor)

    def __call__(self, rank: int) -> tf.Tensor:
        """The value of `output` on `rank`; what is no longer needed is let go at once."""
        values = dict(self._constants)
        for op in self._run:
            if op.type == "RankConst":
                values[op.outputs[0]] = tf.constant(op.attrs["values"][rank], op.outputs[0].dtype)
                continue
            inputs = [values[t] for t in op.inputs]
            results = run_op(op.type, inputs, self._attrs[op], len(op.outputs))
            del inputs
            values.update(zip(op.outputs, results, strict=True))
            for tensor in self._dead.get(op, ()):
                del values[tensor]
        return values[self.output]


def needed_ops(output: Tensor) -> list[Op]:
    """The ops that `output` is computed from, in an order to run them."""
    ordered: dict[Op, None] = {}
    stack = [(output.op, False)]
    while stack:
        op, ready = stack.pop()
        if op in ordered:
            continue
        if ready:
            ordered[op] = None
            continue
        stack.append((op, True))
        stack += [(t.op, False) for t in op.inputs]
    return list(ordered)


def _eager_attrs(op: Op) -> tuple[Any, ...]:
    """Attributes as a flat tuple of names and values."""
    attrs: list[Any] = []
    for name, value in op.attrs.items():
        if not name.startswith("_") and value is not None:
            attrs += [name, _eager_attr(value)]
    return tuple(attrs)


def _eager_attr(value: Any) -> Any:
    if isinstance(value, DType):
        return tf.dtypes.as_dtype(str(value)).as_datatype_enum
    if isinstance(value, UnknownShape):
        return None
    if isinstance(value, list):
        return [_eager_attr(item) for item in value]
    return value
