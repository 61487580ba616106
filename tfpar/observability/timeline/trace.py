"""`Trace`: a timeline as Chrome trace JSON, which Perfetto (ui.perfetto.dev) shows.

    trace = Trace({0: "rank 0"})
    trace.add(Slice(0, "compute", "net/up", 0.001, 0.002, "forward", {"op": "MatMul"}))
    trace.save("t.json")

A process has threads, a thread has slices side by side. Slices of one thread that overlap are
shown in lanes of their own, `compute` and `compute 2`: viewers drop what neither follows nor lies
within another slice. Numbers of processes in the file are one larger: Perfetto takes 0 for the
kernel's idle process. The format: "Trace Event Format" of the Chromium project.
"""

from __future__ import annotations

import dataclasses
import heapq
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import msgspec

from tfpar.spec import TfparError
from tfpar.writable import write_whole

THREADS = ("steps", "tasks", "compute", "communication")
"""The threads of a process, in the order in which they are shown."""

_MOST_SECONDS = 1e12
"""More are no times, but what a damaged file says."""

WAITING = "waiting"
"""The category of the slices in which a rank waits for another."""


@dataclasses.dataclass(frozen=True, eq=False)
class Slice:
    """Slice of a thread: what runs from `start` to `end`, in seconds.

    Attributes:
        process: by its number, and one of its `THREADS`.
        category: what viewers filter by: a phase, or `WAITING`.
        arguments: what is shown of it when it is chosen; JSON values.
    """

    process: int
    thread: str
    name: str
    start: float
    end: float
    category: str = ""
    arguments: Mapping[str, Any] = dataclasses.field(default_factory=dict)


class FlowArrow(NamedTuple):
    """An arrow from a slice to one that it leads to."""

    source: Slice
    target: Slice


@dataclasses.dataclass(eq=False)
class Trace:
    """A timeline.

    Attributes:
        processes: their names, by number.
        notes: what the file says of itself; JSON values.
    """

    processes: Mapping[int, str]
    notes: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    slices: list[Slice] = dataclasses.field(default_factory=list)
    flows: list[FlowArrow] = dataclasses.field(default_factory=list)

    def add(self, slice_: Slice) -> Slice:
        """Append a slice; returns it, for flows."""
        self.slices.append(slice_)
        return slice_

    def to_builtins(self) -> dict[str, Any]:
        """The JSON object: `traceEvents`, metadata first, then by time."""
        lanes = _lanes(self.slices)
        threads = _threads({(s.process, s.thread, lanes[s]) for s in self.slices})
        at = {s: (s.process, threads[s.process, s.thread, lanes[s]]) for s in self.slices}
        events = [_event(s, *at[s]) for s in self.slices]
        for number, flow in enumerate(self.flows, 1):
            events += _arrow(number, flow, at)
        return {
            "traceEvents": [
                *_process_names(self.processes),
                *_thread_names(threads),
                *sorted(events, key=lambda e: (e["ts"], "Xsf".index(e["ph"]), e["pid"], e["tid"])),
            ],
            "displayTimeUnit": "ms",
            "otherData": dict(self.notes),
        }

    def save(self, path: str) -> None:
        """Write the file; it appears whole or not at all.

        Raises:
            TfparError: it cannot be written.
        """
        write_whole("timeline", path, msgspec.json.encode(self.to_builtins()))


def _lanes(slices: Sequence[Slice]) -> dict[Slice, int]:
    """The lane of each slice in its thread: the first that is free when it starts."""
    found: dict[Slice, int] = {}
    busy: dict[tuple[int, str], list[tuple[float, int]]] = {}  # (end, lane)
    free: dict[tuple[int, str], list[int]] = {}
    for one in sorted(slices, key=lambda s: (_ns(s.start), _ns(s.end))):
        key = one.process, one.thread
        running, idle = busy.setdefault(key, []), free.setdefault(key, [])
        while running and running[0][0] <= _ns(one.start):
            heapq.heappush(idle, heapq.heappop(running)[1])
        lane = heapq.heappop(idle) if idle else len(running)
        heapq.heappush(running, (_ns(one.end), lane))
        found[one] = lane
    return found


def _threads(used: set[tuple[int, str, int]]) -> dict[tuple[int, str, int], int]:
    """The number of each lane, unique in the file, in the order in which they are shown."""
    order = sorted(used, key=lambda key: (key[0], _place(key[1]), key[1], key[2]))
    return {key: number for number, key in enumerate(order, 1)}


def _place(thread: str) -> int:
    return THREADS.index(thread) if thread in THREADS else len(THREADS)


def _process_names(processes: Mapping[int, str]) -> Iterator[dict[str, Any]]:
    for order, (process, name) in enumerate(sorted(processes.items())):
        yield _metadata("process_name", process, 0, name=name)
        yield _metadata("process_sort_index", process, 0, sort_index=order)


def _thread_names(threads: Mapping[tuple[int, str, int], int]) -> Iterator[dict[str, Any]]:
    for (process, thread, lane), number in threads.items():
        name = f"{thread} {lane + 1}" if lane else thread
        yield _metadata("thread_name", process, number, name=name)
        yield _metadata("thread_sort_index", process, number, sort_index=number)


def _metadata(what: str, process: int, thread: int, **arguments: Any) -> dict[str, Any]:
    pid = _pid(process)
    return {"ph": "M", "name": what, "pid": pid, "tid": thread, "ts": 0, "args": arguments}


def _pid(process: int) -> int:
    return process + 1


def _event(one: Slice, process: int, thread: int) -> dict[str, Any]:
    start, end = _ns(one.start), _ns(one.end)
    return {
        "ph": "X",
        "name": one.name,
        "cat": one.category or one.thread,
        "pid": _pid(process),
        "tid": thread,
        "ts": _us(start),
        "dur": _us(end - start),
        "args": dict(one.arguments),
    }


def _arrow(
    number: int, flow: FlowArrow, at: Mapping[Slice, tuple[int, int]]
) -> list[dict[str, Any]]:
    """Return the two ends of an arrow, each bound to the slice that it is in."""
    ends = []
    for phase, one in (("s", flow.source), ("f", flow.target)):
        process, thread = at[one]
        end = {"ph": phase, "id": number, "name": "sent", "cat": "transfer"}
        end |= {"pid": _pid(process), "tid": thread, "ts": _us(_ns(one.start))}
        ends.append({**end, "bp": "e"} if phase == "f" else end)
    return ends


def _ns(seconds: float) -> int:
    """Whole nanoseconds: what follows another slice still does so once it is rounded."""
    if not abs(seconds) < _MOST_SECONDS:
        raise TfparError(f"A slice of the timeline is at {seconds:g} s: no step takes that long.")
    return round(seconds * 1e9)


def _us(nanoseconds: int) -> float:
    """Microseconds of which a viewer gets these nanoseconds again, whether it rounds or cuts off.

    One that cuts off takes a slice for overlapping, by a nanosecond, and drops it.
    """
    found = nanoseconds / 1000
    return found if int(found * 1000.0) == nanoseconds else math.nextafter(found, math.inf)
