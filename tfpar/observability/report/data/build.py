"""Builder of a plan's report, which gathers once all that views show."""

from __future__ import annotations

import collections
import dataclasses
import math
from collections.abc import Iterator, Sequence

from tfpar.ir.collection import collection_paused
from tfpar.ir.graph import Op, Shape, itemsize
from tfpar.ir.graph_nodes import cluster
from tfpar.ir.roles import Roles
from tfpar.observability.report.data.attribution import shares_of, stage_of_layer
from tfpar.observability.report.data.calls import merge_repeated_calls
from tfpar.observability.report.data.candidates import candidates_of
from tfpar.observability.report.data.diagnosis import PlanDiagnosis
from tfpar.observability.report.data.flows import flows_of, inputs_of
from tfpar.observability.report.data.layers import layers_of
from tfpar.observability.report.data.overview import build_overview, cost_of, machines_of
from tfpar.observability.report.data.paths import paths_of
from tfpar.observability.report.data.pipeline import pipeline_of
from tfpar.observability.report.data.repeats import repeats_of
from tfpar.observability.report.data.schema import (
    Collective,
    FlowSummary,
    Input,
    LayerSummary,
    Padding,
    Report,
    RunWhole,
    VariableSummary,
    WithoutRule,
    read_report,
)
from tfpar.observability.report.data.variables import variables_of
from tfpar.plans import Plan
from tfpar.propagation.partitioned_graph import PartitionedGraph
from tfpar.spec import Mesh, Shard, Spec, dim_is_even, format_spec, local_shape


def build_report(plan: Plan, partitioned: PartitionedGraph | None = None) -> Report:
    """Build the report of a plan: all that views show of it.

    Args:
        partitioned: what propagation made of it. Without, it is the report that was saved with the
            plan, unless the plan has been changed since; without one of these either, layers and
            collectives are not known.

    Raises:
        PlanError: the report that was saved is malformed, or of another version.
    """
    if partitioned is None and plan.report is not None:
        saved = read_report(plan.report, "the plan")
        if _tells_of(saved, plan):
            return saved
    with collection_paused():
        step = _Step() if partitioned is None else _step(plan, partitioned)
    if partitioned is None:
        step = dataclasses.replace(step, variables=variables_of(plan, None, None, {}))
    told = PlanDiagnosis(
        facts=build_overview(plan),
        machines=machines_of(plan),
        cost=cost_of(plan),
        layers=step.layers,
        collectives=step.collectives,
        pipeline=pipeline_of(plan, step.variables, step.layers),
        candidates=tuple(candidates_of(plan)),
        without_rule=step.without_rule,
        run_whole=step.run_whole,
    )
    return Report(
        tfpar_version=plan.tfpar_version,
        verdict=told.verdict(),
        facts=told.facts,
        machines=told.machines,
        cost=told.cost,
        layers=step.layers,
        variables=step.variables,
        collectives=step.collectives,
        flows=step.flows,
        inputs=step.inputs,
        pipeline=told.pipeline,
        candidates=tuple(told.candidates),
        what_if=(),
        planned_ops=step.planned_ops,
        padding=step.padding,
        without_rule=step.without_rule,
        run_whole=step.run_whole,
        warnings=tuple(told.warnings()),
        hints=tuple(told.hints()),
    )


def _tells_of(report: Report, plan: Plan) -> bool:
    """Whether a report is of this plan, and not of what it was before someone changed it."""
    facts = dataclasses.replace(report.facts, model="", model_class="")  # known to the report alone
    laid = {variable.path: variable.spec for variable in report.variables if variable.fixed}
    planned = {n: format_spec(v.spec) for n, v in plan.variables.items() if v.spec is not None}
    own = dataclasses.replace(build_overview(plan), model="", model_class="")
    return (facts, report.cost, laid) == (own, cost_of(plan), planned)


@dataclasses.dataclass(frozen=True)
class _Step:
    """Part of a `Report` that is read from the plan's partitioned graph."""

    layers: tuple[LayerSummary, ...] = ()
    variables: tuple[VariableSummary, ...] = ()
    collectives: tuple[Collective, ...] = ()
    flows: tuple[FlowSummary, ...] = ()
    inputs: tuple[Input, ...] = ()
    planned_ops: dict[str, int] = dataclasses.field(default_factory=dict)
    padding: Padding | None = None
    without_rule: tuple[WithoutRule, ...] = ()
    run_whole: tuple[RunWhole, ...] = ()


def _step(plan: Plan, partitioned: PartitionedGraph) -> _Step:
    graph = partitioned.graph
    roles = Roles.of(graph, jit_compile=partitioned.jit_compile)
    roles = dataclasses.replace(roles, wire_dtypes=partitioned.wire_dtypes)
    nodes = merge_repeated_calls(cluster(graph, roles))
    model = plan.layers[0].path if plan.layers else ""
    names = paths_of(nodes.nodes, model, {layer.path for layer in plan.layers[1:]})
    paths = dict(zip(nodes.nodes, names, strict=True))
    stages = stage_of_layer(plan, nodes, roles)
    shares = shares_of(plan, partitioned, roles, nodes, stages, paths)
    repeats = repeats_of(graph, nodes, roles, paths)
    types = {op.name: op.type for op in graph.ops}
    planned = collections.Counter(types[name] for name in plan.ops if name in types)
    return _Step(
        layers=layers_of(plan, partitioned, roles, nodes, paths, repeats, stages, shares),
        variables=variables_of(plan, partitioned, nodes, paths),
        collectives=shares.collectives,
        flows=tuple(flows_of(partitioned, nodes, roles, paths)),
        inputs=tuple(inputs_of(partitioned)),
        planned_ops=dict(planned.most_common()),
        padding=_padding(partitioned),
        without_rule=tuple(_without_rule(partitioned)),
        run_whole=tuple(
            RunWhole(op.type, partitioned.mesh.axis_names[axis], op.name)
            for op, axis in partitioned.replicated_regions
        ),
    )


def _padding(partitioned: PartitionedGraph) -> Padding:
    mesh, specs = partitioned.mesh, partitioned.variable_specs
    padded = [v for v, spec in specs.items() if _is_padded(v.shape, spec, mesh)]
    handles = {v.handle for v in partitioned.graph.variables}
    seen: dict[tuple[Shape, Spec], bool] = {}
    tensors = 0
    for tensor, spec in partitioned.specs.items():
        if tensor in handles or not tensor.is_static:
            continue
        key = (tensor.shape, spec)
        if key not in seen:
            seen[key] = _is_padded(tensor.shape, spec, mesh)
        tensors += seen[key]
    extra = sum(
        math.prod(local_shape(v.shape, specs[v], mesh))
        * itemsize(v.dtype)
        * _num_shards(specs[v], mesh)
        - v.num_bytes
        for v in padded
    )
    return Padding(tuple(v.name for v in padded), float(extra), tensors)


def _num_shards(spec: Spec, mesh: Mesh) -> int:
    return mesh.group_size(tuple(a for a, p in enumerate(spec) if isinstance(p, Shard)))


def _is_padded(shape: Sequence[int], spec: Spec, mesh: Mesh) -> bool:
    dims = {p.dim for p in spec if isinstance(p, Shard)}
    return any(not dim_is_even(shape, spec, mesh, d) for d in dims)


def _without_rule(partitioned: PartitionedGraph) -> Iterator[WithoutRule]:
    by_type: dict[str, list[Op]] = {}
    for op in partitioned.prepared.all_fallbacks():
        by_type.setdefault(op.type, []).append(op)
    for kind, ops in sorted(by_type.items()):
        yield WithoutRule(kind, len(ops), ops[0].name)
