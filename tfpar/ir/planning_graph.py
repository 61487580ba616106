"""The graph that is searched: forward, backward, and in place of the optimizer a stand-in.

What an optimizer computes runs where its weight lies; a plan needs to know only that each
gradient ends at its weight. So a plan does not depend on the optimizer, and a step can be planned
that was traced without one.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

from tfpar.ir.graph import DType, Gradient, Graph, Op, Variable
from tfpar.ir.roles import UPDATE, Roles


@dataclasses.dataclass(frozen=True, eq=False)
class PlanningGraph:
    """Attributes:
    graph: ops are those of the step, but for the stand-ins.
    stand_ins: `AssignSub` ops, which cost nothing.
    """

    graph: Graph
    stand_ins: frozenset[Op]


def planning_graph(graph: Graph, gradients: Sequence[Gradient]) -> PlanningGraph:
    """Cut `graph` at its gradients; without any, it stays whole."""
    if not gradients:
        return PlanningGraph(graph, frozenset())
    ends = [t for g in gradients for t in g.tensors]
    by_name = {v.name: v for v in graph.variables}
    roles = Roles.of(graph, ends)
    outputs = [t for t in graph.outputs if roles.phase[t.op] != UPDATE]
    # Counters and seeds go on by themselves; counting steps is the optimizer's.
    sources = {t.op for t in graph.inputs} | {v.handle.op for v in graph.variables if v.trainable}
    effects = [
        op
        for op in graph.effects
        if roles.phase[op] != UPDATE and not sources.isdisjoint(_ancestors([op]))
    ]
    stand_ins: list[Op] = []
    extra: list[Op] = []
    for gradient in gradients:
        values, variable = gradient.values, by_name[gradient.variable]
        if gradient.indices is not None:
            extra += _summed_rows(gradient, variable)
            values = extra[-1].outputs[0]
        op = Op(f"update/{variable.name}", "AssignSubVariableOp", stateful=True)
        op.attrs["dtype"] = DType(variable.dtype)
        op.inputs = [variable.handle, values]
        stand_ins.append(op)
    keep = _ancestors([*(t.op for t in outputs), *effects, *extra, *stand_ins])
    variables = [v for v in graph.variables if v.handle.op in keep]
    inputs = {t.op for t in graph.inputs}
    kept = [op for op in graph.ops if op in keep or op in inputs]
    cut = Graph(
        [*kept, *extra, *stand_ins],
        graph.inputs,
        outputs,
        variables,
        graph.functions,
        [*effects, *stand_ins],
    )
    return PlanningGraph(cut, frozenset(stand_ins))


def _summed_rows(gradient: Gradient, variable: Variable) -> list[Op]:
    """Ops that make the sparse gradient dense."""
    rows = np.array(variable.shape[0], np.int32)
    scope = gradient.values.op.scope
    count = Op(f"{scope}/num_segments", "Const", attrs={"value": rows, "dtype": DType("int32")})
    count.add_output((), "int32")
    assert gradient.indices is not None
    total = Op(f"{scope}/UnsortedSegmentSum", "UnsortedSegmentSum")
    total.attrs = {
        "T": DType(gradient.values.dtype),
        "Tindices": DType(gradient.indices.dtype),
        "Tnumsegments": DType("int32"),
    }
    total.inputs = [gradient.values, gradient.indices, count.outputs[0]]
    total.add_output(variable.shape, gradient.values.dtype)
    return [count, total]


def _ancestors(roots: Sequence[Op]) -> set[Op]:
    found: set[Op] = set()
    stack = list(roots)
    while stack:
        op = stack.pop()
        if op not in found:
            found.add(op)
            stack += [t.op for t in op.inputs]
    return found
