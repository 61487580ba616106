"""Pricing of a step of several stages: its tasks are priced, and then simulated.

A stage is priced as any step is, by its ops, collectives and tensors (`cost.stage_breakdown`), on
the ranks that it has. What stages send goes from each rank to its like in another stage, whole or
in slices (`cost.stage_transfers`). The simulation (`cost.simulator`) says what happens when, and
`PipelineCost` what comes of it.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Mapping, Sequence

from tfpar.cluster.description import Cluster
from tfpar.cost.cost import Cost
from tfpar.cost.pipeline_cost import PipelineCost, ReductionTime, SendTime, StageCost, TaskTime
from tfpar.cost.pipeline_model import StageNetwork, merge_symmetric_routes
from tfpar.cost.simulator import simulate
from tfpar.cost.stage_breakdown import StageCostBreakdown, stage_prices
from tfpar.cost.stage_transfers import (
    ScatterGatherCost,
    StageTransfers,
    pair_ranks,
    resharded_stage_graph,
)
from tfpar.cost.task_partition import TaskPartition
from tfpar.cost.timeline import SimulatedTimeline
from tfpar.pipeline.graph import RECEIVE_AHEAD, TaskGraph, task_graph
from tfpar.pipeline.pipeline import groups_of
from tfpar.pipeline.recompute import RecomputeOf
from tfpar.pipeline.schedule import Schedule
from tfpar.pipeline.stage_graph import StageGraph
from tfpar.pipeline.step_graph import is_synchronized
from tfpar.pipeline.tasks import Task


@dataclasses.dataclass(frozen=True)
class PipelineCostModel:
    """Stages of a step priced for a schedule's actors, ready to be simulated.

    Attributes:
        ranks: of each actor.
        stages: the price of each.
        graph: what stages read of each other, in bytes of a rank.
        synchronized: whether updates wait for the gradients of all stages.
        network: between ranks of different actors.
        step_s: that a step takes besides; see `Cluster`.
        limits: bytes that a rank of each actor may hold: the least of its devices.
        host_limits: the same of the memory of their hosts; infinite where that is not known.
        trains: whether the step has a backward pass. One that has none runs the forward tasks of a
            schedule, in their order; its backward tasks take no time and hold nothing.
    """

    ranks: tuple[tuple[int, ...], ...]
    stages: tuple[StageCostBreakdown, ...]
    graph: StageGraph
    synchronized: bool
    network: StageNetwork
    step_s: float
    limits: tuple[float, ...]
    host_limits: tuple[float, ...]
    trains: bool = True

    @classmethod
    def of(
        cls,
        step: TaskPartition,
        actors: Sequence[int],
        cluster: Cluster,
        recompute: RecomputeOf = False,
        order: Sequence[int] = (),
        among: Sequence[Sequence[int]] = (),
        others: Sequence[TaskPartition] = (),
        layout_of: Sequence[int] = (),
    ) -> PipelineCostModel:
        """Price the stages of a step.

        Args:
            actors: that run each stage.
            recompute: the stages whose backward pass runs their forward pass again.
            order: the ranks, actor by actor; by default in their order.
            among: ranks of the mesh of each actor whose pace and memory count, and all of them are
                taken to send as much; where there are none, all.
            others: the step in other layouts.
            layout_of: the number of the layout of each actor: 0 is `step`, `others` follow; by
                default all have the first.

        Raises:
            TfparError: the cluster has fewer ranks.
        """
        steps, recompute = [step, *others], recompute if step.trains else False
        layout_of = layout_of or [0] * (max(actors) + 1)
        sizes = [steps[n].laid.mesh.size // step.microbatches for n in layout_of]
        cluster = cluster.part(order) if order else cluster
        own = groups_of(sizes)  # as numbered in `cluster`
        parts = [cluster.part(group) for group in own]
        if among:
            parts = [
                part.at_pace_of(ranks) if ranks else part
                for part, ranks in zip(parts, among, strict=True)
            ]
        meshes = tuple(steps[n].laid.mesh.without_last_axis() for n in layout_of)
        slices = ScatterGatherCost(meshes, cluster)
        transfers = [
            StageTransfers(each, actors, slices, _with_layout(n, layout_of) if others else None)
            for n, each in enumerate(steps)
        ]
        beside = _beside(cluster, own, parts)
        prices: list[StageCostBreakdown] = []
        for number, each in enumerate(transfers):
            # Stages of other layouts are priced, too, on the machines of one that has this.
            like = layout_of.index(number)
            on = [a if layout_of[a] == number else like for a in range(len(own))]
            found = stage_prices(each, [parts[a] for a in on], recompute, [beside[a] for a in on])
            prices = prices or found
            for stage, actor in enumerate(actors):
                if layout_of[actor] == number:
                    prices[stage] = found[stage]
        graph = resharded_stage_graph(transfers, [layout_of[a] for a in actors])
        pairs = {(link.source, link.target) for link in graph.links}
        pairs |= {(tie.owner, tie.reader) for tie in graph.ties}
        sent = {
            (one, other): [(a, b, 1.0) for a, b in pair_ranks(own[actors[one]], own[actors[other]])]
            for pair in pairs
            for one, other in (pair, pair[::-1])
        }
        return cls(
            groups_of(sizes, order),
            tuple(prices),
            graph,
            is_synchronized(step.crossings),
            StageNetwork.of(cluster, sent),
            cluster.step_s,
            tuple(part.device.memory_bytes for part in parts),
            tuple(part.host_share_bytes for part in parts),
            step.trains,
        )

    def tasks(self, schedule: Schedule) -> TaskGraph:
        """Build the tasks of a schedule for these stages.

        Where microbatches join, a stage is through with all of them before the next begins, in
        whatever order they come.

        Raises:
            ScheduleError: other stages, or tasks that wait for each other; shows the cycle.
        """
        if not self.trains:
            schedule = Schedule(tuple(tuple(sorted(o, key=_is_backward)) for o in schedule.orders))
        if self.graph.joins:
            orders = [sorted(order, key=_by_stage) for order in schedule.orders]
            schedule = Schedule(tuple(map(tuple, orders)))
        return task_graph(schedule, self.graph, self.synchronized)

    def excess_bytes(self, timeline: SimulatedTimeline) -> float:
        """Find the most that a rank would need beyond its limit; 0: all fits."""
        peaks = zip(timeline.peaks, self.limits, strict=True)
        return max(0.0, *(peak.num_bytes - limit for peak, limit in peaks))

    def run(self, schedule: Schedule) -> SimulatedTimeline:
        """Simulate a step, whose ranks ask for tensors as early as programs do."""
        costs = [stage.cost for stage in self.stages]
        return simulate(self.tasks(schedule), costs, self.simulated_network, RECEIVE_AHEAD)

    @functools.cached_property
    def simulated_network(self) -> StageNetwork:
        """The network without routes that take as long as others do."""
        return merge_symmetric_routes(self.network)


def _with_layout(number: int, layout_of: Sequence[int]) -> frozenset[int]:
    """The actors that have a layout."""
    return frozenset(actor for actor, own in enumerate(layout_of) if own == number)


def _beside(
    cluster: Cluster, own: Sequence[Sequence[int]], parts: Sequence[Cluster]
) -> list[Cluster]:
    """Of each actor its ranks, and those of the actors with which it shares machines, rank by rank
    of each: their collectives share links. An actor within one machine has the links to itself.

    Args:
        own: the ranks of each actor.
        parts: the machines that these are.
    """
    machines = [{cluster.machines[rank] for rank in group} for group in own]
    found = []
    for actor, used in enumerate(machines):
        near = [
            a
            for a, others in enumerate(machines)
            if a != actor and used & others and len(own[a]) == len(own[actor])
        ]
        if len(used) == 1 or not near:
            found.append(parts[actor])
        else:
            each = zip(*(own[a] for a in (actor, *near)), strict=True)
            found.append(cluster.part([rank for ranks in each for rank in ranks]))
    return found


def _is_backward(task: Task) -> bool:
    return task.kind != "F"


def _by_stage(task: Task) -> tuple[bool, int, int]:
    is_forward = task.kind == "F"
    return not is_forward, task.stage if is_forward else -task.stage, task.micro


def staged_cost(
    prices: PipelineCostModel, schedule: Schedule, timeline: SimulatedTimeline
) -> PipelineCost:
    """Collect the cost of a simulated step by stage.

    Args:
        timeline: of `prices`, in the order of `schedule`.
    """
    sent = [0.0] * len(prices.stages)
    for transfer in timeline.transfers:
        sent[transfer.edge.producer.stage] += transfer.edge.num_bytes
    shares = []
    for stage, price in enumerate(prices.stages):
        actor, cost = schedule.actors[stage], price.cost
        peak, room = timeline.peaks[actor], prices.host_limits[actor]
        shares.append(
            StageCost(
                prices.ranks[actor],
                cost.seconds["F"],
                cost.seconds["B"],
                cost.seconds["U"],
                cost.reduction_s,
                timeline.bubbles[actor],
                sent[stage],
                timeline.in_flight[stage],
                cost.fixed_bytes,
                cost.kept_bytes,
                peak.num_bytes,
                "" if peak.task is None else str(peak.task),
                prices.limits[actor],
                sum(_on_host(prices, schedule, timeline, actor)),
                None if math.isinf(room) else room,
            )
        )
    return PipelineCost(
        timeline.seconds + prices.step_s,
        timeline.bubble,
        tuple(shares),
        tasks=tuple(
            TaskTime(ran.start, ran.end, str(ran.task))
            for ran in timeline.events
            if prices.trains or ran.task.kind == "F" or ran.end > ran.start
        ),
        sends=tuple(
            SendTime(
                sent.start,
                sent.end,
                str(sent.edge.producer),
                sent.edge.consumer.stage,
                sent.edge.num_bytes,
            )
            for sent in timeline.transfers
        ),
        reductions=tuple(ReductionTime(*reduced) for reduced in timeline.reductions),
    )


def _on_host(
    prices: PipelineCostModel, schedule: Schedule, timeline: SimulatedTimeline, actor: int
) -> tuple[float, float]:
    """Add up what a rank of an actor has in host memory: slots, and what microbatches in flight
    keep."""
    held = [(prices.stages[stage], stage) for stage in schedule.stages_of(actor)]
    slots = sum(price.host_slot_bytes for price, _ in held)
    kept = sum(timeline.in_flight[stage] * price.host_activation_bytes for price, stage in held)
    return slots, kept


def bottleneck_cost(
    prices: PipelineCostModel, schedule: Schedule, timeline: SimulatedTimeline
) -> Cost:
    """Collect the cost of a simulated step on one rank: time of the actor that works most, memory
    of the one that is nearest to its limit.

    Args:
        timeline: of `prices`, in the order of `schedule`.
    """
    actors, micro = range(schedule.num_actors), schedule.num_microbatches
    busiest = max(actors, key=timeline.busy_s.__getitem__)
    peaks = [timeline.peaks[actor].num_bytes for actor in actors]
    fullest = max(actors, key=lambda actor: (peaks[actor] / prices.limits[actor], peaks[actor]))
    working = [prices.stages[stage] for stage in schedule.stages_of(busiest)]
    holding = [prices.stages[stage] for stage in schedule.stages_of(fullest)]
    kept = sum(
        timeline.in_flight[stage] * prices.stages[stage].cost.kept_bytes
        for stage in schedule.stages_of(fullest)
    )

    def by_phase(found: Sequence[Mapping[str, float]]) -> tuple[float, float, float]:
        total = {kind: sum(one[kind] for one in found) for kind in "FIWU"}
        return micro * total["F"], micro * (total["I"] + total["W"]), total["U"]

    compute = by_phase([price.compute_s for price in working])
    waiting = by_phase([price.waiting_s for price in working])
    host_wait_s = sum(by_phase([price.host_wait_s for price in working]))
    busy = sum(compute) + sum(waiting) + host_wait_s
    weights = sum(price.weight_bytes for price in holding)
    state = sum(price.state_bytes for price in holding)
    away = [_on_host(prices, schedule, timeline, actor) for actor in actors]
    host_slots, host_activations = max(away, key=sum)
    reduction = sum(price.cost.reduction_s for price in working)
    exposed = min(reduction, max(0.0, timeline.seconds - busy))
    return Cost(
        timeline.seconds + prices.step_s,
        compute,
        waiting,
        reduction,
        exposed,
        max(price.bucket_bytes for price in working),
        weights,
        state,
        sum(price.sum_bytes for price in holding),
        kept,
        timeline.peaks[fullest].num_bytes - weights - state,
        bubble_s=max(0.0, timeline.seconds - busy - exposed),
        collectives=sum(price.collectives for price in working),
        host_wait_s=host_wait_s,
        host_slot_bytes=host_slots,
        host_activation_bytes=host_activations,
    )


# --- idle time by its cause -----------------------------------------------------------------


def split_idle_time(cost: Cost, prices: PipelineCostModel, schedule: Schedule) -> Cost:
    """Split the idle time of `cost` by what would end it, found by simulating the step without.

    `exposed_s` is what the step is shorter by if sums of gradients take no time, `transfer_s` what
    it is then shorter by if nothing that is sent does, and `bubble_s` the rest.

    Args:
        cost: of a step in stages, as of `bottleneck_cost`.
        prices: of its stages.
    """
    tasks = prices.tasks(schedule)
    summed = [dataclasses.replace(stage.cost, reduction_s=0) for stage in prices.stages]
    without_sums = simulate(tasks, summed, prices.simulated_network, RECEIVE_AHEAD).seconds
    without_both = simulate(tasks, summed, None, RECEIVE_AHEAD).seconds
    idle = cost.exposed_s + cost.transfer_s + cost.bubble_s
    exposed = _within(cost.seconds - prices.step_s - without_sums, idle)
    transfer = _within(without_sums - without_both, idle - exposed)
    return dataclasses.replace(
        cost, exposed_s=exposed, transfer_s=transfer, bubble_s=idle - exposed - transfer
    )


def _within(seconds: float, most: float) -> float:
    return min(max(0.0, seconds), max(0.0, most))
