"""Critical path of a pipeline's tasks and transfers: a lower bound of a simulated step.

As `cost.simulator` has it, but without events: every transfer has its links to itself, so each task
begins as soon as those before it have ended. No step is simulated as faster, and where transfers
share no links it takes exactly that. It is found in one pass over the tasks, ten times as quickly.

A link also carries all that crosses it in a step, after the first task of all and before the last.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Hashable, Sequence
from typing import NamedTuple

from tfpar.cost.pipeline_model import StageNetwork, StageProfile, StageRoute
from tfpar.pipeline.generators import generate
from tfpar.pipeline.stage_graph import StageLink


class Shape(NamedTuple):
    """Numbers that the order of a pipeline's tasks follows from.

    Attributes:
        virtual: stages of an actor; 1F1B, or interleaved where there are several.
    """

    actors: int
    microbatches: int
    virtual: int = 1

    @property
    def schedule(self) -> str:
        """One of `pipeline.generators.FAMILIES`."""
        return "1f1b" if self.virtual == 1 else "interleaved"


def least_seconds(
    shape: Shape,
    costs: Sequence[StageProfile],
    links: Sequence[StageLink] = (),
    network: StageNetwork | None = None,
) -> float:
    """Bound a step from below: no simulation of it takes fewer seconds.

    Args:
        costs: of each stage.
        links: between each stage and the next, as many less one; none if nothing is sent.
        network: what they cross; None: they take no time.
    """
    forward = [cost.seconds["F"] for cost in costs]
    backward = [cost.seconds["B"] for cost in costs]
    there, back = [0.0] * len(costs), [0.0] * len(costs)
    carried = 0.0
    if network is not None and shape.actors > 1:
        for link in links:
            there[link.target] = _alone(network, link.source, link.target, link.forward_bytes)
            back[link.source] = _alone(network, link.target, link.source, link.backward_bytes or 0)
        most = shape.microbatches * _busiest(network, links)
        carried = forward[0] + most + backward[0] if most else 0.0
    ends = [0.0]
    free = [0.0] * shape.actors
    seconds, delays = forward + backward, there + back
    order = _order(shape)
    for actor, number, before in order.tasks:
        start = ends[before] + delays[number]
        if start < free[actor]:
            start = free[actor]
        free[actor] = end = start + seconds[number]
        ends.append(end)
    return max(carried, _with_reductions(shape, costs, free, [ends[at] for at in order.last]))


def _with_reductions(
    shape: Shape, costs: Sequence[StageProfile], free: Sequence[float], last: Sequence[float]
) -> float:
    """The end of all sums of gradients, those of an actor one after the other.

    Args:
        free: when each actor has run its tasks.
        last: when each stage has.
    """
    ends = list(free)
    reduced = [0.0] * shape.actors
    for stage in sorted(range(len(costs)), key=last.__getitem__):
        actor = stage % shape.actors
        reduced[actor] = max(reduced[actor], last[stage]) + costs[stage].reduction_s
        ends[actor] = max(ends[actor], reduced[actor])
    return max(ends)


def _alone(network: StageNetwork, source: int, target: int, num_bytes: float) -> float:
    """Of a transfer whose routes share links with each other, and with nothing else."""
    routes = network.routes[source, target]
    load: dict[Hashable, float] = {}
    for route in routes:
        for link in _limiting(network, route):
            load[link] = load.get(link, 0.0) + route.part * num_bytes
    starts = [route.latency_s for route in routes]
    flowing = max((num / network.bandwidth[link] for link, num in load.items()), default=0.0)
    return max(max(starts), min(starts) + flowing)


def _busiest(network: StageNetwork, links: Sequence[StageLink]) -> float:
    """Seconds that any link carries of one microbatch."""
    load: dict[Hashable, float] = {}
    for link in links:
        for stages, num_bytes in (
            ((link.source, link.target), link.forward_bytes),
            ((link.target, link.source), link.backward_bytes or 0.0),
        ):
            for route in network.routes[stages]:
                for name in _limiting(network, route):
                    load[name] = load.get(name, 0.0) + route.part * num_bytes
    return max((num / network.bandwidth[name] for name, num in load.items()), default=0.0)


def _limiting(network: StageNetwork, route: StageRoute) -> list[Hashable]:
    return [link for link in route.links if network.bandwidth[link] < math.inf]


class _Order(NamedTuple):
    """Tasks one after the other, each behind all that it waits for.

    Attributes:
        tasks: of each its actor, its stage (as many more if it is a B as there are stages), and its
            place behind which task of another stage it comes; 0: none, the first task is 1.
        last: the place of the last B of each stage.
    """

    tasks: tuple[tuple[int, int, int], ...]
    last: tuple[int, ...]


@functools.lru_cache(maxsize=64)
def _order(shape: Shape) -> _Order:
    schedule = generate(shape.schedule, shape.actors, shape.microbatches, shape.virtual)
    stages = schedule.num_stages
    places: dict[tuple[str, int, int], int] = {}
    tasks: list[tuple[int, int, int]] = []
    last = [0] * stages
    waiting = [iter(order) for order in schedule.orders]
    heads = [next(order, None) for order in waiting]
    while any(heads):
        for actor, order in enumerate(waiting):
            while (task := heads[actor]) is not None:
                stage, micro = task.stage, task.micro
                if task.kind == "F":
                    needed = ("F", stage - 1, micro) if stage else None
                else:
                    end = stage + 1 == stages
                    needed = ("F", stage, micro) if end else ("B", stage + 1, micro)
                if needed is not None and needed not in places:
                    break
                before = 0 if needed is None else places[needed]
                places[task.kind, stage, micro] = place = len(tasks) + 1
                tasks.append((actor, stage if task.kind == "F" else stages + stage, before))
                if task.kind == "B":
                    last[stage] = place
                heads[actor] = next(order, None)
    return _Order(tuple(tasks), tuple(last))
