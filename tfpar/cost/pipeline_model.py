"""Costs of the stages of a pipeline and of the links between them: inputs of the simulation."""

from __future__ import annotations

import dataclasses
from collections.abc import Hashable, Iterable, Mapping
from typing import NamedTuple

from tfpar.cluster.description import Cluster
from tfpar.cluster.network import path_between
from tfpar.spec.arguments import finite


@dataclasses.dataclass(frozen=True)
class StageProfile:
    """Cost of a stage, on each of its ranks.

    Attributes:
        seconds: of a task of each kind that the schedule has, of one microbatch; `U` and `J` may be
            left out if they are nothing.
        fixed_bytes: that the stage holds all the time.
        kept_bytes: that F keeps of a microbatch for its backward pass.
        kept_for_weights_bytes: that W reads and I leaves; None: all that F keeps.
        working_bytes: that a task of each kind needs while it runs, beside all that.
        reduction_s: seconds that the sum of the stage's gradients over its ranks takes.
    """

    seconds: Mapping[str, float]
    fixed_bytes: float = 0
    kept_bytes: float = 0
    kept_for_weights_bytes: float | None = None
    working_bytes: Mapping[str, float] = dataclasses.field(default_factory=dict)
    reduction_s: float = 0

    def __post_init__(self) -> None:
        for name in ("seconds", "working_bytes"):
            for kind, value in getattr(self, name).items():
                finite(f"{name}[{kind!r}]", value)
        for name in ("fixed_bytes", "kept_bytes", "reduction_s"):
            finite(name, getattr(self, name))
        if self.kept_for_weights_bytes is not None:
            finite("kept_for_weights_bytes", self.kept_for_weights_bytes)

    def freed_bytes(self, kind: str) -> float:
        """Find what is freed of F's saved activations when a task of this kind ends; I may leave
        more for W."""
        for_weights = self.kept_for_weights_bytes
        if for_weights is None:
            for_weights = self.kept_bytes
        freed = {"B": self.kept_bytes, "I": self.kept_bytes - for_weights, "W": for_weights}
        return freed.get(kind, 0)


class StageRoute(NamedTuple):
    """Route that a part of what one stage sends another takes.

    Attributes:
        links: names of those that it crosses.
        latency_s: seconds before it is on its way.
        part: of the bytes.
    """

    links: tuple[Hashable, ...]
    latency_s: float = 0
    part: float = 1


@dataclasses.dataclass(frozen=True)
class StageNetwork:
    """Links between the stages of a pipeline.

    Attributes:
        bandwidth: bytes/s of each link, for all that cross it together.
        routes: from stage to stage, for activations one way and gradients the other.
        overlap: what part of a task goes on while its devices send, receive or sum, 0 to 1
            (`Cluster.overlap`).
    """

    bandwidth: Mapping[Hashable, float]
    routes: Mapping[tuple[int, int], tuple[StageRoute, ...]]
    overlap: float = 1

    @classmethod
    def of(
        cls,
        cluster: Cluster,
        sent: Mapping[tuple[int, int], Iterable[tuple[int, int, float]]],
    ) -> StageNetwork:
        """Take the links of a cluster.

        Args:
            sent: from stage to stage, (sender, receiver, part of the bytes) of each pair of ranks.
                A rank that keeps its part crosses no links.
        """
        bandwidth: dict[Hashable, float] = {}
        routes = {}
        for stages, pairs in sent.items():
            found = []
            for sender, receiver, part in pairs:
                shared, latency_s = path_between(cluster, sender, receiver)
                bandwidth.update((link.name, link.bandwidth) for link in shared)
                found.append(StageRoute(tuple(link.name for link in shared), latency_s, part))
            routes[stages] = tuple(found)
        return cls(bandwidth, routes, cluster.overlap)
