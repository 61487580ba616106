"""The pipeline that `--stages`, `--microbatches` and `--schedule` ask for."""

from __future__ import annotations

import argparse

from tfpar.pipeline import Pipeline, Schedule
from tfpar.pipeline.generators import FAMILIES
from tfpar.pipeline.statistics import BATCH_STATISTICS
from tfpar.spec import TfparError


def add_pipeline(parser: argparse.ArgumentParser) -> None:
    """The arguments that say how a training step runs as a pipeline."""
    parser.add_argument(
        "--stages", type=int, metavar="N", help="sets of ranks of a pipeline (default: 1)"
    )
    parser.add_argument(
        "--microbatches",
        type=int,
        metavar="N",
        help="pieces of a rank's batch that run one behind the other; their gradients are added up "
        "(default: 1, or those of the schedule)",
    )
    parser.add_argument(
        "--schedule",
        metavar="NAME|FILE",
        help=f"order of a pipeline's tasks: {', '.join(FAMILIES)}, or a file (default: 1f1b)",
    )
    parser.add_argument(
        "--batch-statistics",
        choices=BATCH_STATISTICS,
        default=BATCH_STATISTICS[0],
        help="what batch normalisation takes its statistics over: the batch (default), or one "
        "microbatch of all ranks, which is another model",
    )


def pipeline_of(options: argparse.Namespace) -> Pipeline | None:
    """None if nothing of one is asked for.

    Raises:
        TfparError: no such schedule, or numbers that it does not have.
    """
    stages, microbatches, schedule = options.stages, options.microbatches, options.schedule
    exact = options.batch_statistics == BATCH_STATISTICS[0]
    if stages is None and microbatches is None and schedule is None and exact:
        return None
    if schedule is not None and schedule not in FAMILIES:
        try:
            return Pipeline(
                stages,
                microbatches,
                Schedule.load(schedule),
                batch_statistics=options.batch_statistics,
            )
        except OSError as error:
            raise TfparError(
                f"--schedule {schedule!r} is neither one of {', '.join(FAMILIES)} nor a file that "
                f"can be read: {error.strerror}."
            ) from None
    if microbatches is None:
        raise TfparError(
            "A pipeline needs --microbatches: in how many pieces a rank's batch runs through it."
        )
    return Pipeline(
        stages, microbatches, schedule or "1f1b", batch_statistics=options.batch_statistics
    )
