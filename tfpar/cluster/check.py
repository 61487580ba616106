"""Checks of the parts of a cluster, without which costs make no sense.

The tables say of each field how it is read: numbers, Python's or numpy's, become floats or ints,
lists become tuples, and anything else is refused.
"""

from __future__ import annotations

import collections
import difflib
import functools
import math
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from tfpar.spec import MOST_RANKS, Mesh, TfparError
from tfpar.spec.arguments import (
    argument_error,
    check_choice,
    check_list,
    finite,
    flag,
    integer,
    number,
    optional,
    text,
)
from tfpar.spec.names import COLLECTIVES, ITEMSIZES

if TYPE_CHECKING:
    from tfpar.cluster.description import Cluster

TOPOLOGIES = ("switch", "direct", "ring", "bus")
"""Topologies of a level, by which its members are joined: each by one port to a switch (also trees
of PCIe switches); by a link between every two; each to its two neighbours (a torus is a ring of
rings); or all by one line that they share."""

ALGORITHMS = ("ring", "tree", "halving", "hierarchical", "heterogeneous-ring")
"""Algorithms by which a library computes a collective; see `cost.collectives`."""

TRANSFER = "transfer"
"""The kind of what is measured that goes from rank to rank."""

Reader = Callable[[str, Any], Any]


def settle(part: Any, readers: Mapping[str, Reader]) -> None:
    """Bring the fields of a frozen dataclass into the one form that they are computed with.

    Raises:
        ArgumentError: a field of another type or out of range; names it.
    """
    for name, read in readers.items():
        object.__setattr__(part, name, read(name, getattr(part, name)))


def parts(kind: type, at_least: int = 0) -> Reader:
    """Make a reader of several `kind`s."""
    what = f"a list of {'one or more ' if at_least else ''}tap.{kind.__name__}"

    def read(name: str, value: Any) -> tuple[Any, ...]:
        found = check_list(name, value, what)
        if len(found) < at_least or not all(isinstance(one, kind) for one in found):
            raise argument_error(name, value, what)
        return found

    return read


def part(kind: type) -> Reader:
    """Make a reader of one `kind`."""

    def read(name: str, value: Any) -> Any:
        if not isinstance(value, kind):
            raise argument_error(name, value, f"a tap.{kind.__name__}")
        return value

    return read


def _rate(name: str, value: Any) -> float:
    return finite(name, value, above=0)


def _count(name: str, value: Any) -> int:
    found = integer(name, value, 1)
    if found > MOST_RANKS:
        raise argument_error(name, value, f"a whole number, 1 to {MOST_RANKS}")
    return found


def _name(name: str, value: Any) -> str:
    if not isinstance(value, str):
        raise argument_error(name, value, "a string")
    return value


def _rates(name: str, value: Any) -> dict[str, float]:
    expected = "FLOP/s by dtype, of 'float32' at least"
    if not isinstance(value, Mapping) or "float32" not in value:
        raise argument_error(name, value, expected)
    for dtype in value:
        if not isinstance(dtype, str) or dtype not in ITEMSIZES:
            near = difflib.get_close_matches(str(dtype), ITEMSIZES, n=3) or ITEMSIZES
            raise argument_error(
                f"{name}'s dtype", dtype, f"one such as {', '.join(map(repr, near))}"
            )
    return {dtype: _rate(f"{name}.{dtype}", rate) for dtype, rate in value.items()}


def _rates_by_name(expected: str, name: str, value: Any) -> dict[str, float]:
    if not isinstance(value, Mapping) or not all(isinstance(key, str) for key in value):
        raise argument_error(name, value, expected)
    return {key: _rate(f"{name}.{key}", rate) for key, rate in value.items()}


def _sizes(name: str, value: Any) -> tuple[int, ...]:
    return tuple(_count(name, size) for size in check_list(name, value, "a list of sizes"))


def _part_of_one(name: str, value: Any) -> float:
    expected = "from 0 (a device waits for its communication) to 1 (it computes on)"
    found = number(name, value, expected=expected)
    if not 0 <= found <= 1:
        raise argument_error(name, value, expected)
    return found


def _algorithms(name: str, value: Any) -> tuple[str, ...]:
    expected = f"some of {', '.join(map(repr, ALGORITHMS))}"
    found = check_list(name, value, expected)
    if not found or not all(isinstance(one, str) and one in ALGORITHMS for one in found):
        raise argument_error(name, value, expected)
    return found


def ranks(name: str, value: Any) -> tuple[int, ...]:
    """Make a reader of ranks."""
    return tuple(integer(name, rank, 0) for rank in check_list(name, value, "a list of ranks"))


_MAYBE_RATE = functools.partial(optional, _rate)

DEVICE: Mapping[str, Reader] = {
    "flops": _rates,
    "memory_bytes": functools.partial(number, above=0),
    "memory_bandwidth": _rate,
    "launch_s": finite,
    "half_size": finite,
    "name": _name,
    "functions_per_s": _MAYBE_RATE,
    "host_bandwidth": functools.partial(number, above=0),
    "host_latency_s": finite,
    "dispatch_s": finite,
    "xla_dispatch_s": finite,
    "ramp_s": finite,
    "entries_per_s": functools.partial(_rates_by_name, "entries a second by op type"),
    "price_per_hour": functools.partial(optional, finite),
    "price_source": _name,
}
LEVEL: Mapping[str, Reader] = {
    "count": _count,
    "bandwidth": _rate,
    "latency_s": finite,
    "topology": lambda name, value: check_choice(name, value, TOPOLOGIES),
    "p2p": _MAYBE_RATE,
    "name": _name,
}
NODE: Mapping[str, Reader] = {
    "count": _count,
    "uplink": _MAYBE_RATE,
    "host_memory_bytes": functools.partial(optional, functools.partial(number, above=0)),
}
MEASURED: Mapping[str, Reader] = {
    "kind": lambda name, value: check_choice(name, value, (*COLLECTIVES, TRANSFER)),
    "mesh": _sizes,
    "axis": lambda name, value: integer(name, value, 0),
    "startup_s": finite,
    "bandwidth": _rate,
    "group": ranks,
}
CORRECTION: Mapping[str, Reader] = {
    "work": _rate,
    "within": _rate,
    "between": _rate,
    "parts": functools.partial(
        _rates_by_name, "factors by the names of types of devices and links"
    ),
}
CLUSTER: Mapping[str, Reader] = {
    "name": text,
    "overlap": _part_of_one,
    "algorithms": _algorithms,
    "step_s": finite,
    "one_memory": flag,
    "ranks": functools.partial(optional, ranks),
}


def check_cluster(cluster: Cluster) -> None:
    """Raise TfparError if the parts of `cluster` do not fit each other; says which."""
    wrong = next(_wrongs(cluster), None)
    if wrong is not None:
        raise TfparError(f"Cluster {cluster.name!r}: {wrong}")


def _wrongs(cluster: Cluster) -> Iterator[str]:
    if not cluster.levels and cluster.num_nodes > 1:
        yield (
            f"it has {cluster.num_nodes} nodes, but no `level` that joins them: the link between "
            f"nodes is missing."
        )
    joined = math.prod(level.count for level in cluster.levels)
    if joined != cluster.num_nodes and cluster.levels:
        counts = " x ".join(str(level.count) for level in cluster.levels)
        product = f"{counts} = " if len(cluster.levels) > 1 else ""
        yield (
            f"its levels join {product}{joined} nodes, but it has {cluster.num_nodes}; make "
            f"`count` of `level` and of `node` agree."
        )
    if cluster.num_devices > MOST_RANKS:
        yield f"it has {cluster.num_devices} devices; plans are for {MOST_RANKS} at most."
    yield from _wrong_ranks(cluster)
    for i, entry in enumerate(cluster.measured):
        where = f"measured[{i}]"
        if not entry.axis < len(entry.mesh):
            yield f"{where}.axis is {entry.axis}, but {where}.mesh has {len(entry.mesh)} axes."
        elif math.prod(entry.mesh) > cluster.num_devices:
            yield (
                f"{where}.mesh has {math.prod(entry.mesh)} ranks, but there are "
                f"{cluster.num_devices} devices."
            )
        elif entry.group and entry.group not in Mesh.of(entry.mesh).groups((entry.axis,)):
            yield (
                f"{where}.group is {list(entry.group)}, which are not the ranks of a group along "
                f"axis {entry.axis} of {where}.mesh."
            )


def _wrong_ranks(cluster: Cluster) -> Iterator[str]:
    if cluster.ranks is None:
        return
    if not cluster.ranks:
        yield "its `ranks` are empty; a part of a cluster has one rank at least."
    for rank, times in collections.Counter(cluster.ranks).items():
        if rank >= cluster.num_devices:
            yield f"its `ranks` name rank {rank}, but it has {cluster.num_devices} devices."
        elif times > 1:
            yield f"its `ranks` name rank {rank} {times} times."
