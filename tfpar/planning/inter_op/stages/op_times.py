"""Seconds of each op of a step on one device, and the slowdown of stages on other devices."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence

from tfpar.cluster.description import Cluster, Device
from tfpar.cost.pricer import Pricer
from tfpar.ir.graph import Op
from tfpar.ir.roles import BACKWARD, FORWARD, Roles
from tfpar.pipeline.pipeline import groups_of
from tfpar.pipeline.recompute import RecomputeOf, recomputes
from tfpar.planning.inter_op.stages.slowdowns import Paces
from tfpar.propagation.engine import propagate
from tfpar.propagation.partitioned_graph import Anchors, PartitionedGraph
from tfpar.propagation.prepared_graph import PreparedGraph
from tfpar.spec import Mesh, replicated_spec

_ONE = Mesh.of([1])


class SingleDeviceProfile:
    """A step on one device, with nothing split."""

    def __init__(self, prepared: PreparedGraph, roles: Roles) -> None:
        self._prepared, self._roles = prepared, roles
        self._known: dict[Device, dict[Op, float]] = {}

    def seconds(self, cluster: Cluster) -> Mapping[Op, float]:
        """Return the seconds of each op by itself; loops and branches with their bodies. Of devices
        that differ it is the slowest."""
        if cluster.device not in self._known:
            pricer = Pricer(_ONE, cluster, self._roles)
            found = dict.fromkeys(self._prepared.graph.ops, 0.0)
            for op, decision in self._whole.decisions.items():
                found[op] = pricer.op_seconds(op, self._prepared.rules[op], decision)
            self._known[cluster.device] = found
        return self._known[cluster.device]

    def paces(
        self,
        cluster: Cluster,
        actors: Sequence[int],
        sizes: Sequence[int],
        recompute: RecomputeOf = False,
    ) -> Paces:
        """Return the pace of each stage, relative to `seconds` shared out among the ranks of the
        first actor: what the ops of the forward and backward pass take together on its devices. All
        are 1 where stages have as many of the same devices, and all or none are recomputed.

        Args:
            cluster: the machines of all ranks.
            actors: that run each stage.
            sizes: ranks of each actor; those of one follow those of the one before.
            recompute: the stages whose forward pass runs twice.

        Raises:
            TfparError: devices differ, and the cluster has fewer ranks.
        """
        twice = 1.0 if isinstance(recompute, bool) else self._work_if_recomputed(cluster)
        shared = tuple(
            sizes[0] / sizes[actor] * (twice if recomputes(recompute, stage) else 1.0)
            for stage, actor in enumerate(actors)
        )
        if len({node.device for node in cluster.nodes}) == 1:
            return shared
        parts = [cluster.part(group) for group in groups_of(sizes)]
        kinds = {part.device: part for part in parts}
        reference = self._total(cluster) if len(kinds) > 1 else 0.0
        if not reference:
            return shared
        paces = {device: self._total(part) / reference for device, part in kinds.items()}
        return tuple(
            paces[parts[actor].device] * share for actor, share in zip(actors, shared, strict=True)
        )

    def _total(self, cluster: Cluster, *phases: int) -> float:
        seconds, among = self.seconds(cluster).items(), phases or (FORWARD, BACKWARD)
        return sum(own for op, own in seconds if self._roles.phase[op] in among)

    def _work_if_recomputed(self, cluster: Cluster) -> float:
        """Both passes of a stage whose forward pass runs twice, over those of one where it runs
        once."""
        total = self._total(cluster)
        return 1 + self._total(cluster, FORWARD) / total if total else 1.0

    @functools.cached_property
    def _whole(self) -> PartitionedGraph:
        graph, whole = self._prepared.graph, replicated_spec(1)
        anchors = Anchors(
            variables={v.name: whole for v in graph.variables},
            inputs=[whole] * len(graph.inputs),
            outputs=[whole] * len(graph.outputs),
        )
        return propagate(self._prepared, _ONE, anchors)
