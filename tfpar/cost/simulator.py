"""Discrete-event simulation of a pipeline: its tasks and transfers, in seconds and bytes.

An actor runs one task at a time, in its order, each once what it needs is there. What goes to
another actor is sent as soon as its task ends, beside whatever the actors compute, and shares links
with what crosses them at the same time (`tfpar.cost.flows`). While it is on its way, or gradients
are summed, tasks of the actors at both ends go on at `StageNetwork.overlap` of their pace.
Collectives within a task are in its seconds. The gradients of a stage are summed over its ranks
from when its last B or W ends, beside what the actor still runs, one stage after the other; its
update waits for that, and so does what goes to the owner of a tied weight. What a stage reads of
such a weight is sent as the step begins.

Memory of an actor changes when a task starts or ends, and when a transfer does:

    always                      what its stages hold: weights, their gradients, slots
    from when F starts          until B ends: what the backward pass reads of it. With halves until
                                I ends, and what W reads until that ends
    while a task runs           what it needs beside
    what is sent                at the sender from when it is made until it is there; at the
                                receiver from when it is on its way until its reader has run.
                                Weights that are sent are among what stages always hold
"""

from __future__ import annotations

import dataclasses
import heapq
import itertools
import math
from collections.abc import Iterable, Sequence
from typing import Literal, NamedTuple

from tfpar.cost.flows import Flow, Flows
from tfpar.cost.pipeline_model import StageNetwork, StageProfile, StageRoute
from tfpar.cost.timeline import ActorPeak, ReductionSpan, SimulatedTimeline, TaskSpan, TransferSpan
from tfpar.pipeline.graph import Edge, TaskGraph
from tfpar.pipeline.tasks import LAST, Task
from tfpar.spec import ArgumentError
from tfpar.spec.arguments import integer, optional

__all__ = ["StageNetwork", "StageRoute", "StageProfile", "SimulatedTimeline", "simulate"]

SENT = ("activations", "gradients", "weights", "sum")
"""Payloads that go along routes. What joins and updates exchange besides is in their seconds."""


def simulate(
    graph: TaskGraph,
    costs: Sequence[StageProfile],
    network: StageNetwork | None = None,
    receive_ahead: int | None = None,
) -> SimulatedTimeline:
    """Simulate a step of a pipeline.

    Numbers are only added and compared, but for the rates of transfers: of whole seconds come whole
    seconds, of fractions fractions.

    Args:
        costs: of each stage.
        network: what transfers cross; None: they take no time.
        receive_ahead: a transfer waits until the receiver has ended all tasks before its reader but
            the last ones, so many, 1 or more; None: it never waits.

    Raises:
        ArgumentError: stages without costs, tasks of a kind without seconds, transfers without a
            route or over links without a bandwidth.
    """
    _check(graph, costs, network)
    run = _Run(graph, costs, network, optional(_ahead, "receive_ahead", receive_ahead))
    run.run()
    return run.timeline()


def _ahead(name: str, value: int) -> int:
    return integer(name, value, 1)


def _check(graph: TaskGraph, costs: Sequence[StageProfile], network: StageNetwork | None) -> None:
    num_stages = graph.stages.num_stages
    if len(costs) != num_stages:
        raise ArgumentError(f"There are {len(costs)} costs for {num_stages} stages.")
    for task in itertools.chain.from_iterable(graph.orders):
        if task.kind not in costs[task.stage].seconds and task.kind not in ("U", "J"):
            raise ArgumentError(
                f"The cost of stage {task.stage} has no seconds for {task.kind}, of which the "
                f"schedule has {task}."
            )
    if network is None:
        return
    for edge in graph.transfers():
        stages = edge.producer.stage, edge.consumer.stage
        if edge.num_bytes and stages not in network.routes:
            raise ArgumentError(
                f"{edge.producer} sends {edge.num_bytes:g} bytes to {edge.consumer}, but the "
                f"network has no route from stage {stages[0]} to stage {stages[1]}."
            )
    for stages, routes in network.routes.items():
        for link in itertools.chain.from_iterable(route.links for route in routes):
            if not network.bandwidth.get(link, 0) > 0:
                raise ArgumentError(
                    f"The route from stage {stages[0]} to stage {stages[1]} crosses {link!r}, "
                    f"whose bandwidth is not given or 0."
                )


class _Moment(NamedTuple):
    """When a task, a flow or a reduction ends, or a flow begins.

    Attributes:
        order: of what is known first, among what happens at the same time.
        number: of the task, the flow or the stage.
    """

    time: float
    order: int
    what: Literal["task", "begin", "flow", "reduction"]
    number: int


@dataclasses.dataclass
class _Transfer:
    """Transfer from one actor to another: a flow for each route.

    Attributes:
        waiting: for its sender, and for its receiver.
        under_way: flows that have not ended.
    """

    edge: Edge
    source: int
    target: int
    reader: int
    routes: tuple[StageRoute, ...]
    waiting: int = 1
    start: float = 0
    under_way: int = 0

    @property
    def held(self) -> float:
        """Bytes at both ends, beside what these always hold."""
        return 0 if self.edge.carries == "weights" else self.edge.num_bytes


@dataclasses.dataclass
class _Running:
    """A task that an actor runs: what was left of it at a time, in seconds, and its rate since.

    Attributes:
        place: among what was written down.
        order: of the moment at which it will end; none while its rate is 0.
    """

    number: int
    place: int
    left: float
    since: float
    rate: float = 0
    order: int = -1


class _Run:
    """The state of a simulation: what has ended, what is under way, what each actor runs next."""

    def __init__(
        self,
        graph: TaskGraph,
        costs: Sequence[StageProfile],
        network: StageNetwork | None,
        receive_ahead: int | None,
    ) -> None:
        self._graph, self._costs = graph, costs
        self._tasks = list(itertools.chain.from_iterable(graph.orders))
        self._number = {task: number for number, task in enumerate(self._tasks)}
        self._actor = [graph.places[task][0] for task in self._tasks]
        # What each task waits for, besides its actor; and what waits for it.
        self._waiting = [0] * len(self._tasks)
        self._readers: list[list[int]] = [[] for _ in self._tasks]
        self._sends: list[list[_Transfer]] = [[] for _ in self._tasks]
        self._received: list[list[_Transfer]] = [[] for _ in self._tasks]
        self._reduces: dict[int, int] = {}  # last B or W of a stage -> the stage
        self._updates: list[list[int]] = [[] for _ in costs]  # that wait for a stage's reduction
        self._sums: list[list[_Transfer]] = [[] for _ in costs]  # that are sent after it
        self._given: list[_Transfer] = []  # that are sent as the step begins
        self._expects: list[list[_Transfer]] = [[] for _ in self._tasks]  # from when a task ends
        self._link(network, receive_ahead)
        # What is under way.
        self._now: float = 0
        self._moments: list[_Moment] = []
        self._order = itertools.count()
        self._next = [0] * len(graph.orders)
        self._may_start = set(range(len(graph.orders)))  # actors whose next task may be free to run
        self._running: list[_Running | None] = [None] * len(graph.orders)
        self._sending = [0] * len(graph.orders)  # transfers and reductions of each actor
        self._overlap = 1 if network is None else network.overlap
        self._reduced: list[float] = [0] * len(graph.orders)  # when an actor's reductions end
        self._bandwidth = {} if network is None else network.bandwidth
        self._flows = Flows(self._bandwidth)
        self._carried: list[tuple[_Transfer, StageRoute]] = []  # by each flow
        self._ends: dict[int, int] = {}  # of a flow, the order of the moment at which it ends
        # What is written down.
        actors = range(len(graph.orders))
        stages = [graph.schedule.stages_of(actor) for actor in actors]
        self._memory = MemoryTracker([sum(costs[s].fixed_bytes for s in held) for held in stages])
        self._in_flight = [0] * len(costs)
        self._most_in_flight = [0] * len(costs)
        self._ran: list[TaskSpan] = []
        self._sent: list[TransferSpan] = []
        self._reductions: list[ReductionSpan] = []

    def _link(self, network: StageNetwork | None, receive_ahead: int | None) -> None:
        """Sort edges: sums that an update waits for, what is sent, and what is there at once."""
        routes = {} if network is None else network.routes
        for edge in (*self._graph.given, *self._graph.edges):
            maker, reader = self._number[edge.producer], self._number[edge.consumer]
            stage = edge.producer.stage
            route = routes.get((stage, edge.consumer.stage))
            source, target = self._actor[maker], self._actor[reader]
            transfer = None
            if source != target and route is not None and edge.carries in SENT:
                transfer = _Transfer(edge, source, target, reader, route)
            summed = edge.consumer.kind == "U"
            if summed and edge.consumer.stage == stage:
                self._reduces[maker] = stage
            if transfer:
                after = self._sums[stage] if summed else self._sends[maker]
                (self._given if edge.carries == "weights" else after).append(transfer)
                self._received[reader].append(transfer)
                place = self._graph.places[edge.consumer][1]
                if receive_ahead is not None and place > receive_ahead:
                    gate = self._graph.orders[target][place - receive_ahead - 1]
                    self._expects[self._number[gate]].append(transfer)
                    transfer.waiting += 1
            elif edge.carries != "weights":
                (self._updates[stage] if summed else self._readers[maker]).append(reader)
            else:
                continue
            self._waiting[reader] += 1

    def run(self) -> None:
        """Run from the first task to the last."""
        self._made(self._given)
        self._start()
        while self._moments:
            self._now = self._moments[0].time
            passed = []
            while self._moments and self._moments[0].time == self._now:
                passed.append(heapq.heappop(self._moments))
            passed = [m for m in passed if m.what != "task" or self._ends_now(m)]
            for moment in passed:
                if moment.what == "task":
                    self._end_running(self._actor[moment.number])
            # What is freed at a moment is, before anything is taken.
            self._change_flows(passed)
            for moment in passed:
                if moment.what == "task":
                    self._end_task(moment.number)
                elif moment.what == "reduction":
                    self._end_reduction(moment.number)
            for moment in passed:
                if moment.what == "task":
                    self._made(self._sends[moment.number])
                    self._send(self._expects[moment.number])
                elif moment.what == "reduction":
                    self._made(self._sums[moment.number])
            self._start()

    def timeline(self) -> SimulatedTimeline:
        """Collect the events of the simulated step."""
        return SimulatedTimeline(
            max(ran.end for ran in self._ran),
            tuple(self._ran),
            tuple(sorted(self._sent, key=lambda sent: sent.start)),
            tuple(self._reductions),
            tuple(self._memory.peaks),
            tuple(map(tuple, self._memory.steps)),
            tuple(self._most_in_flight),
        )

    # --- tasks

    def _start(self) -> None:
        """Every actor that waits runs its next task, if what that needs is there."""
        for actor in sorted(self._may_start):
            order = self._graph.orders[actor]
            if self._running[actor] is None and self._next[actor] < len(order):
                number = self._number[order[self._next[actor]]]
                if not self._waiting[number]:
                    self._next[actor] += 1
                    self._start_task(number)
        self._may_start.clear()
        self._memory.settle(self._now)

    def _start_task(self, number: int) -> None:
        task, actor = self._tasks[number], self._actor[number]
        cost = self._costs[task.stage]
        seconds = cost.seconds.get(task.kind, 0)
        self._running[actor] = _Running(number, len(self._ran), seconds, self._now)
        self._ran.append(TaskSpan(self._now, self._now, actor, task))
        self._set_rate(actor)
        self._memory.take(actor, cost.working_bytes.get(task.kind, 0), task)
        if task.kind == "F":
            self._memory.take(actor, cost.kept_bytes, task)
            self._in_flight[task.stage] += 1
            most = max(self._most_in_flight[task.stage], self._in_flight[task.stage])
            self._most_in_flight[task.stage] = most

    def _end_task(self, number: int) -> None:
        task, actor = self._tasks[number], self._actor[number]
        cost = self._costs[task.stage]
        self._memory.free(actor, cost.working_bytes.get(task.kind, 0))
        freed = cost.freed_bytes(task.kind)
        self._memory.free(actor, max(freed, 0))
        self._memory.take(actor, max(-freed, 0), task)
        for transfer in self._received[number]:
            self._memory.free(actor, transfer.held)
        self._in_flight[task.stage] -= task.kind in LAST
        self._meet(self._readers[number])
        stage = self._reduces.get(number)
        if stage is not None:
            start = max(self._now, self._reduced[actor])
            self._reduced[actor] = end = start + cost.reduction_s
            self._reductions.append(ReductionSpan(start, end, stage))
            self._at(end, "reduction", stage)
            if cost.reduction_s:
                self._sends_more(actor, 1)

    def _end_running(self, actor: int) -> None:
        running = self._running[actor]
        assert running is not None
        self._ran[running.place] = self._ran[running.place]._replace(end=self._now)
        self._running[actor] = None
        self._may_start.add(actor)

    def _sends_more(self, actor: int, more: int) -> None:
        """An actor begins or ends to send, receive or sum something."""
        self._sending[actor] += more
        self._set_rate(actor)

    def _set_rate(self, actor: int) -> None:
        """Let the task that an actor runs go on at the rate that it has from now on."""
        running = self._running[actor]
        rate = self._overlap if self._sending[actor] else 1
        if running is None or running.rate == rate:
            return
        running.left = max(running.left - running.rate * (self._now - running.since), 0)
        running.since, running.rate, running.order = self._now, rate, -1
        if rate or not running.left:
            end = self._now + (running.left / rate if rate not in (0, 1) else running.left)
            running.order = self._at(end, "task", running.number)

    def _ends_now(self, moment: _Moment) -> bool:
        """Whether a task ends at a moment at which that was expected at some time."""
        running = self._running[self._actor[moment.number]]
        return running is not None and running.order == moment.order

    def _end_reduction(self, stage: int) -> None:
        if self._costs[stage].reduction_s:
            self._sends_more(self._graph.schedule.actors[stage], -1)
        self._meet(self._updates[stage])

    def _meet(self, readers: Iterable[int]) -> None:
        for reader in readers:
            self._waiting[reader] -= 1
            if not self._waiting[reader]:
                self._may_start.add(self._actor[reader])

    def _at(self, time: float, what: Literal["task", "begin", "reduction"], number: int) -> int:
        """Note a moment; its order."""
        order = next(self._order)
        heapq.heappush(self._moments, _Moment(time, order, what, number))
        return order

    # --- transfers

    def _made(self, transfers: Iterable[_Transfer]) -> None:
        """Hold what is to be sent, and send it if nothing else has to happen first."""
        for transfer in transfers:
            self._memory.take(transfer.source, transfer.held, transfer.edge.producer)
            self._send([transfer])

    def _send(self, transfers: Iterable[_Transfer]) -> None:
        """One of the two ends is ready; with the other one, send."""
        for transfer in transfers:
            transfer.waiting -= 1
            if transfer.waiting:
                continue
            transfer.start, transfer.under_way = self._now, 1  # this call, until all have begun
            for actor in (transfer.source, transfer.target):
                self._sends_more(actor, 1)
            self._memory.take(transfer.target, transfer.held, transfer.edge.consumer)
            for route in transfer.routes:
                transfer.under_way += 1
                self._carried.append((transfer, route))
                self._at(self._now + route.latency_s, "begin", len(self._carried) - 1)
            self._arrive(transfer)

    def _change_flows(self, passed: Iterable[_Moment]) -> None:
        """End the flows that are through, and begin others, at one moment."""
        begun: dict[int, Flow] = {}
        ended: list[int] = []
        for moment in passed:
            flow = moment.number
            if moment.what == "begin":
                transfer, route = self._carried[flow]
                num_bytes = transfer.edge.num_bytes * route.part
                slow = [link for link in route.links if self._bandwidth[link] < math.inf]
                if num_bytes and slow:
                    begun[flow] = slow, num_bytes
                else:
                    self._arrive(transfer)
            elif moment.what == "flow" and self._ends[flow] == moment.order:
                ended.append(flow)  # at the time that was last thought
        for flow in ended:
            self._arrive(self._carried[flow][0])
        if begun or ended:
            for flow, end in self._flows.change(begun, ended, self._now).items():
                order = self._ends[flow] = next(self._order)
                heapq.heappush(self._moments, _Moment(end, order, "flow", flow))

    def _arrive(self, transfer: _Transfer) -> None:
        """One of its parts is there; with the last one, its reader need not wait for it."""
        transfer.under_way -= 1
        if not transfer.under_way:
            self._sent.append(TransferSpan(transfer.start, self._now, transfer.edge))
            for actor in (transfer.source, transfer.target):
                self._sends_more(actor, -1)
            self._memory.free(transfer.source, transfer.held)
            self._meet([transfer.reader])


# --- Memory of the actors of a pipeline while it is simulated ---


class MemoryTracker:
    """Bytes that each actor holds, its peak, and every change.

    Changes of one moment count together: what is freed then is not held beside what is taken.

    Attributes:
        peaks: of each actor.
        steps: of each actor, (seconds, bytes from then on).
    """

    def __init__(self, fixed: Sequence[float]) -> None:
        self.peaks = [ActorPeak(held, 0, None) for held in fixed]
        self.steps: list[list[tuple[float, float]]] = [[(0, held)] for held in fixed]
        self._held = list(fixed)
        self._changed: dict[int, Task | None] = {}

    def free(self, actor: int, num_bytes: float) -> None:
        """Free something."""
        if num_bytes:
            self._held[actor] -= num_bytes
            self._changed.setdefault(actor, None)

    def take(self, actor: int, num_bytes: float, task: Task) -> None:
        """Store more from now on, because of `task`."""
        if num_bytes:
            self._held[actor] += num_bytes
            self._changed[actor] = task

    def settle(self, now: float) -> None:
        """Record the bytes of actors, once all that happens at a moment has."""
        for actor, task in self._changed.items():
            held = self._held[actor]
            steps = self.steps[actor]
            if steps[-1][0] == now:
                steps.pop()
            if not steps or steps[-1][1] != held:
                steps.append((now, held))
            if held > self.peaks[actor].num_bytes:
                self.peaks[actor] = ActorPeak(held, now, task)
        self._changed.clear()
