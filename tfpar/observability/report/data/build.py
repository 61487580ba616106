"""Builder of a plan's report, which gathers once all that views show."""

from __future__ import annotations

import collections
import dataclasses
import math
import os
import re
from collections.abc import Iterator, Mapping, Sequence

import networkx as nx

from tfpar.ir.collection import collection_paused
from tfpar.ir.constants import Constants
from tfpar.ir.graph import Graph, Op, Shape, Tensor, itemsize
from tfpar.ir.graph_nodes import GraphNode, NodeGraph, cluster
from tfpar.ir.roles import FORWARD, Roles
from tfpar.ir.shared_subgraphs import Signatures, prune_graph, repeated_blocks
from tfpar.observability.report.candidates import explain_rejection
from tfpar.observability.report.data.attribution import shares_of, stage_of_layer
from tfpar.observability.report.data.diagnosis import PlanDiagnosis
from tfpar.observability.report.data.layers import layers_of, paths_of
from tfpar.observability.report.data.overview import (
    build_overview,
    causes_of,
    cost_of,
    machines_of,
    parts_of,
    pipeline_of,
)
from tfpar.observability.report.data.schema import (
    CandidateSummary,
    FlowSummary,
    Input,
    Padding,
    Repeat,
    Report,
    RunWhole,
    WithoutRule,
    read_report,
)
from tfpar.observability.report.data.step_layouts import StepLayouts
from tfpar.observability.report.data.variables import variables_of
from tfpar.observability.report.rentals import rentals_of
from tfpar.observability.report.variables import layout_of_variable, placement_text
from tfpar.plans import Candidate, Plan
from tfpar.propagation.partitioned_graph import PartitionedGraph
from tfpar.spec import Mesh, Replicate, Shard, Spec, dim_is_even, format_spec, local_shape
from tfpar.spec.quantities import format_bytes, format_seconds


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
    report = Report(
        tfpar_version=plan.tfpar_version,
        verdict="",
        facts=build_overview(plan),
        machines=machines_of(plan),
        cost=cost_of(plan),
        layers=(),
        variables=variables_of(plan, None, None, {}) if partitioned is None else (),
        collectives=(),
        flows=(),
        inputs=(),
        pipeline=None,
        candidates=tuple(candidates_of(plan)),
        correction=plan.findings.correction,
        rentals=rentals_of(plan.findings.rentals),
        what_if=(),
        planned_ops={},
        padding=None,
        without_rule=(),
        run_whole=(),
        warnings=(),
        hints=(),
    )
    if partitioned is not None:
        with collection_paused():
            report = _with_step(report, plan, partitioned)
    stages = pipeline_of(plan, report.variables, report.layers)
    report = dataclasses.replace(report, pipeline=stages)
    told = PlanDiagnosis(report)
    return dataclasses.replace(
        report,
        verdict=told.verdict(),
        warnings=tuple(told.warnings()),
        hints=tuple(told.hints()),
    )


def _tells_of(report: Report, plan: Plan) -> bool:
    """Whether a report is of this plan, and not of what it was before someone changed it."""
    facts = dataclasses.replace(report.facts, model="", model_class="")  # known to the report alone
    laid = {variable.path: variable.spec for variable in report.variables if variable.fixed}
    planned = {}
    for name in plan.variables:
        layout, _ = layout_of_variable(plan, name)
        spec = layout.variables[name].spec
        if spec is not None:
            planned[name] = format_spec(spec)
    own = dataclasses.replace(build_overview(plan), model="", model_class="")
    return (facts, report.cost, laid) == (own, cost_of(plan), planned)


def _with_step(report: Report, plan: Plan, partitioned: PartitionedGraph) -> Report:
    """Return `report` with what is read from the plan's partitioned graph."""
    graph = partitioned.graph
    roles = Roles.of(graph, jit_compile=partitioned.jit_compile)
    roles = dataclasses.replace(roles, wire_dtypes=partitioned.wire_dtypes)
    nodes = merge_repeated_calls(cluster(graph, roles))
    model = plan.layers[0].path if plan.layers else ""
    names = paths_of(nodes.nodes, model, {layer.path for layer in plan.layers[1:]})
    paths = dict(zip(nodes.nodes, names, strict=True))
    stages = stage_of_layer(plan, nodes, roles)
    laid = StepLayouts.of(plan, partitioned)
    shares = shares_of(plan, laid, roles, nodes, stages, paths)
    repeats = repeats_of(graph, nodes, roles, paths)
    types = {op.name: op.type for op in graph.ops}
    planned = collections.Counter(types[name] for name in plan.ops if name in types)
    return dataclasses.replace(
        report,
        layers=layers_of(plan, laid, roles, nodes, paths, repeats, stages, shares),
        variables=variables_of(plan, laid, nodes, paths),
        collectives=shares.collectives,
        flows=tuple(flows_of(laid, nodes, roles, paths, stages)),
        inputs=tuple(inputs_of(partitioned)),
        planned_ops=dict(planned.most_common()),
        padding=_padding(partitioned),
        without_rule=tuple(_without_rule(partitioned)),
        run_whole=tuple(
            RunWhole(op.type, partitioned.mesh.axis_names[axis], op.name)
            for op, axis in partitioned.replicated_regions
        ),
        idle_axes=tuple(_idle_axes(plan, partitioned)),
    )


def _idle_axes(plan: Plan, partitioned: PartitionedGraph) -> Iterator[str]:
    """Yield the axes of several ranks along which all ranks compute and store the same."""
    strategies = [decision.strategy for decision in partitioned.decisions.values()]
    specs = {spec for one in strategies for spec in (*one.in_specs, *one.out_specs)}
    specs |= {*partitioned.variable_specs.values()}
    specs |= {v.slots for v in plan.variables.values() if v.slots is not None}
    for axis, (name, size) in enumerate(zip(plan.mesh.axis_names, plan.mesh.shape, strict=True)):
        if size > 1 and all(isinstance(spec[axis], Replicate) for spec in specs):
            yield name


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


# --- Merging of the calls of a layer that is called several times ---


def merge_repeated_calls(nodes: NodeGraph) -> NodeGraph:
    """The nodes of a graph, those that hold the same weights as one, where the first of them is."""
    first: dict[tuple[str, ...], GraphNode] = {}
    calls: dict[GraphNode, list[GraphNode]] = {}
    for node in nodes.nodes:
        held = tuple(weight.name for weight in node.weights)
        calls.setdefault(first.setdefault(held, node) if held else node, []).append(node)
    if len(calls) == len(nodes.nodes):
        return nodes
    joined: dict[GraphNode, GraphNode] = {}
    for node, same in calls.items():
        ops = [op for call in same for op in call.ops]
        whole = node if len(same) == 1 else GraphNode(node.name, ops, node.weights)
        joined.update(dict.fromkeys(same, whole))
    flow = nx.DiGraph()
    flow.add_nodes_from(dict.fromkeys(joined[node] for node in nodes.nodes))
    for source, target in nodes.graph.edges:
        if joined[source] is not joined[target]:
            flow.add_edge(joined[source], joined[target])
    return NodeGraph(flow, {op: joined[node] for op, node in nodes.node_of.items()})


# --- Candidates that a plan was compared with, and why they lost ---


def candidates_of(plan: Plan) -> Iterator[CandidateSummary]:
    """The plan, then what else was found or priced, by kind; nothing where it was not priced."""
    if plan.cost is None:
        return
    step_s = 0.0 if plan.cluster is None else plan.cluster.step_s
    limit = math.inf
    if plan.cluster is not None:
        limit = max(device.memory_bytes for device in plan.cluster.devices)
    found = plan.findings
    measured = {trial.name: trial.measured_s for trial in found.trials}
    own = found.trials[0].measured_s if found.trials else None
    parts = parts_of(plan.cost, step_s)
    fits, bytes_ = plan.fits(limit), plan.cost.memory_bytes
    yield CandidateSummary(
        *("this plan", "plan", plan.cost.seconds, bytes_, fits, "", parts, own),
        causes=causes_of(plan.cost, step_s),
    )
    for one in found.layouts:
        lost = "no plan on it comes near"
        if one.memory_bytes is not None:
            lost = _why(plan.cost.seconds, one.seconds, one.memory_bytes, limit)
        yield CandidateSummary(
            one.name, "layout", one.seconds, one.memory_bytes, _fits(one, limit), lost
        )
    for one in found.rivals:
        yield CandidateSummary(
            one.name,
            "pipeline",
            _seconds(one),
            one.memory_bytes,
            _fits(one, limit),
            explain_rejection(one, plan),
            () if one.cost is None else parts_of(one.cost, step_s),
            measured.get(one.name),
            one.corrected_s,
            None if one.cost is None else causes_of(one.cost, step_s),
        )
    for one in found.attempts:
        lost = ""
        if math.isfinite(one.seconds):
            room = math.inf if one.fits else 0.0
            lost = _why(plan.cost.seconds, one.seconds, one.memory_bytes, room)
        yield CandidateSummary(one.name, "move", _seconds(one), one.memory_bytes, one.fits, lost)
    for one in found.baselines:
        yield CandidateSummary(
            one.name, "baseline", one.seconds, one.memory_bytes, _fits(one, limit)
        )
    if plan.bound is not None:
        yield CandidateSummary("lower bound", "baseline", plan.bound.seconds, None, None, "")
    for one in found.trials:
        lost = one.reason
        if one.measured_s is not None and own is not None and one is not found.trials[0]:
            lost = f"measured {format_seconds(one.measured_s - own)} slower"
        yield CandidateSummary(
            one.name,
            "trial",
            _seconds(one),
            None,
            None,
            lost,
            measured_s=one.measured_s,
            corrected_s=one.corrected_s,
        )


def _seconds(candidate: Candidate) -> float | None:
    """Seconds in a report, which has no infinity."""
    return candidate.seconds if math.isfinite(candidate.seconds) else None


def _fits(candidate: Candidate, limit: float) -> bool | None:
    return None if candidate.memory_bytes is None else candidate.memory_bytes <= limit


def _why(chosen_s: float, seconds: float, memory: float | None, limit: float) -> str:
    """Return the reason why another mesh was not taken."""
    if memory is not None and memory > limit:
        return f"does not fit: a rank would store {format_bytes(memory)}"
    if seconds > chosen_s:
        return f"{format_seconds(seconds - chosen_s)} slower"
    return "nearer than predictions can tell, and less simple"


# --- Flows between layers in the forward pass ---


def flows_of(
    laid: StepLayouts,
    nodes: NodeGraph,
    roles: Roles,
    paths: Mapping[GraphNode, str],
    stages: Sequence[int | None],
) -> Iterator[FlowSummary]:
    """The tensors, handles of variables aside, that a layer reads of another going forward."""
    stage_of = dict(zip(nodes.nodes, stages, strict=True))
    for reader in nodes.nodes:
        partitioned = laid.of_stage(stage_of[reader])
        wanted: dict[Tensor, dict[str, None]] = {}
        for op in reader.ops:
            if roles.phase[op] != FORWARD or op not in partitioned.decisions:
                continue
            read_as = partitioned.decisions[op].strategy.in_specs
            for tensor, spec in zip(op.inputs, read_as, strict=True):
                source = nodes.node_of.get(tensor.op)
                if source not in (None, reader) and tensor.dtype != "resource":
                    wanted.setdefault(tensor, {})[format_spec(spec)] = None
        for tensor, specs in wanted.items():
            made_in = laid.of_stage(stage_of[nodes.node_of[tensor.op]])
            yield FlowSummary(
                source=paths[nodes.node_of[tensor.op]],
                target=paths[reader],
                tensor=tensor.name,
                shape=tuple(tensor.shape or ()),
                dtype=str(tensor.dtype),
                num_bytes=tensor.num_bytes,
                spec=format_spec(made_in.specs[tensor]),
                read_as=tuple(specs),
            )


def inputs_of(partitioned: PartitionedGraph) -> Iterator[Input]:
    """Yield the step's inputs, each with what a rank is given of it and what its ops take of that.

    Where ops are split one by one, "the batch is not split" says little: one input may be needed
    whole by each rank, and another only in part.
    """
    mesh, consumers = partitioned.mesh, partitioned.prepared.consumers
    for tensor in partitioned.graph.inputs:
        if not tensor.shape or mesh.size == 1:
            continue
        taken: dict[Spec, None] = {}
        for op in consumers.get(tensor, ()):
            specs = partitioned.decisions[op].strategy.in_specs
            taken.update((s, None) for t, s in zip(op.inputs, specs, strict=True) if t is tensor)
        given = _given(partitioned.specs[tensor], mesh)
        used = "; ".join(dict.fromkeys(_given(spec, mesh) for spec in taken)) or "nothing"
        yield Input(tensor.op.name, tuple(tensor.shape), given, used)


def _given(spec: Spec, mesh: Mesh) -> str:
    text = placement_text(spec, mesh)
    return "all of it" if text == "replicated" else text


# --- Layers that are members of repeated blocks (TAP, section IV-D) ---

_PARTS = re.compile(r"\d+|[^\d/_]+|[/_]")


def repeats_of(
    graph: Graph, nodes: NodeGraph, roles: Roles, paths: Mapping[GraphNode, str]
) -> dict[GraphNode, Repeat]:
    """The place of each node that is part of a block that repeats."""
    signatures = Signatures(Constants(graph), roles)
    found: dict[GraphNode, Repeat] = {}
    blocks = repeated_blocks(nodes, prune_graph(nodes, signatures), signatures)
    for number, block in enumerate(blocks):
        # Ops between layers, such as sums, may be called something else.
        own = [
            _holder([paths[node] for node in members if node.weights])
            for members in block.instances
        ]
        name = _pattern(own)
        for i, members in enumerate(block.instances):
            for member, node in enumerate(members):
                found[node] = Repeat(number, name, i, block.count, member)
    return found


def _holder(paths: Sequence[str]) -> str:
    """The path that all of a block's layers lie in, or what their names begin with
    (`block_0_fc1` and `block_0_fc2` with `block_0`); that of the first if they have nothing in
    common."""
    if len(paths) == 1:
        return paths[0]
    common = os.path.commonprefix([_PARTS.findall(path) for path in paths])
    text = "".join(common)
    if not any(path == text or path[len(text)] in "/_.-" for path in paths):
        text = text.rpartition("/")[0] or text.rpartition("_")[0]
    return text.rstrip("/_.-") or paths[0]


def _pattern(names: Sequence[str]) -> str:
    """Return the common name of instances, with `*` for the numbers in which they differ."""
    parts = [_PARTS.findall(name) for name in names]
    if len({len(own) for own in parts}) > 1:
        return f"{names[0]} ..."
    columns = zip(*parts, strict=True)
    return "".join(own[0] if len(set(own)) == 1 else "*" for own in map(list, columns))
