"""What each rank of a strategy stores, and whether it fits."""

from __future__ import annotations

import math

from tfpar.search.three_d.model import Model
from tfpar.search.three_d.strategy import Strategy
from tfpar.search.three_d.table import LayerKind
from tfpar.spec import PlanError


def stored_bytes(model: Model, strategy: Strategy) -> tuple[float, ...]:
    """What each rank of each actor stores at most, with the microbatches in flight of its schedule.

    With virtual stages it is a bound: each microbatch in flight counts as that of the actor's
    largest stage.
    """
    most = max(model.microbatches(strategy))
    runs = [[model.table.kind(layer) for layer in run] for run in strategy.runs]
    found = []
    for actor in range(strategy.actors):
        own = [runs[stage] for stage in strategy.stages_of(actor)]
        fixed = sum(held_bytes(kind, strategy) for kinds in own for kind in kinds)
        kept = max(sum(kept_bytes(kind, strategy) for kind in kinds) for kinds in own)
        again = max(again_bytes(kind, strategy) for kinds in own for kind in kinds)
        found.append(fixed + in_flight(strategy, actor, most) * kept + again)
    return tuple(found)


def fits(model: Model, strategy: Strategy) -> bool:
    """Whether every rank has the memory that its stages need."""
    devices = model.cluster.devices
    return all(
        stored <= min(devices[rank].memory_bytes for rank in strategy.stage(actor))
        for actor, stored in enumerate(stored_bytes(model, strategy))
    )


def held_bytes(kind: LayerKind, strategy: Strategy) -> float:
    """That a rank stores of a layer all the time.

    Of experts it has its part alone, whose slots only the copies with the same part share.
    """
    shards, experts = strategy.memory.shard_slots, kind.experts
    if experts is None:
        held = _with_slots(kind.fixed_bytes, kind.slot_bytes if shards else 0.0, strategy.data)
        return held / strategy.tensor
    slots, own = (kind.slot_bytes, experts.slot_bytes) if shards else (0.0, 0.0)
    dense = _with_slots(kind.fixed_bytes - experts.fixed_bytes, slots - own, strategy.data)
    groups = strategy.data // strategy.experts
    part = _with_slots(experts.fixed_bytes, own, groups) / strategy.experts
    return (dense + part) / strategy.tensor


def _with_slots(fixed: float, slots: float, copies: int) -> float:
    """Bytes of a rank if copies share these slots out."""
    return fixed - slots + slots / copies


def kept_bytes(kind: LayerKind, strategy: Strategy) -> float:
    """That a rank keeps of a microbatch for the backward pass of a layer.

    Raises:
        PlanError: the layer is to be computed again, and cannot be.
    """
    if not strategy.memory.recompute:
        return kind.kept_bytes * strategy.microbatch / strategy.tensor
    if kind.input_bytes is None:
        raise PlanError("A layer is to be computed again, but has no input_bytes.")
    return kind.input_bytes * strategy.microbatch


def again_bytes(kind: LayerKind, strategy: Strategy) -> float:
    """That a rank needs beside, while it computes a layer again."""
    if not strategy.memory.recompute:
        return 0.0
    return kind.kept_bytes * strategy.microbatch / strategy.tensor


def in_flight(strategy: Strategy, actor: int, microbatches: int) -> int:
    """Of microbatches, in any of the actor's stages, of 1F1B or its interleaved form."""
    left = strategy.actors - actor - 1
    if strategy.virtual == 1:
        return min(microbatches, left + 1)
    group = math.ceil(microbatches / max(1, microbatches // strategy.actors))
    return min(microbatches * strategy.virtual, (strategy.virtual - 1) * group + 2 * left + 1)
