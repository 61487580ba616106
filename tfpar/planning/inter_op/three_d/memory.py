"""Memory of each rank of a strategy, and whether it fits."""

from __future__ import annotations

import math

from tfpar.planning.inter_op.three_d.cost_table import LayerCost
from tfpar.planning.inter_op.three_d.problem import StrategyProblem
from tfpar.planning.inter_op.three_d.strategy import Strategy3D


def stored_bytes(model: StrategyProblem, strategy: Strategy3D) -> tuple[float, ...]:
    """Return the most that a rank of each actor stores, with the microbatches in flight of its
    schedule.

    With virtual stages it is a bound: each microbatch in flight counts as that of the actor's
    largest stage.
    """
    most = max(model.microbatches(strategy))
    runs = [stage_costs(model, strategy, stage) for stage in range(strategy.stages)]
    found = []
    for actor in range(strategy.actors):
        own = [runs[stage] for stage in strategy.stages_of(actor)]
        fixed = sum(cost.fixed_bytes for costs in own for cost in costs)
        kept = max(sum(cost.kept_bytes for cost in costs) for costs in own)
        working = max(cost.working_bytes for costs in own for cost in costs)
        found.append(fixed + in_flight(strategy, actor, most) * kept + working)
    return tuple(found)


def stage_costs(model: StrategyProblem, strategy: Strategy3D, stage: int) -> list[LayerCost]:
    """Return the costs of the layers of a stage."""
    layout = strategy.layout(stage)
    return [model.table.cost_of(layer, layout) for layer in strategy.runs[stage]]


def fixed_bytes(model: StrategyProblem, strategy: Strategy3D, actor: int) -> float:
    """Return what a rank of an actor stores all the time."""
    stages = strategy.stages_of(actor)
    return sum(cost.fixed_bytes for s in stages for cost in stage_costs(model, strategy, s))


def fits(model: StrategyProblem, strategy: Strategy3D) -> bool:
    """Whether every rank has the memory that its stages need, and its host that of their slots."""
    devices, room = model.cluster.devices, model.cluster.host_share_bytes
    return all(
        stored <= min(devices[rank].memory_bytes for rank in strategy.stage(actor))
        for actor, stored in enumerate(stored_bytes(model, strategy))
    ) and (math.isinf(room) or max(_host_bytes(model, strategy)) <= room)


def _host_bytes(model: StrategyProblem, strategy: Strategy3D) -> list[float]:
    """Of each actor, what a rank has in host memory."""
    of_stages = [
        sum(cost.host_bytes for cost in stage_costs(model, strategy, stage))
        for stage in range(strategy.stages)
    ]
    return [sum(of_stages[s] for s in strategy.stages_of(a)) for a in range(strategy.actors)]


def in_flight(strategy: Strategy3D, actor: int, microbatches: int) -> int:
    """Count the microbatches in flight in the actor's stages, under 1F1B or its interleaved
    form."""
    left = strategy.actors - actor - 1
    if strategy.virtual == 1:
        return min(microbatches, left + 1)
    group = math.ceil(microbatches / max(1, microbatches // strategy.actors))
    return min(microbatches * strategy.virtual, (strategy.virtual - 1) * group + 2 * left + 1)
