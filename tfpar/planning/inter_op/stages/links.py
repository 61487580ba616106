"""Links between the devices of stages, for steps that a link may limit.

A step takes about what `cost.closed_form` says, where one microbatch at a time passes a link, as a
stage; as much comes back over it as goes forth.
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Mapping, Sequence

from tfpar.cluster.description import Cluster
from tfpar.cost.closed_form import pipeline_seconds
from tfpar.cost.collectives import transfer_seconds
from tfpar.cost.stage_transfers import pair_ranks
from tfpar.pipeline.pipeline import groups_of
from tfpar.planning.inter_op.stages.slowdowns import Paces
from tfpar.planning.inter_op.stages.units import UnitGraph


@dataclasses.dataclass(frozen=True)
class StageLinks:
    """Links between the actors of a pipeline, and the seconds of a step that they allow.

    Attributes:
        cluster: the machines of all ranks.
        actors: that run each stage.
        sizes: ranks of each actor; those of one follow those of the one before. They share what a
            stage computes and sends.
        microbatches: that a step has.
    """

    cluster: Cluster
    actors: tuple[int, ...]
    sizes: tuple[int, ...]
    microbatches: int

    def is_link_bound(self, graph: UnitGraph, stages: Sequence[int], paces: Paces) -> bool:
        """Whether a microbatch takes longer on a link than on any devices."""
        return max(self._sent(graph, stages).values(), default=0.0) > max(
            self._computed(graph, stages, paces)
        )

    def step_seconds(self, graph: UnitGraph, stages: Sequence[int], paces: Paces) -> float:
        """Estimate the seconds of a step with units in these stages."""
        computed, sent = self._computed(graph, stages, paces), self._sent(graph, stages)
        slowest = max([*computed, *sent.values()])
        return pipeline_seconds(self.microbatches, slowest, sum(computed), 2 * sum(sent.values()))

    def _computed(self, graph: UnitGraph, stages: Sequence[int], paces: Paces) -> list[float]:
        """Seconds of a microbatch on each actor."""
        found = [0.0] * (max(self.actors) + 1)
        for stage, seconds in enumerate(graph.stage_seconds(stages, paces)):
            found[self.actors[stage]] += seconds / self.sizes[0] / self.microbatches
        return found

    def _sent(self, graph: UnitGraph, stages: Sequence[int]) -> Mapping[tuple[int, int], float]:
        """Seconds of what a microbatch sends one way, from actor to actor."""
        num_bytes: dict[tuple[int, int], float] = collections.defaultdict(float)
        for flow in graph.flows:
            source = self.actors[stages[flow.source]]
            for target in {self.actors[stages[reader]] for reader in flow.readers} - {source}:
                num_bytes[source, target] += flow.num_bytes / 2
        groups = groups_of(self.sizes)
        found = {}
        for (a, b), sent in num_bytes.items():
            pairs = pair_ranks(groups[a], groups[b])
            each = sent / max(self.sizes[a], self.sizes[b]) / self.microbatches
            found[a, b] = transfer_seconds(pairs, each, self.cluster)
        return found
