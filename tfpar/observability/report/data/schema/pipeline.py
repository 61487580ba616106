"""Schema of a plan's pipeline: its stages, and the times of their tasks."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class Stage:
    """A stage of a pipeline; seconds of one microbatch (of the update: of a step); see
    `tfpar.cost.pipeline_cost.StageCost`.

    Attributes:
        layers: its layers in words: the first and the last.
        num_bytes: of its variables, and `device_bytes` on a rank.
        bubble: what its ranks wait, as a part of what they work.
    """

    ranks: tuple[int, ...]
    layers: str
    num_bytes: int
    device_bytes: int | None
    forward_s: float | None = None
    backward_s: float | None = None
    update_s: float | None = None
    reduction_s: float | None = None
    bubble: float | None = None
    sent_bytes: float | None = None
    in_flight: int | None = None
    fixed_bytes: float | None = None
    kept_bytes: float | None = None
    peak_bytes: float | None = None
    peak_task: str = ""
    limit_bytes: float | None = None


@dataclasses.dataclass(frozen=True)
class ScheduleTime:
    """A schedule that the plan's was picked from."""

    name: str
    seconds: float
    memory_bytes: float
    fits: bool


@dataclasses.dataclass(frozen=True)
class TaskSummary:
    """A task of a pipeline, from start to end in seconds from the start of the step.

    Attributes:
        actor: that runs it.
        kind: F, B, I, W, U; or R for a sum of gradients over the ranks of a stage.
        microbatch: None for what runs once.
    """

    start: float
    end: float
    actor: int
    stage: int
    kind: str
    microbatch: int | None


@dataclasses.dataclass(frozen=True)
class TransferSummary:
    """Transfer from one stage to another, from start to end."""

    start: float
    end: float
    source: int
    target: int
    microbatch: int | None
    num_bytes: float


@dataclasses.dataclass(frozen=True)
class PipelineSummary:
    """Pipeline of a plan: its stages, and the times of their tasks.

    Attributes:
        schedule: in words.
        actors: the ranks of each actor.
        actor_of_stage: the actor that runs each stage.
        recompute: forward passes run again in the backward pass.
        bubble: what all ranks wait, as a part of what they work; None where nothing was priced.
        schedules: that the plan's was picked from, itself the first.
        tasks, transfers: of a simulated step, by their starts; empty where it is not known.
    """

    schedule: str
    actors: tuple[tuple[int, ...], ...]
    actor_of_stage: tuple[int, ...]
    recompute: bool
    stages: tuple[Stage, ...]
    bubble: float | None = None
    schedules: tuple[ScheduleTime, ...] = ()
    tasks: tuple[TaskSummary, ...] = ()
    transfers: tuple[TransferSummary, ...] = ()
