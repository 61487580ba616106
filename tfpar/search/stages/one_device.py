"""What each op of a step takes on one device."""

from __future__ import annotations

from tfpar.cluster.description import Cluster
from tfpar.cost.pricer import Pricer
from tfpar.ir.graph import Op
from tfpar.ir.roles import Roles
from tfpar.propagation.engine import propagate
from tfpar.propagation.partitioned import Anchors
from tfpar.propagation.prepared import PreparedGraph
from tfpar.spec import Mesh, replicated


def one_device_seconds(prepared: PreparedGraph, cluster: Cluster, roles: Roles) -> dict[Op, float]:
    """Seconds of each op by itself, with nothing split; loops and branches with their bodies."""
    graph, whole, mesh = prepared.graph, replicated(1), Mesh.of([1])
    anchors = Anchors(
        variables={v.name: whole for v in graph.variables},
        inputs=[whole] * len(graph.inputs),
        outputs=[whole] * len(graph.outputs),
    )
    partitioned = propagate(prepared, mesh, anchors)
    pricer = Pricer(mesh, cluster, roles)
    seconds = dict.fromkeys(graph.ops, 0.0)
    for op, decision in partitioned.decisions.items():
        seconds[op] = pricer.op_seconds(op, prepared.rules[op], decision)
    return seconds
