"""What a timeline's file has to be, whoever made it."""

from __future__ import annotations

import collections
import json
from pathlib import Path
from typing import Any

from tests.observability.timeline.perfetto import Imported

Event = dict[str, Any]


class TimelineFile:
    """A file that was read and checked.

    Attributes:
        slices: by time, each with the name of its `thread`, and its `pid` from 0 on, as ranks.
        processes: their names, by number.
    """

    def __init__(self, path: Path | str) -> None:
        self.content = json.loads(Path(path).read_text())
        events: list[Event] = self.content["traceEvents"]
        assert {e["ph"] for e in events} <= {"M", "X", "s", "f"}
        imported, kinds = Imported(events), collections.Counter(e["ph"] for e in events)
        assert not imported.dropped
        assert (imported.slices, imported.flows) == (kinds["X"], kinds["s"])
        for event in events:
            event["pid"] -= 1
        times = [e["ts"] for e in events]
        assert times == sorted(times) and min(times) >= 0
        told = {(e["name"], e["pid"], e["tid"]): e["args"] for e in events if e["ph"] == "M"}
        self.slices = [e for e in events if e["ph"] == "X"]
        for event in events:
            assert isinstance(event["pid"], int) and isinstance(event["tid"], int)
            assert ("process_name", event["pid"], 0) in told
            if event["ph"] != "M":
                name = told["thread_name", event["pid"], event["tid"]]["name"]
                event["thread"] = name.rstrip(" 0123456789")
        assert all(e["dur"] >= 0 and e["name"] for e in self.slices)
        self._check_apart()
        self._check_arrows([e for e in events if e["ph"] in "sf"])
        names = {pid: args for (what, pid, _), args in told.items() if what == "process_name"}
        self.processes = {pid: args["name"] for pid, args in names.items()}

    def _check_apart(self) -> None:
        """Viewers draw slices of a thread only where they do not overlap."""
        ends: dict[tuple[int, int], float] = collections.defaultdict(float)
        for event in self.slices:
            key = event["pid"], event["tid"]
            assert event["ts"] >= ends[key] - 1e-6, event
            ends[key] = event["ts"] + event["dur"]

    def _check_arrows(self, ends: list[Event]) -> None:
        phases: dict[int, str] = collections.defaultdict(str)
        for end in ends:
            phases[end["id"]] += end["ph"]
        assert set(phases.values()) <= {"sf"}
        starts = {(e["pid"], e["tid"], e["ts"]) for e in self.slices}
        assert all((e["pid"], e["tid"], e["ts"]) in starts for e in ends)

    def of(self, thread: str, rank: int | None = None, **arguments: Any) -> list[Event]:
        """The slices of a thread, and of a rank, that have these arguments."""
        return [
            e
            for e in self.slices
            if e["thread"] == thread
            and rank in (None, e["pid"])
            and arguments.items() <= e["args"].items()
        ]

    def waits(self, rank: int | None = None) -> list[Event]:
        """Those in which ranks wait for others."""
        return [e for e in self.of("communication", rank) if e["cat"] == "waiting"]

    def collectives(self, rank: int | None = None, **arguments: Any) -> list[Event]:
        return [e for e in self.of("communication", rank, **arguments) if e["cat"] != "waiting"]
