"""Colocation: forward ops that have to be in one stage, and the stages that follow from it where
none are assigned."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence

from tfpar.ir.graph import Graph, Op, Tensor
from tfpar.ir.traits import VARIABLE_READS
from tfpar.pipeline.step_stages import can_be_sent


def together(graph: Graph, ops: Sequence[Op]) -> list[tuple[Op, Op]]:
    """(earlier, later) of ops that have to be in one stage: they touch a variable that one of them
    writes, or one reads of the other what cannot be sent: a list, strings, a tensor whose shape is
    known only when the step runs.

    Args:
        ops: those that stages are given for, in the order of the graph.
    """
    members, consumers = set(ops), graph.consumers()
    found = [(t.op, op) for op in ops for t in op.inputs if t.op in members and not can_be_sent(t)]
    for variable in graph.variables:
        touching = [op for op in consumers.get(variable.handle, ()) if op in members]
        if any(op.type not in VARIABLE_READS for op in touching):
            touching += readers_of(variable.handle, consumers, members)
            found += [(touching[0], op) for op in touching[1:]]
    return found


def readers_of(
    handle: Tensor, consumers: Mapping[Tensor, Sequence[Op]], members: Collection[Op]
) -> Iterator[Op]:
    """Yield the members that read a variable's value from an op that is no member itself."""
    for op in consumers.get(handle, ()):
        if op.type in VARIABLE_READS and op not in members:
            for tensor in op.outputs:
                yield from (r for r in consumers.get(tensor, ()) if r in members)


# --- stages of a step that is not assigned any ----------------------------------------------
# That is an evaluation of a model whose training step has stages, or a function that trains
# nothing. Nothing is balanced: weights are stored and gradients computed elsewhere. Stages whose
# variables the step does not read have nothing to do in it.


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
