"""Picture of one step of a timeline's file, as SVG: who computes, communicates and waits, and when.

A lane of a rank is columns of pixels. A column has the colour of what takes most of its time, so
that a picture has about the same size however many slices the step has.
"""

from __future__ import annotations

import collections
import html
import itertools
import math
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import msgspec

from tfpar.observability.timeline.trace import THREADS, WAITING
from tfpar.spec.quantities import format_seconds

MOST_RANKS = 16
"""More are not drawn."""

_LEFT, _COLUMNS, _TOP, _LANE, _GAP = 150, 800, 44, 14, 6
"""In pixels: the names, the time, the legend, a lane, and what is between two ranks."""

_COLOURS = {
    "forward": "#4c8dd9",
    "backward": "#e0903a",
    "update": "#5aa35a",
    "communication": "#8e5bbf",
    WAITING: "#c8c8c8",
    "other": "#7a7a7a",
}

Lane = tuple[int, str]
"""A process and a thread of it, whose lanes in the file are drawn as one."""


class _Span(NamedTuple):
    """Work in a lane, in microseconds."""

    lane: Lane
    kind: str
    start: float
    end: float


def draw_step(path: str) -> str | None:
    """Draw the last step of a timeline's file; None if there is no such file or no step in it."""
    try:
        with open(path, "rb") as file:
            events = msgspec.json.decode(file.read())["traceEvents"]
    except (OSError, msgspec.DecodeError, KeyError, TypeError):
        return None
    named = {(e["name"], e["pid"], e["tid"]): e["args"] for e in events if e["ph"] == "M"}
    ranks = {pid: args["name"] for (what, pid, _), args in named.items() if what == "process_name"}
    spans: list[_Span] = []
    steps: dict[str, list[_Span]] = collections.defaultdict(list)
    for event in (e for e in events if e["ph"] == "X"):
        thread = named["thread_name", event["pid"], event["tid"]]["name"].rstrip(" 0123456789")
        span = _Span(
            (event["pid"], thread), _kind(thread, event), event["ts"], event["ts"] + event["dur"]
        )
        (steps[event["name"]] if thread == THREADS[0] else spans).append(span)
    if not steps:
        return None
    name, last = max(steps.items(), key=lambda step: max(span.end for span in step[1]))
    window = min(span.start for span in last), max(span.end for span in last)
    return _draw(f"{name}: {format_seconds((window[1] - window[0]) / 1e6)}", ranks, spans, window)


def _kind(thread: str, event: Mapping[str, Any]) -> str:
    """The colour's name of a slice."""
    kind = str(event.get("cat"))
    if thread == "communication" and kind != WAITING:
        return thread
    return kind if kind in _COLOURS else "other"


def _draw(
    title: str, ranks: Mapping[int, str], spans: Iterable[_Span], window: tuple[float, float]
) -> str:
    """Draw what runs in a window of time, in microseconds."""
    columns = _columns(spans, window)
    shown = sorted(ranks)[:MOST_RANKS]
    parts, y = [], float(_TOP)
    for rank in shown:
        lanes = [thread for thread in THREADS[1:] if (rank, thread) in columns]
        for thread in lanes or ["compute"]:
            text = f"{ranks[rank]}, {thread}" if lanes else f"{ranks[rank]}: nothing of its own"
            parts.append(_text(_LEFT - 8, y + _LANE - 3, text, "end"))
            parts += _paths(columns.get((rank, thread), {}), y)
            y += _LANE + 1
        y += _GAP
    if len(ranks) > len(shown):
        parts.append(_text(_LEFT, y + _LANE, f"{len(ranks) - len(shown)} more ranks", "start"))
        y += _LANE + _GAP
    seconds = (window[1] - window[0]) / 1e6
    parts += _axis(seconds, y)
    used = {kind for kinds in columns.values() for kind in kinds.values()}
    parts += _legend(title, [kind for kind in _COLOURS if kind in used])
    width, height = _LEFT + _COLUMNS + 40, y + 22
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height:g}" width="{width}" '
        f'height="{height:g}" font-family="sans-serif" font-size="11"><rect width="100%" '
        f'height="100%" fill="#fff"/>{"".join(parts)}</svg>'
    )


def _columns(spans: Iterable[_Span], window: tuple[float, float]) -> dict[Lane, dict[int, str]]:
    """The kind of each column of a lane in which anything runs: what takes most of its time."""
    start, end = window
    per_us = _COLUMNS / max(end - start, 1e-9)
    taken: dict[Lane, dict[int, dict[str, float]]] = {}
    for span in spans:
        first, last = (min(max((t - start) * per_us, 0), _COLUMNS) for t in (span.start, span.end))
        if first == last and not start <= span.start < end:
            continue  # of another step
        columns = taken.setdefault(span.lane, {})
        for column in range(int(first), max(math.ceil(last), int(first) + 1)):
            share = min(last, column + 1) - max(first, column)
            kinds = columns.setdefault(column, collections.defaultdict(float))
            kinds[span.kind] += max(share, 1e-9)
    return {
        lane: {
            column: max(kinds, key=kinds.__getitem__) for column, kinds in sorted(columns.items())
        }
        for lane, columns in taken.items()
    }


def _paths(columns: Mapping[int, str], y: float) -> Iterator[str]:
    """A path for each kind in a lane: a box for each run of its columns."""
    boxes: dict[str, list[str]] = {}
    runs = itertools.groupby(enumerate(columns.items()), lambda at: (at[1][0] - at[0], at[1][1]))
    for (_, kind), run in runs:
        found = [column for _, (column, _) in run]
        boxes.setdefault(kind, []).append(
            f"M{_LEFT + found[0]} {y:g}h{len(found)}v{_LANE}h-{len(found)}z"
        )
    for kind, drawn in boxes.items():
        yield f'<path fill="{_COLOURS[kind]}" d="{"".join(drawn)}"/>'


def _axis(seconds: float, y: float) -> Iterator[str]:
    for quarter in range(5):
        x = _LEFT + _COLUMNS * quarter / 4
        yield f'<path stroke="#999" d="M{x:g} {_TOP}V{y:g}" stroke-dasharray="1 3"/>'
        text = format_seconds(seconds * quarter / 4) if quarter else "0"
        yield _text(x, y + 12, text, "middle")


def _legend(title: str, kinds: Iterable[str]) -> Iterator[str]:
    yield f'<text x="8" y="16" font-weight="bold">{html.escape(title)}</text>'
    for i, kind in enumerate(kinds):
        x = _LEFT + 120 * i
        yield f'<rect x="{x}" y="24" width="10" height="10" fill="{_COLOURS[kind]}"/>'
        yield _text(x + 15, 33, kind, "start")


def _text(x: float, y: float, text: str, anchor: str) -> str:
    return f'<text x="{x:g}" y="{y:g}" text-anchor="{anchor}">{html.escape(text)}</text>'
