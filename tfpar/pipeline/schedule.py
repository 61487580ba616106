"""`Schedule`: the order of tasks on each actor, as a value."""

from __future__ import annotations

import dataclasses
import functools
import os

from tfpar.pipeline.tasks import Task
from tfpar.pipeline.text import format_orders, parse_orders
from tfpar.pipeline.validate import Orders, check_complete, read_orders
from tfpar.readable import UnreadableError, read_text
from tfpar.spec import ScheduleError
from tfpar.spec.arguments import path as path_of
from tfpar.spec.arguments import text as text_of


@dataclasses.dataclass(frozen=True)
class Schedule:
    """Schedule of a pipeline: the order in which each actor runs its tasks.

        schedule = tap.Schedule.load("zero_bubble.csv")
        print(schedule.num_stages, schedule.num_microbatches)

    A schedule is complete: it has every task of its stages and microbatches once, and all tasks of
    a stage are on one actor. Whether it can run depends on which stage reads which
    (`StageGraph.check`).

    Args:
        orders: for each actor (ranks that run tasks together) its tasks in order, of kinds F, B, I
            and W (`tfpar.pipeline.tasks`).

    Raises:
        ScheduleError: a task is missing, twice, of another kind or before what it needs; a stage
            has no actor, or two. Names them.
    """

    orders: Orders

    def __post_init__(self) -> None:
        object.__setattr__(self, "orders", read_orders(self.orders))
        check_complete(self.orders)

    @classmethod
    def parse(cls, text: str) -> Schedule:
        """Parse the schedule that a text states, a line for each actor; see `tfpar.pipeline.text`.

        Raises:
            ScheduleError: names the line and the cell; and as of `Schedule`.
        """
        return cls._read(text_of("text", text, "the text of a schedule"), "the schedule")

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Schedule:
        """Load the schedule in a file: what `save` wrote, or PyTorch's pipelining.

        Raises:
            ScheduleError: the file cannot be read; names it, the line and the cell; and as of
                `Schedule`.
        """
        name = path_of("path", path)
        try:
            text = read_text(name, "utf-8-sig")
        except UnreadableError as error:
            raise ScheduleError(f"Cannot read the schedule {name!r}: {error}.") from error
        return cls._read(text, repr(name))

    @classmethod
    def _read(cls, text: str, source: str) -> Schedule:
        orders = parse_orders(text, source)
        try:
            return cls(orders)
        except ScheduleError as error:
            raise ScheduleError(f"{source}: {error}") from None

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the schedule to a file that `load` reads, and PyTorch's pipelining too.

        Raises:
            ScheduleError: the file cannot be written.
        """
        name = path_of("path", path)
        try:
            with open(name, "w", encoding="utf-8") as file:
                file.write(f"{self}\n")
        except OSError as error:
            raise ScheduleError(f"Cannot write the schedule {name!r}: {error.strerror}.") from error

    def __str__(self) -> str:
        """A line for each actor, such as `0F0,0F1,0B0,0B1`; `parse` reads it back."""
        return format_orders(self.orders)

    @property
    def num_actors(self) -> int:
        """Number of actors."""
        return len(self.orders)

    @functools.cached_property
    def num_stages(self) -> int:
        """Number of stages, virtual ones counted."""
        return 1 + max(task.stage for order in self.orders for task in order)

    @functools.cached_property
    def num_microbatches(self) -> int:
        """Number of microbatches."""
        return 1 + max(task.micro for task in self.orders[0])

    @functools.cached_property
    def actors(self) -> tuple[int, ...]:
        """Of each stage, the actor that runs it."""
        found = {task.stage: actor for actor, order in enumerate(self.orders) for task in order}
        return tuple(found[stage] for stage in range(self.num_stages))

    def stages_of(self, actor: int) -> tuple[int, ...]:
        """Return the stages of one actor, in their order."""
        return tuple(stage for stage, home in enumerate(self.actors) if home == actor)

    def forward(self) -> tuple[tuple[Task, ...], ...]:
        """Return the forward tasks of each actor in order: what evaluation runs."""
        return tuple(tuple(t for t in order if t.kind == "F") for order in self.orders)
