"""What each op of a step takes on one device, and how much longer stages on other devices take."""

from __future__ import annotations

from collections.abc import Sequence

from tfpar.cluster.description import Cluster
from tfpar.cost.pricer import Pricer
from tfpar.ir.graph import Op
from tfpar.ir.roles import UPDATE, Roles
from tfpar.propagation.engine import propagate
from tfpar.propagation.partitioned import Anchors, PartitionedGraph
from tfpar.propagation.prepared import PreparedGraph
from tfpar.search.stages.paces import Paces
from tfpar.spec import Mesh, replicated

_ONE = Mesh.of([1])


def one_device_seconds(prepared: PreparedGraph, cluster: Cluster, roles: Roles) -> dict[Op, float]:
    """Seconds of each op by itself, with nothing split; loops and branches with their bodies. Of
    devices that differ it is the slowest."""
    return _seconds(prepared, _whole(prepared), cluster, roles)


def stage_paces(
    prepared: PreparedGraph, cluster: Cluster, roles: Roles, actors: Sequence[int], size: int
) -> Paces:
    """The pace of each stage, relative to `one_device_seconds`: what the ops of the forward and
    backward pass take together on its devices. All are 1 where stages have the same devices.

    Args:
        cluster: the machines of all ranks.
        actors: that run each stage.
        size: ranks of each actor: those of actor `a` are `a * size` to `(a + 1) * size - 1`.

    Raises:
        TfparError: devices differ, and the cluster has fewer ranks.
    """
    alike = (1.0,) * len(actors)
    if len({node.device for node in cluster.nodes}) == 1:
        return alike
    parts = [cluster.part(range(a * size, (a + 1) * size)) for a in range(max(actors) + 1)]
    kinds = {part.device: part for part in parts}
    if len(kinds) == 1:
        return alike
    whole = _whole(prepared)

    def total(machines: Cluster) -> float:
        seconds = _seconds(prepared, whole, machines, roles)
        return sum(own for op, own in seconds.items() if roles.phase[op] != UPDATE)

    reference = total(cluster)
    if not reference:
        return alike
    paces = {device: total(part) / reference for device, part in kinds.items()}
    return tuple(paces[parts[actor].device] for actor in actors)


def _whole(prepared: PreparedGraph) -> PartitionedGraph:
    """The step with nothing split."""
    graph, whole = prepared.graph, replicated(1)
    anchors = Anchors(
        variables={v.name: whole for v in graph.variables},
        inputs=[whole] * len(graph.inputs),
        outputs=[whole] * len(graph.outputs),
    )
    return propagate(prepared, _ONE, anchors)


def _seconds(
    prepared: PreparedGraph, whole: PartitionedGraph, cluster: Cluster, roles: Roles
) -> dict[Op, float]:
    pricer = Pricer(_ONE, cluster, roles)
    seconds = dict.fromkeys(prepared.graph.ops, 0.0)
    for op, decision in whole.decisions.items():
        seconds[op] = pricer.op_seconds(op, prepared.rules[op], decision)
    return seconds
