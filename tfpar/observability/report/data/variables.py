"""Variables of a plan: the placement of each, the reason for it, and its uses."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from tfpar.ir.graph import Op, Tensor
from tfpar.ir.graph import Variable as StepVariable
from tfpar.ir.graph_nodes import GraphNode, NodeGraph
from tfpar.ir.traits import HANDED_ON
from tfpar.observability.report.data.schema import Option, Use, VariableSummary
from tfpar.observability.report.data.step_layouts import StepLayouts
from tfpar.observability.report.variables import (
    layout_of_variable,
    placement_text,
    shard_bytes,
    variable_bytes,
    variables_in_stages,
)
from tfpar.plans import Plan, PlannedVariable
from tfpar.propagation.follow import followed_weights
from tfpar.propagation.partitioned_graph import PartitionedGraph, Reshard
from tfpar.spec import Mesh, Replicate, Spec, format_spec, local_shape

MOST_SHOWN = 12
"""How many uses, and reshards, of a variable are kept."""


def variables_of(
    plan: Plan,
    laid: StepLayouts | None,
    nodes: NodeGraph | None,
    paths: Mapping[GraphNode, str],
) -> tuple[VariableSummary, ...]:
    """Summarise all variables of the plan, in its order.

    Args:
        nodes, paths: of the graph, and what they are called; None where it is not known.
    """
    layers = {w.name: paths[node] for node in (nodes.nodes if nodes else ()) for w in node.weights}
    uses = [] if laid is None else [_Uses(plan, each) for each in laid.partitioned]
    placed = variables_in_stages(plan, None if laid is None else laid.partitioned[0])
    found = []
    for path, planned in plan.variables.items():
        layout, number = layout_of_variable(plan, path)
        own = _Laid(layout.variables.get(path, planned), *placed[path])
        users = uses[number] if number < len(uses) else None
        found.append(_variable(plan, path, own, layers.get(path), users))
    return tuple(found)


class _Laid(NamedTuple):
    """A variable, and how it lies on the mesh of its stage; spec None: that is not known."""

    planned: PlannedVariable
    spec: Spec | None
    mesh: Mesh


def _variable(
    plan: Plan,
    path: str,
    variable: _Laid,
    layer: str | None,
    uses: _Uses | None,
) -> VariableSummary:
    stages, (planned, spec, mesh) = plan.stages, variable
    laid = None if spec is None else local_shape(planned.shape, spec, mesh)
    known = {} if uses is None else uses.of(path, planned)
    why = known.pop("why", planned.why or ("" if spec is None else "fixed by the plan"))
    return VariableSummary(
        path=path,
        layer=layer,
        kind="weight" if planned.trainable else "state",
        fixed=planned.spec is not None,
        shape=planned.shape,
        dtype=planned.dtype,
        placement=None if spec is None else placement_text(spec, mesh),
        spec=None if spec is None else format_spec(spec),
        slots=None if planned.slots is None else format_spec(planned.slots),
        gathered=None if planned.gathered is None else placement_text(planned.gathered, mesh),
        local_shape=None if laid is None else tuple(laid),
        num_bytes=variable_bytes(planned),
        device_bytes=None if spec is None else shard_bytes(planned, spec, mesh),
        why=why,
        stage=None if stages is None else stages.owners.get(path),
        offloaded=path in plan.offloaded.slots,
        # Those of a pipeline were priced without its stages: they are no step of its own.
        options=() if spec is None or stages is not None else _options(plan, planned, spec),
        **known,
    )


def _options(plan: Plan, planned: PlannedVariable, spec: Spec) -> tuple[Option, ...]:
    """List the other specs that the planner priced for the variable, the runner-up first."""
    others = [a for a in planned.alternatives if a.spec != spec or a.layout]
    found = []
    for other in sorted(others, key=lambda a: a.seconds):
        names = zip(other.spec, other.axis_names or plan.mesh.axis_names, strict=True)
        laid = ", ".join(f"{p} over {n}" for p, n in names if not isinstance(p, Replicate))
        seconds = other.seconds if math.isfinite(other.seconds) else None
        found.append(Option(laid or "replicated", format_spec(other.spec), other.layout, seconds))
    return tuple(found)


class _Uses:
    """Who uses the variables of a step, and what is moved around them."""

    def __init__(self, plan: Plan, partitioned: PartitionedGraph) -> None:
        self._plan, self._partitioned = plan, partitioned
        self._by_name = {v.name: v for v in partitioned.graph.variables}
        self._order = {op: i for i, op in enumerate(partitioned.graph.ops)}
        self._follows = followed_weights(partitioned.graph, partitioned.prepared.rules)
        self._reshards: dict[Tensor, list[Reshard]] = {}
        for reshard in partitioned.reshards:
            self._reshards.setdefault(reshard.tensor, []).append(reshard)

    def of(self, path: str, planned: PlannedVariable) -> dict[str, Any]:
        """The fields of a variable that the graph tells; none if it is not in the graph."""
        variable = self._by_name.get(path)
        if variable is None:
            return {}
        readers = self._readers(variable.handle)
        near = {variable.handle, *(t for op in readers for t in (*op.inputs, *op.outputs))}
        reshards = [r for tensor in near for r in self._reshards.get(tensor, ())]
        reshards.sort(key=lambda r: self._order[r.tensor.op])
        mesh = self._partitioned.mesh
        return {
            "why": self._why(planned, variable, readers),
            "uses": tuple(map(self._use, readers[:MOST_SHOWN])),
            "num_uses": len(readers),
            "reshards": tuple(_reshard_text(r, mesh) for r in reshards[:MOST_SHOWN]),
            "num_reshards": len(reshards),
        }

    def _use(self, op: Op) -> Use:
        strategy = self._partitioned.decisions[op].strategy
        reads, makes = (
            " ".join(f"[{format_spec(spec)}]" for spec in specs) or "nothing"
            for specs in (strategy.in_specs, strategy.out_specs)
        )
        return Use(op.type, op.name, reads, makes, op.name in self._plan.ops)

    def _readers(self, handle: Tensor) -> list[Op]:
        """The ops that use the variable's value or assign it, past those that only relabel it."""
        consumers = self._partitioned.prepared.consumers
        stack, seen = [handle], set()
        found = []
        while stack:
            for op in consumers.get(stack.pop(), ()):
                if op in seen:
                    continue
                seen.add(op)
                if op.type in HANDED_ON:
                    stack += op.outputs
                else:
                    found.append(op)
        return sorted(found, key=self._order.__getitem__)

    def _why(self, planned: PlannedVariable, variable: StepVariable, readers: Sequence[Op]) -> str:
        if planned.spec is not None:
            return planned.why or "fixed by the plan"
        if variable.trainable:
            if not readers:
                return "no op reads it, so it is replicated"
            return f"no constraint; it is laid as its first reader wants it, {readers[0].name!r}"
        link = self._follows.get(variable)
        if link is not None:
            leading = self._plan.variables.get(link[0].name)
            apart = leading is not None and leading.slots is not None
            lies = "lies like it" if not apart else "is split further than it, to store less"
            return f"no constraint; it is updated along with {link[0].name!r} and {lies}"
        return "no constraint, and it belongs to no weight: replicated"


def _reshard_text(reshard: Reshard, mesh: Mesh) -> str:
    steps = ", then ".join(
        f"{step.kind} over {' x '.join(mesh.axis_names[a] for a in step.axes)}"
        for step in reshard.steps(mesh)
    )
    return (
        f"{reshard.tensor.name}: {format_spec(reshard.source)} -> {format_spec(reshard.target)} "
        f"({steps})"
    )
