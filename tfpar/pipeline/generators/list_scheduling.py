"""List scheduling: an order made from the durations of tasks, for stages that differ.

Whenever an actor is free it takes, of the tasks whose inputs are there, a backward pass (`B` or
`I`), else a forward pass if what that keeps fits beside the rest, else a `W`; or by another rule of
that kind, of which none is the best for all stages. Microbatches go through each stage in their
order. Room is left for the same microbatch in other stages of the same ranks: so the oldest
microbatch can always go on, and the order has an end.
"""

from __future__ import annotations

import dataclasses
import heapq
import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from tfpar.pipeline.schedule import Schedule
from tfpar.pipeline.stage_graph import StageGraph
from tfpar.pipeline.tasks import Kind, Task
from tfpar.spec import ScheduleError


@dataclasses.dataclass(frozen=True)
class StageDurations:
    """Durations of a stage's tasks for a microbatch, and the memory that it saves for it.

    Attributes:
        seconds: of F and B or, with halves, of F, I and W.
        kept: what F keeps until B ends, in any unit.
        kept_for_weights: what is kept from I to W; None: as much as F keeps.
    """

    seconds: Mapping[str, float]
    kept: float = 1
    kept_for_weights: float | None = None

    def held_after(self, kind: Kind) -> float:
        """Return the memory that is still saved for a microbatch when its task ends."""
        for_weights = self.kept if self.kept_for_weights is None else self.kept_for_weights
        return {"F": self.kept, "I": for_weights}.get(kind, 0)


class TooLate(ScheduleError):
    """An actor would not be through with its tasks when it has to be."""


class Rule(NamedTuple):
    """Priority rule by which an actor chooses its next task.

    Attributes:
        kinds: F, B (or I) and W; the first goes before the others.
        patience: the part of a task's seconds that an actor waits for one that goes before it.
    """

    kinds: str
    patience: float


SLACK = 1e-9
"""By how much, relatively, sums of seconds may differ and count as equal."""

RULES = tuple(Rule(kinds, wait) for kinds in ("BFW", "BWF", "FBW") for wait in (0.0, 0.25, 0.5))
"""The best of these is seldom far from the best order of all."""


def list_schedule(
    actors: Sequence[int],
    microbatches: int,
    work: Sequence[StageDurations],
    *,
    halves: bool = False,
    stages: StageGraph | None = None,
    delays: Mapping[tuple[int, int], float] | None = None,
    most: Sequence[float] | None = None,
    rule: Rule = RULES[0],
    latest: Sequence[float] | None = None,
) -> Schedule:
    """Schedule tasks of stages with these durations and saved activations.

    Args:
        actors: that run each stage.
        work: of each stage.
        halves: whether backward passes are run in halves, I and W.
        stages: what reads of what, without joins; by default a chain.
        delays: seconds from stage to stage, 0 where none are given.
        most: what each actor may keep at once; None: there is no limit.
        latest: when each actor has to be through; None: whenever it is. A list is given up as soon
            as it is known that one will not be.

    Raises:
        ScheduleError: an actor may not keep as much as one microbatch takes; a TooLate if one would
            not be through in time.
    """
    limits = [math.inf] * (max(actors) + 1) if most is None else most
    stages = stages or StageGraph.chain(len(actors))
    return _Listing(
        actors, microbatches, work, halves, stages, delays or {}, limits, rule, latest
    ).run()


class _Candidate(NamedTuple):
    start: float
    task: Task


class _Listing:
    """The state: what has been ordered, when it ends, what each actor keeps."""

    def __init__(
        self,
        actors: Sequence[int],
        microbatches: int,
        work: Sequence[StageDurations],
        halves: bool,
        stages: StageGraph,
        delays: Mapping[tuple[int, int], float],
        most: Sequence[float],
        rule: Rule,
        latest: Sequence[float] | None,
    ) -> None:
        self.actors, self.microbatches, self.work = actors, microbatches, work
        self.backward: Kind = "I" if halves else "B"
        self.halves = halves
        self.most, self.rule = most, rule
        # What stages read on the way up and on the way back, and the actors that read of them.
        kinds: tuple[Kind, ...] = ("F", "I", "W") if halves else ("F", "B")
        self._reads: dict[Kind, list[list[int]]] = {kind: [[] for _ in actors] for kind in kinds}
        self._readers: dict[Kind, list[set[int]]] = {k: [set() for _ in actors] for k in kinds}
        for link in stages.links:
            self._link("F", link.source, link.target)
            if link.backward_bytes is not None:
                self._link(self.backward, link.target, link.source)
        self._delays = delays
        self._of = [
            [s for s, home in enumerate(actors) if home == actor]
            for actor in range(max(actors) + 1)
        ]
        self._next: dict[tuple[Kind, int], int] = {}
        self._ends: dict[Task, float] = {}
        self._free = [0.0] * len(self._of)
        self._held = [0.0] * len(self._of)
        each = [sum(work[s].seconds[kind] for s in own for kind in kinds) for own in self._of]
        self._left = [microbatches * seconds for seconds in each]
        self._latest = latest

    def run(self) -> Schedule:
        orders: list[list[Task]] = [[] for _ in self._of]
        total = len(self.actors) * self.microbatches * (3 if self.halves else 2)
        choices: list[_Candidate | None] = [None] * len(self._of)
        soonest: list[tuple[float, int]] = []  # choices that were made, also such as are no more
        changed = set(range(len(self._of)))
        for _ in range(total):
            for actor in changed:
                choice = choices[actor] = self._choice(actor)
                if choice is not None:
                    heapq.heappush(soonest, (choice.start, actor))
            chosen = None
            while soonest and chosen is None:
                start, actor = heapq.heappop(soonest)
                choice = choices[actor]
                if choice is not None and choice.start == start:
                    chosen = choice
            if chosen is None:
                raise ScheduleError(
                    f"There is no order in which actors keep no more than {list(self.most)}: one "
                    f"microbatch takes {[w.kept for w in self.work]} in the stages."
                )
            orders[actor].append(chosen.task)
            self._take(actor, chosen)
            changed = {actor, *self._readers[chosen.task.kind][chosen.task.stage]}
        return Schedule(tuple(map(tuple, orders)))

    def _link(self, kind: Kind, maker: int, reader: int) -> None:
        """A stage reads what the task of another makes."""
        self._reads[kind][reader].append(maker)
        self._readers[kind][maker].add(self.actors[reader])

    def _take(self, actor: int, chosen: _Candidate) -> None:
        start, task = chosen
        work = self.work[task.stage]
        self._ends[task] = self._free[actor] = start + work.seconds[task.kind]
        self._left[actor] -= work.seconds[task.kind]
        if self._latest is not None:
            through, latest = self._free[actor] + self._left[actor], self._latest[actor]
            if through > latest * (1 + SLACK):
                raise TooLate(f"Actor {actor} is through after {through:g} s, not {latest:g} s.")
        before = {"F": 0.0, "W": work.held_after("I")}.get(task.kind, work.kept)
        self._held[actor] += work.held_after(task.kind) - before
        self._next[task.kind, task.stage] = task.micro + 1

    def _choice(self, actor: int) -> _Candidate | None:
        """Choose the next task of an actor: the first of its candidates in their order that need
        not be waited for, but for a part of the time that another would take."""
        found = [c for c in self._candidates(actor) if c is not None]
        if not found:
            return None
        soonest = min(found)
        spare = self.rule.patience * self.work[soonest.task.stage].seconds[soonest.task.kind]
        return next(c for c in found if c.start <= soonest.start + spare)

    def _candidates(self, actor: int) -> list[_Candidate | None]:
        stages = self._of[actor]
        found: list[_Candidate | None] = []
        for kind in self.rule.kinds:
            if kind == "F":
                fitting = (s for s in reversed(stages) if self._fits(actor, s))
                found += [self._candidate("F", stage) for stage in fitting]
            elif kind == "W":
                found += [self._candidate("W", stage) for stage in stages] if self.halves else []
            else:
                found += [self._candidate(self.backward, stage) for stage in stages]
        return found

    def _fits(self, actor: int, stage: int) -> bool:
        """Whether there is room for the next microbatch, and for others of these ranks' stages that
        are not ahead of it."""
        micro = self._next.get(("F", stage), 0)
        behind = (s for s in self._of[actor] if s != stage and self._next.get(("F", s), 0) <= micro)
        needed = self.work[stage].kept + sum(self.work[s].kept for s in behind)
        return self._held[actor] + needed <= self.most[actor] * (1 + 1e-12)

    def _candidate(self, kind: Kind, stage: int) -> _Candidate | None:
        """The next task of a kind at a stage, if it is known when what it needs is there."""
        micro = self._next.get((kind, stage), 0)
        if micro == self.microbatches:
            return None
        reads = () if kind == "W" else self._reads[kind][stage]
        needs = [(Task(kind, s, micro), self._delays.get((s, stage), 0.0)) for s in reads]
        if kind != "F":
            needs.append((Task("I" if kind == "W" else "F", stage, micro), 0.0))
        start = self._free[self.actors[stage]]
        for task, delay in needs:
            end = self._ends.get(task)
            if end is None:
                return None
            start = max(start, end + delay * (self.actors[task.stage] != self.actors[stage]))
        return _Candidate(start, Task(kind, stage, micro))
