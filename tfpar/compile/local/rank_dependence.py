"""Rank dependence: the mesh axes along which the ranks of a program compute different things.

Where all ranks are in one memory, what they would all compute is computed once, and a variable that
several hold is stored and updated once. So whoever puts several ops into one, as regions of XLA
are, has to keep what ranks share apart from what each has of its own.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from tfpar.compile.local.local_graph import TASK, LocalProgram
from tfpar.compile.local.reshard import COLLECTIVE_TYPES
from tfpar.ir.graph import Graph, Op, Tensor, walk_functions
from tfpar.ir.traits import REGIONS, VARIABLE_READS
from tfpar.spec import Mesh, Shard, Spec

Axes = frozenset[int]

DIFFERS = "_tfpar_differs"
"""The attribute of a call of a region: the axes along which ranks differ in it. Ranks in one memory
that differ along no other run it once, for all of them."""

_MADE_ALIKE = ("AllReduce", "AllGather", "Broadcast")
"""Collectives that give all ranks of a group the same."""


def find_rank_dependent_axes(program: LocalProgram) -> dict[Op, Axes]:
    """Find for each op of the program's graph the axes along which ranks differ in it, or may."""
    graph, mesh = program.graph, program.mesh
    every = frozenset(a for a, size in enumerate(mesh.shape) if size > 1)
    apart = find_body_inputs(graph)
    given = {
        t: _split(spec) & every for t, spec in zip(graph.inputs, program.input_specs, strict=True)
    }
    for variable in graph.variables:
        split = _split(program.variable_specs[variable.name]) & every
        given[variable.handle] = every if variable.handle in apart else split
    found: dict[Op, Axes] = {}
    for op in graph.ops:
        if op.type == "Placeholder":
            found[op] = given.get(op.outputs[0], every)
        elif op.type == "RankConst":
            found[op] = frozenset(a for a in every if _differs(op, a, mesh))
        elif _is_each_ranks_own(graph, op):
            found[op] = every
        else:
            found[op] = _axes(op, found) & every
    return found


def _is_each_ranks_own(graph: Graph, op: Op) -> bool:
    """Whether nothing is known of how ranks differ in an op."""
    bodies = (body for _, body in walk_functions(graph, op))
    return op.type in (TASK, "Recv") or any(map(_holds_rank_constants, bodies))


def _axes(op: Op, found: Mapping[Op, Axes]) -> Axes:
    """Return the mesh axes along which ranks differ in an op, given those of the ops that it
    reads."""
    read = op.inputs
    if op.type not in VARIABLE_READS | REGIONS:
        # What ranks share they give the same value, even where each has computed it.
        read = [t for t in read if t.dtype == "resource"] or read
    axes: Axes = frozenset().union(*(found[t.op] for t in read))
    if op.type in COLLECTIVE_TYPES:
        over = frozenset(op.attrs["axes"])
        return axes - over if op.type in _MADE_ALIKE else axes | over
    return axes


def find_body_inputs(graph: Graph) -> set[Tensor]:
    """Find the inputs of loops, branches, calls and tasks, but not of regions that ranks may share.

    Variables among it stay with each rank.
    """
    found: set[Tensor] = set()
    for op in graph.ops:
        bodies = [body for _, body in walk_functions(graph, op)]
        if DIFFERS in op.attrs:
            (body,) = bodies
            inner = find_body_inputs(body)
            found |= {t for t, at in zip(op.inputs, body.inputs, strict=True) if at in inner}
        elif bodies:
            found.update(op.inputs)
    return found


def _split(spec: Spec) -> Axes:
    return frozenset(axis for axis, placement in enumerate(spec) if isinstance(placement, Shard))


def _differs(op: Op, axis: int, mesh: Mesh) -> bool:
    """Whether ranks that differ in their place along one axis have different constants."""
    values = [np.asarray(value) for value in op.attrs["values"]]
    return any(
        not np.array_equal(values[rank], values[group[0]])
        for group in mesh.groups((axis,))
        for rank in group
    )


def _holds_rank_constants(body: Graph) -> bool:
    return any(
        op.type == "RankConst"
        or any(_holds_rank_constants(inner) for _, inner in walk_functions(body, op))
        for op in body.ops
    )
