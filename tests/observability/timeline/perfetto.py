"""What Perfetto makes of a file: its own trace processor, where there is one, and its rules.

The rules are those of its importer of Chrome's JSON, which drops some events without a word in its
page: a slice that overlaps another one of its thread in part, an arrow of which an end is in no
slice. It reads numbers of microseconds as whole nanoseconds: today rounded, and for years cut off.
"""

from __future__ import annotations

import collections
import csv
import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

from tests.time_limits import time_limit

UINT32 = 2**32


def find_trace_processor() -> str | None:
    """The program, as `TFPAR_TRACE_PROCESSOR` names it or as it is found; None: there is none."""
    named = os.environ.get("TFPAR_TRACE_PROCESSOR")
    return named or shutil.which("trace_processor_shell") or shutil.which("trace_processor")


def query(program: str, trace: Path, sql: str) -> list[list[str]]:
    """The rows that the trace processor finds in a file, as text, without their titles."""
    file = trace.with_suffix(".sql")
    file.write_text(sql)
    command = [program, "-q", str(file), str(trace)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=time_limit(60))
    assert done.returncode == 0, done.stderr
    return list(csv.reader(line for line in done.stdout.splitlines() if line))[1:]


class Imported:
    """What the rules make of events.

    Attributes:
        slices, flows: how many rows there are of each.
        dropped: events that make no row.
    """

    def __init__(self, events: list[dict[str, Any]]) -> None:
        self.slices = self.flows = 0
        self.dropped: list[dict[str, Any]] = []
        open_: dict[tuple[int, int], list[int]] = collections.defaultdict(list)  # ends, inner last
        begun: set[int] = set()
        for event in sorted(events, key=lambda e: _nanoseconds(e["ts"])):
            pid, tid = event["pid"], event["tid"]
            assert 0 < pid < UINT32 and 0 <= tid < UINT32, event  # 0 is the kernel's idle process
            if event["ph"] == "M":
                continue
            assert tid > 0, event
            now, ends = _nanoseconds(event["ts"]), open_[pid, tid]
            if event["ph"] == "X":
                end = now + _nanoseconds(event["dur"])
                while ends and ends[-1] <= now:
                    ends.pop()
                if any(now < other < end for other in ends):
                    self.dropped.append(event)
                else:
                    self.slices += 1
                    ends.append(end)
            elif not ends or (event["ph"] == "f" and event["id"] not in begun):
                self.dropped.append(event)
            elif event["ph"] == "s":
                begun.add(event["id"])
            else:
                assert event["bp"] == "e"  # or it binds to the next slice
                self.flows += 1


def _nanoseconds(microseconds: float) -> int:
    found = round(microseconds * 1000.0)
    assert int(microseconds * 1000.0) == found, microseconds
    return found
