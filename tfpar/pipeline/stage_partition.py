"""Partition of a step into stages, with as little sent between them as can be."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from tfpar.ir.graph import Graph, Op, Tensor
from tfpar.ir.passes.copy import copy_graph
from tfpar.ir.passes.trim import clone_op
from tfpar.ir.roles import Roles
from tfpar.ir.step import StepGraph
from tfpar.ir.traits import ADDITIONS, REARRANGED, VARIABLE_READS
from tfpar.pipeline.partial_sums import sum_by_stage
from tfpar.pipeline.step_stages import constant_ops, stages_of_step

_HANDED_ON = REARRANGED | ADDITIONS | {"Cast"}
"""They are linear in what they read."""

_ADDED = ADDITIONS | {"Pack"}
"""Ops in which terms of one sum meet: Keras packs the losses of a model before it adds them up."""


def partition_step(
    step: StepGraph, forward_stage: Mapping[Op, int], lying: Mapping[str, int] | None = None
) -> dict[Op, int]:
    """Cut a simplified step into stages, in place; of one stage it stays as it is.

    Args:
        forward_stage, lying: of ops of the forward pass, and of variables; see `stages_of_step`.

    Returns:
        the stage of every op of the step's graph, which is another one now.

    Raises:
        PlanError: as of `stages_of_step`.
    """
    roles = Roles.of(step.graph, step.gradient_tensors)
    stage = stages_of_step(step.graph, roles, forward_stage, lying)
    if len({*stage.values()}) == 1:
        return stage
    found: dict[Op, int] = {}

    def cut(graph: Graph) -> Graph:
        staged, copies = copy_graph(graph)
        stages = {copies[op]: s for op, s in stage.items()}
        for each in (sum_by_stage, read_once, own_constants):
            stages = each(staged, stages)
        found.update(stages)
        return staged

    step.rewrite(cut)
    return found


def sent_whole(graph: Graph, stage: Mapping[Op, int]) -> frozenset[Tensor]:
    """Find the tensors that are summed over ranks and microbatches where they are made: those that
    are sent, and those that are added to them in another stage.

    So the gradient of a weight that several stages read is sent once a step, and added to that of
    its owner after the last microbatch.

    Args:
        stage: of every op.
    """
    readers = graph.consumers()
    sent: set[Tensor] = set()
    found: set[Tensor] = set()
    for op in graph.ops:
        came = [t for t in op.inputs if t in sent or stage[t.op] != stage[op]]
        found.update(came)
        if came and op.type in _ADDED:
            found.update(op.inputs)
        if came and op.type in _HANDED_ON:
            sent.update(t for t in op.outputs if len(readers.get(t, ())) == 1)
    return frozenset(found)


# --- copies ---------------------------------------------------------------------------------
# Each stage gets its own: of constants, and of the values of variables that lie elsewhere.


def own_constants(graph: Graph, stage: Mapping[Op, int]) -> dict[Op, int]:
    """Copy what depends on constants alone to each stage that reads it, in place.

    Args:
        stage: of every op.

    Returns:
        the stage of every op that there is now.
    """
    found = dict(stage)
    constant = constant_ops(graph)
    readers = graph.consumers()
    needed: dict[Op, set[int]] = {}
    for op in reversed(graph.ops):
        if op in constant:
            asking = [r for t in op.outputs for r in readers.get(t, ())]
            at = {s for r in asking for s in (needed[r] if r in constant else (found[r],))}
            returned = any(t in graph.outputs for t in op.outputs)
            needed[op] = at | ({found[op]} if returned or not at else set())
    copies: dict[tuple[Op, int], Op] = {}
    ops: list[Op] = []
    for op in graph.ops:
        inputs = op.inputs
        if op in constant and found[op] not in needed[op]:
            found[op] = min(needed[op])
        for s in sorted(needed.get(op, {found[op]})):
            own = op
            if s != found[op]:
                own = clone_op(op, ())
                own.name = f"{op.name}/stage_{s}"
                found[own] = s
            own.inputs = [
                copies[t.op, s].outputs[t.index] if t.op in constant else t for t in inputs
            ]
            copies[op, s] = own
            ops.append(own)
    graph.ops = ops
    return {op: found[op] for op in ops}


def read_once(graph: Graph, stage: Mapping[Op, int]) -> dict[Op, int]:
    """Let other stages share one read of a variable between two of its updates, in place.

    Each weight of an optimizer reads the learning rate and counts steps for itself: the value would
    be sent as often.

    Args:
        stage: of every op.

    Returns:
        the stage of every op that there is now.
    """
    readers = graph.consumers()
    shared: dict[Tensor, Tensor] = {}  # reads, and the first of the same value
    for variable in graph.variables:
        touching = readers.get(variable.handle, ())
        reads = [
            op
            for op in touching
            if op.type == "ReadVariableOp"
            and any(stage[r] != stage[op] for r in readers.get(op.outputs[0], ()))
        ]
        if len(reads) > 1:
            writers = [op for op in touching if op.type not in VARIABLE_READS]
            first: dict[tuple[bool, ...], Op] = {}
            for op, after in zip(reads, _after(graph, reads, writers), strict=True):
                shared[op.outputs[0]] = first.setdefault(after, op).outputs[0]
    if not shared:
        return dict(stage)
    for op in graph.ops:
        op.inputs = [shared.get(t, t) if stage[t.op] != stage[op] else t for t in op.inputs]
    return _without_unread(graph, stage, {t.op: first.op for t, first in shared.items()})


def _after(graph: Graph, reads: Sequence[Op], writers: Sequence[Op]) -> Iterator[tuple[bool, ...]]:
    """For each of `reads`, which of `writers` it comes after."""
    following = []
    for writer in writers:
        reached = {writer}
        for op in graph.ops:
            if any(t.op in reached for t in op.inputs) or any(c in reached for c in op.control):
                reached.add(op)
        following.append(reached)
    return (tuple(op in reached for reached in following) for op in reads)


def _without_unread(graph: Graph, stage: Mapping[Op, int], first: Mapping[Op, Op]) -> dict[Op, int]:
    """Remove reads that nothing reads any more; what waited for them waits for the `first`."""
    read = {t.op for op in graph.ops for t in op.inputs} | {t.op for t in graph.outputs}
    gone = {op: other for op, other in first.items() if other is not op and op not in read}
    graph.ops = [op for op in graph.ops if op not in gone]
    for op in graph.ops:
        op.control = [*dict.fromkeys(gone.get(c, c) for c in op.control)]
    return {op: stage[op] for op in graph.ops}
