"""Costs of the stages of a pipeline and of the links between them: inputs of the simulation."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Hashable, Iterable, Iterator, Mapping
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


# --- symmetric parts of a network -----------------------------------------------------------
# One of each is enough for the simulation. A stage of 32 copies x 8 tensor ranks sends over 256
# routes, all of which begin together. Where 8 of them cross the same links, each has an eighth of
# what these have for one of them; and where the routes of one machine share nothing with those of
# another, and look the same, they take as long. So one route of each kind says when the last of all
# arrives.

Key = tuple[tuple[int, int], StageRoute]
"""A route, and the stages that it leads from and to."""


def merge_symmetric_routes(network: StageNetwork) -> StageNetwork:
    """Merge symmetric routes: transfers take as long over fewer of them.

    Of routes that are left out, the parts of the bytes are left out too.
    """
    bandwidth: dict[Hashable, float] = {}
    routes: dict[tuple[int, int], list[StageRoute]] = {stages: [] for stages in network.routes}
    seen = set()
    for component in _components(network):
        times = collections.Counter(component)
        # One of as many that cross the same links everywhere, and as much of the links.
        each = next(iter(times.values())) if len(set(times.values())) == 1 else 1
        kept = list(times) if each > 1 else component
        shares = {link: network.bandwidth[link] / each for _, route in kept for link in route.links}
        looks = _looks(kept, shares)
        if looks in seen:
            continue
        seen.add(looks)
        bandwidth |= shares
        for stages, route in kept:
            routes[stages].append(route)
    found = {stages: tuple(some) for stages, some in routes.items()}
    return dataclasses.replace(network, bandwidth=bandwidth, routes=found)


def _components(network: StageNetwork) -> Iterator[list[Key]]:
    """Routes that share links, directly or through others; those without links alone."""
    first: dict[Hashable, Hashable] = {}

    def root(link: Hashable) -> Hashable:
        while first[link] != link:
            first[link] = link = first[first[link]]
        return link

    keys = [(stages, route) for stages, routes in network.routes.items() for route in routes]
    for _, route in keys:
        for link in route.links:
            first.setdefault(link, link)
            first[root(link)] = root(route.links[0])
    found: dict[Hashable, list[Key]] = {}
    for number, (stages, route) in enumerate(keys):
        at: Hashable = root(route.links[0]) if route.links else ("alone", number)
        found.setdefault(at, []).append((stages, route))
    yield from found.values()


def _looks(routes: Iterable[Key], bandwidth: dict[Hashable, float]) -> Hashable:
    """The routes of a component with links numbered as they come, and what these carry."""
    number: dict[Hashable, int] = {}
    shapes = [
        (stages, route.latency_s, route.part, _numbered(route.links, number))
        for stages, route in routes
    ]
    return tuple(shapes), tuple(bandwidth[link] for link in number)


def _numbered(links: Iterable[Hashable], number: dict[Hashable, int]) -> tuple[int, ...]:
    return tuple(number.setdefault(link, len(number)) for link in links)
