"""A predicted timeline: a step as the plan's prices have it, read off the plan's report.

A step that is no pipeline runs layer by layer: forward, backward in the other order, update. After
its ops a layer waits for its collectives, as far as they are not hidden behind its compute. Sums
of gradients run beside the backward pass, and end when the update begins. So the timeline is as
long as the plan's step. Of a pipeline it shows tasks and transfers at the times of the simulation,
and within each task the layers of its stage, in proportion.
"""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from tfpar.observability.report.data.schema import (
    Collective,
    LayerSummary,
    Phase,
    PipelineSummary,
    Report,
    TransferSummary,
)
from tfpar.observability.report.data.schema import TaskSummary as TaskRan
from tfpar.observability.timeline.trace import WAITING, FlowArrow, Slice, Trace
from tfpar.spec import Mesh, PlanError

MOST_RANKS = 64
"""With more ranks than these, one of each set that does the same is shown."""

MOST_SLICES = 150_000
"""Likewise with more slices: a file of some 40 MB."""

_SAME = 1e-12
"""Seconds by which times may differ that are the same."""

_TASKS: Mapping[str, Phase] = {"F": "forward", "B": "backward", "I": "backward", "W": "backward"}


@dataclasses.dataclass(eq=False)
class _Set:
    """Actor of the trace: ranks that do the same, and what they do.

    Attributes:
        stages: of a pipeline, those that they run.
        drawn: slices of its first rank, which each of the others has, too.
    """

    ranks: tuple[int, ...]
    stages: tuple[int, ...] = ()
    drawn: list[Slice] = dataclasses.field(default_factory=list)

    def draw(
        self, thread: str, name: str, start: float, end: float, category: str, **arguments: Any
    ) -> Slice:
        drawn = Slice(self.ranks[0], thread, name, start, end, category, arguments)
        self.drawn.append(drawn)
        return drawn

    @property
    def name(self) -> str:
        """Name of the track: its ranks, and the stages that they run."""
        first, last = self.ranks[0], self.ranks[-1]
        text = f"ranks {first} to {last}" if last > first else f"rank {first}"
        return f"{text}, stage {', '.join(map(str, self.stages))}" if self.stages else text


def predicted_trace(report: Report) -> Trace:
    """The timeline of a step.

    Raises:
        PlanError: the report has no prices, or no layers.
    """
    if report.cost is None:
        raise PlanError(
            "The plan has no prices, so that nothing is known of when what runs. Make it for a "
            "cluster (tfpar plan --cluster)."
        )
    if not report.layers and (report.pipeline is None or not report.pipeline.tasks):
        raise PlanError(
            "The plan's file has no report: an older tfpar wrote it, or it was saved without its "
            "graph. Make it again: tfpar plan ... -o PLAN.JSON."
        )
    layers = _Layers(report)
    arrows: list[tuple[_Set, Slice, _Set, Slice]] = []
    if report.pipeline is None or not report.pipeline.tasks:
        sets = [_Set(tuple(range(report.facts.ranks)))]
        _draw_step(sets[0], report, layers)
    else:
        sets = _sets_of(report.pipeline)
        arrows = _draw_pipeline(sets, report.pipeline, report.cost.seconds, layers)
    for one in sets:
        one.draw("steps", "step", 0.0, report.cost.seconds, "step")
    return _of_ranks(sets, arrows, report)


# --- a step in one piece -------------------------------------------------------------


def _draw_step(own: _Set, report: Report, layers: _Layers) -> None:
    cost = report.cost
    assert cost is not None
    at = next((part.seconds for part in cost.parts if part.name == "start"), 0.0)
    if at:
        own.draw("compute", "start", 0.0, at, "step")
    waited = sum(layers.waited(report.layers, phase) for phase in ("forward", "backward"))
    hidden = cost.hidden_s / waited if waited else 0.0
    at = layers.draw(own, report.layers, "forward", at, hidden)
    at = layers.draw(own, report.layers[::-1], "backward", at, hidden) + cost.exposed_s
    _draw_gradients(own, layers.beside(report.layers), at)
    at = layers.draw(own, report.layers, "update", at, 0.0)
    if cost.host_wait_s:
        own.draw("compute", "waits for the host", at, at + cost.host_wait_s, "step")


def _draw_gradients(own: _Set, sums: Sequence[Collective], end: float) -> None:
    """Sums of gradients, one after another, the last of which ends at `end`."""
    at = max(0.0, end - sum(one.seconds for one in sums))
    for one in sums:
        own.draw("communication", _name(one), at, at + one.seconds, one.phase, **_told(one))
        at += one.seconds


class _Layers:
    """The layers of a report, with their collectives."""

    def __init__(self, report: Report) -> None:
        self._between: dict[tuple[str | None, Phase], list[Collective]] = defaultdict(list)
        self._beside: dict[str | None, list[Collective]] = defaultdict(list)
        for one in report.collectives:
            if one.when == "beside":
                self._beside[one.layer].append(one)
            else:
                self._between[one.layer, one.phase].append(one)
        self.of_stage: dict[int, list[LayerSummary]] = defaultdict(list)
        for layer in report.layers:
            self.of_stage[layer.stage or 0].append(layer)

    def waited(self, layers: Iterable[LayerSummary], phase: Phase) -> float:
        """Seconds of the collectives that ops of a phase wait for, hidden ones too."""
        return sum(c.seconds for layer in layers for c in self._between[layer.path, phase])

    def beside(self, layers: Sequence[LayerSummary]) -> list[Collective]:
        """The sums of gradients, in the order in which the backward pass makes them."""
        return [one for layer in layers[::-1] for one in self._beside[layer.path]]

    def draw(
        self,
        own: _Set,
        layers: Iterable[LayerSummary],
        phase: Phase,
        at: float,
        hidden: float,
        scale: float = 1.0,
    ) -> float:
        """Draw a phase of some layers from `at` on; returns when it ends.

        Args:
            hidden: the part of collectives that runs behind the compute of their layer.
            scale: of all times.
        """
        for layer in layers:
            seconds = getattr(layer.seconds, phase) * scale
            if seconds:
                told = {"class": layer.class_name, "source": layer.source, "op": layer.kind}
                told = {key: text for key, text in told.items() if text}
                own.draw("compute", layer.path, at, at + seconds, phase, **told)
            at += seconds
            for one in self._between[layer.path, phase]:
                taken = one.seconds * scale
                start = max(0.0, at - hidden * taken)
                at += taken * (1 - hidden)
                own.draw("communication", _name(one), start, at, phase, **_told(one, scale))
        return at

    def seconds(self, layers: Iterable[LayerSummary], phase: Phase) -> float:
        """Return the seconds of the layers' ops and of the collectives that they wait for."""
        layers = list(layers)
        return self.waited(layers, phase) + sum(getattr(la.seconds, phase) for la in layers)


# --- pipelines -------------------------------------------------------------------------


def _sets_of(pipeline: PipelineSummary) -> list[_Set]:
    return [
        _Set(ranks, tuple(s for s, of in enumerate(pipeline.actor_of_stage) if of == actor))
        for actor, ranks in enumerate(pipeline.actors)
    ]


def _draw_pipeline(
    sets: Sequence[_Set], pipeline: PipelineSummary, seconds: float, layers: _Layers
) -> list[tuple[_Set, Slice, _Set, Slice]]:
    """Draw tasks and transfers; returns which transfer leads from which set to which."""
    ends = [*(ran.end for ran in pipeline.tasks), *(sent.end for sent in pipeline.transfers)]
    before = max(0.0, seconds - max(ends))
    for one in sets:
        if before > 1e-12:
            one.draw("compute", "start", 0.0, before, "step")
    for ran in pipeline.tasks:
        _draw_task(sets[ran.actor], ran, before, layers)
    arrows = []
    for sent in pipeline.transfers:
        source, target = (sets[pipeline.actor_of_stage[s]] for s in (sent.source, sent.target))
        told: dict[str, Any] = {"bytes": sent.num_bytes, "microbatch": sent.microbatch}
        times = before + sent.start, before + sent.end
        out = source.draw(
            "communication", f"send to stage {sent.target}", *times, "transfer", **told
        )
        come = target.draw(
            "communication", f"recv from stage {sent.source}", *times, "transfer", **told
        )
        arrows.append((source, out, target, come))
    for actor, own in enumerate(sets):
        _draw_waits(own, actor, pipeline, before)
    return arrows


def _draw_waits(own: _Set, actor: int, pipeline: PipelineSummary, before: float) -> None:
    """Draw the times in which an actor has nothing to run until another stage sends to it.

    A wait ends when the other stage begins to send what the actor's next task reads.
    """
    come = [s for s in pipeline.transfers if pipeline.actor_of_stage[s.target] == actor]
    ended = 0.0
    for ran in pipeline.tasks:
        if ran.actor != actor or ran.kind == "R":
            continue
        last = max((s for s in come if s.end <= ran.start + _SAME), key=_end, default=None)
        if last is not None and last.end > ran.start - _SAME and last.start > ended + _SAME:
            times = before + ended, before + last.start
            name = f"waiting for stage {last.source}"
            told: dict[str, Any] = {"for": _task(ran)}
            own.draw("communication", name, *times, WAITING, **told)
        ended = max(ended, ran.end)


def _end(sent: TransferSummary) -> float:
    return sent.end


def _draw_task(own: _Set, ran: TaskRan, before: float, layers: _Layers) -> None:
    start, end = before + ran.start, before + ran.end
    stage = layers.of_stage[ran.stage]
    if ran.kind == "R":
        sums = layers.beside(stage)
        num_bytes = sum(one.num_bytes for one in sums)
        name, told = "sum of gradients", {"stage": ran.stage, "bytes": num_bytes}
        own.draw("communication", name, start, end, "backward", **told)
        return
    phase: Phase = _TASKS.get(ran.kind, "update")
    own.draw("tasks", _task(ran), start, end, phase, stage=ran.stage, microbatch=ran.microbatch)
    ordered = stage[::-1] if phase == "backward" else stage
    whole = layers.seconds(ordered, phase)
    if whole and ran.kind != "J":
        layers.draw(own, ordered, phase, start, 0.0, (end - start) / whole)


def _task(ran: TaskRan) -> str:
    """Format a task as schedules write it: `1F0`, `1U`."""
    return f"{ran.stage}{ran.kind}{'' if ran.microbatch is None else ran.microbatch}"


# --- ranks -------------------------------------------------------------------------------


def _of_ranks(
    sets: Sequence[_Set], arrows: Sequence[tuple[_Set, Slice, _Set, Slice]], report: Report
) -> Trace:
    """Make a track for each rank; with too many, one for each actor."""
    num_ranks = sum(len(one.ranks) for one in sets)
    each = num_ranks <= MOST_RANKS
    each = each and sum(len(one.ranks) * len(one.drawn) for one in sets) <= MOST_SLICES
    notes: dict[str, Any] = {
        "timeline": "predicted",
        "seconds": report.cost.seconds if report.cost else None,
        "plan": report.verdict,
        "shown": "every rank" if each else "one rank for each set of ranks that do the same",
        "tfpar": report.tfpar_version,
    }
    if each:
        names = {rank: f"rank {rank}" for one in sets for rank in one.ranks}
    else:
        names = {one.ranks[0]: one.name for one in sets}
    trace = Trace(names, notes)
    mesh = Mesh(
        tuple(axis.name for axis in report.facts.mesh),
        tuple(axis.size for axis in report.facts.mesh),
    )
    made: dict[tuple[int, Slice], Slice] = {}
    for one in sets:
        for place, rank in enumerate(one.ranks if each else one.ranks[:1]):
            for drawn in one.drawn:
                told = dict(drawn.arguments)
                if each and "axes" in told:
                    told["group"] = [one.ranks[r] for r in _group(mesh, told["axes"], place)]
                own = dataclasses.replace(drawn, process=rank, arguments=told)
                made[rank, drawn] = trace.add(own)
    for source, sent, target, received in arrows:
        for a, b in zip(source.ranks, target.ranks, strict=False):
            if (a, sent) in made and (b, received) in made:
                trace.flows.append(FlowArrow(made[a, sent], made[b, received]))
    return trace


def _group(mesh: Mesh, axes: Sequence[str], place: int) -> tuple[int, ...]:
    """The ranks of a set that communicate over these axes with the one at `place`."""
    groups = mesh.groups(tuple(mesh.axis(name) for name in axes))
    return next(group for group in groups if place in group)


def _name(one: Collective) -> str:
    return f"{one.layer or 'step'} {one.kind}"


def _told(one: Collective, scale: float = 1.0) -> dict[str, Any]:
    return {
        "bytes": one.num_bytes,
        "axes": list(one.axes),
        "count": one.count,
        "predicted": one.seconds * scale,
    }
