"""A plan as a `networkx.DiGraph`: GraphNodes, and the tensors that flow between them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import networkx as nx

from tfpar.cost.work import flops
from tfpar.ir.constants import Constants
from tfpar.ir.graph import Tensor, Variable, itemsize
from tfpar.ir.graph_nodes import GraphNode, NodeGraph, cluster
from tfpar.ir.roles import FORWARD, Roles
from tfpar.ir.shared_subgraphs import Signatures, prune_graph, repeated_blocks
from tfpar.propagation.partitioned import PartitionedGraph
from tfpar.report.layers import LayerReport, layer_reports
from tfpar.spec import Mesh, PlanError, Spec, format_spec, local_shape

if TYPE_CHECKING:
    from tfpar.plans import Plan


def plan_graph(plan: Plan, partitioned: PartitionedGraph | None) -> nx.DiGraph:
    """The graph of `Plan.graph`.

    Args:
        partitioned: what propagation made of the plan.

    Raises:
        PlanError: it is not known: the plan is from a file.
    """
    if partitioned is None:
        raise PlanError(
            "This plan holds no graph: a plan file keeps placements alone. Take the plan of "
            "tap.plan(build, batch, mesh), or tap.plan_of(model) after the model ran a step."
        )
    roles = Roles.of(partitioned.graph)
    nodes = cluster(partitioned.graph, roles)
    reports: Mapping[GraphNode, LayerReport] = {}
    if plan.cluster is not None:
        reports = {r.node: r for r in layer_reports(partitioned, plan.cluster, nodes)}
    blocks = _blocks(partitioned, nodes, roles)
    graph = nx.DiGraph(mesh=str(partitioned.mesh))
    for node in nodes.nodes:
        graph.add_node(
            node.name,
            **_described(node, partitioned, roles),
            **blocks.get(node, {}),
            **_priced(reports.get(node)),
        )
    for source, reader in nodes.graph.edges:
        tensors = _flowing(source, reader, partitioned, roles)
        if tensors:
            size = sum(tensor["bytes"] for tensor in tensors)
            graph.add_edge(source.name, reader.name, tensors=tensors, bytes=size)
    return graph


def _described(node: GraphNode, partitioned: PartitionedGraph, roles: Roles) -> dict[str, Any]:
    """What a node is, whatever the machines."""
    rules, specs, mesh = partitioned.prepared.rules, partitioned.variable_specs, partitioned.mesh
    work = {op: flops(op, rules[op]) for op in node.ops if op in rules}
    forward = [op for op in node.ops if roles.phase[op] == FORWARD]
    return {
        "kind": max(forward or node.ops, key=lambda op: work.get(op, 0.0)).type,
        "ops": len(node.ops),
        "flops": sum(work.values()),
        "weights": {v.name: format_spec(specs[v]) for v in node.weights},
        "weight_bytes": sum(v.num_bytes for v in node.weights),
        "device_weight_bytes": sum(_local_bytes(v, specs[v], mesh) for v in node.weights),
    }


def _priced(report: LayerReport | None) -> dict[str, Any]:
    """What a node takes on the plan's machines, if it was made for some."""
    if report is None:
        return {}
    counts = {f"{k} over {axes}": n for (k, axes), (n, _) in report.collectives.items()}
    return {"seconds": report.seconds, "collectives": counts}


def _blocks(
    partitioned: PartitionedGraph, nodes: NodeGraph, roles: Roles
) -> dict[GraphNode, dict[str, int]]:
    """Of which block that repeats a node is part, and of which of its instances."""
    signatures = Signatures(Constants(partitioned.graph), roles)
    repeated = repeated_blocks(nodes, prune_graph(nodes, signatures), signatures)
    return {
        node: {"block": number, "instance": i}
        for number, repeat in enumerate(repeated)
        for i, members in enumerate(repeat.instances)
        for node in members
    }


def _flowing(
    source: GraphNode, reader: GraphNode, partitioned: PartitionedGraph, roles: Roles
) -> list[dict[str, Any]]:
    """The tensors, handles of variables aside, that `reader` reads of `source` going forward."""
    made = set(source.ops)
    wanted: dict[Tensor, dict[str, None]] = {}
    for op in reader.ops:
        if roles.phase[op] == FORWARD and op in partitioned.decisions:
            read_as = partitioned.decisions[op].strategy.in_specs
            for tensor, spec in zip(op.inputs, read_as, strict=True):
                if tensor.op in made and tensor.dtype != "resource":
                    wanted.setdefault(tensor, {})[format_spec(spec)] = None
    return [
        {
            "name": tensor.name,
            "shape": list(tensor.shape or ()),
            "dtype": str(tensor.dtype),
            "bytes": tensor.num_bytes,
            "spec": format_spec(partitioned.specs[tensor]),
            "read_as": list(specs),
        }
        for tensor, specs in wanted.items()
    ]


def _local_bytes(variable: Variable, spec: Spec, mesh: Mesh) -> int:
    return math.prod(local_shape(variable.shape, spec, mesh)) * itemsize(variable.dtype)
