"""Baselines: choices of other systems in the same space, priced the same way."""

from __future__ import annotations

import dataclasses
import math
import random
import time
from collections import Counter

from tfpar.cluster.description import Cluster
from tfpar.planning.inter_op.three_d.alpa import AlpaPlan
from tfpar.planning.inter_op.three_d.alpa import alpa as best_alpa
from tfpar.planning.inter_op.three_d.cost_table import LayerLayout
from tfpar.planning.inter_op.three_d.evaluation import Evaluation, StrategySearchResult
from tfpar.planning.inter_op.three_d.memory import fits
from tfpar.planning.inter_op.three_d.problem import StrategyProblem
from tfpar.planning.inter_op.three_d.space import StrategySpace, even
from tfpar.planning.inter_op.three_d.strategy import Strategy3D
from tfpar.planning.problem import Progress


def megatron(model: StrategyProblem) -> list[Strategy3D]:
    """Megatron-LM's heuristic (auto3d, §5): a strategy for each microbatch size that it tries.

    Layers are split over no more devices than the smallest machine has; tensor x stages is the
    least that holds the model, tensor before stages, experts over as many copies as can be. Stages
    have equally many layers, and take the ranks in their order.
    """
    smallest = min(Counter(model.cluster.machines).values())
    space = StrategySpace(model)
    found = []
    for microbatch in sorted({degrees.microbatch for degrees in space.degrees}):
        tried = [
            d
            for d in space.degrees
            if d.microbatch == microbatch and d.tensor <= smallest and d.virtual == 1
        ]
        for degrees in sorted(tried, key=lambda d: (-d.data, -d.tensor, -d.experts)):
            strategy = even(model, degrees)
            if fits(model, strategy):
                found.append(strategy)
                break
    return found


def random_search(
    model: StrategyProblem,
    *,
    seed: int = 0,
    trials: int = 50,
    seconds: float = math.inf,
    progress: Progress | None = None,
) -> StrategySearchResult:
    """Find the best of strategies that are drawn from the whole space (auto3d, §5).

    Args:
        seconds: after which the search ends with what it has, one strategy at least.
        progress: is called with each point that is priced.

    Raises:
        PlanError: there is no strategy; a MemoryLimitError if none that was drawn fits.
    """
    rng = random.Random(seed)
    space = StrategySpace(model)
    evaluation = Evaluation(space, progress)
    deadline = time.monotonic() + seconds

    def over() -> bool:
        return time.monotonic() > deadline

    for trial in range(trials):
        if trial and over():
            break
        evaluation.price(space.sample(rng, rng.choice(space.degrees)))
    return evaluation.chosen(over=over)


def alpa(model: StrategyProblem, equal: bool = False) -> AlpaPlan:
    """Plan by Alpa's two levels, as if every device and link were the slowest one of the cluster.

    Args:
        equal: all stages have submeshes of one shape.

    Raises:
        PlanError: nothing fits.
    """
    return best_alpa(dataclasses.replace(model, cluster=_all_as_the_slowest(model)), equal)


def _all_as_the_slowest(model: StrategyProblem) -> Cluster:
    cluster = model.cluster
    table = model.table

    def seconds(name: str) -> float:
        layouts = [
            LayerLayout(d.data, d.tensor, d.microbatch, d.experts)
            for d in StrategySpace(model).degrees
        ]
        layouts = [one for one in layouts if table.has([name], one)]
        return sum(sum(table.passes(kind, name, one)) for kind in table.layers for one in layouts)

    slowest = max(cluster.devices, key=lambda device: seconds(device.name))
    slowest = dataclasses.replace(
        slowest, memory_bytes=min(device.memory_bytes for device in cluster.devices)
    )
    uplinks = [node.uplink for node in cluster.nodes if node.uplink is not None]
    uplink = min(uplinks, default=None)
    nodes = tuple(
        dataclasses.replace(node, device=slowest, uplink=uplink) for node in cluster.nodes
    )
    return dataclasses.replace(cluster, nodes=nodes)
