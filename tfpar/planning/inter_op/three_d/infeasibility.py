"""Error for a cluster on which no strategy fits: by how much the nearest one exceeds memory, and
what would help."""

from __future__ import annotations

import dataclasses

from tfpar.planning.inter_op.three_d.memory import stored_bytes
from tfpar.planning.inter_op.three_d.problem import StrategyProblem
from tfpar.planning.inter_op.three_d.space import StrategySpace, even
from tfpar.planning.inter_op.three_d.strategy import MemoryOptions, Strategy3D
from tfpar.spec import MemoryLimitError
from tfpar.spec.quantities import format_bytes


def infeasible_error(space: StrategySpace, tried: int) -> MemoryLimitError:
    """Return the error that none of the strategies that were tried fits.

    The nearest is the one of which a rank needs least, compared with what its device has: with all
    that stores less, and as many layers in each stage, on ranks in their order.
    """
    model = space.model
    memory = MemoryOptions(
        recompute=model.table.can_recompute,
        shard_slots=model.table.can_shard_slots,
    )
    nearest = min(
        (dataclasses.replace(even(model, d), memory=memory) for d in space.degrees),
        key=lambda strategy: max(
            needed / there for needed, there in _needed(model, strategy).values()
        ),
    )
    by_actor = _needed(model, nearest)
    actor = max(by_actor, key=lambda actor: by_actor[actor][0] / by_actor[actor][1])
    needed, there = by_actor[actor]
    device = min(
        (model.cluster.devices[rank] for rank in nearest.stage(actor)),
        key=lambda device: device.memory_bytes,
    )
    text = (
        f"None of {tried} strategies that were tried fits into the memory of "
        f"{model.cluster.name!r}. "
    )
    if needed <= there:
        return MemoryLimitError(f"{text}Another does ({nearest}): search for longer.", needed)
    return MemoryLimitError(
        f"{text}The nearest ({nearest}) needs {format_bytes(needed)} on a "
        f"{device.name or 'device'} with {format_bytes(there)}, {format_bytes(needed - there)} "
        f"more than there is. {_advice(model, nearest, actor, there)}",
        needed,
    )


def _needed(model: StrategyProblem, strategy: Strategy3D) -> dict[int, tuple[float, float]]:
    """Of each actor, what a rank stores, and what the smallest of its devices holds."""
    devices = model.cluster.devices
    return {
        actor: (stored, min(devices[rank].memory_bytes for rank in strategy.stage(actor)))
        for actor, stored in enumerate(stored_bytes(model, strategy))
    }


def _advice(model: StrategyProblem, strategy: Strategy3D, actor: int, there: float) -> str:
    table = model.table
    held = sum(
        table.cost_of(layer, strategy.layout).fixed_bytes
        for stage in strategy.stages_of(actor)
        for layer in strategy.runs[stage]
    )
    if held > there:
        advice = "Use more devices, or devices with more memory"
        if not strategy.memory.shard_slots:
            advice += "; give the layers' slot_bytes, so that copies can share slots out"
    else:
        advice = "Use smaller microbatches, or more devices"
        if not strategy.memory.recompute:
            advice += "; give all layers' input_bytes, so that they can be computed again"
    return f"Weights, gradients and slots alone are {format_bytes(held)}. {advice}."
