"""Extraction, from a profile, of what each rank ran and which collectives it took part in."""

from __future__ import annotations

import dataclasses
import itertools
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple, Protocol

from tfpar.ir.graph import Op
from tfpar.observability.timeline.nodes import Local, Meeting, Nodes, TaskCall
from tfpar.observability.timeline.records import CollectiveSpan, OpSpan, StepOfRank


class Event(Protocol):
    """An op that ran; `interop.profiler.OpEvent`."""

    @property
    def node(self) -> str: ...
    @property
    def op_type(self) -> str: ...
    @property
    def start(self) -> int: ...
    @property
    def end(self) -> int: ...
    @property
    def waits(self) -> bool: ...


class StepWindow(NamedTuple):
    """A step that was run: its number, as Keras counts, from `start` to `end`."""

    number: int
    start: int
    end: int


@dataclasses.dataclass(eq=False)
class _Run:
    """One run of a collective: its nodes' first start, and their last end."""

    meeting: Meeting
    start: int
    end: int


def steps_of_ranks(
    window: StepWindow,
    events: Iterable[Event],
    nodes: Nodes,
    ranks: Sequence[int],
    ahead: int = 0,
) -> dict[int, StepOfRank]:
    """Extract what each rank of this process did in a step.

    Args:
        events: by their starts; those outside of the window are left out.
        ranks: that this process has.
        ahead: how many nanoseconds the machine's clock is ahead of the profile's.
    """
    found = _Found(nodes)
    for event in events:
        if window.start <= event.start <= window.end:
            found.take(event)
    met = found.met()
    return {
        rank: StepOfRank(
            window.number,
            window.start + ahead,
            window.end + ahead,
            [_moved(one, ahead) for one in found.ran[rank]],
            [_moved(one, ahead) for one in found.tasks[rank]],
            [
                CollectiveSpan(one.kind, one.nth, one.arrived + ahead, one.end + ahead)
                for one in met.get(rank, ())
            ],
        )
        for rank in ranks
    }


def _moved(one: OpSpan, ahead: int) -> OpSpan:
    return OpSpan(one.start + ahead, one.end + ahead, one.name, one.what, one.phase)


class _Found:
    """The events of a step, sorted by what they are."""

    def __init__(self, nodes: Nodes) -> None:
        self.ran: dict[int, list[OpSpan]] = defaultdict(list)
        self.tasks: dict[int, list[OpSpan]] = defaultdict(list)
        self._nodes = nodes
        self._runs: dict[str, list[_Run]] = defaultdict(list)  # by key
        self._seen: dict[str, int] = defaultdict(int)
        self._ends: dict[str, dict[int, list[int]]] = defaultdict(lambda: defaultdict(list))

    def take(self, event: Event) -> None:
        """Note an event; they come by their starts."""
        what = self._nodes.find(event.node, event.op_type)
        if isinstance(what, Local):
            self._ran(what.rank, what.name, event)
            self._ends[what.name][what.rank].append(event.end)
        elif isinstance(what, TaskCall):
            for rank in what.group:
                ran = OpSpan(event.start, event.end, what.task, event.op_type, "task")
                self.tasks[rank].append(ran)
                self._ends[what.name][rank].append(event.end)
        elif what is not None and self._nodes.is_carried(event.op_type):
            self._meet(what, event)
        elif what is not None and self._nodes.alone is not None:
            self._ran(self._nodes.alone, what.op.name, event)

    def _ran(self, rank: int, name: str, event: Event) -> None:
        origins = self._nodes.origins
        ran = OpSpan(event.start, event.end, origins.path(name), event.op_type, origins.phase(name))
        self.ran[rank].append(ran)

    def _meet(self, meeting: Meeting, event: Event) -> None:
        """Count a node of a collective: each of its nodes runs once in one run of it."""
        self._seen[event.node] += 1
        runs = self._runs[meeting.kind.key]
        if len(runs) < self._seen[event.node]:
            runs.append(_Run(meeting, event.start, event.end))
        run = runs[self._seen[event.node] - 1]
        run.start, run.end = min(run.start, event.start), max(run.end, event.end)

    def met(self) -> dict[int, list[CollectiveSpan]]:
        """Return the collectives that each rank met, by the times at which it arrived."""
        arrivals = _Arrivals(self._runs, self._ends)
        found: dict[int, list[CollectiveSpan]] = defaultdict(list)
        for runs in self._runs.values():
            for nth, run in enumerate(runs):
                kind, alone = run.meeting.kind, self._nodes.alone
                for rank in kind.group if alone is None else [alone]:
                    arrived = run.start if alone is not None else arrivals.of(run, rank)
                    found[rank].append(CollectiveSpan(kind, nth, arrived, run.end))
        return {rank: sorted(each, key=lambda m: m.arrived) for rank, each in found.items()}


class _Arrivals:
    """Times at which the ranks of one process had computed the operands of a collective.

    There it is plain arithmetic, which begins once the last rank has.

    Args:
        runs: of collectives, by key.
        ends: of ops, by name and rank.
    """

    def __init__(
        self, runs: Mapping[str, Sequence[_Run]], ends: Mapping[str, Mapping[int, list[int]]]
    ) -> None:
        self._ends = ends
        self._runs: dict[Op, list[_Run]] = defaultdict(list)
        for run in itertools.chain.from_iterable(runs.values()):
            self._runs[run.meeting.op].append(run)

    def of(self, run: _Run, rank: int) -> int:
        """Return the time at which `rank` had the operands of `run`.

        TensorFlow may have left out what makes them, or fused it with what that reads: what was
        seen last before counts.
        """
        waiting = list(dict.fromkeys(t.op for t in run.meeting.op.inputs))
        seen, ends = {*waiting}, []
        while waiting:
            op = waiting.pop()
            end = self._end(op, rank, run.end)
            if end is not None:
                ends.append(end)
                continue
            makers = dict.fromkeys(t.op for t in op.inputs if t.op not in seen)
            seen.update(makers)
            waiting += makers
        return max(ends, default=run.start)

    def _end(self, op: Op, rank: int, before: int) -> int | None:
        """Return the last time, up to `before`, at which `op` ended."""
        if op in self._runs:
            ends = [run.end for run in self._runs[op] if rank in run.meeting.kind.group]
        else:
            of_ranks = self._ends.get(op.name, {})
            # One that is not the rank's own has run for all that share its operands.
            ends = of_ranks.get(rank) or next(iter(of_ranks.values()), [])
        return max((end for end in ends if end <= before), default=None)
