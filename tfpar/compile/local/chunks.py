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

from collections.abc import Collection

from tfpar.compile.local.chunk_writer import ChunkWriter
from tfpar.compile.local.local_graph import LocalProgram, build_local_program
from tfpar.compile.local.stagger import stagger_chunks
from tfpar.ir.graph import Graph, Tensor
from tfpar.ir.order import sort_topologically
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


def sum_before_scattering(graph: Graph, axes: tuple[int, ...]) -> None:
    """Sum over `axes`, the chunks, before what is summed is scattered over ranks; in place.

    Over ranks it is better to scatter first, since then there is less to sum. But a sum over chunks
    moves nothing, and if it comes first, one tensor is scattered instead of one for each chunk.
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
