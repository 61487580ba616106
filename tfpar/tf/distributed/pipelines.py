"""Check that all ranks were given the same pipeline.

The first rank plans for all. Without this a rank that was started with another schedule would build
the plan of the first with microbatches of its own.
"""

from __future__ import annotations

import itertools
from typing import Any

from tfpar.pipeline import AUTO, Schedule
from tfpar.pipeline.generators import name_of
from tfpar.pipeline.statistics import BatchStatisticsOf
from tfpar.tf.distributed.differences import differing_fields, first_differing
from tfpar.tf.distributed.world import World

_TASKS = "tasks"


def agree_on_pipeline(
    world: World,
    schedule: Schedule,
    recompute: bool,
    batch_statistics: BatchStatisticsOf = "exact",
    *,
    decided: bool = True,
    picked: bool = False,
) -> None:
    """Check that every rank asks for this pipeline, which may be one of one stage.

    Args:
        recompute, batch_statistics: see `pipeline.Pipeline`.
        decided: False with `pipeline="auto"`: the first rank's plan says what it is.
        picked: another schedule of these tasks may be picked when the step is planned.

    Raises:
        RuntimeMismatchError: on every rank; names two ranks and what they differ in.
    """
    asked = {
        "stages": schedule.num_stages,
        "sets of ranks": schedule.num_actors,
        "microbatches": schedule.num_microbatches,
        "schedule": AUTO if picked else name_of(schedule),
        "recompute": recompute,
        "batch_statistics": batch_statistics,
        "pipeline": "given" if decided else "auto",
        _TASKS: [[str(task) for task in order] for order in schedule.orders],
    }
    world.agree("their pipelines", asked, _difference)


def _difference(told: list[dict[str, Any]]) -> str:
    """Describe how the pipeline of the first rank that differs from rank 0 differs."""
    first, (rank, other) = told[0], first_differing(told)
    one, two = ({k: repr(v) for k, v in said.items() if k != _TASKS} for said in (first, other))
    differing = differing_fields(one, two, rank)
    if not differing:
        pairs = zip(first[_TASKS], other[_TASKS], strict=True)
        actor, lines = next((a, pair) for a, pair in enumerate(pairs) if pair[0] != pair[1])
        tasks = itertools.zip_longest(*lines, fillvalue="nothing")
        here, there = next(pair for pair in tasks if pair[0] != pair[1])
        differing = [f"set of ranks {actor} runs {here} on rank 0 where rank {rank} has {there}"]
    return (
        f"{', '.join(differing)}. Give every rank the same pipeline= or plan=; do the processes "
        f"run the same script with the same arguments?"
    )
