"""Reader of a timeline that `tap.Timeline` wrote: one of its steps, for a plan's report."""

from __future__ import annotations

import dataclasses
import os
import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

from tfpar.observability.report.data.schema import (
    MeasuredLane,
    MeasuredSlice,
    MeasuredStep,
    Report,
)
from tfpar.readable import UnreadableError, convert, parse_json, read_text
from tfpar.spec import PlanError, arguments

MOST_SLICES = 10_000
"""More are slow to draw: then the first ranks are shown, as many as have no more together."""

_STEP = re.compile(r"step (\d{1,18})")
_LANE = re.compile(r"(tasks|compute|communication)( \d+)?")


@dataclasses.dataclass(frozen=True)
class _Event:
    ph: str
    name: str = ""
    pid: int = 0
    tid: int = 0
    ts: float = 0.0
    dur: float = 0.0
    cat: str = ""
    args: dict[str, Any] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class _File:
    traceEvents: tuple[_Event, ...]


def with_measured(report: Report, path: str | os.PathLike[str]) -> Report:
    """Return a report with a step of the timeline at `path` beside the predicted one.

    Raises:
        ArgumentError: `path` is no path.
        PlanError: the file cannot be read, holds no measured step, or is of another model.
    """
    path = arguments.path("timeline", path)
    step = read_measured(path)
    known = {layer.path for layer in report.layers}
    ran = {s.name for lane in step.lanes for s in lane.slices if lane.thread.startswith("compute")}
    if known and ran and not any({name, name.partition("/")[2]} & known for name in ran):
        raise PlanError(
            f"The timeline {path!r} is of another model: none of its slices ({min(ran)!r}, ...) "
            f"is called after a layer of the plan ({min(known)!r}, ...)."
        )
    return dataclasses.replace(report, measured=step)


def read_measured(path: str) -> MeasuredStep:
    """Read the step of median length.

    Raises:
        PlanError: the file cannot be read, or holds no measured step.
    """
    try:
        events = convert(parse_json(read_text(path)), _File, lax=True).traceEvents
    except UnreadableError as error:
        raise PlanError(f"Cannot read the timeline {path!r}: {error}") from error
    ranks = sorted({event.pid for event in events if event.ph == "X"})
    threads = {
        (e.pid, e.tid): str(e.args.get("name"))
        for e in events
        if e.ph == "M" and e.name == "thread_name"
    }
    steps: dict[int, list[_Event]] = defaultdict(list)
    for event in events:
        found = _STEP.fullmatch(event.name)
        if found and event.ph == "X" and threads.get((event.pid, event.tid)) == "steps":
            steps[int(found[1])].append(event)
    if not steps:
        raise PlanError(
            f"The timeline {path!r} holds no measured step. Give a file that tap.Timeline or "
            f"`tfpar run --timeline-filename` wrote; `tfpar timeline` predicts one."
        )
    seconds = {number: _length(parts) for number, parts in steps.items()}
    number = sorted(seconds, key=lambda n: (seconds[n], n))[(len(seconds) - 1) // 2]
    return MeasuredStep(
        source=os.path.basename(path),
        number=number,
        seconds=seconds[number],
        all_seconds=tuple(seconds[n] for n in sorted(seconds)),
        ranks=len(ranks),
        lanes=_lanes(
            [e for e in events if e.ph == "X" and e.args.get("step") == number],
            threads,
            ranks,
            min(part.ts for part in steps[number]),
        ),
    )


def _length(parts: Sequence[_Event]) -> float:
    """Seconds of a step, of which each rank has a part."""
    return (max(p.ts + p.dur for p in parts) - min(p.ts for p in parts)) / 1e6


def _lanes(
    events: Sequence[_Event],
    threads: Mapping[tuple[int, int], str],
    ranks: Sequence[int],
    begin: float,
) -> tuple[MeasuredLane, ...]:
    """The lanes of the first ranks, in the file's order of threads."""
    slices: dict[tuple[int, int], list[MeasuredSlice]] = defaultdict(list)
    for e in events:
        if _LANE.fullmatch(threads.get((e.pid, e.tid), "")):
            start = (e.ts - begin) / 1e6
            slices[e.pid, e.tid].append(MeasuredSlice(e.name, e.cat, start, start + e.dur / 1e6))
    lanes: list[MeasuredLane] = []
    drawn = 0
    for rank, pid in enumerate(ranks):
        own = [key for key in sorted(slices) if key[0] == pid]
        drawn += sum(len(slices[key]) for key in own)
        if rank and drawn > MOST_SLICES:
            break
        lanes += [MeasuredLane(rank, threads[key], tuple(slices[key])) for key in own]
    return tuple(lanes)
