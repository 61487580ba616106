"""What a strategy takes: by the formulas that rank, and by the simulation that decides.

auto3d, §4.2-4.3, for K stages, M microbatches, and dp copies of the pipeline:

    eq. 1   all-reduce of a payload    2 payload / N * sum_i 1 / B_i   along a ring of N links
    eq. 3   t_i = seconds of the stage's layers + what its tensor ranks sum
    eq. 4   T_pipeline = (M - 1) max_i t_i + sum_i c_i + sum_i t_i
    eq. 2   T = max over copies of T_pipeline + max over stages of T_dpsync

`c_i` is a transfer there and one back. With v virtual stages an actor takes T_a = the sum of those
of its t_i, and fills and drains the pipeline with one of them:

    eq. 4'  T_pipeline = (M - 1 / v) max_a T_a + sum_i c_i (K / v - 1) / (K - 1) + sum_i t_i / v

which is eq. 4 for v = 1, and (M v + K / v - 1) t for equal stages (Narayanan et al. 2021, §2.2).

The simulation (`cost.pipeline`) has the same durations, but lets a stage's gradients travel while
others still compute, gives transfers the links that they share, and takes the fastest of the
all-reduces that the cluster's library knows: in a ring whose parts all move at once, the slowest
link alone counts, and not their sum.
"""

from __future__ import annotations

from collections.abc import Sequence

from tfpar.cost.pipeline import simulate
from tfpar.cost.stages import Network, StageCost
from tfpar.cost.timeline import Timeline
from tfpar.pipeline.generators import generate
from tfpar.pipeline.graph import task_graph
from tfpar.pipeline.stage_graph import StageGraph, StageLink
from tfpar.search.three_d.durations import one_ring, passes_of_copies, sent_seconds, sync_seconds
from tfpar.search.three_d.model import Model
from tfpar.search.three_d.stored import again_bytes, held_bytes, kept_bytes
from tfpar.search.three_d.strategy import Strategy
from tfpar.search.three_d.table import Passes


def quick_seconds(model: Model, strategy: Strategy) -> float:
    """Seconds of a step by equations 1 to 4.

    Raises:
        PlanError: the table has no times for it, or it does not fit the model.
    """
    cluster = one_ring(model.cluster)
    microbatches = model.microbatches(strategy)
    sent = [2 * seconds for seconds in sent_seconds(model, strategy)]
    stages = [
        passes_of_copies(model, cluster, strategy, s, run) for s, run in enumerate(strategy.runs)
    ]
    copies = zip(*([sum(passes) for passes in stage] for stage in stages), strict=True)
    pipeline = max(
        pipeline_seconds(own, sent, count, strategy.virtual)
        for own, count in zip(copies, microbatches, strict=True)
    )
    syncs = [sync_seconds(model, cluster, strategy, s) for s in range(strategy.stages)]
    return pipeline + max(
        sum(syncs[s] for s in strategy.stages_of(actor)) for actor in range(strategy.actors)
    )


def pipeline_seconds(
    stage_seconds: Sequence[float], sent_seconds: Sequence[float], microbatches: int, virtual: int
) -> float:
    """Equation 4, of any number of virtual stages.

    Args:
        stage_seconds: of a microbatch in each stage.
        sent_seconds: of a microbatch from each stage to the next, and back.
    """
    actors = len(stage_seconds) // virtual
    slowest = max(sum(stage_seconds[actor::actors]) for actor in range(actors))
    exposed = sum(sent_seconds)
    if virtual > 1:
        exposed *= (actors - 1) / len(sent_seconds)
    return (microbatches - 1 / virtual) * slowest + exposed + sum(stage_seconds) / virtual


def simulated(model: Model, strategy: Strategy, schedule: str | None = None) -> Timeline:
    """A step as the events of its tasks, each stage as slow as the slowest of its copies.

    Copies whose shares of the batch differ are simulated one by one; the slowest counts.

    Args:
        schedule: one of `pipeline.generators.FAMILIES`; by default 1F1B, interleaved where actors
            have several stages.

    Raises:
        PlanError: the table has no times for it, or it does not fit the model.
    """
    microbatches = model.microbatches(strategy)
    stages = [
        passes_of_copies(model, model.cluster, strategy, s, run)
        for s, run in enumerate(strategy.runs)
    ]
    if schedule is None:
        schedule = "1f1b" if strategy.virtual == 1 else "interleaved"
    if not strategy.shares:
        slowest = [
            Passes(max(p.forward for p in copies), max(p.backward for p in copies))
            for copies in stages
        ]
        return _simulated(model, strategy, slowest, microbatches[0], schedule)
    copies = dict.fromkeys(zip(zip(*stages, strict=True), microbatches, strict=True))
    timelines = [_simulated(model, strategy, own, count, schedule) for own, count in copies]
    return max(timelines, key=lambda timeline: timeline.seconds)


def _simulated(
    model: Model, strategy: Strategy, stages: Sequence[Passes], microbatches: int, schedule: str
) -> Timeline:
    """One copy, beside others that send at the same time.

    Args:
        stages: of a microbatch in each.
    """
    costs, links, pairs = [], [], {}
    for s, run in enumerate(strategy.runs):
        kinds = [model.table.kind(layer) for layer in run]
        costs.append(
            StageCost(
                {"F": stages[s].forward, "B": stages[s].backward},
                fixed_bytes=sum(held_bytes(kind, strategy) for kind in kinds),
                kept_bytes=sum(kept_bytes(kind, strategy) for kind in kinds),
                working_bytes={"B": max(again_bytes(kind, strategy) for kind in kinds)},
                reduction_s=sync_seconds(model, model.cluster, strategy, s),
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
        generate(schedule, strategy.actors, microbatches, strategy.virtual),
        StageGraph(strategy.stages, tuple(links)),
    )
    return simulate(graph, costs, network)
