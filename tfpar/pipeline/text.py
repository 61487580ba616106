"""Schedules as text: a line for each actor, as PyTorch's pipelining writes them.

    0F0,0F1,0B0,,0B1
    1F0,1B0,1F1,1B1

A cell is a stage, a kind and a microbatch. Empty cells are idle time if all tasks take as long, and
say nothing of the order. Spaces separate cells as commas do. Files differ in what a `B` is:

- Where a stage has `I`, the half for inputs has a letter of its own, and `B` is the whole backward
  pass. So it is where a stage has no `W`.
- Where a stage has `W` and no `I`, its `B` is the half for inputs. A `BW` beside it is the whole.
- `(0F7;7B3)OVERLAP_F_B` is a pair that runs at the same time where ranks can; here the first runs
  before the second.

Files with communication list what is sent (`SEND_F`, `RECV_F`, `SEND_B`, `RECV_B`), and how weights
are laid (`UNSHARD`, `RESHARD`, `REDUCE_GRAD`). These cells are passed over: what is sent follows
from what stages read, how weights are laid from their plans. The order of tasks is the same.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import NamedTuple

from tfpar.pipeline.tasks import Kind, Task
from tfpar.pipeline.validate import Orders
from tfpar.spec import ScheduleError
from tfpar.spec.arguments import shown

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
