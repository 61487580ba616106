"""Types of machines that the actors of a pipeline have: a layout is searched for each.

A planner knows the machines of one actor. Where those of another have other devices or links,
another layout may be better there, and for the whole step: what is found for each type is priced
in all stages, and the fastest is taken (`placing`).
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from tfpar.cluster.description import Cluster
from tfpar.cluster.network import likeness
from tfpar.pipeline.pipeline import groups_of


def list_machine_types(
    cluster: Cluster, sizes: Sequence[int], size: int, limits: Sequence[float] = ()
) -> dict[Cluster, int]:
    """List the machines on which layouts for the ranks of an actor are searched, and how many
    actors have such: of equal ones, the first.

    A planner prices the whole model there, of which each actor stores a part. So it may use the
    memory of a rank of each of them: the limits as they are would refuse plans that fit. See
    `memory.stages`.

    Args:
        sizes: ranks of each actor, one behind the other.
        size: ranks of those actors that layouts are searched for.
        limits: bytes that a rank of each may store, at most; by default what its device has.

    Raises:
        TfparError: the cluster has fewer ranks.
    """
    parts = [cluster.part(group) for group in groups_of(sizes)]
    devices = [part.device.memory_bytes for part in parts]
    room = map(min, devices, limits or devices)
    memory = sum(n / size * each for n, each in zip(sizes, room, strict=True))
    first: dict[object, Cluster] = {}
    found: dict[Cluster, int] = {}
    for part in (part for part, n in zip(parts, sizes, strict=True) if n == size):
        machines = part.with_memory(memory)
        kind = first.setdefault(likeness(machines), machines)
        found[kind] = found.get(kind, 0) + 1
    return found


def search_machine_types(kinds: Collection[Cluster]) -> list[Cluster]:
    """Return all of them, but machines that differ where each is found in other types: together
    they have the pace of the slowest, and what suits that is found there."""
    alone = {kind.devices[0] for kind in kinds if len(set(kind.devices)) == 1}
    return [k for k in kinds if len(set(k.devices)) == 1 or not alone.issuperset(k.devices)]
