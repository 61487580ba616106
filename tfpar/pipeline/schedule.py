"""`Schedule`: the order of tasks on each actor, as a value."""

from __future__ import annotations

import dataclasses
import functools
import os
import re
from collections.abc import Iterator
from typing import NamedTuple

from tfpar.pipeline.tasks import Kind, Task
from tfpar.pipeline.validate import Orders, check_complete, read_orders
from tfpar.readable import UnreadableError, read_text
from tfpar.spec import ScheduleError
from tfpar.spec.arguments import path as path_of
from tfpar.spec.arguments import shown
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

    @functools.cached_property
    def halved_stages(self) -> frozenset[int]:
        """Stages whose backward pass runs in halves."""
        return frozenset(t.stage for order in self.orders for t in order if t.kind == "I")

    def stages_of(self, actor: int) -> tuple[int, ...]:
        """Return the stages of one actor, in their order."""
        return tuple(stage for stage, home in enumerate(self.actors) if home == actor)

    def forward(self) -> tuple[tuple[Task, ...], ...]:
        """Return the forward tasks of each actor in order: what evaluation runs."""
        return tuple(tuple(t for t in order if t.kind == "F") for order in self.orders)


# --- Schedules as text: a line for each actor, as PyTorch's pipelining writes them ---
#
#     0F0,0F1,0B0,,0B1
#     1F0,1B0,1F1,1B1
#
# A cell is a stage, a kind and a microbatch. Empty cells are idle time if all tasks take as long,
# and say nothing of the order. Spaces separate cells as commas do. Files differ in what a `B` is:
#
# - Where a stage has `I`, the half for inputs has a letter of its own, and `B` is the whole
# backward   pass. So it is where a stage has no `W`.
# - Where a stage has `W` and no `I`, its `B` is the half for inputs. A `BW` beside it is the whole.
# - `(0F7;7B3)OVERLAP_F_B` is a pair that runs at the same time where ranks can; here the first runs
#   before the second.
#
# Files with communication list what is sent (`SEND_F`, `RECV_F`, `SEND_B`, `RECV_B`), and how
# weights
# are laid (`UNSHARD`, `RESHARD`, `REDUCE_GRAD`). These cells are passed over: what is sent follows
# from what stages read, how weights are laid from their plans. The order of tasks is the same.

COMMUNICATION = ("SEND_F", "RECV_F", "SEND_B", "RECV_B", "UNSHARD", "RESHARD", "REDUCE_GRAD")

_CELL = re.compile(r"(?P<stage>\d{1,9})(?P<kind>[A-Z_]+)(?P<micro>\d{0,9})", re.ASCII)
_PAIR = re.compile(r"\((?P<cells>[^()]*)\)OVERLAP_F_B")
_SEPARATED = re.compile(r"\([^()]*\)[^,\s]*|[^,\s]+")


class _Cell(NamedTuple):
    """A task as it is written: `kind` is F, B, I, W or BW."""

    kind: str
    stage: int
    micro: int


def format_orders(orders: Orders) -> str:
    """Format a schedule as text: no idle cells, halves as `I` and `W`."""
    return "\n".join(",".join(map(str, order)) for order in orders)


def parse_orders(text: str, source: str) -> Orders:
    """Parse the tasks of each actor.

    Args:
        source: names the text in errors.

    Raises:
        ScheduleError: names the line and the cell that cannot be read.
    """
    lines = text.splitlines()
    filled = [number for number, line in enumerate(lines) if line.strip(", \t")]
    if not filled:
        raise ScheduleError(f"{source} has no tasks. A line of it is such as 0F0,0F1,0B0,0B1.")
    rows = []
    for number in range(filled[0], filled[-1] + 1):
        rows.append([cell for cell in _cells(lines[number], f"{source}, line {number + 1}")])
    cells = [cell for row in rows for cell in row]
    with_weights = {cell.stage for cell in cells if cell.kind == "W"}
    with_inputs = {cell.stage for cell in cells if cell.kind == "I"}
    halved = with_weights - with_inputs
    return tuple(tuple(_task(cell, halved) for cell in row) for row in rows)


def _task(cell: _Cell, halved: set[int]) -> Task:
    """The task of a cell, given the stages whose `B` is the half for inputs."""
    kinds: dict[str, Kind] = {"F": "F", "I": "I", "W": "W", "BW": "B"}
    if cell.kind == "B":
        return Task("I" if cell.stage in halved else "B", cell.stage, cell.micro)
    return Task(kinds[cell.kind], cell.stage, cell.micro)


def _cells(line: str, where: str) -> Iterator[_Cell]:
    for at, match in enumerate(_SEPARATED.finditer(line), start=1):
        written = match[0]
        pair = _PAIR.fullmatch(written)
        inside = pair["cells"].split(";") if pair else [written]
        for cell in inside:
            found = _CELL.fullmatch(cell.strip())
            if found and found["kind"] in COMMUNICATION and not pair:
                continue
            if not found or found["kind"] not in ("F", "B", "I", "W", "BW") or not found["micro"]:
                raise ScheduleError(
                    f"{where}, cell {at}: cannot read {shown(written)}. A cell is a stage, one of "
                    f"F, B, I and W, and a microbatch, such as 2F0, or a pair such as "
                    f"(0F7;7B3)OVERLAP_F_B."
                )
            yield _Cell(found["kind"], int(found["stage"]), int(found["micro"]))
