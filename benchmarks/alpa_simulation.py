"""Simulation of Alpa's plans on the cluster as it is, with machines that may differ."""

from __future__ import annotations

import itertools

from tfpar.cost.pipeline_model import StageNetwork, StageProfile
from tfpar.cost.simulator import simulate
from tfpar.cost.timeline import SimulatedTimeline
from tfpar.pipeline.generators import generate
from tfpar.pipeline.graph import task_graph
from tfpar.pipeline.stage_graph import StageGraph, StageLink
from tfpar.planning.inter_op.three_d.alpa import AlpaPlan, AlpaStage
from tfpar.planning.inter_op.three_d.cost_table import LayerLayout
from tfpar.planning.inter_op.three_d.problem import StrategyProblem
from tfpar.planning.inter_op.three_d.time_terms import exchange_seconds, packed


def simulate_alpa(model: StrategyProblem, plan: AlpaPlan) -> SimulatedTimeline:
    """Simulate a step as the events of its tasks (1F1B), each stage as slow as the slowest of its
    ranks.

    Each rank gets the samples of its copy from one rank of the stage before.
    """
    ends = [0, *itertools.accumulate(stage.size for stage in plan.stages)]
    ranks = [range(start, end) for start, end in itertools.pairwise(ends)]
    costs = [_cost(model, plan, stage, own) for stage, own in zip(plan.stages, ranks, strict=True)]
    links, pairs = [], {}
    for s, (one, other) in enumerate(itertools.pairwise(ranks)):
        reader = plan.stages[s + 1]
        sender = plan.stages[s]
        last = model.table.cost_of(sender.layers[-1], _layout(plan, sender))
        ways = sender.data * reader.tensor
        sent, returned = ways * last.sent_bytes, ways * last.returned_bytes
        links.append(StageLink(s, s + 1, sent, returned))
        part = 1 / len(other)
        there = [(one[i * len(one) // len(other)], rank, part) for i, rank in enumerate(other)]
        pairs[s, s + 1] = there
        pairs[s + 1, s] = [(b, a, part) for a, b, _ in there]
    graph = task_graph(
        generate("1f1b", len(plan.stages), model.batch // plan.microbatch),
        StageGraph(len(plan.stages), tuple(links)),
    )
    return simulate(graph, costs, StageNetwork.of(model.cluster, pairs) if pairs else None)


def _cost(model: StrategyProblem, plan: AlpaPlan, stage: AlpaStage, ranks: range) -> StageProfile:
    table, layout = model.table, _layout(plan, stage)
    costs = [table.cost_of(layer, layout) for layer in stage.layers]
    names = {model.cluster.devices[rank].name for rank in ranks}
    each = [
        [table.passes(table.layers[layer], name, layout) for name in names]
        for layer in stage.layers
    ]
    sizes, part = costs[0].sizes, model.cluster.part(ranks)
    forward, backward = (
        sum(exchange_seconds(found, sizes, part) for found in exchanged)
        for exchanged in ([c.forward for c in costs], [c.backward for c in costs])
    )
    once = packed(e for cost in costs for e in (*cost.sums, *cost.gathers))
    update = sum(max(c.update_s.get(name, 0.0) for name in names) for c in costs if c.update_s)
    return StageProfile(
        {
            "F": forward + sum(max(passes.forward for passes in layer) for layer in each),
            "B": backward + sum(max(passes.backward for passes in layer) for layer in each),
        },
        fixed_bytes=sum(cost.fixed_bytes for cost in costs),
        kept_bytes=sum(cost.kept_bytes for cost in costs),
        reduction_s=exchange_seconds(once, sizes, part) + update,
    )


def _layout(plan: AlpaPlan, stage: AlpaStage) -> LayerLayout:
    microbatch = plan.microbatch // stage.data
    return LayerLayout(stage.data, stage.tensor, microbatch, stage.experts)
