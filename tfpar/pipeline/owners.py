"""Owners of variables: the stage of each variable of a step, and those in which the update runs."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence

import networkx as nx

from tfpar.ir.graph import Graph, Op, Tensor
from tfpar.ir.roles import BACKWARD, FORWARD
from tfpar.ir.traits import VARIABLE_READS
from tfpar.spec import PlanError


def variable_owners(
    graph: Graph,
    phase: Mapping[Op, int],
    stage: Mapping[Op, int],
    lying: Mapping[str, int] | None = None,
) -> dict[Tensor, int]:
    """Find by handle the stage that owns each variable, of those that the forward pass touches or
    that are placed in a stage already.

    It is the stage that writes it (running statistics, metrics), or else the one that it is placed
    in, or else the first that reads it.

    Args:
        stage: of forward ops, as far as they have one.
        lying: by name, the stages in which variables are placed already.

    Raises:
        PlanError: a variable is written in several stages.
    """
    consumers, lying = graph.consumers(), lying or {}
    found = {}
    for variable in graph.variables:
        staged = [
            op for op in consumers.get(variable.handle, ()) if phase[op] == FORWARD and op in stage
        ]
        writing = {stage[op] for op in staged if op.type not in VARIABLE_READS}
        if len(writing) > 1:
            listed = " and ".join(map(str, sorted(writing)))
            raise PlanError(
                f"Variable {variable.name!r} is written in stages {listed}; what writes it has to "
                f"be in one stage."
            )
        touching = {stage[op] for op in staged if op.type != "ReadVariableOp"}
        if variable.name in lying and touching <= {lying[variable.name]}:
            found[variable.handle] = lying[variable.name]
        elif staged:
            found[variable.handle] = min(writing or {stage[op] for op in staged})
    return found


def update_stages(
    graph: Graph, phase: Mapping[Op, int], stage: Mapping[Op, int], owners: Mapping[Tensor, int]
) -> dict[Op, int]:
    """Stages of what has none yet and runs beside the passes: the update and what it reads.

    What works on one weight hangs together by its handle, its slots and tensors that are no
    scalars, and runs in the stage of the weight. What belongs to no weight and reads no gradient is
    computed where it is read first (a learning rate). What does read one is left open: it goes
    where that is (a global norm). What touches a variable within the backward pass (weights that
    are moved before another gradient is taken) runs in the stage of the variable, too.

    Args:
        stage: of ops that have one; the backward pass is left out.
        owners: by handle, of variables that the forward pass touches.

    Raises:
        PlanError: an op updates weights of several stages.
    """
    variables = graph.variable_of()
    open_ops = [
        op
        for op in graph.ops
        if op not in stage and (phase[op] != BACKWARD or any(t in variables for t in op.inputs))
    ]
    groups = _groups(graph, open_ops)
    found: dict[Op, int] = {}
    loose: list[list[Op]] = []  # variables that belong to no weight, with what touches them
    for group, handles in groups:
        stages = {owners[h] for h in handles if h in owners}
        if len(stages) == 1:
            found.update(dict.fromkeys(group, *stages))
        elif stages:
            found.update(_apart(group, owners, min(stages), set(handles)))
        elif handles:
            loose.append(group)
    consumers = graph.consumers()
    late: set[Op] = set()
    for op in graph.ops:
        if phase[op] == BACKWARD or any(t.op in late for t in op.inputs):
            late.add(op)

    def first_read(ops: Collection[Op]) -> int | None:
        within = set(ops)
        readers = (r for op in ops for t in op.outputs for r in consumers.get(t, ()))
        stages = [found[r] for r in readers if r in found and r not in within]
        return min(stages, default=None)

    held = {op for group in loose for op in group}
    free = [op for op in open_ops if op not in found and op not in held and op not in late]

    def where_read() -> None:
        for op in reversed(free):
            first = first_read([op])
            if op not in found and first is not None:
                found[op] = first

    where_read()
    for op in free:  # results, such as those of metrics
        read = [s for t in op.inputs if (s := stage.get(t.op, found.get(t.op))) is not None]
        if op not in found and read:
            found[op] = max(read)
    where_read()
    for group in loose:
        found.update(dict.fromkeys(group, first_read(group) or 0))
    where_read()
    return found


def _groups(graph: Graph, ops: Sequence[Op]) -> Iterator[tuple[list[Op], list[Tensor]]]:
    """The ops in groups that hang together, each with the handles that it touches."""
    handles = graph.variable_of()
    together = nx.Graph()
    together.add_nodes_from(ops)
    members = set(ops)
    for op in ops:
        for tensor in (*op.inputs, *op.outputs):
            if tensor in handles:
                together.add_edge(op, tensor)
            elif tensor.shape != () and tensor.op in members and tensor.op is not op:
                together.add_edge(op, tensor.op)
    place = {op: i for i, op in enumerate(graph.ops)}
    for part in nx.connected_components(together):
        inside = sorted((x for x in part if isinstance(x, Op)), key=place.__getitem__)
        touched = sorted((x for x in part if isinstance(x, Tensor)), key=lambda t: place[t.op])
        yield inside, touched


def _apart(
    group: Sequence[Op], owners: Mapping[Tensor, int], other: int, handles: Collection[Tensor]
) -> Iterator[tuple[Op, int]]:
    """Of ops that work on weights of several stages together: those that touch a variable.

    Args:
        other: the stage of variables that the forward pass does not touch.
    """
    for op in group:
        touched = [t for t in (*op.inputs, *op.outputs) if t in handles]
        stages = {owners.get(t, other) for t in touched}
        if len(stages) > 1:
            listed = " and ".join(map(str, sorted(stages)))
            raise PlanError(
                f"Op {op.name!r} ({op.type}) updates variables of stages {listed}; it cannot be in "
                f"both."
            )
        for stage in stages:
            yield op, stage
