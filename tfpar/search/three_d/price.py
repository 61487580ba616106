"""What a strategy takes: by the formulas that rank, and by the simulation that decides.

auto3d, §4.2-4.3, for K stages, M microbatches, and dp copies of the pipeline:

    eq. 1   all-reduce of a payload    2 payload / N * sum_i 1 / B_i   along a ring of N links
    eq. 3   t_i = seconds of the stage's layers + what its tensor ranks sum
    eq. 4   T_pipeline = (M - 1) max_i t_i + sum_i c_i + sum_i t_i
    eq. 2   T = max over copies of T_pipeline + max over stages of T_dpsync

`c_i` is a transfer there and one back. The simulation (`cost.pipeline`) has the same durations, but
lets a stage's gradients travel while others still compute, gives transfers the links that they
share, and takes the fastest of the all-reduces that the cluster's library knows: in a ring whose
parts all move at once, the slowest link alone counts, and not their sum.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import math
import operator

from tfpar.cluster.description import Cluster
from tfpar.cluster.network import transfer_link
from tfpar.cost.collectives import collective_seconds, transfer_seconds
from tfpar.cost.pipeline import simulate
from tfpar.cost.stages import Network, StageCost
from tfpar.cost.timeline import Timeline
from tfpar.pipeline.generators import generate
from tfpar.pipeline.graph import task_graph
from tfpar.pipeline.stage_graph import StageGraph, StageLink
from tfpar.search.stages.layers import pipeline_seconds
from tfpar.search.three_d.strategy import Strategy
from tfpar.search.three_d.table import Case, LayerTable, Passes
from tfpar.spec import Mesh, PlanError

TENSOR, DATA = (1,), (0,)
"""Axes of a stage's mesh."""


@dataclasses.dataclass(frozen=True)
class Model:
    """What is trained, and where.

    Attributes:
        batch: samples of a step, of all copies together.
    """

    table: LayerTable
    cluster: Cluster
    batch: int


def quick_seconds(model: Model, strategy: Strategy) -> float:
    """Seconds of a step by equations 1 to 4.

    Raises:
        PlanError: the table has no times for it, or it does not fit the model.
    """
    cluster = one_ring(model.cluster)
    microbatches = _microbatches(model, strategy)
    sent = [2 * seconds for seconds in _sent_seconds(model, strategy)]
    stages = [_passes(model, cluster, strategy, s, run) for s, run in enumerate(strategy.runs)]
    copies = zip(*([sum(passes) for passes in stage] for stage in stages), strict=True)
    pipeline = max(pipeline_seconds(own, sent, microbatches) for own in copies)
    return pipeline + max(_sync_seconds(model, cluster, strategy, s) for s in range(len(stages)))


def simulated(model: Model, strategy: Strategy, schedule: str = "1f1b") -> Timeline:
    """A step as the events of its tasks, each stage as slow as the slowest of its copies.

    Args:
        schedule: one of `pipeline.generators.FAMILIES`.

    Raises:
        PlanError: the table has no times for it, or it does not fit the model.
    """
    microbatches = _microbatches(model, strategy)
    costs, links, pairs = [], [], {}
    for s, run in enumerate(strategy.runs):
        copies = _passes(model, model.cluster, strategy, s, run)
        kinds = [model.table.kind(layer) for layer in run]
        costs.append(
            StageCost(
                {
                    "F": max(passes.forward for passes in copies),
                    "B": max(passes.backward for passes in copies),
                },
                fixed_bytes=sum(kind.fixed_bytes for kind in kinds) / strategy.tensor,
                kept_bytes=sum(kind.kept_bytes for kind in kinds)
                * (strategy.microbatch / strategy.tensor),
                reduction_s=_sync_seconds(model, model.cluster, strategy, s),
            )
        )
        if s + 1 < strategy.stages:
            senders, readers = strategy.stage(s), strategy.stage(s + 1)
            num_bytes = kinds[-1].sent_bytes * strategy.microbatch * len(senders)
            links.append(StageLink(s, s + 1, num_bytes, num_bytes))
            part = 1 / len(senders)
            there = [(a, b, part) for a, b in zip(senders, readers, strict=True)]
            pairs[s, s + 1] = there
            pairs[s + 1, s] = [(b, a, part) for a, b, _ in there]
    network = Network.of(model.cluster, pairs) if pairs else None
    graph = task_graph(
        generate(schedule, strategy.stages, microbatches),
        StageGraph(strategy.stages, tuple(links)),
    )
    return simulate(graph, costs, network)


def stored_bytes(model: Model, strategy: Strategy) -> tuple[float, ...]:
    """What each rank of each stage stores at most, with the microbatches in flight of 1F1B."""
    microbatches = _microbatches(model, strategy)
    found = []
    for s, run in enumerate(strategy.runs):
        kinds = [model.table.kind(layer) for layer in run]
        alive = min(microbatches, strategy.stages - s) * strategy.microbatch
        whole = sum(kind.fixed_bytes + alive * kind.kept_bytes for kind in kinds)
        found.append(whole / strategy.tensor)
    return tuple(found)


def fits(model: Model, strategy: Strategy) -> bool:
    """Whether every rank has the memory that its stage needs."""
    devices = model.cluster.devices
    return all(
        stored <= min(devices[rank].memory_bytes for rank in strategy.stage(s))
        for s, stored in enumerate(stored_bytes(model, strategy))
    )


def _microbatches(model: Model, strategy: Strategy) -> int:
    if sum(strategy.counts) != len(model.table):
        raise PlanError(
            f"The stages have {sum(strategy.counts)} layers, the model has {len(model.table)}."
        )
    if max(strategy.ranks) >= model.cluster.size:
        raise PlanError(
            f"The placement has rank {max(strategy.ranks)}, but cluster {model.cluster.name!r} has "
            f"{model.cluster.size} devices."
        )
    return strategy.microbatches(model.batch)


def layer_seconds(model: Model, strategy: Strategy, stage: int) -> list[float]:
    """What each layer of the model takes of a microbatch, both passes, on the ranks of a stage."""
    cluster = one_ring(model.cluster)
    known: dict[str, float] = {}
    for layer, name in enumerate(model.table.layers):
        if name not in known:
            run = range(layer, layer + 1)
            known[name] = max(map(sum, _passes(model, cluster, strategy, stage, run)))
    return [known[name] for name in model.table.layers]


def transfer_rates(model: Model, strategy: Strategy) -> list[float]:
    """Bytes/s from each rank of a stage to the next stage, when all of them send; infinite without
    links between them."""
    found = []
    for s in range(strategy.stages - 1):
        pairs = tuple(zip(strategy.stage(s), strategy.stage(s + 1), strict=True))
        found.append(transfer_link(model.cluster, tuple(sorted(pairs))).bandwidth)
    return found


def _passes(
    model: Model, cluster: Cluster, strategy: Strategy, stage: int, layers: range
) -> list[Passes]:
    """Of each copy of a stage, what a microbatch takes in some layers: eq. 3, both passes apart."""
    kinds = collections.Counter(model.table.layers[layer] for layer in layers)
    ranks, devices = strategy.stage(stage), cluster.devices
    summing = sum(
        count * _all_reduce(cluster, strategy, stage, TENSOR, strategy.microbatch * num_bytes)
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
            known[names] = Passes(forward, backward)
        found.append(known[names])
    return found


def _sync_seconds(model: Model, cluster: Cluster, strategy: Strategy, stage: int) -> float:
    """T_dpsync of a stage: the copies sum its gradients."""
    num_bytes = sum(model.table.kind(layer).gradient_bytes for layer in strategy.runs[stage])
    return _all_reduce(cluster, strategy, stage, DATA, num_bytes / strategy.tensor)


def _sent_seconds(model: Model, strategy: Strategy) -> list[float]:
    """From each stage to the next, of a microbatch of all copies at once."""
    found = []
    for s in range(strategy.stages - 1):
        last = model.table.kind(strategy.runs[s][-1])
        pairs = zip(strategy.stage(s), strategy.stage(s + 1), strict=True)
        num_bytes = last.sent_bytes * strategy.microbatch
        found.append(transfer_seconds(pairs, num_bytes, model.cluster) if num_bytes else 0.0)
    return found


def _all_reduce(
    cluster: Cluster, strategy: Strategy, stage: int, axes: tuple[int, ...], num_bytes: float
) -> float:
    """Of all groups of the stage at once, beside those of stages on the same machines."""
    if not num_bytes or (strategy.tensor if axes == TENSOR else strategy.data) == 1:
        return 0.0
    ranks = _beside(cluster, strategy, stage)
    mesh = Mesh.of([len(ranks) // strategy.data // strategy.tensor, strategy.data, strategy.tensor])
    along = tuple(axis + 1 for axis in axes)
    return collective_seconds("all_reduce", along, num_bytes, mesh, _part(cluster, ranks))


@functools.lru_cache(maxsize=4096)
def _beside(cluster: Cluster, strategy: Strategy, stage: int) -> tuple[int, ...]:
    """The ranks of a stage, and of those that share a machine with it: their groups share links.

    A stage within one machine has the links to itself, as those of a switch are.
    """
    machines = [{cluster.machines[r] for r in strategy.stage(s)} for s in range(strategy.stages)]
    own = machines[stage]
    near = [s for s, others in enumerate(machines) if s == stage or len(own) > 1 and own & others]
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
