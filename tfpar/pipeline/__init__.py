"""Pipelines: stages, microbatches, tasks and their schedules. Free of TensorFlow."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tfpar.lazy import lazy_exports
from tfpar.pipeline.pipeline import AUTO, SEARCHES, Pipeline
from tfpar.pipeline.recompute import RecomputeOf
from tfpar.pipeline.schedule import Schedule
from tfpar.pipeline.tasks import Task

if TYPE_CHECKING:
    from tfpar.pipeline.generators import FAMILIES, generate, name_of
    from tfpar.pipeline.generators.list_scheduling import list_schedule
    from tfpar.pipeline.graph import RECEIVE_AHEAD, task_graph
    from tfpar.pipeline.recompute import RecomputeOf
    from tfpar.pipeline.stage_graph import Join, StageGraph, StageLink, Tie
    from tfpar.pipeline.stage_partition import partition_step, sent_whole
    from tfpar.pipeline.statistics import EXACT
    from tfpar.pipeline.step_stages import assignable, stages_of_step

__all__ = [
    "AUTO",
    "EXACT",
    "FAMILIES",
    "RECEIVE_AHEAD",
    "SEARCHES",
    "Join",
    "Pipeline",
    "RecomputeOf",
    "Schedule",
    "StageGraph",
    "StageLink",
    "Task",
    "Tie",
    "assignable",
    "generate",
    "list_schedule",
    "name_of",
    "partition_step",
    "sent_whole",
    "stages_of_step",
    "task_graph",
]

__getattr__ = lazy_exports(
    __name__,
    {
        "tfpar.pipeline.generators": ["FAMILIES", "generate", "name_of"],
        "tfpar.pipeline.generators.list_scheduling": ["list_schedule"],
        "tfpar.pipeline.graph": ["RECEIVE_AHEAD", "task_graph"],
        "tfpar.pipeline.recompute": ["RecomputeOf"],
        "tfpar.pipeline.stage_graph": ["Join", "StageGraph", "StageLink", "Tie"],
        "tfpar.pipeline.stage_partition": ["partition_step", "sent_whole"],
        "tfpar.pipeline.statistics": ["EXACT"],
        "tfpar.pipeline.step_stages": ["assignable", "stages_of_step"],
    },
)
