"""A measured timeline: what all ranks recorded, on one clock, with who waited for whom."""

from __future__ import annotations

import dataclasses
import statistics
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence

from tfpar.observability.timeline.records import CollectiveSpan, OpSpan, RankTrace
from tfpar.observability.timeline.trace import WAITING, FlowArrow, Slice, Trace

Key = tuple[int, str, int]
"""Of one run of a collective: its step, its key in the step, and how often it ran before there."""


@dataclasses.dataclass(frozen=True)
class _Part:
    """Part of one rank in one run of a collective, in the common time of all ranks."""

    rank: int
    met: CollectiveSpan
    arrived: int
    end: int


def measured_trace(
    records: Sequence[RankTrace], notes: Mapping[str, object] | None = None
) -> Trace:
    """The timeline of some steps.

    Args:
        records: of all ranks.
        notes: what the file says of itself.
    """
    ahead = clocks_ahead(records)
    begins = [step.start - ahead[r.clock] for r in records for step in r.steps]
    zero = min(begins, default=0)
    trace = Trace({r.rank: f"rank {r.rank}" for r in records}, dict(notes or {}))
    parts: dict[Key, list[_Part]] = defaultdict(list)
    for record in records:
        before = zero + ahead[record.clock]
        for step in record.steps:
            start, end = _seconds(step.start - before), _seconds(step.end - before)
            trace.add(Slice(record.rank, "steps", f"step {step.number}", start, end))
            for thread, several in (("tasks", step.tasks), ("compute", step.ran)):
                for ran in several:
                    trace.add(_ran(record.rank, thread, ran, before, step.number))
            for met in step.met:
                key = step.number, met.kind.key, met.nth
                parts[key].append(_Part(record.rank, met, met.arrived - before, met.end - before))
    for (number, *_), each in parts.items():
        _draw(trace, each, number)
    return trace


def clocks_ahead(records: Iterable[RankTrace]) -> dict[str, int]:
    """Estimate how many nanoseconds each clock is ahead of that of the first record.

    A collective ends at about the same moment on all of its ranks: clocks differ by the median of
    how its ends do. Ranks on one machine share a clock. Of clocks whose ranks have met in nothing,
    the begins of steps stand for that.
    """
    ends: dict[str, dict[Key, list[int]]] = {}
    begins: dict[str, dict[int, int]] = {}
    for record in records:
        own = ends.setdefault(record.clock, defaultdict(list))
        for step in record.steps:
            begins.setdefault(record.clock, {}).setdefault(step.number, step.start)
            for met in step.met:
                own[step.number, met.kind.key, met.nth].append(met.end)
    ahead: dict[str, int] = {}
    while len(ahead) < len(ends):
        known = [*ahead]
        if not known:
            ahead[next(iter(ends))] = 0
            continue
        # The clock next that has met most often with one that is known.
        pairs = [(len(ends[a].keys() & ends[b].keys()), a, b) for a in known for b in ends]
        shared, near, far = max(
            (pair for pair in pairs if pair[2] not in ahead), key=lambda pair: pair[0]
        )
        if shared:
            common = ends[near].keys() & ends[far].keys()
            differences = [max(ends[far][key]) - max(ends[near][key]) for key in common]
        else:
            one, other = begins.get(near, {}), begins.get(far, {})
            differences = [other[n] - one[n] for n in one.keys() & other.keys()] or [0]
        ahead[far] = ahead[near] + round(statistics.median(differences))
    return ahead


def _draw(trace: Trace, parts: Sequence[_Part], step: int) -> None:
    """One run of a collective: on each rank what it waited for, and what it took from then on."""
    # Who sends knows what it is.
    kind = max((part.met.kind for part in parts), key=lambda kind: kind.what == "send")
    late = max(parts, key=lambda part: part.arrived)
    arguments = {
        "step": step,
        "bytes": kind.num_bytes,
        "group": list(kind.group),
        "axes": list(kind.axes),
        "layers": list(kind.layers),
    }
    if kind.predicted_s is not None:
        arguments["predicted"] = kind.predicted_s
    drawn: dict[str, Slice] = {}
    for part in parts:
        begin = min(max(part.arrived, late.arrived), part.end)
        own = part.met.kind
        name = own.named(kind.layers)
        if begin > part.arrived and own.what != "send":  # which nothing waits for
            waiting = f"waiting for rank {late.rank}"
            told = {"step": step, "for": name, "group": list(kind.group)}
            times = _seconds(part.arrived), _seconds(begin)
            trace.add(Slice(part.rank, "communication", waiting, *times, WAITING, told))
        times = _seconds(begin), _seconds(part.end)
        drawn[own.what] = trace.add(
            Slice(part.rank, "communication", name, *times, kind.phase, arguments)
        )
    if drawn.keys() == {"send", "recv"}:
        trace.flows.append(FlowArrow(drawn["send"], drawn["recv"]))


def _ran(rank: int, thread: str, ran: OpSpan, before: int, step: int) -> Slice:
    start, end = _seconds(ran.start - before), _seconds(ran.end - before)
    return Slice(rank, thread, ran.name, start, end, ran.phase, {"op": ran.what, "step": step})


def _seconds(nanoseconds: int) -> float:
    return nanoseconds / 1e9
