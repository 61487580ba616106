"""Layers of a plan: the path, class, placement and cost of each."""

from __future__ import annotations

import math
import os
import re
from collections import Counter
from collections.abc import Container, Iterable, Mapping, Sequence

import numpy as np

from tfpar.cost.op_compute import flops
from tfpar.cost.patterns import patterns
from tfpar.ir.graph_nodes import GraphNode, NodeGraph
from tfpar.ir.roles import FORWARD, PHASES, Roles
from tfpar.ir.step import ModelLayer
from tfpar.ir.traits import CONSTANTS
from tfpar.observability.report.data.attribution import LayerAttribution
from tfpar.observability.report.data.schema import ByPhase, BytesByKind, LayerSummary, Repeat
from tfpar.observability.report.data.step_layouts import StepLayouts
from tfpar.observability.report.variables import placement_text
from tfpar.plans import Plan
from tfpar.propagation.partitioned_graph import PartitionedGraph
from tfpar.spec.quantities import format_bytes, format_seconds


def layers_of(
    plan: Plan,
    laid: StepLayouts,
    roles: Roles,
    nodes: NodeGraph,
    paths: Mapping[GraphNode, str],
    repeats: Mapping[GraphNode, Repeat],
    stages: Sequence[int | None],
    shares: LayerAttribution,
) -> tuple[LayerSummary, ...]:
    """A layer for each GraphNode, in the order of the model."""
    known = {layer.path: layer for layer in plan.layers}
    found: list[LayerSummary] = []
    of_first: dict[tuple[int, int, int], tuple[str, ...]] = {}
    for row, node in enumerate(nodes.nodes):
        stage, repeat = stages[row], repeats.get(node)
        partitioned, number = laid.of_stage(stage), laid.number_of(stage)
        alike = None if repeat is None else (repeat.block, repeat.member, number)
        lines = of_first.get(alike) if alike is not None else None
        if lines is None:
            lines = _patterns(laid.plan_of(stage), node, partitioned)
        if alike is not None:
            of_first[alike] = lines
        found.append(
            _layer(
                partitioned,
                roles,
                node,
                known.get(paths[node], ModelLayer(paths[node], "")),
                repeat,
                stage,
                shares,
                row,
                lines,
            )
        )
    return tuple(found)


def _layer(
    partitioned: PartitionedGraph,
    roles: Roles,
    node: GraphNode,
    known: ModelLayer,
    repeat: Repeat | None,
    stage: int | None,
    shares: LayerAttribution,
    row: int,
    lines: tuple[str, ...],
) -> LayerSummary:
    rules, specs = partitioned.prepared.rules, partitioned.variable_specs
    work = {op: flops(op, rules[op]) for op in node.ops if op in rules}
    forward = [op for op in node.ops if roles.phase[op] == FORWARD] or node.ops
    computing = [op for op in forward if op.type not in CONSTANTS] or forward
    placements = {placement_text(specs[weight], partitioned.mesh) for weight in node.weights}
    split = "; ".join(sorted(placements - {"replicated"}))
    return LayerSummary(
        path=known.path,
        class_name=known.class_name,
        source=known.source,
        repeat=repeat,
        stage=stage,
        ops=len(node.ops),
        kind=max(computing, key=lambda op: work.get(op, 0.0)).type,
        flops=float(sum(work.values())),
        placement=(split or "replicated") if placements else "",
        weights=sum(math.prod(weight.shape) for weight in node.weights),
        weight_bytes=sum(weight.num_bytes for weight in node.weights),
        seconds=_by_phase(shares.compute[row]),
        communication_s=_by_phase(shares.waiting[row]),
        memory=BytesByKind(
            float(shares.weights[row]), float(shares.slots[row]), float(shares.live[row])
        ),
        kept_bytes=float(shares.kept[row]),
        patterns=lines,
    )


def _by_phase(seconds: np.ndarray) -> ByPhase:
    return ByPhase(**dict(zip(PHASES, seconds.tolist(), strict=True)))


def _patterns(plan: Plan, node: GraphNode, partitioned: PartitionedGraph) -> tuple[str, ...]:
    """The node's sharding patterns: Split or Replica, and the Communication that follows."""
    if plan.cluster is None:
        return ()
    batch = tuple(plan.mesh.axis(n) for n in plan.batch_axes)
    lines = []
    for pattern in patterns(node, partitioned.prepared, plan.mesh, plan.cluster, batch):
        moved = ", ".join(
            f"{c.kind} over {c.axis} ({c.phase}, {format_bytes(c.num_bytes)})"
            for c in pattern.communication
        )
        laid = f"{pattern.placement} over {pattern.axis}" if pattern.axis else "R"
        time = f" {format_seconds(pattern.seconds)}: {moved}" if moved else " no communication"
        lines.append(f"{pattern.weight.rpartition('/')[2]} {laid}:{time}")
    return tuple(lines)


# --- paths ----------------------------------------------------------------------------------
# A step's ops lie in scopes such as `gpt_1/block_0_1/att_1/query_1`, numbered by call, while its
# weights bear the path of the layer that holds them, `block_0/att/query/kernel`. Each scope that
# holds weights thus says what it and those around it are called; ops of other scopes are named
# after the nearest of these.

_COUNT = re.compile(r"_\d+$")


def paths_of(nodes: Sequence[GraphNode], model: str, layers: Container[str] = ()) -> list[str]:
    """The path of each node; no two have the same.

    Args:
        model: the name of the model, which paths may begin with; may be empty.
        layers: paths of the model's layers. Ops of a layer that has no weights are called by it.
    """
    known = index_paths(nodes)
    holders = {path for own in known.values() for path in _upwards(own)}
    found: list[str] = []
    taken: Counter[str] = Counter()
    for node in nodes:
        path = layer_path(node) if node.weights else _path(node.name, known, model)
        around = path.rpartition("/")[0]
        if not node.weights and around in layers and around not in holders and not taken[around]:
            path = around
        taken[path] += 1
        found.append(path if taken[path] == 1 else f"{path}#{taken[path]}")
    return found


def index_paths(nodes: Iterable[GraphNode]) -> dict[str, str]:
    """Map each scope that holds weights, and those around it, to their paths."""
    known: dict[str, str] = {}
    for node in nodes:
        if node.weights:
            known = {**_aligned(node.name, layer_path(node)), **known}
    return known


def layer_path(node: GraphNode) -> str:
    """Return the path of the layer that holds a node's weights: the common part of theirs."""
    holders = [weight.name.rpartition("/")[0].split("/") for weight in node.weights]
    common = os.path.commonprefix(holders)
    return "/".join(common) or node.weights[0].name


def _aligned(scope: str, path: str) -> dict[str, str]:
    """The paths of a scope and of those around it, as far as their names go together."""
    scopes, parts = scope.split("/"), path.split("/")
    while scopes and not _is_call_of(scopes[-1], parts[-1]):
        scopes.pop()  # scopes within the layer
    found = {}
    while scopes and parts and _is_call_of(scopes[-1], parts[-1]):
        found["/".join(scopes)] = "/".join(parts)
        scopes.pop()
        parts.pop()
    return found


def _is_call_of(scope: str, name: str) -> bool:
    return scope == name or _COUNT.sub("", scope) == name


def _path(name: str, known: Mapping[str, str], model: str) -> str:
    """The path of an op whose layer has no weights."""
    for scope in _upwards(name):
        if scope in known:
            return known[scope] + name[len(scope) :]
    first, _, rest = name.partition("/")
    return rest if rest and model and _is_call_of(first, model) else name


def _upwards(path: str) -> list[str]:
    """The path, and those around it."""
    parts = path.split("/")
    return ["/".join(parts[:n]) for n in range(len(parts), 0, -1)]
