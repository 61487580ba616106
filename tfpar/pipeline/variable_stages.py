"""Stages of a step that is not assigned any: its ops run in the stages of the variables that they
read.

That is an evaluation of a model whose training step has stages, or a function that trains nothing.
Nothing is balanced: weights are stored and gradients computed elsewhere. Stages whose variables the
step does not read have nothing to do in it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from tfpar.ir.graph import Graph, Op
from tfpar.pipeline.colocation import together


def infer_variable_stages(
    graph: Graph,
    ops: Sequence[Op],
    owners: Mapping[str, int],
    fixed: Mapping[Op, int] | None = None,
) -> dict[Op, int]:
    """Infer the latest stage of what each of `ops` comes of: of variables, and of other ops.

    Args:
        ops: those that `pipeline.step_stages.assignable` lists.
        owners: the stages of variables, by name; of others nothing is known.
        fixed: stages that ops are in at the earliest, as far as they are given.
    """
    least = {v.handle.op: owners[v.name] for v in graph.variables if v.name in owners}
    least.update((op, max(stage, least.get(op, 0))) for op, stage in (fixed or {}).items())
    bound: dict[Op, list[Op]] = {}
    for one, other in together(graph, ops):
        bound.setdefault(one, []).append(other)
        bound.setdefault(other, []).append(one)
    stage = dict.fromkeys(graph.ops, 0)
    moved = True
    while moved:  # each pass moves some op to a later stage, or is the last
        moved = False
        for op in graph.ops:
            at = max([stage[op], least.get(op, 0), *(stage[t.op] for t in op.inputs)])
            for each in (op, *bound.get(op, ())):
                if stage[each] < at:
                    stage[each] = at
                    moved = True
    return {op: stage[op] for op in ops}
