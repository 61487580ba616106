"""Layers to the stages of a strategy whose degrees and placement are given."""

from __future__ import annotations

import dataclasses
import math

from tfpar.search.stages.layers import Layer, Place, pipe_dp
from tfpar.search.three_d.price import Model, fits, layer_seconds, transfer_rates
from tfpar.search.three_d.strategy import Strategy
from tfpar.spec import MemoryLimitError


def even_counts(layers: int, stages: int) -> tuple[int, ...]:
    """As many layers in each stage, or one more in the first."""
    each, more = divmod(layers, stages)
    return tuple(each + (stage < more) for stage in range(stages))


def assigned(model: Model, strategy: Strategy) -> Strategy | None:
    """The strategy with the layers in each stage that take least by equation 4.

    A stage has one speed: that of its ranks with all layers of the model.

    Returns:
        None if the memory of its ranks is too small for any assignment.
    """
    if strategy.stages == 1:
        return strategy if fits(model, strategy) else None
    table, tensor, microbatch = model.table, strategy.tensor, strategy.microbatch
    each = [layer_seconds(model, strategy, stage) for stage in range(strategy.stages)]
    layers = [
        Layer(
            seconds,
            2 * microbatch * table.kind(number).sent_bytes,
            table.kind(number).fixed_bytes / tensor,
            table.kind(number).kept_bytes * microbatch / tensor,
        )
        for number, seconds in enumerate(each[0])
    ]
    devices = model.cluster.devices
    places = [
        Place(
            (sum(each[0]) / sum(own)) if sum(own) else 1.0,
            rate,
            min(devices[rank].memory_bytes for rank in strategy.stage(stage)),
        )
        for stage, (own, rate) in enumerate(
            zip(each, [*transfer_rates(model, strategy), math.inf], strict=True)
        )
    ]
    try:
        found = pipe_dp(layers, places, strategy.microbatches(model.batch))
    except MemoryLimitError:
        return None
    return dataclasses.replace(strategy, counts=found.counts)
