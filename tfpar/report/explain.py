"""What a plan does with one variable, as text."""

from __future__ import annotations

import difflib
import math
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from tfpar.constraints.patterns import without_call_counts
from tfpar.cost.patterns import patterns
from tfpar.ir.graph import Op, Tensor, Variable
from tfpar.ir.graph_nodes import GraphNode
from tfpar.ir.traits import HANDED_ON
from tfpar.propagation.follow import followed_weights
from tfpar.report.alike_names import alike_names
from tfpar.report.layers import LayerReport, layer_reports
from tfpar.report.pipeline import ranks_of_stage
from tfpar.report.summary import simpler_than
from tfpar.report.variables import placement_text, shard_bytes, variable_bytes, variable_specs
from tfpar.spec import Mesh, PlanError, Replicate, Spec, format_spec, local_shape
from tfpar.spec.quantities import format_bytes, format_seconds

if TYPE_CHECKING:
    from tfpar.plans import Plan, PlannedVariable
    from tfpar.propagation.partitioned import PartitionedGraph, Reshard

_MAX_LINES = 12


def explain(plan: Plan, name: str, partitioned: PartitionedGraph | None = None) -> str:
    """Where variable `name` lies and why, who reads it, and which reshards that takes.

    Args:
        name: a variable's path, or an end of it that no other variable's path has; or a layer:
            the name of a GraphNode, or its end.

    Raises:
        PlanError: the plan has no such variable, or several; names them, or the nearest.
    """
    if partitioned is not None and plan.cluster is not None and not _is_variable(plan, name):
        for report in layer_reports(partitioned, plan.cluster):
            named = {report.node.name, without_call_counts(report.node.name)}
            if any(n == name or n.endswith(f"/{name}") for n in named):
                return _explain_layer(plan, report, partitioned)
    name = _full_name(plan, name)
    variable = plan.variables[name]
    spec = variable_specs(plan, partitioned)[name]
    size = format_bytes(variable_bytes(variable))
    head = f"Variable {name!r}, {variable.dtype} {variable.shape}, {size}"
    simpler = [f"  {line}" for line in simpler_than(plan)]
    if spec is None:
        left = "  Left to propagation: run a step, or pass what was partitioned."
        return "\n".join([head, *_stage(plan, name), left, *simpler])
    lines = [
        head,
        f"  Placement: {placement_text(spec, plan.mesh)} ({format_spec(spec)} on {plan.mesh})",
        f"  Per device: {local_shape(variable.shape, spec, plan.mesh)}, "
        f"{format_bytes(shard_bytes(variable, spec, plan.mesh))}",
    ]
    lines += _stage(plan, name)
    if name in plan.offloaded.slots:
        lines.append("  Its optimizer slots lie in host memory between their uses.")
    lines += _alternatives(plan, variable, spec)
    lines += simpler
    found = None
    if partitioned is not None:
        found = next((v for v in partitioned.graph.variables if v.name == name), None)
    if partitioned is None or found is None:
        return "\n".join([*lines, f"  Why: {variable.why or 'fixed by the plan'}"])
    readers = list(_readers(partitioned, found.handle))
    lines.append(f"  Why: {_why(plan, variable, found, partitioned, readers)}")
    lines.append("  Used by:" if readers else "  Used by no op.")
    for op in readers[:_MAX_LINES]:
        strategy = partitioned.decisions[op].strategy
        sides = (
            " ".join(map(_short, s)) or "nothing" for s in (strategy.in_specs, strategy.out_specs)
        )
        said = " (as the plan says)" if op.name in plan.ops else ""
        lines.append(f"    {op.type} {op.name!r}: {' -> '.join(sides)}{said}")
    lines += _more(readers)
    touching = _touching(partitioned, found.handle, readers)
    lines.append("  Reshards around them:" if touching else "  No reshard around them.")
    lines += [f"    {_reshard_text(r, partitioned.mesh)}" for r in touching[:_MAX_LINES]]
    return "\n".join([*lines, *_more(touching)])


def _stage(plan: Plan, name: str) -> list[str]:
    """In which stage of a pipeline the variable lies."""
    if plan.stages is None or name not in plan.stages.owners:
        return []
    stage = plan.stages.owners[name]
    ranks = ranks_of_stage(plan.stages, stage, plan.mesh)
    return [f"  Stage: {stage} of {plan.stages.num_stages}, on ranks {ranks}"]


def _is_variable(plan: Plan, name: str) -> bool:
    return any(path == name or path.endswith(f"/{name}") for path in plan.variables)


def _explain_layer(plan: Plan, report: LayerReport, partitioned: PartitionedGraph) -> str:
    node = report.node
    lines = [
        f"Layer {node.name!r}: {len(node.ops)} ops, {format_bytes(report.num_bytes)} of weights "
        f"on a device, {format_seconds(report.seconds)} a step without overlap and packing"
    ]
    specs = variable_specs(plan, partitioned)
    for weight in node.weights:
        spec = specs[weight.name]
        assert spec is not None
        lines.append(f"  {weight.name} {weight.shape}: {placement_text(spec, plan.mesh)}")
        lines += [f"  {line}" for line in _stage(plan, weight.name)]
        planned = plan.variables[weight.name]
        lines += [f"  {line}" for line in _alternatives(plan, planned, spec)]
    lines += _patterns(plan, node, partitioned)
    lines.append("  Collectives:" if report.collectives else "  No collectives.")
    lines += [
        f"    {count} {kind} over {axes}, {format_bytes(size)}"
        for (kind, axes), (count, size) in report.collectives.items()
    ]
    return "\n".join(lines)


def _patterns(plan: Plan, node: GraphNode, partitioned: PartitionedGraph) -> list[str]:
    """The node's sharding patterns: Split or Replica, and the Communication that follows."""
    assert plan.cluster is not None
    batch = tuple(plan.mesh.axis(n) for n in plan.batch_axes)
    found = patterns(node, partitioned.prepared, plan.mesh, plan.cluster, batch)
    lines = ["  Sharding patterns, each by itself:"] if found else []
    for pattern in found:
        moved = ", ".join(
            f"{c.kind} over {c.axis} ({c.phase}, {format_bytes(c.num_bytes)})"
            for c in pattern.communication
        )
        laid = f"{pattern.placement} over {pattern.axis}" if pattern.axis else "R"
        time = f" {format_seconds(pattern.seconds)}: {moved}" if moved else " no communication"
        lines.append(f"    {pattern.weight.rpartition('/')[2]} {laid}:{time}")
    return lines


def _alternatives(plan: Plan, variable: PlannedVariable, spec: Spec) -> list[str]:
    """What else the planner priced for the variable, the runner-up first."""
    others = [a for a in variable.alternatives if a.spec != spec or a.layout]
    others.sort(key=lambda a: a.seconds)
    if plan.cost is None or not others:
        return []
    best = plan.cost.seconds
    lines = [f"  Step with it as chosen: {format_seconds(best)}; otherwise, at best:"]
    for other in others:
        text = "not valid"
        if math.isfinite(other.seconds):
            text = format_seconds(other.seconds)
            if best > 0:
                text += f" ({100 * (other.seconds - best) / best:+.1f} %)"
        where = f" on {other.layout}" if other.layout else ""
        names = zip(other.spec, other.axis_names or plan.mesh.axis_names, strict=True)
        laid = ", ".join(f"{p} over {n}" for p, n in names if not isinstance(p, Replicate))
        lines.append(f"    {laid or 'replicated'}{where}: {text}")
    return lines


def _full_name(plan: Plan, name: str) -> str:
    if name in plan.variables:
        return name
    ending = [path for path in plan.variables if path.endswith(f"/{name}")]
    if len(ending) == 1:
        return ending[0]
    if ending:
        count, groups = len(ending), alike_names(ending)
        raise PlanError(
            f"The plan has several variables {name!r}, {count} in all: {groups}. Give more of the "
            f"path."
        )
    near = difflib.get_close_matches(name, plan.variables, n=3, cutoff=0.3)
    hint = f" The nearest names: {', '.join(map(repr, near))}." if near else ""
    raise PlanError(f"The plan has no variable {name!r}.{hint}")


def _more(listed: Sequence[object]) -> list[str]:
    return [f"    and {len(listed) - _MAX_LINES} more"] if len(listed) > _MAX_LINES else []


def _short(spec: Spec) -> str:
    return f"[{format_spec(spec)}]"


def _why(
    plan: Plan,
    planned: PlannedVariable,
    variable: Variable,
    partitioned: PartitionedGraph,
    readers: list[Op],
) -> str:
    if planned.spec is not None:
        return planned.why or "fixed by the plan"
    if variable.trainable:
        if not readers:
            return "no op reads it, so it is replicated"
        return f"no constraint; it is laid as its first reader wants it, {readers[0].name!r}"
    link = followed_weights(partitioned.graph, partitioned.prepared.rules).get(variable)
    if link is not None:
        leading = plan.variables.get(link[0].name)
        apart = leading is not None and leading.slots is not None
        lies = "lies like it" if not apart else "is split further than it, to store less"
        return f"no constraint; it is updated along with {link[0].name!r} and {lies}"
    return "no constraint, and it belongs to no weight: replicated"


def _readers(partitioned: PartitionedGraph, handle: Tensor) -> Iterator[Op]:
    """The ops that use the variable's value or assign it, past those that only relabel it."""
    consumers = partitioned.prepared.consumers
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
    order = {op: i for i, op in enumerate(partitioned.graph.ops)}
    yield from sorted(found, key=order.__getitem__)


def _touching(
    partitioned: PartitionedGraph, handle: Tensor, readers: Sequence[Op]
) -> list[Reshard]:
    near = {handle, *(t for op in readers for t in (*op.inputs, *op.outputs))}
    return [r for r in partitioned.reshards if r.tensor in near]


def _reshard_text(reshard: Reshard, mesh: Mesh) -> str:
    steps = ", then ".join(
        f"{step.kind} over {' x '.join(mesh.axis_names[a] for a in step.axes)}"
        for step in reshard.steps(mesh)
    )
    return (
        f"{reshard.tensor.name}: {format_spec(reshard.source)} -> {format_spec(reshard.target)} "
        f"({steps})"
    )
