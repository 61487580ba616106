"""What the parts of a strategy take, in seconds: passes, sums of gradients, transfers."""

from __future__ import annotations

import collections
import dataclasses
import functools
import math
import operator

from tfpar.cluster.description import Cluster
from tfpar.cluster.network import transfer_link
from tfpar.cost.collectives import collective_seconds, transfer_seconds
from tfpar.search.three_d.model import Model
from tfpar.search.three_d.strategy import Strategy
from tfpar.search.three_d.table import Case, Passes
from tfpar.spec import Mesh

TENSOR, DATA = (1,), (0,)
"""Axes of a stage's mesh."""


def passes_of_copies(
    model: Model, cluster: Cluster, strategy: Strategy, stage: int, layers: range
) -> list[Passes]:
    """Of each copy of a stage, what a microbatch takes in some layers: eq. 3, both passes apart.

    Tensor ranks sum as much in the backward pass as in the forward pass; a layer that is computed
    again takes its forward pass twice.
    """
    kinds = collections.Counter(model.table.layers[layer] for layer in layers)
    ranks, devices = strategy.stage(stage), cluster.devices
    summing = sum(
        count * _tensor_sum(cluster, strategy, stage, strategy.microbatch * num_bytes)
        for name, count in kinds.items()
        if (num_bytes := model.table.kinds[name].reduced_bytes)
    )
    known: dict[frozenset[str], Passes] = {}
    found = []
    for first in range(0, len(ranks), strategy.tensor):
        names = frozenset(devices[rank].name for rank in ranks[first : first + strategy.tensor])
        if names not in known:
            forward = backward = summing
            for kind, count in kinds.items():
                cases = (Case(name, strategy.tensor, strategy.microbatch) for name in names)
                each = [model.table.passes(kind, case) for case in cases]
                forward += count * max(passes.forward for passes in each)
                backward += count * max(passes.backward for passes in each)
            if strategy.memory.recompute:
                backward += forward
            known[names] = Passes(forward, backward)
        found.append(known[names])
    return found


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
    """T_dpsync of a stage: the copies sum its gradients.

    Where they share the slots out, each gets the sum of its part alone, and all gather the weights.
    """
    kinds = [model.table.kind(layer) for layer in strategy.runs[stage]]
    gradients = sum(kind.gradient_bytes for kind in kinds) / strategy.tensor
    if not strategy.memory.shard_slots:
        return _along_copies("all_reduce", cluster, strategy, stage, gradients)
    weights = sum(kind.weight_bytes for kind in kinds) / strategy.tensor
    return _along_copies("reduce_scatter", cluster, strategy, stage, gradients) + _along_copies(
        "all_gather", cluster, strategy, stage, weights
    )


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


def _tensor_sum(cluster: Cluster, strategy: Strategy, stage: int, num_bytes: float) -> float:
    return _of_groups("all_reduce", TENSOR, strategy.tensor, cluster, strategy, stage, num_bytes)


def _along_copies(
    kind: str, cluster: Cluster, strategy: Strategy, stage: int, num_bytes: float
) -> float:
    return _of_groups(kind, DATA, strategy.data, cluster, strategy, stage, num_bytes)


def _of_groups(
    kind: str,
    axes: tuple[int, ...],
    size: int,
    cluster: Cluster,
    strategy: Strategy,
    stage: int,
    num_bytes: float,
) -> float:
    """Of all groups of the stage at once, beside those of stages on the same machines."""
    if not num_bytes or size == 1:
        return 0.0
    ranks = _beside(cluster, strategy, stage % strategy.actors)
    mesh = Mesh.of([len(ranks) // strategy.data // strategy.tensor, strategy.data, strategy.tensor])
    along = tuple(axis + 1 for axis in axes)
    return collective_seconds(kind, along, num_bytes, mesh, _part(cluster, ranks))


@functools.lru_cache(maxsize=4096)
def _beside(cluster: Cluster, strategy: Strategy, actor: int) -> tuple[int, ...]:
    """The ranks of an actor, and of those that share a machine with it: their groups share links.

    An actor within one machine has the links to itself, as those of a switch are.
    """
    machines = [{cluster.machines[r] for r in strategy.stage(a)} for a in range(strategy.actors)]
    own = machines[actor]
    near = [a for a, others in enumerate(machines) if a == actor or len(own) > 1 and own & others]
    return functools.reduce(operator.add, map(strategy.stage, near))


@functools.lru_cache(maxsize=4096)
def _part(cluster: Cluster, ranks: tuple[int, ...]) -> Cluster:
    return cluster.part(ranks)


@functools.lru_cache(maxsize=64)
def one_ring(cluster: Cluster) -> Cluster:
    """The cluster with eq. 1's all-reduce and no other."""
    return dataclasses.replace(cluster, algorithms=("heterogeneous-ring",))


def widest_link(cluster: Cluster) -> float:
    """Bytes/s that no link between two devices is above."""
    levels = [*cluster.levels, *(level for node in cluster.nodes for level in node.levels)]
    uplinks = [node.uplink for node in cluster.nodes if node.uplink is not None]
    return max([*(level.bandwidth for level in levels), *uplinks], default=math.inf)
