"""Chunks: a rank computes its part of the batch in a few pieces, one behind the other (ATP §4.1).

On the mesh data=2 a rank has 8 of 16 samples. In two chunks it computes four, then the other four,
and while it does, what the first four have to send is on its way.

A chunk is treated as a rank along one more mesh axis, the minor one. The step is propagated and
written for data=2 x chunk=2, as if there were four ranks of four samples each: that takes care of
normalization, losses, random draws and padding. Then the ranks along `chunk` are made one again
(`run_chunks`):

    for data=2 x chunk=2                           for data=2
    %y = MatMul(%x, %w), %x differs by chunk       %y and %y/chunk1
    %w = ReadVariableOp(...), the same for all     once
    AllReduce over data                            one for each chunk
    AllReduce over chunk                           AddN of the two, within the rank
    AllReduce over data and chunk (a gradient)     AddN, then one AllReduce over data

At last the chunks are put in order, so that one computes while another's tensors are on their way
(`stagger_chunks`).
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Mapping

import numpy as np

from tfpar.compile.local.local_graph import LocalProgram, build_local_program
from tfpar.compile.local.rank_local_axis import (
    NotRepeatableError,
    RankLocalAxis,
    constant_of_sub_batch,
)
from tfpar.compile.local.reshard import CHUNK, COLLECTIVE_TYPES, ONCE
from tfpar.ir.graph import Graph, Op, Tensor
from tfpar.ir.order import sort_topologically
from tfpar.ir.traits import SOURCES
from tfpar.propagation.engine import propagate
from tfpar.propagation.partitioned_graph import Anchors, PartitionedGraph
from tfpar.spec import Mesh, Replicate, Shard

CHUNKS = (1, 2, 4)
"""Numbers of chunks that there may be: more are too small to compute and to send efficiently (ATP
§4.1)."""


def with_chunks(mesh: Mesh, chunks: int) -> Mesh:
    """Return `mesh` with the axis of the chunks behind its own."""
    name = "chunk"
    while name in mesh.axis_names:
        name += "_"
    return mesh.with_axis(name, chunks)


def build_chunked_program(laid: PartitionedGraph) -> LocalProgram:
    """Build the program of a step whose batch is in chunks.

    Variables and inputs have the same specs as without. A loop or branch whose body has an effect
    cannot run on chunks: its effect would come more than once.

    Args:
        laid: the step with the axis of the chunks (`split_batch`).

    Raises:
        NotRepeatableError: names the op.
    """
    return run_chunks(build_local_program(laid))


def split_batch(
    partitioned: PartitionedGraph, anchors: Anchors, batched: Collection[Tensor], parts: int
) -> PartitionedGraph:
    """Return the same step on the mesh with an axis of so many parts of a rank's batch behind its
    own.

    Args:
        partitioned: the step in one piece, from `anchors`.
        batched: the inputs of which each part gets its own.
    """
    mesh = with_chunks(partitioned.mesh, parts)
    laid = propagate(partitioned.prepared, mesh, chunked_anchors(partitioned, anchors, batched))
    laid.wire_dtypes, laid.jit_compile = partitioned.wire_dtypes, partitioned.jit_compile
    return laid


def chunked_anchors(
    partitioned: PartitionedGraph, anchors: Anchors, batched: Collection[Tensor]
) -> Anchors:
    """Return the anchors of propagation with chunks: variables as they are placed, `batched` inputs
    cut.

    Args:
        partitioned: the same step without chunks, from `anchors`.
    """
    return Anchors(
        variables={v.name: (*s, Replicate()) for v, s in partitioned.variable_specs.items()},
        inputs=[
            (*spec, Shard(0) if tensor in batched else Replicate())
            for tensor, spec in zip(partitioned.graph.inputs, anchors.inputs, strict=True)
        ],
        tensors=anchors.tensors,
        ops=anchors.ops,
        outputs=[(*s, Replicate()) for s in partitioned.output_specs],
    )


def run_chunks(program: LocalProgram) -> LocalProgram:
    """Return the program for the mesh without its last axis, whose ranks are chunks within a rank.

    Raises:
        NotRepeatableError: names an op that must not run once for each chunk.
    """
    sum_before_scattering(program.graph, (program.mesh.num_axes - 1,))
    writer = ChunkWriter(program)
    for op in program.graph.ops:
        writer.write(op)
    made = writer.finish([e for op in program.graph.effects for e in writer.ops[op]])
    stagger_chunks(made.graph, writer.runs_for, writer.parts)
    return made


def sum_before_scattering(
    graph: Graph, axes: tuple[int, ...], scattered_first: Collection[Tensor] = ()
) -> None:
    """Sum over `axes`, the chunks, before what is summed is scattered over ranks; in place.

    Over ranks it is better to scatter first, since then there is less to sum. But a sum over chunks
    moves nothing, and if it comes first, one tensor is scattered instead of one for each chunk.

    Args:
        scattered_first: sums that stay as they are.
    """
    readers = graph.consumers()
    moved: dict[Tensor, Tensor] = {}
    for op in graph.ops:
        if op.type != "AllReduce" or op.attrs["axes"] != axes:
            continue
        (scattered,) = op.inputs
        while scattered.op.type == "Reshape" and len(readers[scattered]) == 1:
            scattered = scattered.op.inputs[0]
        scatter = scattered.op
        if (
            scatter.type == "ReduceScatter"
            and op.outputs[0] not in scattered_first
            and scatter.attrs["reduction"] == op.attrs["reduction"]
            and len(readers[scattered]) == 1
        ):
            (result,) = op.outputs
            moved[result] = op.inputs[0]
            op.inputs, op.outputs = list(scatter.inputs), []
            scatter.inputs = [op.add_output(op.inputs[0].shape, result.dtype)]
    if moved:
        for op in graph.ops:
            op.inputs = [moved.get(t, t) for t in op.inputs]
        graph.outputs = [moved.get(t, t) for t in graph.outputs]
        graph.ops = sort_topologically(graph.ops)


# --- Writer of a program with chunks for ranks ---


class ChunkWriter(RankLocalAxis):
    """Emits the ops of a program with chunks, each once for each chunk.

    Attributes:
        runs_for: the chunks for which a new op runs, where that is not all of them.
    """

    def __init__(self, program: LocalProgram) -> None:
        super().__init__(program)
        self.runs_for: dict[Op, frozenset[int]] = {}

    def write(self, op: Op) -> None:
        """Emit what `op` of the program becomes.

        Raises:
            NotRepeatableError: it must not run once for each chunk.
        """
        self.build.name = op.name
        if op.type == "Placeholder":
            self.write_source(op)
        elif self.meets(op):
            self.write_crossing(op)
        else:
            self._clone(op)

    def _clone(self, op: Op) -> None:
        """Once for each chunk, or for several that would run it on the same tensors."""
        groups: dict[Hashable, list[int]] = {}
        for chunk in range(self.parts):
            groups.setdefault(self._key(op, chunk), []).append(chunk)
        if len(groups) > 1 and self.repetition.has_effects(op):
            raise NotRepeatableError(op)
        made: list[Op] = [op] * self.parts
        for members in groups.values():
            clone = self._emit(op, members[0], alone=len(groups) == 1)
            if len(groups) > 1:
                self.runs_for[clone] = frozenset(members)
            before = (self.ops[c][chunk] for c in op.control for chunk in members)
            clone.control = list(dict.fromkeys(before))
            for chunk in members:
                made[chunk] = clone
        self.ops[op] = made
        for i, tensor in enumerate(op.outputs):
            self.tensors[tensor] = [clone.outputs[i] for clone in made]

    def _key(self, op: Op, chunk: int) -> Hashable:
        """Equal for chunks that `op` runs for once."""
        if op.type == "RankConst":
            return tuple(
                np.asarray(v).tobytes() for v in constant_of_sub_batch(op, chunk, self.parts)
            )
        if ONCE in op.attrs or self.repetition.writes(op):
            return None  # chunks hold the same, even where each has computed it
        inputs = tuple(self.tensors[t][chunk] for t in op.inputs)
        return inputs, chunk if self.repetition.bodies.differ(op) else None

    def _emit(self, op: Op, chunk: int, alone: bool) -> Op:
        name = f"{op.name}/chunk{chunk}" if chunk else op.name
        outputs = [(t.shape, t.dtype) for t in op.outputs]
        if op.type == "RankConst":
            values = constant_of_sub_batch(op, chunk, self.parts)
            return self.build.per_rank(values, op.outputs[0].dtype).op
        attrs = self.repetition.bodies.attrs(op, chunk)
        if not alone and op.type in COLLECTIVE_TYPES:
            attrs = {**attrs, CHUNK: chunk}
        inputs = [self.tensors[t][chunk] for t in op.inputs]
        return self.build.emit(op.type, inputs, outputs, attrs, name, stateful=op.stateful)


# --- The order of chunks ---
#
# An *interval* is what a chunk computes between two collectives. Here are two products in two
# chunks; each result of the first product is added up over ranks:
#
#     interval 0            collective             interval 1
#     x0 = a0 @ w           s0 = AllReduce(x0)     y0 = s0 @ v        chunk 0
#     x1 = a1 @ w           s1 = AllReduce(x1)     y1 = s1 @ v        chunk 1
#
# Nothing in the graph says whether `x1` is computed before `x0`, after it, or at the same time. An
# op that begins an interval of a chunk is therefore made to wait for what the chunk before it hands
# to collectives in the same interval: `x1` gets a control edge from `x0`. So `x0` is done first,
# and `s0` is on its way while `x1` is computed.

_UNORDERED = SOURCES.union(COLLECTIVE_TYPES)
"""Op types that backends give no control edges."""


def stagger_chunks(graph: Graph, runs_for: Mapping[Op, frozenset[int]], chunks: int) -> None:
    """Add control edges between the chunks of `graph`, in place.

    No edge closes a cycle: along every edge (interval, first chunk) does not decrease, and along a
    new one it increases.

    Args:
        runs_for: the chunks for which an op runs, where these are not all `chunks`.
    """
    everyone = frozenset(range(chunks))
    here = {op: runs_for.get(op, everyone) for op in graph.ops}
    intervals = _intervals(graph, here)
    sent: dict[tuple[int, int], list[Op]] = {}  # by interval and chunk, what collectives carry
    for op in runs_for:
        for maker in (t.op for t in op.inputs if op.type in COLLECTIVE_TYPES):
            if maker in runs_for and maker.type not in _UNORDERED:
                sent.setdefault((intervals[maker], min(here[maker])), []).append(maker)
    for op in runs_for:
        chunk = min(here[op])
        if op.type not in _UNORDERED and not any(
            intervals[b] == intervals[op] and min(here[b]) == chunk
            for b in op.predecessors
            if b.type not in _UNORDERED
        ):
            before = sent.get((intervals[op], chunk - 1), ())
            op.control = list(dict.fromkeys((*op.control, *before)))
    graph.ops = sort_topologically(graph.ops)


def _intervals(graph: Graph, here: Mapping[Op, frozenset[int]]) -> dict[Op, int]:
    """Count the collectives, and other meetings of chunks, that precede each op."""
    intervals: dict[Op, int] = {}
    for op in graph.ops:
        intervals[op] = max(
            (
                intervals[b] + (b.type in COLLECTIVE_TYPES or not here[op] <= here[b])
                for b in op.predecessors
            ),
            default=0,
        )
    return intervals
