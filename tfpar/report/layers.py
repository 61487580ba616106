"""A plan layer by layer: placement, bytes, collectives and time of every GraphNode."""

from __future__ import annotations

import dataclasses

from tfpar.cluster.description import Cluster
from tfpar.cost.pricer import Pricer
from tfpar.cost.traffic import traffic
from tfpar.ir.graph_nodes import GraphNode, NodeGraph, cluster
from tfpar.ir.roles import Roles
from tfpar.propagation.partitioned import PartitionedGraph


@dataclasses.dataclass(eq=False)
class LayerReport:
    """What one GraphNode takes on a rank in a step.

    Attributes:
        num_bytes: of its weights' shards.
        collectives: (kind, mesh axes) -> (count, payload bytes) of its own tensors.
        seconds: computing, and these collectives one by one.
        activation_bytes: of what it makes for the backward pass.
    """

    node: GraphNode
    num_bytes: int = 0
    collectives: dict[tuple[str, str], tuple[int, int]] = dataclasses.field(default_factory=dict)
    seconds: float = 0.0
    activation_bytes: float = 0.0

    def collectives_text(self) -> str:
        """`2 all_reduce over model`, one kind after the other."""
        return ", ".join(
            f"{count} {kind} over {axes}" for (kind, axes), (count, _) in self.collectives.items()
        )


def layer_reports(
    partitioned: PartitionedGraph, machines: Cluster, nodes: NodeGraph | None = None
) -> list[LayerReport]:
    """A report for each GraphNode, in the order of the model.

    Args:
        nodes: of the graph, if they are known already.
    """
    roles = _roles(partitioned)
    nodes = nodes or cluster(partitioned.graph, roles)
    pricer = Pricer(partitioned.mesh, machines, roles)
    reports = {node: LayerReport(node) for node in nodes.nodes}
    rules = partitioned.prepared.rules
    names = partitioned.mesh.axis_names
    for op, decision in partitioned.decisions.items():
        if op in nodes.node_of:
            terms = pricer.zero()
            pricer.add_op(terms, op, rules[op], decision)
            seconds = terms.compute.sum() + terms.communication.sum()
            reports[nodes.node_of[op]].seconds += float(seconds)
            reports[nodes.node_of[op]].activation_bytes += terms.activation_bytes
    for moved in partitioned.communications():
        if moved.tensor is None or moved.op not in nodes.node_of:
            continue
        report = reports[nodes.node_of[moved.op]]
        key = (moved.kind, " x ".join(names[a] for a in moved.axes))
        count, total = report.collectives.get(key, (0, 0))
        report.collectives[key] = (count + 1, total + moved.num_bytes)
        report.seconds += pricer.seconds(moved) + pricer.cut_seconds(moved)
    for report in reports.values():
        report.num_bytes = sum(
            pricer.local_bytes(v, partitioned.variable_specs[v]) for v in report.node.weights
        )
    return list(reports.values())


def collective_times(
    partitioned: PartitionedGraph, machines: Cluster
) -> dict[tuple[str, tuple[str, ...]], float]:
    """By (kind, mesh axes): seconds that the collectives of a step take one after another."""
    roles = _roles(partitioned)
    seconds: dict[tuple[str, tuple[str, ...]], float] = {}
    for entry in traffic(partitioned, machines, roles):
        key = entry.kind, entry.axes
        seconds[key] = seconds.get(key, 0.0) + entry.seconds
    return seconds


def _roles(partitioned: PartitionedGraph) -> Roles:
    roles = Roles.of(partitioned.graph, jit_compile=partitioned.jit_compile)
    return dataclasses.replace(roles, wire_dtypes=partitioned.wire_dtypes)
