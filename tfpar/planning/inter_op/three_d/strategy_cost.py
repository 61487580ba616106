"""The cost of a strategy by part, as a table of layers says it: what is said of strategies that are
not planned."""

from __future__ import annotations

from typing import NamedTuple

from tfpar.cost.cost import Cost
from tfpar.planning.inter_op.three_d.cost_model import simulate_strategy
from tfpar.planning.inter_op.three_d.cost_table import Passes
from tfpar.planning.inter_op.three_d.memory import fixed_bytes, stored_bytes
from tfpar.planning.inter_op.three_d.problem import StrategyProblem
from tfpar.planning.inter_op.three_d.strategy import Strategy3D
from tfpar.planning.inter_op.three_d.time_terms import (
    computed_passes,
    sync_seconds,
    times_of_copies,
    update_seconds,
)


def strategy_cost(model: StrategyProblem, strategy: Strategy3D) -> Cost:
    """Return what a step costs on the ranks of the actor that works most, and what a rank stores
    on that which stores most.

    What it waits for other stages, and for what they send, is all in `bubble_s`.

    Raises:
        PlanError: the table has no times for the strategy, or it does not fit the model.
    """
    seconds = simulate_strategy(model, strategy).seconds
    found = max((_of_actor(model, strategy, a) for a in range(strategy.actors)), key=_busy)
    stored = stored_bytes(model, strategy)
    fullest = max(range(strategy.actors), key=stored.__getitem__)
    fixed = fixed_bytes(model, strategy, fullest)
    compute, exchanged, exposed, host_wait_s = found
    return Cost(
        seconds,
        compute,
        exchanged,
        gradients_s=exposed,
        exposed_s=exposed,
        bucket_bytes=1,
        state_bytes=fixed,
        live_bytes=stored[fullest] - fixed,
        bubble_s=max(0.0, seconds - _busy(found)),
        host_wait_s=host_wait_s,
    )


_Times = tuple[float, float, float]


class _ActorTimes(NamedTuple):
    """Seconds of an actor in a step: that it computes and exchanges, by phase, that it waits for
    sums of gradients, and for its host."""

    compute: _Times
    exchanged: _Times
    exposed: float
    host_wait_s: float


def _of_actor(model: StrategyProblem, strategy: Strategy3D, actor: int) -> _ActorTimes:
    count = max(model.microbatches(strategy))
    forward = backward = update = sent_forward = sent_backward = exposed = host_wait_s = 0.0
    for stage in strategy.stages_of(actor):
        run = strategy.runs[stage]
        own = computed_passes(model, strategy, stage)
        copies = times_of_copies(model, model.cluster, strategy, stage, run)
        running = Passes(*map(max, zip(*(copy.running for copy in copies), strict=True)))
        taken = Passes(*map(max, zip(*(copy.taken for copy in copies), strict=True)))
        forward += count * own.forward
        backward += count * own.backward
        sent_forward += count * max(0.0, running.forward - own.forward)
        sent_backward += count * max(0.0, running.backward - own.backward)
        host_wait_s += count * (sum(taken) - sum(running))
        updating = update_seconds(model, strategy, stage)
        update += updating
        exposed += sync_seconds(model, model.cluster, strategy, stage) - updating
    compute, exchanged = (forward, backward, update), (sent_forward, sent_backward, 0.0)
    return _ActorTimes(compute, exchanged, exposed, host_wait_s)


def _busy(found: _ActorTimes) -> float:
    return sum(found.compute) + sum(found.exchanged) + found.exposed + found.host_wait_s
