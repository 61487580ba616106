"""What a plan of Alpa's takes on the machines that there are, which need not be alike."""

from __future__ import annotations

import itertools

from tfpar.cost.collectives import collective_seconds
from tfpar.cost.pipeline import simulate
from tfpar.cost.stages import Network, StageCost
from tfpar.cost.timeline import Timeline
from tfpar.pipeline.generators import generate
from tfpar.pipeline.graph import task_graph
from tfpar.pipeline.stage_graph import StageGraph, StageLink
from tfpar.search.three_d.alpa import AlpaPlan, AlpaStage
from tfpar.search.three_d.model import Model
from tfpar.search.three_d.table import Case
from tfpar.spec import Mesh


def simulated_alpa(model: Model, plan: AlpaPlan) -> Timeline:
    """A step as the events of its tasks (1F1B), each stage as slow as the slowest of its ranks.

    Each rank gets the samples of its copy from one rank of the stage before.
    """
    ends = [0, *itertools.accumulate(stage.size for stage in plan.stages)]
    ranks = [range(start, end) for start, end in itertools.pairwise(ends)]
    costs = [_cost(model, plan, stage, own) for stage, own in zip(plan.stages, ranks, strict=True)]
    links, pairs = [], {}
    for s, (one, other) in enumerate(itertools.pairwise(ranks)):
        reader = plan.stages[s + 1]
        last = model.table.kind(plan.stages[s].layers[-1])
        num_bytes = last.sent_bytes * plan.microbatch * reader.tensor
        links.append(StageLink(s, s + 1, num_bytes, num_bytes))
        part = 1 / len(other)
        there = [(one[i * len(one) // len(other)], rank, part) for i, rank in enumerate(other)]
        pairs[s, s + 1] = there
        pairs[s + 1, s] = [(b, a, part) for a, b, _ in there]
    graph = task_graph(
        generate("1f1b", len(plan.stages), model.batch // plan.microbatch),
        StageGraph(len(plan.stages), tuple(links)),
    )
    return simulate(graph, costs, Network.of(model.cluster, pairs) if pairs else None)


def _cost(model: Model, plan: AlpaPlan, stage: AlpaStage, ranks: range) -> StageCost:
    table, share = model.table, plan.microbatch // stage.data
    kinds = [table.kind(layer) for layer in stage.layers]
    names = {model.cluster.devices[rank].name for rank in ranks}
    cases = [Case(name, stage.tensor, share) for name in names]
    each = [[table.passes(table.layers[layer], case) for case in cases] for layer in stage.layers]
    mesh, part = Mesh.of([stage.data, stage.tensor]), model.cluster.part(ranks)

    def summed(axis: int, num_bytes: float) -> float:
        if not num_bytes:
            return 0.0
        return collective_seconds("all_reduce", (axis,), num_bytes, mesh, part)

    summing = sum(summed(1, share * kind.reduced_bytes) for kind in kinds)
    return StageCost(
        {
            "F": summing + sum(max(passes.forward for passes in layer) for layer in each),
            "B": summing + sum(max(passes.backward for passes in layer) for layer in each),
        },
        fixed_bytes=sum(kind.fixed_bytes for kind in kinds) / stage.tensor,
        kept_bytes=sum(kind.kept_bytes for kind in kinds) * share / stage.tensor,
        reduction_s=summed(0, sum(kind.gradient_bytes for kind in kinds) / stage.tensor),
    )
