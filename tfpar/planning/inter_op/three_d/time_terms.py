"""Terms of a strategy's time, in seconds: passes, sums of gradients, transfers."""

from __future__ import annotations

import collections
import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from tfpar.cluster.description import Cluster, Device, Node
from tfpar.cluster.network import transfer_link
from tfpar.cost.collectives import collective_seconds, transfer_seconds
from tfpar.cost.host import issued_in_order
from tfpar.planning.inter_op.three_d.cost_table import (
    NO_TIME,
    LayerCost,
    LayerExchange,
    LayerLayout,
    Passes,
)
from tfpar.planning.inter_op.three_d.memory import stage_costs
from tfpar.planning.inter_op.three_d.problem import StrategyProblem
from tfpar.planning.inter_op.three_d.strategy import Strategy3D
from tfpar.spec import Mesh


def passes_of_copies(
    model: StrategyProblem, cluster: Cluster, strategy: Strategy3D, stage: int, layers: range
) -> list[Passes]:
    """Return for each copy of a stage the seconds of a microbatch in some layers: eq. 3, both
    passes apart, and what devices wait for hosts.

    A layer that is computed again takes its forward pass twice. Copies that wait for each other,
    as those that share experts do, are as slow as the slowest of them.
    """
    return [copy.taken for copy in times_of_copies(model, cluster, strategy, stage, layers)]


class CopyTimes(NamedTuple):
    """Seconds of a copy of a stage for a microbatch.

    Attributes:
        running: of its devices, with what these exchange.
        taken: these, and what devices wait for their hosts to issue ops.
    """

    running: Passes
    taken: Passes


def times_of_copies(
    model: StrategyProblem, cluster: Cluster, strategy: Strategy3D, stage: int, layers: range
) -> list[CopyTimes]:
    """Return the times of each copy of a stage; see `passes_of_copies`."""
    equal = [
        (name, len(list(some)))
        for name, some in itertools.groupby(model.table.layers[layer] for layer in layers)
    ]
    layout = strategy.layout(stage)
    costs = {name: model.table.cost(name, layout) for name, _ in equal}
    ranks, devices = strategy.stage(stage), cluster.devices
    part = _beside(cluster, strategy, stage)
    exchanged = {
        name: Passes(
            exchange_seconds(cost.forward, cost.sizes, part),
            exchange_seconds(cost.backward, cost.sizes, part),
        )
        for name, cost in costs.items()
    }
    copies = max(cost.together for cost in costs.values())
    size = copies * strategy.tensor
    known: dict[frozenset[str], CopyTimes] = {}
    found = []
    for first in range(0, len(ranks), size):
        names = frozenset(devices[rank].name for rank in ranks[first : first + size])
        if names not in known:
            known[names] = _of_devices(model, layout, names, equal, exchanged)
        found += [known[names]] * copies
    return found


def _of_devices(
    model: StrategyProblem,
    layout: LayerLayout,
    names: frozenset[str],
    equal: Sequence[tuple[str, int]],
    exchanged: Mapping[str, Passes],
) -> CopyTimes:
    """The times of layers on devices that wait for each other.

    Args:
        equal: the kinds of layers, in their order, and how many of each follow each other.
        exchanged: what layers of a kind exchange.
    """
    each = []
    for name, count in equal:
        costs = model.table.cost(name, layout).dispatch_s
        issuing = [costs.get(device, NO_TIME) for device in names]
        issued = Passes(*map(max, zip(*issuing, strict=True)))
        running = _computed(model, layout, name, names, max).plus(exchanged[name])
        if layout.recompute:
            running, issued = running.recomputed(), issued.recomputed()
        each.append((count, running, issued))
    running = functools.reduce(lambda sum_, one: sum_.plus(one[1], one[0]), each, NO_TIME)
    if not any(sum(issued) for *_, issued in each):
        return CopyTimes(running, running)
    taken = Passes(
        issued_in_order([(n, one.forward, issued.forward) for n, one, issued in each]),
        issued_in_order([(n, one.backward, issued.backward) for n, one, issued in each[::-1]]),
    )
    return CopyTimes(running, taken)


def _computed(
    model: StrategyProblem,
    layout: LayerLayout,
    kind: str,
    names: Iterable[str],
    of_devices: Callable[[Iterable[float]], float],
) -> Passes:
    """Return the compute time of a layer for a microbatch: the longest, or the shortest, of some
    devices."""
    each = [model.table.passes(kind, name, layout) for name in names]
    return Passes(
        of_devices(passes.forward for passes in each),
        of_devices(passes.backward for passes in each),
    )


def layer_seconds(model: StrategyProblem, strategy: Strategy3D, stage: int) -> list[float]:
    """Return the seconds of each layer for a microbatch, both passes, on the ranks of a stage."""
    cluster = one_ring(model.cluster)
    known: dict[str, float] = {}
    for layer, name in enumerate(model.table.layers):
        if name not in known:
            run = range(layer, layer + 1)
            known[name] = max(map(sum, passes_of_copies(model, cluster, strategy, stage, run)))
    return [known[name] for name in model.table.layers]


def sync_seconds(
    model: StrategyProblem, cluster: Cluster, strategy: Strategy3D, stage: int
) -> float:
    """T_dpsync of a stage: its ranks sum its gradients, and what of that is not hidden is waited
    for, as is what they exchange and compute behind it."""
    costs = stage_costs(model, strategy, stage)
    sizes, part = costs[0].sizes, _beside(cluster, strategy, stage)
    if strategy.overlap.gradients and strategy.data > 1:
        found = _exposed_seconds(model, cluster, strategy, stage)
    else:
        found = exchange_seconds(packed(e for c in costs for e in c.sums), sizes, part)
    found += exchange_seconds(packed(e for c in costs for e in c.gathers), sizes, part)
    return found + update_seconds(model, strategy, stage)


def layer_sync_seconds(model: StrategyProblem, strategy: Strategy3D, name: str) -> float:
    """Return the seconds that ranks of the first stage need once a step for a layer of a kind, with
    what its slots take to come from hosts and go back."""
    cost = model.table.cost(name, strategy.layout(0))
    part = _beside(one_ring(model.cluster), strategy, 0)
    moved = [packed(cost.sums), packed(cost.gathers)]
    found = sum(exchange_seconds(exchanged, cost.sizes, part) for exchanged in moved)
    if not cost.host_bytes:
        return found
    return found + max(host_seconds([cost], model.cluster.devices[r]) for r in strategy.stage(0))


def update_seconds(model: StrategyProblem, strategy: Strategy3D, stage: int) -> float:
    """Return what the slowest rank of a stage computes of the update, and waits for copies from its
    host and back."""
    costs = stage_costs(model, strategy, stage)
    devices = {model.cluster.devices[rank] for rank in strategy.stage(stage)}
    names = {device.name for device in devices}
    computed = sum(
        max(cost.update_s.get(name, 0.0) for name in names) for cost in costs if cost.update_s
    )
    return computed + max(host_seconds(costs, device) for device in devices)


def host_seconds(costs: Sequence[LayerCost], device: Device) -> float:
    """Return the seconds in which slots in host memory come to a device and go back."""
    away = [cost.host_bytes for cost in costs if cost.host_bytes]
    return 2 * (len(away) * device.host_latency_s + sum(away) / device.host_bandwidth)


def computed_passes(model: StrategyProblem, strategy: Strategy3D, stage: int) -> Passes:
    """Return what the slowest rank of a stage computes of a microbatch, both passes apart."""
    counts = collections.Counter(model.table.layers[layer] for layer in strategy.runs[stage])
    names = {model.cluster.devices[rank].name for rank in strategy.stage(stage)}
    layout = strategy.layout(stage)
    found = NO_TIME
    for kind, count in counts.items():
        found = found.plus(_computed(model, layout, kind, names, max), count)
    return found.recomputed() if layout.recompute else found


def _exposed_seconds(
    model: StrategyProblem, cluster: Cluster, strategy: Strategy3D, stage: int
) -> float:
    """From the end of a stage's last backward pass until all its gradients are summed.

    A layer's are summed once it has them and those after it are summed. Behind a second of what
    layers compute, `Cluster.overlap` seconds of sums can hide; what layers exchange hides nothing.
    """
    table, layout = model.table, strategy.layout(stage)
    names = {cluster.devices[rank].name for rank in strategy.stage(stage)}
    part = _beside(cluster, strategy, stage)
    known: dict[str, tuple[float, float]] = {}
    computed = summed = 0.0
    for layer in reversed(strategy.runs[stage]):
        name = table.layers[layer]
        if name not in known:
            least = _computed(model, layout, name, names, min)
            backward = least.backward + (least.forward if layout.recompute else 0.0)
            cost = table.cost(name, layout)
            summing = exchange_seconds(packed(cost.sums), cost.sizes, part)
            known[name] = cluster.overlap * backward, summing
        hiding, summing = known[name]
        computed += hiding
        summed = max(summed, computed) + summing
    return summed - computed


def sent_seconds(model: StrategyProblem, strategy: Strategy3D) -> list[float]:
    """Return the seconds from each stage to the next, of a microbatch of all copies at once."""
    found = []
    for s in range(strategy.stages - 1):
        num_bytes = model.table.cost_of(strategy.runs[s][-1], strategy.layout(s)).sent_bytes
        pairs = zip(strategy.stage(s), strategy.stage(s + 1), strict=True)
        found.append(transfer_seconds(pairs, num_bytes, model.cluster) if num_bytes else 0.0)
    return found


def transfer_rates(model: StrategyProblem, strategy: Strategy3D) -> list[float]:
    """Bytes/s from each rank of a stage to the next stage, when all of them send; infinite without
    links between them."""
    found = []
    for s in range(strategy.stages - 1):
        pairs = tuple(zip(strategy.stage(s), strategy.stage(s + 1), strict=True))
        found.append(transfer_link(model.cluster, tuple(sorted(pairs))).bandwidth)
    return found


def _beside(cluster: Cluster, strategy: Strategy3D, stage: int) -> Cluster:
    """The ranks of a stage, and of those on the same machines."""
    parts = contention_domains(cluster, strategy.ranks, strategy.actors)
    return parts[stage % strategy.actors]


def exchange_seconds(
    exchanges: Iterable[LayerExchange], sizes: tuple[int, ...], part: Cluster
) -> float:
    """Return the seconds of exchanges of all groups of a stage at once.

    Args:
        sizes: of the mesh of the stage's ranks.
        part: these, and those of as large stages beside it.
    """
    found = 0.0
    for kind, axes, num_bytes, times in exchanges:
        if num_bytes and any(sizes[axis] > 1 for axis in axes):
            mesh = _mesh((part.size // math.prod(sizes), *sizes))
            behind = tuple(axis + 1 for axis in axes)
            found += times * collective_seconds(kind, behind, num_bytes, mesh, part)
    return found


def packed(exchanges: Iterable[LayerExchange]) -> list[LayerExchange]:
    """Merge exchanges of the same kind and groups into one."""
    total: dict[tuple[str, tuple[int, ...]], float] = {}
    for kind, axes, num_bytes, times in exchanges:
        total[kind, axes] = total.get((kind, axes), 0.0) + num_bytes * times
    return [LayerExchange(*key, num_bytes) for key, num_bytes in total.items()]


@functools.lru_cache(maxsize=1024)
def _mesh(sizes: tuple[int, ...]) -> Mesh:
    return Mesh.of(sizes)


@functools.lru_cache(maxsize=64)
def one_ring(cluster: Cluster) -> Cluster:
    """Return the cluster with eq. 1's all-reduce and no other."""
    return dataclasses.replace(cluster, algorithms=("heterogeneous-ring",))


def widest_link(cluster: Cluster) -> float:
    """Bytes/s that no link between two devices is above."""
    levels = [*cluster.levels, *(level for node in cluster.nodes for level in node.levels)]
    uplinks = [node.uplink for node in cluster.nodes if node.uplink is not None]
    return max([*(level.bandwidth for level in levels), *uplinks], default=math.inf)


# --- Contention domains ---
#
# On thousands of devices most of these parts are equal to others. Where machines are joined by one
# level of links, a part of other machines of the same kinds takes as long, so each is brought to
# the first machines of its kinds: what was found for one then holds for all.


@functools.lru_cache(maxsize=64)
def contention_domains(
    cluster: Cluster, ranks: tuple[int, ...], actors: int
) -> tuple[Cluster, ...]:
    """Return for each actor its ranks, and those of the actors that share a machine with it: their
    groups share links.

    An actor within one machine has the links to itself, as those of a switch are.

    Args:
        ranks: those of each actor, one after the other.
    """
    size = len(ranks) // actors
    own = [ranks[first : first + size] for first in range(0, len(ranks), size)]
    machines = [{cluster.machines[rank] for rank in stage} for stage in own]
    users: dict[int, list[int]] = {}
    for actor, used in enumerate(machines):
        for machine in used:
            users.setdefault(machine, []).append(actor)
    found = []
    for actor, used in enumerate(machines):
        near = {actor} if len(used) == 1 else {a for machine in used for a in users[machine]}
        beside = itertools.chain.from_iterable(own[a] for a in sorted(near))
        found.append(_part(cluster, _on_the_first_alike(cluster, tuple(beside))))
    return tuple(found)


@functools.lru_cache(maxsize=4096)
def _part(cluster: Cluster, ranks: tuple[int, ...]) -> Cluster:
    return cluster.part(ranks)


def _on_the_first_alike(cluster: Cluster, ranks: Sequence[int]) -> tuple[int, ...]:
    """The same ranks of other machines, the first ones of the same kinds."""
    if cluster.ranks is not None or len(cluster.levels) > 1 or cluster.measured:
        return tuple(ranks)
    alike, starts = _machines(cluster)
    left: dict[int, Iterator[int]] = {}
    moved: dict[int, int] = {}
    found = []
    for rank in ranks:
        machine = cluster.machines[rank]
        if machine not in moved:
            others = alike[machine]
            moved[machine] = next(left.setdefault(others[0], iter(others)))
        found.append(starts[moved[machine]] + rank - starts[machine])
    return tuple(found)


@functools.lru_cache(maxsize=64)
def _machines(cluster: Cluster) -> tuple[list[list[int]], list[int]]:
    """Of each machine those that are like it, in order; and its first rank."""
    kinds: dict[Node, list[int]] = {}
    alike: list[list[int]] = []
    starts, start = [], 0
    for node in cluster.nodes:
        kind = dataclasses.replace(node, count=1)
        for _ in range(node.count):
            kinds.setdefault(kind, []).append(len(alike))
            alike.append(kinds[kind])
            starts.append(start)
            start += node.size
    return alike, starts
