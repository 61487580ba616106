"""Schedules by name. Each family is a rule that gives the tasks of every actor in order."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

from tfpar.pipeline.generators.gpipe import gpipe
from tfpar.pipeline.generators.schedule_1f1b import (
    interleaved,
    schedule_1f1b,
)
from tfpar.pipeline.generators.zero_bubble import zb_h1, zb_v
from tfpar.pipeline.schedule import Schedule
from tfpar.spec import ArgumentError, ScheduleError
from tfpar.spec.arguments import argument_error, check_choice, integer

__all__ = [
    "FAMILIES",
    "MOST_PASSES",
    "Family",
    "check_passes",
    "generate",
    "gpipe",
    "interleaved",
    "name_of",
    "schedule_1f1b",
    "schedule_on",
    "schedules_on",
    "zb_h1",
    "zb_v",
]


class Family(NamedTuple):
    """A rule, and how many stages an actor may have.

    Attributes:
        rule: of (actors, microbatches, virtual stages).
        virtual_stages: of each actor, where nothing else is asked.
        most: more stages than that an actor cannot have; None: any number.
        least: fewer it cannot have.
    """

    rule: Callable[[int, int, int], Schedule]
    virtual_stages: int
    most: int | None
    least: int = 1


FAMILIES: Mapping[str, Family] = {
    "gpipe": Family(gpipe, 1, None),
    "1f1b": Family(schedule_1f1b, 1, 1),
    "interleaved": Family(interleaved, 2, None),
    "zb-h1": Family(zb_h1, 1, 1),
    "zb-v": Family(zb_v, 2, 2, least=2),
}


MOST_PASSES = 2**20
"""Forward passes of a schedule, of all stages. They are listed one by one: this takes seconds."""

_LEAST_KEPT_FIRST = sorted(FAMILIES, key=lambda name: name == "gpipe")


def generate(
    name: str, actors: int, microbatches: int, virtual_stages: int | None = None
) -> Schedule:
    """Generate a schedule of a family.

        print(generate("1f1b", 2, 4))

    Args:
        name: one of `FAMILIES`.
        actors: their number.
        virtual_stages: of each actor; by default 2 where the family is made for that, else 1.

    Raises:
        ArgumentError: names the argument and what was given.
    """
    family = FAMILIES[check_choice("schedule", name, FAMILIES)]
    actors, microbatches = integer("actors", actors, 1), integer("microbatches", microbatches, 1)
    virtual_stages = stages_of_each(name, virtual_stages)
    check_passes(actors * virtual_stages, microbatches)
    return family.rule(actors, microbatches, virtual_stages)


def check_passes(stages: int, microbatches: int) -> None:
    """Check that a schedule of so many stages and microbatches is not too long.

    Raises:
        ArgumentError: it is; says so.
    """
    if stages * microbatches > MOST_PASSES:
        raise ArgumentError(
            f"{stages:,} stages that run {microbatches:,} microbatches make a schedule that is too "
            f"long; at most {MOST_PASSES:,} forward passes are possible. Give fewer stages or "
            f"microbatches."
        )


def schedules_on(
    actors: Sequence[int], microbatches: int, halves: bool = True
) -> Iterator[tuple[str, Schedule]]:
    """Yield the schedules by name whose stages these actors run, and their names: first those that
    keep least.

    Args:
        actors: of each stage.
        halves: whether backward passes may run in halves.
    """
    num_actors = max(actors) + 1
    for name in _LEAST_KEPT_FIRST:
        try:
            schedule = generate(name, num_actors, microbatches, len(actors) // num_actors)
        except ArgumentError:  # not for so many stages
            continue
        if schedule.actors == tuple(actors) and (halves or not schedule.halved_stages):
            yield name, schedule


def schedule_on(actors: Sequence[int], microbatches: int, halves: bool = True) -> Schedule:
    """Return the first of `schedules_on`.

    Raises:
        ScheduleError: there is none.
    """
    for _, schedule in schedules_on(actors, microbatches, halves):
        return schedule
    raise ScheduleError(f"There is no schedule by name for stages on actors {list(actors)}.")


def name_of(schedule: Schedule) -> str:
    """Return the family that a schedule is of; `"given"` if it is of none."""
    each, rest = divmod(schedule.num_stages, schedule.num_actors)
    for name in sorted(FAMILIES, key=lambda name: name != "1f1b"):  # several with one microbatch
        with contextlib.suppress(ArgumentError):
            made = generate(name, schedule.num_actors, schedule.num_microbatches, each)
            if made == schedule and not rest:
                return name
    return "given"


def stages_of_each(name: str, virtual_stages: int | None) -> int:
    """Return the number of stages of each actor in a schedule of this family.

    Raises:
        ArgumentError: more or fewer than it can have.
    """
    family = FAMILIES[name]
    if virtual_stages is None:
        return family.virtual_stages
    found = integer("virtual_stages", virtual_stages, family.least)
    if family.most is not None and found > family.most:
        raise argument_error(
            "virtual_stages", virtual_stages, f"{family.most} with schedule {name!r}"
        )
    return found
