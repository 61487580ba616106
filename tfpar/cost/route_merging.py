"""Reduction of a network to one of each of its symmetric parts, for the simulation.

A stage of 32 copies x 8 tensor ranks sends over 256 routes, all of which begin together. Where 8 of
them cross the same links, each has an eighth of what these have for one of them; and where the
routes of one machine share nothing with those of another, and look the same, they take as long.
So one route of each kind says when the last of all arrives.
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Hashable, Iterable, Iterator

from tfpar.cost.pipeline_model import StageNetwork, StageRoute

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
