"""Merge of the programs of all rank classes (ranks of equal shapes) into one program.

All classes run the same ops, which differ in constants alone: sizes, indices, offsets. Where they
do, a constant becomes a `RankConst`. That of a task is made outside, and given to each of its
calls.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from tfpar.compile.local.local_graph import TASK, LocalProgram
from tfpar.ir.graph import Graph, Op, Shape, ShapeAttr, Tensor, UnknownShape
from tfpar.ir.traits import CONSTANTS
from tfpar.propagation.partitioned_graph import PartitionedGraph
from tfpar.propagation.uneven_batch import UnevenSplitError, check_shares, with_uneven_mesh
from tfpar.spec import UnevenMesh

_IN_BLOCKS = ("bfloat16",)
"""Dtypes whose all-reduces processes rewrite (`compile.local.block_all_reduce`), by the one shape
of an operand."""


def build_uneven_program(
    laid: PartitionedGraph,
    meshes: Sequence[UnevenMesh],
    write: Callable[[PartitionedGraph], LocalProgram],
) -> LocalProgram:
    """Build the program of every rank, each with its share of the batch.

    Args:
        laid: on the even mesh; in parts, with their axis behind the others.
        meshes: the same one with shares: the first is taken with which that can be.
        write: gives the program of one kind of ranks.

    Raises:
        UnevenSplitError: the step cannot be cut so.
    """
    for mesh in meshes:
        try:
            check_shares(laid, mesh)
            return _merged([write(with_uneven_mesh(laid, view)) for view in mesh.views])
        except UnevenSplitError:
            if mesh is meshes[-1]:
                raise
    raise AssertionError("no shares")


def _merged(programs: Sequence[LocalProgram]) -> LocalProgram:
    """The one program of all ranks.

    Args:
        programs: what ranks run that see their mesh so, one for each of its views; the tensors of
            the result have the shapes of the one with the largest share. Programs are used up.

    Raises:
        UnevenSplitError: they differ in more than constants.
    """
    meshes = [program.mesh for program in programs]
    mesh = meshes[0]
    assert isinstance(mesh, UnevenMesh)
    base = programs[meshes.index(mesh.widest)]
    graphs = [program.graph for program in programs]
    shapes: dict[Tensor, Sequence[Shape]] = {}
    merge = functools.partial(_merge, kind=mesh.view_of, shapes=shapes)
    merge(base.graph, graphs)
    tasks = {op.attrs["body"] for op in base.graph.ops if op.type == TASK}
    for name, body in base.graph.functions.items():
        if any(name not in graph.functions for graph in graphs):
            raise UnevenSplitError(name)
        differing = merge(body, [graph.functions[name] for graph in graphs])
        if name in tasks:
            _give(base.graph, name, differing, shapes)
    return dataclasses.replace(base, mesh=mesh, shapes=shapes)


def _give(
    graph: Graph, name: str, constants: Sequence[Op], shapes: dict[Tensor, Sequence[Shape]]
) -> None:
    """Have the calls of a task be given `constants` of its body, in which ranks differ."""
    calls = [op for op in graph.ops if op.type == TASK and op.attrs["body"] == name]
    for constant in constants:
        (taken,) = constant.outputs
        made = Op(f"{name}/{constant.name}", "RankConst", attrs=constant.attrs)
        given = made.add_output(taken.shape, taken.dtype)
        if taken in shapes:
            shapes[given] = shapes[taken]
        graph.ops.insert(0, made)
        for call in calls:
            call.inputs.append(given)
        constant.type, constant.attrs = "Placeholder", {"dtype": constant.attrs["dtype"]}
        graph.functions[name].inputs.append(taken)


def _merge(
    base: Graph,
    graphs: Sequence[Graph],
    kind: Sequence[int],
    shapes: dict[Tensor, Sequence[Shape]],
) -> list[Op]:
    """Let `base` do what all `graphs` do; gives the constants in which they differ.

    Args:
        kind: of each rank, the position of its graph.
        shapes: is filled with the tensors whose shapes differ, with the shape on each rank.
    """
    places = [_places(graph) for graph in graphs]
    ends = [[place[t] for t in g.outputs] for g, place in zip(graphs, places, strict=True)]
    if any(len(g.ops) != len(base.ops) for g in graphs) or any(e != ends[0] for e in ends):
        raise UnevenSplitError("")
    made: list[tuple[Op, dict[str, Any], str]] = []
    for op, *alike in zip(base.ops, *(g.ops for g in graphs), strict=True):
        wired = [
            (one.name, [place[t] for t in one.inputs], [c.name for c in one.control])
            for one, place in zip(alike, places, strict=True)
        ]
        if any(w != wired[0] for w in wired):
            raise UnevenSplitError(op.name)
        if op.type in CONSTANTS and all(one.type in CONSTANTS for one in alike):
            of_ranks = [_values(alike[k], len(kind))[rank] for rank, k in enumerate(kind)]
            if any(not np.array_equal(value, of_ranks[0]) for value in of_ranks):
                made.append((op, {"values": of_ranks, "dtype": op.attrs["dtype"]}, "RankConst"))
        elif any(one.type != op.type for one in alike):
            raise UnevenSplitError(op.name)
        elif op.type != "Placeholder":
            made.append((op, _common(op, alike), op.type))
        for i, tensor in enumerate(op.outputs):
            each = [one.outputs[i].shape for one in alike]
            if any(shape != tensor.shape for shape in each):
                shapes[tensor] = tuple(each[k] for k in kind)
        if op.type == "AllReduce" and any(t in shapes and t.dtype in _IN_BLOCKS for t in op.inputs):
            raise UnevenSplitError(op.name)
    for op, attrs, op_type in made:  # only now, since `base` is among those that are read
        op.attrs, op.type = attrs, op_type
    return [op for op, _, op_type in made if op_type == "RankConst"]


def _places(graph: Graph) -> dict[Tensor, tuple[int, int]]:
    return {t: (i, t.index) for i, op in enumerate(graph.ops) for t in op.outputs}


def _values(op: Op, ranks: int) -> Sequence[np.ndarray]:
    """Return the value of a constant on each rank."""
    values: Sequence[np.ndarray] = op.attrs["values"] if op.type == "RankConst" else ()
    return values or [op.attrs["value"]] * ranks


def _common(op: Op, alike: Sequence[Op]) -> dict[str, Any]:
    """The attributes of ops of which each is for one kind of ranks."""
    common = dict(op.attrs)
    for key, value in op.attrs.items():
        if all(repr(one.attrs.get(key)) == repr(value) for one in alike):
            continue
        if not isinstance(value, list) or not all(
            isinstance(v, ShapeAttr | UnknownShape) for v in value
        ):
            raise UnevenSplitError(op.name)
        # What loops and branches say of their results: where they differ, nothing.
        each = zip(*(one.attrs[key] for one in alike), strict=True)
        common[key] = [v[0] if all(o == v[0] for o in v) else UnknownShape() for v in each]
    return common
