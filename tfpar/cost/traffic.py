"""What a step moves, by kind, group and phase: for summaries, and for those who check a plan."""

from __future__ import annotations

import dataclasses

from tfpar.cluster.description import Cluster
from tfpar.cost.collectives import collective_seconds
from tfpar.ir.roles import PHASES, Roles
from tfpar.propagation.partitioned import PartitionedGraph


@dataclasses.dataclass(frozen=True)
class Traffic:
    """The collectives of one kind, phase and group, in one step.

    Attributes:
        num_bytes: payload on one rank, as `reshard.step_bytes` counts it, of all of them.
        seconds: what they take one after another, each by itself.
    """

    kind: str
    axes: tuple[str, ...]
    phase: str
    count: int
    num_bytes: int
    seconds: float


def traffic(partitioned: PartitionedGraph, cluster: Cluster, roles: Roles) -> list[Traffic]:
    """The collectives of one step by kind, group and phase: exactly those that are emitted.

    Before some are packed; of a folded graph, those of what is left.
    """
    mesh = partitioned.mesh
    found: dict[tuple[str, tuple[int, ...], int], tuple[int, int, float]] = {}
    for moved in partitioned.communications(roles.wire_dtypes):
        key = moved.kind, moved.axes, roles.phase[moved.op]
        count, num_bytes, seconds = found.get(key, (0, 0, 0.0))
        taken = collective_seconds(moved.kind, moved.axes, moved.num_bytes, mesh, cluster)
        found[key] = count + 1, num_bytes + moved.num_bytes, seconds + taken
    return [
        Traffic(kind, tuple(mesh.axis_names[a] for a in axes), PHASES[phase], *values)
        for (kind, axes, phase), values in sorted(found.items())
    ]
