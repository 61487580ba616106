"""`TaskGraph`: a schedule's tasks with what they wait for (Rhino §6.1).

    F of a stage            needs F of the stages that it reads of
    B, I of a stage         need its F, and B or I of the stages that read of it
    W                       needs its I
    sums of gradients       go from one B or W of a stage to the next, and to U
    U                       runs at the end of an actor's order; of a tied weight it needs the sum
                            of the other stage too, which needed the value of the step before
    J                       needs all microbatches of some tasks, and all of others need it

Together with the order on each actor that must have no cycle. A cycle is a schedule that waits for
itself: the error shows it.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Literal, NamedTuple

from tfpar.pipeline.schedule import Schedule
from tfpar.pipeline.stage_graph import Join, StageGraph, Tie
from tfpar.pipeline.tasks import BACKWARD, LAST, Kind, Task
from tfpar.pipeline.validate import Orders
from tfpar.spec import ScheduleError

RECEIVE_AHEAD = 2
"""A rank asks for a tensor once it has ended all tasks before the reader but so many. Asked for as
the step begins, the tensors of all microbatches would pile up there; right before the reader, the
rank would wait for what is on its way."""

Carries = Literal["activations", "gradients", "kept", "sum", "scalars", "join", "weights"]


class Edge(NamedTuple):
    """Dependence of one task on another, which reads what the first makes.

    Attributes:
        carries: activations and gradients between stages, what a backward pass reads of its forward
            pass (kept), sums of gradients, scalars of these that all updates need, what joins read
            and make, values of tied weights.
        num_bytes: that are sent where the two tasks are on different actors.
    """

    producer: Task
    consumer: Task
    carries: Carries
    num_bytes: float = 0.0


@dataclasses.dataclass(frozen=True)
class TaskGraph:
    """Graph of tasks: the order of each actor, and the dependences between tasks.

    Attributes:
        orders: of each actor, updates and joins included.
        edges: between tasks.
        given: from updates of the step before.
    """

    schedule: Schedule
    stages: StageGraph
    orders: Orders
    edges: tuple[Edge, ...]
    given: tuple[Edge, ...] = ()

    @functools.cached_property
    def places(self) -> Mapping[Task, tuple[int, int]]:
        """Of each task, its actor and its place in that actor's order."""
        return {
            task: (actor, at)
            for actor, order in enumerate(self.orders)
            for at, task in enumerate(order)
        }

    def transfers(self) -> tuple[Edge, ...]:
        """Return the edges from one actor to another."""
        places = self.places
        return tuple(
            edge
            for edge in (*self.given, *self.edges)
            if places[edge.producer][0] != places[edge.consumer][0]
        )


def task_graph(
    schedule: Schedule, stages: StageGraph | None = None, synchronized: bool = False
) -> TaskGraph:
    """Return the task graph of a schedule.

    Args:
        stages: by default a chain.
        synchronized: every update waits for the gradients of all stages: for a global norm, or a
            check that they are finite.

    Raises:
        ScheduleError: other stages than the schedule's, or tasks that wait for each other; shows
            the cycle.
    """
    stages = stages or StageGraph.chain(schedule.num_stages)
    if stages.num_stages != schedule.num_stages:
        raise ScheduleError(
            f"The schedule has {schedule.num_stages} stages, but the model is cut in "
            f"{stages.num_stages}."
        )
    run = _Tasks(schedule, frozenset(itertools.chain.from_iterable(schedule.orders)))
    joins = list(_joins(run, stages.joins))
    orders = [list(order) for order in schedule.orders]
    for task, edges in joins:
        order = orders[schedule.actors[task.stage]]
        order.insert(_place(order, task, edges), task)
    for order in orders:
        # The last B or W of a stage is what its update waits for: stages in the order of these.
        last = {task.stage: at for at, task in enumerate(order) if task.kind in LAST}
        order.extend(Task("U", stage) for stage in sorted(last, key=last.__getitem__))
    found = itertools.chain(
        _edges(run, stages),
        (edge for _, edges in joins for edge in edges),
        _sums(schedule, stages.ties, synchronized),
    )
    given = tuple(_given(schedule, stages.ties))
    graph = TaskGraph(schedule, stages, tuple(map(tuple, orders)), tuple(found), given)
    _check_order(graph)
    return graph


def check_schedule(
    schedule: Schedule,
    stages: StageGraph | None = None,
) -> None:
    """Check that a schedule can run.

    Args:
        stages: by default a chain of as many as the schedule has.

    Raises:
        ScheduleError: it has another number of stages, or tasks that wait for each other; shows
            the cycle.
    """
    task_graph(schedule, stages)


class _Tasks(NamedTuple):
    """Tasks of a schedule: of each stage and microbatch the whole backward pass, or halves."""

    schedule: Schedule
    present: frozenset[Task]

    def backward(self, stage: int, micro: int) -> Task:
        """The task that sends gradients to the stages before."""
        return next(task for kind in BACKWARD if (task := Task(kind, stage, micro)) in self.present)

    def of(self, kind: Kind, stage: int) -> Iterator[Task]:
        """All microbatches of F, or of the backward pass."""
        for micro in range(self.schedule.num_microbatches):
            yield Task("F", stage, micro) if kind == "F" else self.backward(stage, micro)


def _edges(run: _Tasks, stages: StageGraph) -> Iterator[Edge]:
    """Yield the edges of microbatches, within a stage and between stages."""
    for stage in range(stages.num_stages):
        for micro in range(run.schedule.num_microbatches):
            backward = run.backward(stage, micro)
            yield Edge(Task("F", stage, micro), backward, "kept")
            if backward.kind == "I":
                yield Edge(backward, Task("W", stage, micro), "kept")
    for link in stages.links:
        for micro in range(run.schedule.num_microbatches):
            maker, reader = (Task("F", stage, micro) for stage in (link.source, link.target))
            yield Edge(maker, reader, "activations", link.forward_bytes)
            if link.backward_bytes is not None:
                back, there = (run.backward(s, micro) for s in (link.target, link.source))
                yield Edge(back, there, "gradients", link.backward_bytes)


def _sums(schedule: Schedule, ties: Sequence[Tie], synchronized: bool) -> Iterator[Edge]:
    """Gradients are added up in the order in which the actor makes them."""
    lasts: dict[int, Task] = {}
    for order in schedule.orders:
        for task in order:
            if task.kind in LAST:
                if task.stage in lasts:
                    yield Edge(lasts[task.stage], task, "sum")
                lasts[task.stage] = task
    for stage, last in lasts.items():
        yield Edge(last, Task("U", stage), "sum")
        if synchronized:
            others = (one for one in sorted(lasts) if one != stage)
            yield from (Edge(last, Task("U", one), "scalars") for one in others)
    for tie in ties:
        if tie.gradient_bytes is not None:
            yield Edge(lasts[tie.reader], Task("U", tie.owner), "sum", tie.gradient_bytes)


def _given(schedule: Schedule, ties: Sequence[Tie]) -> Iterator[Edge]:
    """Yield the edges by which a stage reads another's weights, before its first task."""
    for tie in ties:
        order = schedule.orders[schedule.actors[tie.reader]]
        first = next(task for task in order if task.stage == tie.reader)
        yield Edge(Task("U", tie.owner), first, "weights", tie.num_bytes)


def _joins(run: _Tasks, joins: Sequence[Join]) -> Iterator[tuple[Task, list[Edge]]]:
    """Each join as a task, and its edges."""
    numbers: dict[int, int] = {}
    for join in joins:
        number = numbers[join.stage] = numbers.get(join.stage, -1) + 1
        task = Task("J", join.stage, number)
        made = [Edge(t, task, "join") for kind, stage in join.after for t in run.of(kind, stage)]
        held = [Edge(task, t, "join") for kind, stage in join.before for t in run.of(kind, stage)]
        yield task, made + held


def _place(order: Sequence[Task], join: Task, edges: Iterable[Edge]) -> int:
    """Return the position of a join in its actor's order.

    After the last task that it waits for, if all of these are this actor's or it holds up none of
    this actor. Else before the first one that it holds up, since what comes earlier can run while
    the join waits for other actors.
    """
    held = {edge.consumer for edge in edges if edge.producer == join}
    needed = {edge.producer for edge in edges if edge.consumer == join}
    after = [at + 1 for at, task in enumerate(order) if task in needed]
    if len(after) == len(needed):
        return max(after)
    return next((at for at, task in enumerate(order) if task in held), max(after, default=0))


def _check_order(graph: TaskGraph) -> None:
    tasks = list(itertools.chain.from_iterable(graph.orders))
    number = {task: at for at, task in enumerate(tasks)}
    needs: list[dict[int, str]] = [{} for _ in tasks]
    for order in graph.orders:
        for before, after in zip(order, order[1:], strict=False):
            needs[number[after]][number[before]] = "runs after"
    for edge in graph.edges:
        needs[number[edge.consumer]][number[edge.producer]] = "needs"
    cycle = first_cycle(needs)
    if cycle:
        shown = str(tasks[cycle[0]])
        for one, other in zip(cycle, [*cycle[1:], cycle[0]], strict=True):
            shown += f" {needs[one][other]} {tasks[other]}"
            shown += f" (actor {graph.places[tasks[other]][0]})," if other != cycle[0] else ""
        raise ScheduleError(
            f"The schedule can never end, its tasks wait for each other: {shown}. Move one of them."
        )


def first_cycle(needs: Sequence[Iterable[int]]) -> list[int]:
    """Positions that wait for each other, each for the next one and the last for the first; or [].

    Args:
        needs: of each position, those that it waits for, each once.
    """
    waiting = [0] * len(needs)
    readers: list[list[int]] = [[] for _ in needs]
    for at, found in enumerate(needs):
        for other in found:
            waiting[at] += 1
            readers[other].append(at)
    ready = [at for at, count in enumerate(waiting) if not count]
    for at in ready:
        for reader in readers[at]:
            waiting[reader] -= 1
            if not waiting[reader]:
                ready.append(reader)
    if len(ready) == len(needs):
        return []
    # Whoever still waits, waits for another who does: that leads into a cycle.
    at = next(i for i, count in enumerate(waiting) if count)
    path: dict[int, int] = {}
    while at not in path:
        path[at] = len(path)
        at = next(other for other in needs[at] if waiting[other])
    return list(path)[path[at] :]
