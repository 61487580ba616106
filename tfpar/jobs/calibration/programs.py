"""Local programs to be timed: the same ops one after another, on every rank.

Links of a chain hang on each other by control edges and all get the same operands, so that values
neither grow nor are known beforehand, and any op can follow itself.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

from tfpar.cluster.network import Groups
from tfpar.compile.local.local_graph import LocalProgram
from tfpar.compile.local.transfers import recv, send
from tfpar.compile.local.xla_regions import Compiles, compile_regions
from tfpar.ir.builder import GraphBuilder
from tfpar.ir.graph import DType, Op, Tensor, itemsize
from tfpar.spec import Mesh, Shard

Emit = Callable[[GraphBuilder, Sequence[Tensor], Sequence[Op]], Op]
"""Appends ops on the operands that begin after other ops; returns the last one."""

_MOST_TURNS = 32  # of operands: filling them takes time, too
_COLUMNS = 64
"""Of the tensors that collectives move, in each rank's block; rows make up their size."""


class Chains:
    """A program of chains that run side by side; each rank has operands of its own."""

    def __init__(self, mesh: Mesh) -> None:
        self._build = GraphBuilder(name="calibration")
        self._mesh = mesh
        attrs = {"dtype": DType("float32")}
        op = self._build.emit("Placeholder", (), [((1,), "float32")], attrs, name="one")
        self._one = op.outputs[0]
        self._build.graph.inputs.append(self._one)

    def program(self) -> LocalProgram:
        """Return the program of the chains that were added; it is fed a 1 for each rank."""
        mesh = self._mesh
        fed = (Shard(0),) * mesh.num_axes
        return LocalProgram(self._build.graph, mesh, [(mesh.size,)], [fed], [], {})

    def add(
        self,
        emit: Emit,
        shapes: Sequence[tuple[int, ...]],
        dtype: str | Sequence[str],
        length: int,
        spread_bytes: float = 0.0,
    ) -> None:
        """A chain of `length` links on operands of these shapes.

        Args:
            dtype: of all operands, or of each.
            spread_bytes: so much at least, in bytes, is read and written before a link meets memory
                that another link has used: what caches hold is gone by then. 0: all links have the
                same operands, and write where the one before has written.
        """
        dtypes = [dtype] * len(shapes) if isinstance(dtype, str) else dtype
        operands = [*zip(shapes, dtypes, strict=True)]
        size = sum(math.prod(shape) * itemsize(dtype) for shape, dtype in operands)
        turns = max(1, min(_MOST_TURNS, math.ceil(spread_bytes / size)))
        sets = [[self._filled(*operand) for operand in operands] for _ in range(turns)]
        last: list[Op] = []
        made: list[Op] = []
        for i in range(length):
            last = [emit(self._build, sets[i % turns], last)]
            made += last
            if turns > 1 and i >= turns:
                last = [*last, self._held(made[i - turns], last)]
            self._build.graph.effects += last  # or it would be left out, as nobody reads it

    def _held(self, op: Op, after: Sequence[Op]) -> Op:
        """Reads a number of what `op` has made, which is there until then."""
        x = op.outputs[0]
        flat = self._build.reshape(x, (x.num_elements,))
        attrs = {"T": DType(x.dtype), "Index": DType("int32")}
        begin, size = (self._build.shape_const((n,)) for n in (0, 1))
        return self._build.emit(
            "Slice", (flat, begin, size), [((1,), x.dtype)], attrs, control=after
        )

    def _filled(self, shape: tuple[int, ...], dtype: str) -> Tensor:
        """Ones, which no rank shares with another; of int32, row numbers."""
        one = self._build.cast(self._build.reshape(self._one, ()), dtype)
        if dtype == "int32":
            (count,) = shape
            zero, end = (self._build.const(n, dtype) for n in (0, count))
            return self._build.one("Range", (zero, end, one), shape, dtype, {"Tidx": DType(dtype)})
        attrs = {"T": DType(dtype), "index_type": DType("int32")}
        return self._build.one("Fill", (self._build.shape_const(shape), one), shape, dtype, attrs)


def xla_chain_of(mesh: Mesh, side: int, compiles: Compiles) -> Callable[[int], LocalProgram]:
    """Makes a program of so many square matrix products, each of the last one's result, that XLA
    compiles as one: it starts a kernel for each.

    Args:
        compiles: which ops XLA compiles.
    """

    def of_the_last(build: GraphBuilder, operands: Sequence[Tensor], after: Sequence[Op]) -> Op:
        before = after[0].outputs[0] if after else operands[0]
        return product(build, (before, operands[1]), ())

    def made(length: int) -> LocalProgram:
        program = chain_of(mesh, of_the_last, [(side, side)] * 2)(length)
        compile_regions(program.graph, compiles)
        return program

    return made


def chain_of(
    mesh: Mesh,
    emit: Emit,
    shapes: Sequence[tuple[int, ...]],
    dtype: str | Sequence[str] = "float32",
    spread_bytes: float = 0.0,
) -> Callable[[int], LocalProgram]:
    """Makes a program of so many links; see `Chains.add`."""

    def made(length: int) -> LocalProgram:
        chains = Chains(mesh)
        chains.add(emit, shapes, dtype, length, spread_bytes)
        return chains.program()

    return made


def product(
    build: GraphBuilder, operands: Sequence[Tensor], after: Sequence[Op], transposed: bool = False
) -> Op:
    """A MatMul; the second operand may be given transposed."""
    x, y = operands
    attrs = {"T": DType(x.dtype), "transpose_a": False, "transpose_b": transposed}
    outputs = [((x.shape[0], y.shape[0 if transposed else 1]), x.dtype)]
    return build.emit("MatMul", (x, y), outputs, attrs, control=after)


def elementwise(op_type: str) -> Emit:
    """An op whose result is as large as each operand."""

    def emit(build: GraphBuilder, operands: Sequence[Tensor], after: Sequence[Op]) -> Op:
        x = operands[0]
        return build.emit(
            op_type, operands, [(x.shape, x.dtype)], {"T": DType(x.dtype)}, control=after
        )

    return emit


def collective(kind: str, mesh: Mesh, axes: tuple[int, ...]) -> Emit:
    """A collective of `spec.names.GROUP_OPERATIONS` over mesh axes, of operands of two dims each;
    several travel as one, as gradients that are packed do, but for permutes, of one operand."""
    parts = mesh.group_size(axes)

    def emit(build: GraphBuilder, operands: Sequence[Tensor], after: Sequence[Op]) -> Op:
        # Control edges are of local ops only.
        given = [_identity(build, x, after).outputs[0] for x in operands]
        (rows, columns), dtype = given[0].shape, given[0].dtype
        first, second = ((dim,) * len(given) for dim in (0, 1))
        types: dict[str, tuple[str, dict[str, Any], tuple[int, ...]]] = {
            "all_reduce": ("AllReduce", {"reduction": "sum", "T": DType(dtype)}, (rows, columns)),
            "all_gather": ("AllGather", {"dims": second}, (rows, columns * parts)),
            "reduce_scatter": (
                "ReduceScatter",
                {"dims": second, "reduction": "sum"},
                (rows, columns // parts),
            ),
            "all_to_all": (
                "AllToAll",
                {"split_dims": second, "concat_dims": first},
                (rows * parts, columns // parts),
            ),
            "broadcast": ("Broadcast", {}, (rows, columns)),
            "permute": (
                "Permute",
                {"targets": tuple((part - 1) % parts for part in range(parts))},
                (rows, columns),
            ),
        }
        op_type, attrs, shape = types[kind]
        attrs = {**attrs, "axes": axes}
        moved = build.emit(op_type, given, [(shape, dtype)] * len(given), attrs)
        return [_identity(build, result) for result in moved.outputs][-1]

    return emit


def after_product(emit: Emit | None = None) -> Emit:
    """Return an emitter of a product and of the collective after it, as in a step.

    The product is that of the last two operands. The first operand then goes to `emit`; None:
    nothing follows.
    """

    def both(build: GraphBuilder, operands: Sequence[Tensor], after: Sequence[Op]) -> Op:
        x, *factors = operands
        last = product(build, factors, after)
        made = elementwise("AddV2")(build, [x, x], [last])
        return made if emit is None else emit(build, made.outputs, [])

    return both


def transfer(rings: Groups) -> Emit:
    """Return an emitter of transfers: each rank sends to the next of its ring, all at once.

    Every rank is in one ring.
    """
    following = {a: b for ring in rings for a, b in zip(ring, [*ring[1:], ring[0]], strict=True)}
    before = {b: a for a, b in following.items()}
    ranks = range(len(following))

    def emit(build: GraphBuilder, operands: Sequence[Tensor], after: Sequence[Op]) -> Op:
        x = _identity(build, operands[0], after)
        key = f"link{len(build.graph.ops)}"
        send(build, x.outputs[0], key, [following[rank] for rank in ranks])
        shape, dtype = x.outputs[0].shape, x.outputs[0].dtype
        return _identity(build, recv(build, shape, dtype, key, [before[r] for r in ranks], [x]))

    return emit


def _identity(build: GraphBuilder, x: Tensor, after: Sequence[Op] = ()) -> Op:
    return build.emit("Identity", (x,), [(x.shape, x.dtype)], {"T": DType(x.dtype)}, control=after)


def operand_of(kind: str, parts: int, num_bytes: int) -> tuple[tuple[int, int], int]:
    """Shape of a collective's float32 operand for a payload of about `num_bytes`, and the payload.

    The payload is counted as `reshard.step_bytes` does: of a gather it is the result.
    """
    columns = _COLUMNS * parts
    rows = max(1, round(num_bytes / (columns * itemsize("float32"))))
    own = columns // parts if kind == "all_gather" else columns
    return (rows, own), rows * columns * itemsize("float32")
