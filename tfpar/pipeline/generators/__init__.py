"""Schedules by name. Each family is a rule that gives the tasks of every actor in order."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from typing import NamedTuple

from tfpar.pipeline.generators.gpipe import gpipe
from tfpar.pipeline.generators.one_forward_one_backward import (
    interleaved,
    one_forward_one_backward,
)
from tfpar.pipeline.generators.zero_bubble import zb_h1, zb_v
from tfpar.pipeline.schedule import Schedule
from tfpar.spec import ArgumentError
from tfpar.spec.arguments import integer, one_of, refused

__all__ = [
    "FAMILIES",
    "Family",
    "generate",
    "gpipe",
    "interleaved",
    "name_of",
    "one_forward_one_backward",
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
    "1f1b": Family(one_forward_one_backward, 1, 1),
    "interleaved": Family(interleaved, 2, None),
    "zb-h1": Family(zb_h1, 1, 1),
    "zb-v": Family(zb_v, 2, 2, least=2),
}


def generate(
    name: str, actors: int, microbatches: int, virtual_stages: int | None = None
) -> Schedule:
    """The schedule of a family.

        print(generate("1f1b", 2, 4))

    Args:
        name: one of `FAMILIES`.
        actors: sets of ranks.
        virtual_stages: of each actor; by default 2 where the family is made for that, else 1.

    Raises:
        ArgumentError: names the argument and what was given.
    """
    family = FAMILIES[one_of("schedule", name, FAMILIES)]
    actors, microbatches = integer("actors", actors, 1), integer("microbatches", microbatches, 1)
    return family.rule(actors, microbatches, stages_of_each(name, virtual_stages))


def name_of(schedule: Schedule) -> str:
    """The family that a schedule is of; `"given"` if it is of none."""
    each, rest = divmod(schedule.num_stages, schedule.num_actors)
    for name in sorted(FAMILIES, key=lambda name: name != "1f1b"):  # several with one microbatch
        with contextlib.suppress(ArgumentError):
            made = generate(name, schedule.num_actors, schedule.num_microbatches, each)
            if made == schedule and not rest:
                return name
    return "given"


def stages_of_each(name: str, virtual_stages: int | None) -> int:
    """How many stages each actor has in a schedule of this family.

    Raises:
        ArgumentError: more or fewer than it can have.
    """
    family = FAMILIES[name]
    if virtual_stages is None:
        return family.virtual_stages
    found = integer("virtual_stages", virtual_stages, family.least)
    if family.most is not None and found > family.most:
        raise refused("virtual_stages", virtual_stages, f"{family.most} with schedule {name!r}")
    return found
