"""Megatron's split of two layers on a mesh: which rank has which part of what.

Nothing is drawn by hand: two weights are fixed, the specs of all other tensors and the collectives
are those that propagation finds.
"""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Iterator, Sequence

import tfpar as tap
from scripts.pictures.svg import COLOURS, Drawing
from tfpar.ir.text import parse_graph
from tfpar.plans import plan_from_constraints
from tfpar.propagation.engine import propagate
from tfpar.propagation.partitioned_graph import PartitionedGraph
from tfpar.propagation.prepared_graph import prepare
from tfpar.spec import Mesh, Partial, Spec, format_spec
from tfpar.spec.layout import local_indices

MESH = Mesh.of({"data": 2, "model": 2})
CONSTRAINTS = (
    tap.batch("data"),
    tap.shard("A", dim=1, axis="model"),
    tap.shard("B", dim=0, axis="model"),
)
GRAPH = """
graph(%x) {
  variable "A": float32[4,16] = %a, trainable
  variable "B": float32[16,4] = %b, trainable
  %x: float32[8,4] = Placeholder {dtype = float32}
  %a: resource[4,16] = Placeholder {dtype = resource}
  %b: resource[16,4] = Placeholder {dtype = resource}
  %A: float32[4,16] = ReadVariableOp(%a) {dtype = float32}
  %B: float32[16,4] = ReadVariableOp(%b) {dtype = float32}
  %columns: float32[8,16] = MatMul(%x, %A) {transpose_a = false, transpose_b = false}
  %h: float32[8,16] = Relu(%columns)
  %y: float32[8,4] = MatMul(%h, %B) {transpose_a = false, transpose_b = false}
  return(%y)
}
"""
NAMES = {"x": "x", "A": "A", "h": "relu(x A)", "B": "B", "y": "relu(x A) B"}
"""Of the tensors that are drawn, in their order; one that is moved is drawn before and after."""
CELL, TOP, GAP = 11, 74, 46


def split() -> PartitionedGraph:
    """The two layers on the mesh."""
    graph = parse_graph(GRAPH)
    plan = plan_from_constraints(graph, MESH, CONSTRAINTS)
    fed = tuple(
        tap.Shard(0) if name in plan.batch_axes else tap.Replicate() for name in MESH.axis_names
    )
    anchors = dataclasses.replace(plan.anchors(), inputs=[fed])
    return propagate(prepare(graph), MESH, anchors)


def draw() -> Drawing:
    found = split()
    columns = list(_drawn(found))
    drawing = Drawing(
        40 + sum(shape[1] * CELL + GAP for _, shape, _ in columns),
        TOP + max(shape[0] for _, shape, _ in columns) * CELL + 54,
        "Two layers of a transformer on a mesh of 2 x 2 ranks, as Megatron splits them",
        "python -m scripts.pictures",
    )
    drawing.text(20, 24, f"Megatron's split on {MESH}: the parts that ranks 0 to 3 hold", 15)
    x = 20.0
    for name, shape, spec in columns:
        partial = any(isinstance(p, Partial) for p in spec)
        drawing.text(x, TOP - 24, name, 13)
        drawing.text(x, TOP - 9, format_spec(spec), 11)
        for (rows, entries), ranks in _blocks(shape, spec):
            at = x + entries.start * CELL, TOP + rows.start * CELL
            width, height = len(entries) * CELL, len(rows) * CELL
            drawing.box(*at, width, height, COLOURS[ranks[0]])
            words = (" + " if partial else " ").join(map(str, ranks))
            place = at[0] + width / 2, at[1] + height / 2 + 4
            drawing.text(*place, words, 12, "middle", "white")
        x += shape[1] * CELL + GAP
    moved = [
        f"{m.step.kind} over {' and '.join(MESH.axis_names[a] for a in m.step.axes)}"
        for m in found.communications()
    ]
    words = f"0 + 1: each has a sum of its own, both are to be added: {', '.join(moved)}"
    drawing.text(20, drawing.height - 18, words)
    return drawing


def _drawn(found: PartitionedGraph) -> Iterator[tuple[str, tuple[int, ...], Spec]]:
    """Names, shapes and specs, from left to right."""
    tensors = {op.name: op.outputs[0] for op in found.prepared.graph.ops}
    before = {reshard.tensor: reshard.source for reshard in found.reshards}
    for name, shown in NAMES.items():
        tensor = tensors[name]
        shape = tuple(n or 0 for n in tensor.shape or ())
        if tensor in before:
            yield shown, shape, before[tensor]
            shown = "added up"
        yield shown, shape, found.specs[tensor]


def _blocks(shape: Sequence[int], spec: Spec) -> Iterator[tuple[tuple[range, range], list[int]]]:
    """The parts of a matrix, as rows and columns, and the ranks that hold each."""
    holders: dict[tuple[range, range], list[int]] = defaultdict(list)
    for rank in range(MESH.size):
        coords = MESH.coordinates(rank)
        rows, columns = (
            range(int(index[0]), int(index[-1]) + 1)
            for index in (local_indices(n, dim, spec, MESH, coords) for dim, n in enumerate(shape))
        )
        holders[rows, columns].append(rank)
    yield from holders.items()
