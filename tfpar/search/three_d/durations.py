"""What the parts of a strategy take, in seconds: passes, sums of gradients, transfers."""

from __future__ import annotations

import collections
import dataclasses
import functools
import math
from collections.abc import Callable, Iterable, Sequence

from tfpar.cluster.description import Cluster
from tfpar.cluster.network import transfer_link
from tfpar.cost.collectives import collective_seconds, transfer_seconds
from tfpar.search.three_d.beside import parts_of_actors
from tfpar.search.three_d.model import Model
from tfpar.search.three_d.strategy import Strategy
from tfpar.search.three_d.table import Case, LayerKind, Passes
from tfpar.spec import Mesh

GROUPS, EXPERTS, TENSOR = 1, 2, 3
"""Axes of the mesh of a stage and those beside it. Copies are along the first two: those along the
second share experts."""


def passes_of_copies(
    model: Model, cluster: Cluster, strategy: Strategy, stage: int, layers: range
) -> list[Passes]:
    """Of each copy of a stage, what a microbatch takes in some layers: eq. 3, both passes apart.

    Ranks exchange as much in the backward pass as in the forward pass; a layer that is computed
    again takes its forward pass twice. Copies that share experts are as slow as the slowest of
    them.
    """
    kinds = collections.Counter(model.table.layers[layer] for layer in layers)
    ranks, devices = strategy.stage(stage), cluster.devices
    exchanged = sum(
        count * _exchange_seconds(model.table.kinds[name], cluster, strategy, stage)
        for name, count in kinds.items()
    )
    meet = any(model.table.kinds[name].experts is not None for name in kinds)
    copies = strategy.experts if meet else 1
    size = copies * strategy.tensor
    known: dict[frozenset[str], Passes] = {}
    found = []
    for first in range(0, len(ranks), size):
        names = frozenset(devices[rank].name for rank in ranks[first : first + size])
        if names not in known:
            forward = backward = exchanged
            for kind, count in kinds.items():
                slowest = _computed(model, strategy, kind, names, max)
                forward += count * slowest.forward
                backward += count * slowest.backward
            if strategy.memory.recompute:
                backward += forward
            known[names] = Passes(forward, backward)
        found += [known[names]] * copies
    return found


def _exchange_seconds(kind: LayerKind, cluster: Cluster, strategy: Strategy, stage: int) -> float:
    """Of a microbatch in one pass of a layer: its tensor ranks sum, and tokens go to their experts
    and back."""
    found = 0.0
    if kind.reduced_bytes:
        num_bytes = strategy.microbatch * kind.reduced_bytes
        found += _of_groups("all_reduce", (TENSOR,), cluster, strategy, stage, num_bytes)
    if kind.experts is not None:
        num_bytes = strategy.microbatch * kind.experts.routed_bytes
        found += 2 * _of_groups("all_to_all", (EXPERTS,), cluster, strategy, stage, num_bytes)
    return found


def _computed(
    model: Model,
    strategy: Strategy,
    kind: str,
    names: Iterable[str],
    of_devices: Callable[[Iterable[float]], float],
) -> Passes:
    """What a layer computes of a microbatch: the longest, or the shortest, of some devices."""
    degrees = strategy.tensor, strategy.microbatch, strategy.experts
    each = [model.table.passes(kind, Case(name, *degrees)) for name in names]
    return Passes(
        of_devices(passes.forward for passes in each),
        of_devices(passes.backward for passes in each),
    )


def layer_seconds(model: Model, strategy: Strategy, stage: int) -> list[float]:
    """What each layer of the model takes of a microbatch, both passes, on the ranks of a stage."""
    cluster = one_ring(model.cluster)
    known: dict[str, float] = {}
    for layer, name in enumerate(model.table.layers):
        if name not in known:
            run = range(layer, layer + 1)
            known[name] = max(map(sum, passes_of_copies(model, cluster, strategy, stage, run)))
    return [known[name] for name in model.table.layers]


def sync_seconds(model: Model, cluster: Cluster, strategy: Strategy, stage: int) -> float:
    """T_dpsync of a stage: the copies sum its gradients, and what of that is not hidden is waited
    for.

    Where they share the slots out, each gets the sum of its part alone, and all gather the weights.
    """
    if strategy.data == 1:
        return 0.0
    kinds = [model.table.kind(layer) for layer in strategy.runs[stage]]
    if strategy.overlap.gradients:
        gradients = _exposed_seconds(model, cluster, strategy, stage)
    else:
        gradients = _gradient_seconds(kinds, cluster, strategy, stage)
    if not strategy.memory.shard_slots:
        return gradients
    own = sum(kind.experts.weight_bytes for kind in kinds if kind.experts is not None)
    weights = sum(kind.weight_bytes for kind in kinds) - own
    return gradients + _along_copies("all_gather", cluster, strategy, stage, weights, own)


def _gradient_seconds(
    kinds: Sequence[LayerKind], cluster: Cluster, strategy: Strategy, stage: int
) -> float:
    """Until the copies have summed the gradients of some layers, all of them together."""
    own = sum(kind.experts.gradient_bytes for kind in kinds if kind.experts is not None)
    gradients = sum(kind.gradient_bytes for kind in kinds) - own
    collective = "reduce_scatter" if strategy.memory.shard_slots else "all_reduce"
    return _along_copies(collective, cluster, strategy, stage, gradients, own)


def _exposed_seconds(model: Model, cluster: Cluster, strategy: Strategy, stage: int) -> float:
    """From the end of a stage's last backward pass until all its gradients are summed.

    A layer's are summed once it has them and those after it are summed. Behind a second of what
    layers compute, `Cluster.overlap` seconds of sums can hide; what layers exchange hides nothing.
    """
    table = model.table
    names = {cluster.devices[rank].name for rank in strategy.stage(stage)}
    known: dict[str, tuple[float, float]] = {}
    computed = summed = 0.0
    for layer in reversed(strategy.runs[stage]):
        name = table.layers[layer]
        if name not in known:
            least = _computed(model, strategy, name, names, min)
            backward = least.backward + (least.forward if strategy.memory.recompute else 0.0)
            summing = _gradient_seconds([table.kinds[name]], cluster, strategy, stage)
            known[name] = cluster.overlap * backward, summing
        hiding, summing = known[name]
        computed += hiding
        summed = max(summed, computed) + summing
    return summed - computed


def sent_seconds(model: Model, strategy: Strategy) -> list[float]:
    """From each stage to the next, of a microbatch of all copies at once."""
    found = []
    for s in range(strategy.stages - 1):
        last = model.table.kind(strategy.runs[s][-1])
        pairs = zip(strategy.stage(s), strategy.stage(s + 1), strict=True)
        num_bytes = last.sent_bytes * strategy.microbatch
        found.append(transfer_seconds(pairs, num_bytes, model.cluster) if num_bytes else 0.0)
    return found


def transfer_rates(model: Model, strategy: Strategy) -> list[float]:
    """Bytes/s from each rank of a stage to the next stage, when all of them send; infinite without
    links between them."""
    found = []
    for s in range(strategy.stages - 1):
        pairs = tuple(zip(strategy.stage(s), strategy.stage(s + 1), strict=True))
        found.append(transfer_link(model.cluster, tuple(sorted(pairs))).bandwidth)
    return found


def _along_copies(
    kind: str, cluster: Cluster, strategy: Strategy, stage: int, dense: float, own: float
) -> float:
    """Of bytes that all copies have of the whole stage, and of those of experts."""
    dense /= strategy.tensor
    own /= strategy.tensor * strategy.experts
    if strategy.experts == 1:
        return _of_groups(kind, (GROUPS,), cluster, strategy, stage, dense + own)
    return _of_groups(kind, (GROUPS, EXPERTS), cluster, strategy, stage, dense) + _of_groups(
        kind, (GROUPS,), cluster, strategy, stage, own
    )


def _of_groups(
    kind: str,
    axes: tuple[int, ...],
    cluster: Cluster,
    strategy: Strategy,
    stage: int,
    num_bytes: float,
) -> float:
    """Of all groups of the stage at once, beside those of stages on the same machines."""
    sizes = strategy.data // strategy.experts, strategy.experts, strategy.tensor
    if not num_bytes or all(sizes[axis - 1] == 1 for axis in axes):
        return 0.0
    beside = parts_of_actors(cluster, strategy.ranks, strategy.actors)[stage % strategy.actors]
    mesh = _mesh((beside.size // math.prod(sizes), *sizes))
    return collective_seconds(kind, axes, num_bytes, mesh, beside)


@functools.lru_cache(maxsize=1024)
def _mesh(sizes: tuple[int, ...]) -> Mesh:
    return Mesh.of(sizes)


@functools.lru_cache(maxsize=64)
def one_ring(cluster: Cluster) -> Cluster:
    """The cluster with eq. 1's all-reduce and no other."""
    return dataclasses.replace(cluster, algorithms=("heterogeneous-ring",))


def widest_link(cluster: Cluster) -> float:
    """Bytes/s that no link between two devices is above."""
    levels = [*cluster.levels, *(level for node in cluster.nodes for level in node.levels)]
    uplinks = [node.uplink for node in cluster.nodes if node.uplink is not None]
    return max([*(level.bandwidth for level in levels), *uplinks], default=math.inf)
