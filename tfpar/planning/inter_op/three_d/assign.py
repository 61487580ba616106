"""Assignment of layers to the stages of a strategy whose degrees and placement are given, and of
the batch to copies."""

from __future__ import annotations

import dataclasses
import heapq
import math
import operator
from collections.abc import Sequence

from tfpar.planning.inter_op.stages.pipe_dp import (
    ChainLayer,
    ChainOption,
    StageDevice,
    try_pipe_dp,
)
from tfpar.planning.inter_op.three_d.cost_model import lower_bound_seconds
from tfpar.planning.inter_op.three_d.memory import fits, in_flight
from tfpar.planning.inter_op.three_d.problem import StrategyProblem
from tfpar.planning.inter_op.three_d.strategy import MemoryOptions, Strategy3D
from tfpar.planning.inter_op.three_d.time_terms import (
    layer_seconds,
    layer_sync_seconds,
    one_ring,
    passes_of_copies,
    sync_seconds,
    transfer_rates,
)


def even_counts(layers: int, stages: int) -> tuple[int, ...]:
    """Divide the layers evenly among the stages, the first of which get one more where it does not
    come out even."""
    each, more = divmod(layers, stages)
    return tuple(each + (stage < more) for stage in range(stages))


def assign_layers(
    model: StrategyProblem, strategy: Strategy3D, memories: Sequence[MemoryOptions] = ()
) -> Strategy3D | None:
    """Assign to each stage of the strategy the layers, and what it does to store less, that take
    least by equation 4. What that takes once a step counts as if each microbatch took a part.

    A stage has one speed: that of its ranks with all layers of the model. Each of an actor's
    stages may store as many bytes.

    Args:
        memories: that each stage chooses from; by default all stages have those of the strategy.

    Returns:
        None if the memory of its ranks is too small for any assignment.
    """
    memories = memories or [strategy.options(0)]
    each_way = [dataclasses.replace(strategy, memory=memory) for memory in memories]
    if strategy.stages == 1:
        fitting = [one for one in each_way if fits(model, one)]
        if len(fitting) < 2:
            return fitting[0] if fitting else None
        return min(fitting, key=lambda one: lower_bound_seconds(model, one))
    microbatches = max(strategy.microbatches(model.batch))
    each = [layer_seconds(model, each_way[0], actor) for actor in range(strategy.actors)]
    options = _options(model, each_way, microbatches, each[0])
    devices = model.cluster.devices
    memory = [
        min(devices[rank].memory_bytes for rank in strategy.stage(actor)) / strategy.virtual
        for actor in range(strategy.actors)
    ]
    least = min(option.reserved_bytes for _, option in options)
    if min(memory) <= least:
        return None
    places = [
        StageDevice(
            _speed(each[0], each[stage % strategy.actors]), rate, memory[stage % strategy.actors]
        )
        for stage, rate in enumerate([*transfer_rates(model, strategy), math.inf])
    ]
    alive = [
        math.ceil(in_flight(strategy, stage % strategy.actors, microbatches) / strategy.virtual)
        for stage in range(strategy.stages)
    ]
    found = try_pipe_dp([option for _, option in options], places, microbatches, in_flight=alive)
    if found is None:
        return None
    chosen = dataclasses.replace(
        strategy,
        counts=found.counts,
        memory=tuple(options[number][0] for number in found.options),
    )
    if fits(model, chosen):
        return chosen
    on_device = [memory for memory in memories if not memory.offload_slots]
    if not 0 < len(on_device) < len(memories):
        return None
    return assign_layers(model, strategy, on_device)  # hosts may have no room


def _options(
    model: StrategyProblem, ways: Sequence[Strategy3D], microbatches: int, seconds: list[float]
) -> list[tuple[MemoryOptions, ChainOption]]:
    """The layers as the first actor runs them in each way; ways are left out that neither take nor
    store less than another.

    Args:
        seconds: of each layer in the first way.
    """
    table, number = model.table, {name: i for i, name in enumerate(model.table.layers)}
    passes = {ways[0].options(0).recompute: seconds}
    once: dict[MemoryOptions, list[float]] = {}
    for way in ways:
        memory = way.options(0)
        if memory.recompute not in passes:
            passes[memory.recompute] = layer_seconds(model, way, 0)
        once[memory] = [
            layer_sync_seconds(model, way, name) if len(ways) > 1 else 0.0 for name in number
        ]
    least = [*map(min, zip(*once.values(), strict=True))]
    found: list[tuple[MemoryOptions, ChainOption]] = []
    known: list[list[float]] = []
    for way in ways:
        memory, layout = way.options(0), way.layout(0)
        layers: dict[str, ChainLayer] = {}
        for (name, i), own, fewest in zip(number.items(), once[memory], least, strict=True):
            cost = table.cost(name, layout)
            taken = passes[memory.recompute][i] + (own - fewest) / microbatches
            sent = cost.sent_bytes + cost.returned_bytes
            layers[name] = ChainLayer(taken, sent, cost.fixed_bytes, cost.kept_bytes)
        working = max(table.cost(name, layout).working_bytes for name in number)
        each = [x for o in layers.values() for x in (o.seconds, o.fixed_bytes, o.kept_bytes)]
        known.append([*each, working])
        chain = [layers[name] for name in table.layers]
        found.append((memory, ChainOption(chain, working / way.virtual)))
    return [
        one
        for i, (one, own) in enumerate(zip(found, known, strict=True))
        if not any(
            j != i and (j < i or other != own) and all(map(operator.le, other, own))
            for j, other in enumerate(known)
        )
    ]


def shards_slots_for_free(model: StrategyProblem, strategy: Strategy3D) -> bool:
    """Whether a step takes no longer where copies share slots out, in each layer on its own."""
    plain, sharded = (
        dataclasses.replace(strategy, memory=MemoryOptions(shard_slots=shard))
        for shard in (False, True)
    )
    return all(
        layer_sync_seconds(model, sharded, name) <= layer_sync_seconds(model, plain, name)
        for name in dict.fromkeys(model.table.layers)
    )


def balance_microbatches(model: StrategyProblem, strategy: Strategy3D) -> Strategy3D:
    """Give each copy of the strategy so many microbatches that the copy that takes longest takes
    least.

    A copy takes as long for each microbatch as its slowest actor does. Each has one microbatch at
    least; the next one always goes to the copy that would be through with it first, which is best
    for whole numbers. Copies that share experts run as many each.
    """
    groups = strategy.data // strategy.experts
    if groups == 1:
        return strategy
    cluster = one_ring(model.cluster)
    stages = [
        [sum(passes) for passes in passes_of_copies(model, cluster, strategy, s, run)]
        for s, run in enumerate(strategy.runs)
    ]
    seconds = [
        max(
            sum(stages[s][copy] for s in strategy.stages_of(actor))
            for actor in range(strategy.actors)
            for copy in range(group * strategy.experts, (group + 1) * strategy.experts)
        )
        for group in range(groups)
    ]
    if max(seconds) == min(seconds):
        return strategy
    shares = [1] * groups
    ends = [(2 * own, group) for group, own in enumerate(seconds)]
    heapq.heapify(ends)
    for _ in range(sum(strategy.microbatches(model.batch)) // strategy.experts - groups):
        end, group = ends[0]
        shares[group] += 1
        heapq.heapreplace(ends, (end + seconds[group], group))
    of_copies = tuple(share for share in shares for _ in range(strategy.experts))
    return dataclasses.replace(strategy, shares=of_copies)


def overlap_gradient_sums(model: StrategyProblem, strategy: Strategy3D) -> Strategy3D:
    """Have the strategy sum gradients layer by layer during the backward pass, if less of that is
    waited for: each layer's sum starts anew."""
    if strategy.data == 1 or not model.table.sums_overlap:
        return strategy
    other = dataclasses.replace(strategy, overlap=strategy.overlap._replace(gradients=True))
    cluster = one_ring(model.cluster)
    before, after = (
        max(
            sum(sync_seconds(model, cluster, one, s) for s in one.stages_of(actor))
            for actor in range(one.actors)
        )
        for one in (strategy, other)
    )
    return other if after < before else strategy


def _speed(first: list[float], own: list[float]) -> float:
    """Of an actor, if the first one's is 1."""
    return sum(first) / sum(own) if sum(own) else 1.0
