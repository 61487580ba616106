"""Cost of a strategy in three dimensions: formulas that rank, and the simulation that decides.

auto3d, §4.2-4.3, for K stages, M microbatches, and dp copies of the pipeline:

    eq. 1   all-reduce of a payload    2 payload / N * sum_i 1 / B_i   along a ring of N links
    eq. 3   t_i = seconds of the stage's layers + what its tensor ranks sum
    eq. 4   T_pipeline of t_i and c_i, and of v virtual stages (`cost.closed_form`)
    eq. 2   T = max over copies of T_pipeline + max over stages of T_dpsync

`c_i` is a transfer there and one back; of v virtual stages sum_i c_i (K / v - 1) / (K - 1) is sent
while the pipeline is filled and drained. An actor takes no less than what it sends of a microbatch:
that hides behind what it computes, and nothing hides behind nothing. Where transfers are not
overlapped, they are in t_i, and c_i is 0.

The simulation (`cost.simulator`) has the same durations, but lets a stage's gradients travel while
others still compute, gives transfers the links that they share, and takes the fastest of the
all-reduces that the cluster's library knows: in a ring whose parts all move at once, the slowest
link alone counts, and not their sum.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Sequence
from typing import NamedTuple

from tfpar.cluster.description import Cluster
from tfpar.cost.closed_form import pipeline_seconds
from tfpar.cost.critical_path import Shape, least_seconds
from tfpar.cost.pipeline_model import StageNetwork, StageProfile, merge_symmetric_routes
from tfpar.cost.simulator import simulate
from tfpar.cost.timeline import SimulatedTimeline
from tfpar.pipeline.generators import generate
from tfpar.pipeline.graph import task_graph
from tfpar.pipeline.stage_graph import StageGraph, StageLink
from tfpar.planning.inter_op.three_d.cost_table import Passes
from tfpar.planning.inter_op.three_d.memory import stage_costs
from tfpar.planning.inter_op.three_d.problem import StrategyProblem
from tfpar.planning.inter_op.three_d.strategy import Strategy3D
from tfpar.planning.inter_op.three_d.time_terms import (
    one_ring,
    passes_of_copies,
    sent_seconds,
    sync_seconds,
)


def analytic_seconds(model: StrategyProblem, strategy: Strategy3D) -> float:
    """Return the seconds of a step by equations 1 to 4.

    Raises:
        PlanError: the table has no times for it, or it does not fit the model.
    """
    cluster = one_ring(model.cluster)
    microbatches = model.microbatches(strategy)
    stages = _passes(model, cluster, strategy)
    sent = [0.0] * (strategy.stages - 1)
    if strategy.overlap.transfers:
        sent = [2 * seconds for seconds in sent_seconds(model, strategy)]
    copies = zip(*([sum(passes) for passes in stage] for stage in stages), strict=True)
    pipeline = max(
        _copy_seconds(own, sent, count, strategy.virtual)
        for own, count in zip(copies, microbatches, strict=True)
    )
    syncs = [sync_seconds(model, cluster, strategy, s) for s in range(strategy.stages)]
    return pipeline + max(
        sum(syncs[s] for s in strategy.stages_of(actor)) for actor in range(strategy.actors)
    )


def _passes(model: StrategyProblem, cluster: Cluster, strategy: Strategy3D) -> list[list[Passes]]:
    """Of each copy of each stage, with what it sends if it computes nothing then."""
    stages = [
        passes_of_copies(model, cluster, strategy, s, run) for s, run in enumerate(strategy.runs)
    ]
    if strategy.overlap.transfers:
        return stages
    sent = [0.0, *sent_seconds(model, strategy), 0.0]
    return [
        [Passes(forward + sent[s + 1], backward + sent[s]) for forward, backward in copies]
        for s, copies in enumerate(stages)
    ]


def _copy_seconds(
    stage_seconds: Sequence[float], sent_seconds: Sequence[float], microbatches: int, virtual: int
) -> float:
    """Seconds of a copy of the pipeline by equation 4.

    Args:
        stage_seconds: of a microbatch in each stage.
        sent_seconds: of a microbatch from each stage to the next, and back.
    """
    actors = len(stage_seconds) // virtual
    ends = [0.0, *sent_seconds, 0.0]
    sending = [(before + after) / 2 for before, after in itertools.pairwise(ends)]
    slowest = max(
        max(sum(stage_seconds[actor::actors]), sum(sending[actor::actors]))
        for actor in range(actors)
    )
    exposed = sum(sent_seconds)
    if virtual > 1:
        exposed *= (actors - 1) / len(sent_seconds)
    return pipeline_seconds(microbatches, slowest, sum(stage_seconds), exposed, virtual)


def simulate_strategy(
    model: StrategyProblem, strategy: Strategy3D, schedule: str | None = None
) -> SimulatedTimeline:
    """Simulate a step as the events of its tasks, each stage as slow as the slowest of its copies.

    Copies whose shares of the batch differ are simulated one by one; the slowest counts.

    Args:
        schedule: one of `pipeline.generators.FAMILIES`; by default 1F1B, interleaved where actors
            have several stages.

    Raises:
        PlanError: the table has no times for it, or it does not fit the model.
    """
    timelines = [
        simulate(
            task_graph(
                generate(
                    schedule or copy.shape.schedule,
                    strategy.actors,
                    copy.shape.microbatches,
                    strategy.virtual,
                ),
                StageGraph(strategy.stages, copy.links),
            ),
            copy.costs,
            copy.network,
        )
        for copy in _copies(model, strategy)
    ]
    return max(timelines, key=lambda timeline: timeline.seconds)


def lower_bound_seconds(model: StrategyProblem, strategy: Strategy3D) -> float:
    """Return the seconds that `simulate_strategy` is not below, found ten times as quickly
    (`cost.critical_path`).

    Raises:
        PlanError: the table has no times for it, or it does not fit the model.
    """
    return max(least_seconds(*copy) for copy in _copies(model, strategy))


class _Copy(NamedTuple):
    """A copy of the pipeline, beside others that send at the same time."""

    shape: Shape
    costs: tuple[StageProfile, ...]
    links: tuple[StageLink, ...]
    network: StageNetwork | None


def _copies(model: StrategyProblem, strategy: Strategy3D) -> list[_Copy]:
    """Those that may be the slowest: with equal shares one whose stages are the slowest of all."""
    microbatches = model.microbatches(strategy)
    stages = _passes(model, model.cluster, strategy)
    if strategy.shares:
        each = dict.fromkeys(zip(zip(*stages, strict=True), microbatches, strict=True))
    else:
        slowest = tuple(
            Passes(max(p.forward for p in copies), max(p.backward for p in copies))
            for copies in stages
        )
        each = {(slowest, microbatches[0]): None}
    links, network = _sent(model, strategy)
    unpriced = [_cost(model, strategy, s) for s in range(strategy.stages)]
    return [
        _Copy(
            Shape(strategy.actors, count, strategy.virtual),
            tuple(
                dataclasses.replace(cost, seconds={"F": passes.forward, "B": passes.backward})
                for cost, passes in zip(unpriced, own, strict=True)
            ),
            links,
            network,
        )
        for own, count in each
    ]


def _cost(model: StrategyProblem, strategy: Strategy3D, stage: int) -> StageProfile:
    """Return the memory of a stage and the seconds of the sum of its gradients, without its
    passes."""
    costs = stage_costs(model, strategy, stage)
    return StageProfile(
        {},
        fixed_bytes=sum(cost.fixed_bytes for cost in costs),
        kept_bytes=sum(cost.kept_bytes for cost in costs),
        working_bytes={"B": max(cost.working_bytes for cost in costs)},
        reduction_s=sync_seconds(model, model.cluster, strategy, stage),
    )


def _sent(
    model: StrategyProblem, strategy: Strategy3D
) -> tuple[tuple[StageLink, ...], StageNetwork | None]:
    """Return the bytes sent from each stage to the next and back, and the network that they
    pass."""
    size = strategy.data * strategy.tensor
    links = []
    for s, run in enumerate(strategy.runs[:-1]):
        last = model.table.cost_of(run[-1], strategy.layout(s))
        sent, returned = size * last.sent_bytes, size * last.returned_bytes
        links.append(StageLink(s, s + 1, sent, returned))
    # What is not overlapped is in the seconds of tasks.
    if not links or not strategy.overlap.transfers:
        return tuple(links), None
    return tuple(links), _network(model.cluster, strategy.ranks, strategy.actors, strategy.virtual)


@functools.lru_cache(maxsize=256)
def _network(cluster: Cluster, ranks: tuple[int, ...], actors: int, virtual: int) -> StageNetwork:
    """From each rank of an actor to the same one of the next, and back."""
    size = len(ranks) // actors
    stages = [ranks[s % actors * size :][:size] for s in range(actors * virtual)]
    pairs = {}
    for s, (senders, readers) in enumerate(itertools.pairwise(stages)):
        there = [(a, b, 1 / size) for a, b in zip(senders, readers, strict=True)]
        pairs[s, s + 1] = there
        pairs[s + 1, s] = [(b, a, part) for a, b, part in there]
    return merge_symmetric_routes(StageNetwork.of(cluster, pairs))
