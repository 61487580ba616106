"""Checks of a schedule that need no graph of stages: it has every task once, where it can run."""

from __future__ import annotations

from typing import Any

from tfpar.pipeline.tasks import SCHEDULED, Task, format_tasks
from tfpar.spec import ScheduleError
from tfpar.spec.arguments import check_list, shown, to_integer

Orders = tuple[tuple[Task, ...], ...]


def read_orders(orders: Any) -> Orders:
    """Return `orders` in the form that a `Schedule` has.

    Raises:
        ArgumentError: no lists.
        ScheduleError: what is no task, or none that a schedule orders.
    """
    expected = "for each set of ranks, the tasks that it runs"
    rows = enumerate(check_list("orders", orders, expected))
    found = [check_list(f"orders[{actor}]", row, expected) for actor, row in rows]
    return tuple(
        tuple(_task(task, f"Task {at} of actor {actor}") for at, task in enumerate(order))
        for actor, order in enumerate(found)
    )


def _task(value: Any, where: str) -> Task:
    fields = tuple(value) if isinstance(value, tuple | list) else ()
    if len(fields) == 3 and fields[0] in SCHEDULED:
        kind, stage, micro = fields[0], to_integer(fields[1]), to_integer(fields[2])
        if stage is not None and micro is not None and min(stage, micro) >= 0:
            return Task(kind, stage, micro)
    given = str(value) if isinstance(value, Task) else shown(value)
    raise ScheduleError(
        f"{where} is {given}; it must be a Task of kind {', '.join(SCHEDULED)} with a stage and a "
        f"microbatch, both counted from 0."
    )


def check_complete(orders: Orders) -> None:
    """Check that stages and microbatches are numbered from 0, and that every task is there once.

    Raises:
        ScheduleError: names the tasks, stages or actors that are wrong.
    """
    if not orders:
        raise ScheduleError("The schedule has no actors: it orders nothing.")
    for actor, order in enumerate(orders):
        if not order:
            raise ScheduleError(
                f"Actor {actor} runs nothing. Leave it out, or give it a stage: a line of a "
                f"schedule is a set of ranks."
            )
    places = _places(orders)
    stages = sorted({task.stage for task in places})
    micros = sorted({task.micro for task in places})
    for who, what, found in (("actor", "stage", stages), ("stage", "microbatch", micros)):
        absent = next((number for number, one in enumerate(found) if number != one), None)
        if absent is not None:
            raise ScheduleError(
                f"No {who} runs {what} {absent}, though there is a {what} {found[-1]}: they are "
                f"numbered from 0."
            )
    _check_homes(places)
    _check_each(places, len(stages), len(micros))


def _places(orders: Orders) -> dict[Task, tuple[int, int]]:
    """Of each task, its actor and its place in that actor's order."""
    places: dict[Task, tuple[int, int]] = {}
    for actor, order in enumerate(orders):
        for at, task in enumerate(order):
            if task in places:
                first = places[task]
                raise ScheduleError(
                    f"{task} is there twice: task {first[1]} of actor {first[0]}, and task {at} of "
                    f"actor {actor}."
                )
            places[task] = actor, at
    return places


def _check_homes(places: dict[Task, tuple[int, int]]) -> None:
    homes: dict[int, tuple[int, Task]] = {}
    for task, (actor, _) in places.items():
        home, first = homes.setdefault(task.stage, (actor, task))
        if home != actor:
            raise ScheduleError(
                f"Stage {task.stage} is on two actors: {first} on {home}, {task} on {actor}. The "
                f"ranks of a stage hold its weights, and run all of its tasks."
            )


def _check_each(places: dict[Task, tuple[int, int]], stages: int, micros: int) -> None:
    """Each microbatch has F, and B or I and W, at each stage, in this order."""
    for stage in range(stages):
        lacking: list[Task] = []
        for micro in range(micros):
            forward, whole, half, weights = (Task(kind, stage, micro) for kind in SCHEDULED)
            halves = [task for task in (half, weights) if task in places]
            if whole in places and halves:
                raise ScheduleError(
                    f"The schedule has {whole}, a whole backward pass, and "
                    f"{format_tasks(halves)}, a half of the same: it can have {whole}, "
                    f"or {half} and {weights}."
                )
            needed = [forward, half, weights] if halves else [forward, whole]
            lacking += [task for task in needed if task not in places]
            there = [task for task in needed if task in places]
            for before, after in zip(there, there[1:], strict=False):
                if places[before] > places[after]:
                    raise ScheduleError(
                        f"{after} comes before {before} on actor {places[after][0]}, but needs "
                        f"what that makes."
                    )
        if lacking:
            raise ScheduleError(
                f"The schedule lacks {format_tasks(lacking)}: each of {stages} stages needs a "
                f"forward and a backward pass (B, or I and W) of each of {micros} microbatches."
            )
