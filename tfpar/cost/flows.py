"""Max-min fair sharing of links by transfers that cross them at the same time, exactly.

No transfer can be faster without another that is no faster than it becoming slower: links are
filled evenly until the first is full, what crosses that has its rate, and the others go on. Rates
change when a transfer begins or ends: those of the transfers that it shares links with, directly or
through others.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Hashable, Iterable, Mapping, Sequence

Link = Hashable
Flow = tuple[Sequence[Link], float]
"""The links that a transfer crosses, one at least, and its bytes."""
Ends = dict[int, float]
"""When transfers will be through."""


def fair_rates(
    paths: Mapping[int, Sequence[Link]], bandwidth: Mapping[Link, float]
) -> dict[int, float]:
    """Share links fairly: bytes/s of each of several transfers that are under way.

    Args:
        paths: of each, the links that it crosses, one at least.
        bandwidth: bytes/s of each link, for all that cross it together.
    """
    crossing: dict[Link, dict[int, None]] = {}
    for name, links in paths.items():
        for link in links:
            crossing.setdefault(link, {})[name] = None
    left = {link: bandwidth[link] for link in crossing}
    rates: dict[int, float] = {}
    while crossing:
        full = min(crossing, key=lambda link: left[link] / len(crossing[link]))
        share = left[full] / len(crossing[full])
        for name in list(crossing[full]):
            rates[name] = share
            for link in dict.fromkeys(paths[name]):
                left[link] -= share
                del crossing[link][name]
                if not crossing[link]:
                    del crossing[link]
    return rates


@dataclasses.dataclass
class _Flow:
    """A transfer that is under way: what was left of it at a time, and its rate since."""

    links: Sequence[Link]
    left: float
    since: float
    rate: float = 0


class Flows:
    """Transfers that are under way, and when each is through if none begins or ends."""

    def __init__(self, bandwidth: Mapping[Link, float]) -> None:
        self._bandwidth = bandwidth
        self._flows: dict[int, _Flow] = {}
        self._crossing: dict[Link, dict[int, None]] = {}

    def change(self, begun: Mapping[int, Flow], ended: Iterable[int], now: float) -> Ends:
        """Begin transfers, and end others that are through, all at one moment.

        Returns:
            When those end that begin, and those whose rate changes.
        """
        links: dict[Link, None] = {}
        for name in ended:
            for link in self._flows.pop(name).links:
                self._crossing[link].pop(name, None)
                links[link] = None
        for name, (path, num_bytes) in begun.items():
            self._flows[name] = _Flow(path, num_bytes, now)
            for link in path:
                self._crossing.setdefault(link, {})[name] = None
                links[link] = None
        names = self._connected(links)
        rates = fair_rates({name: self._flows[name].links for name in names}, self._bandwidth)
        ends = {}
        for name in names:
            flow = self._flows[name]
            if rates[name] != flow.rate:
                flow.left = max(flow.left - flow.rate * (now - flow.since), 0)
                flow.since, flow.rate = now, rates[name]
                ends[name] = now + flow.left / flow.rate
        return ends

    def _connected(self, links: Iterable[Link]) -> list[int]:
        """The transfers that share links with whoever crosses these, directly or through others."""
        waiting, seen = list(links), set(links)
        found: dict[int, None] = {}
        for link in waiting:
            for name in self._crossing.get(link, ()):
                if name not in found:
                    found[name] = None
                    new = [one for one in self._flows[name].links if one not in seen]
                    waiting += new
                    seen.update(new)
        return sorted(found)
