"""The pipeline that `--stages`, `--microbatches` and `--schedule` ask for."""

from __future__ import annotations

import argparse
from typing import Literal

from tfpar.pipeline import AUTO, SEARCHES, Pipeline, Schedule
from tfpar.pipeline.generators import FAMILIES
from tfpar.pipeline.statistics import BATCH_STATISTICS
from tfpar.readable import UnreadableError
from tfpar.spec import ScheduleError, TfparError


def add_pipeline(parser: argparse.ArgumentParser) -> None:
    """The arguments that say how a training step runs as a pipeline."""
    parser.add_argument(
        "--stages",
        type=_stages,
        metavar="N|auto",
        help="sets of ranks of a pipeline; auto: as many as are best, with the microbatches that "
        "are (default: 1)",
    )
    parser.add_argument(
        "--search",
        choices=SEARCHES,
        help="how --stages auto looks for a pipeline: enumerate (default) tries each number of "
        "stages; the others choose stages, layout, placement and microbatches together",
    )
    parser.add_argument(
        "--seed",
        type=int,
        metavar="N",
        help="of --search anneal or random: the same seed finds the same plan (default: 0)",
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
        help=f"order of a pipeline's tasks: {', '.join(FAMILIES)}, {AUTO} (the fastest by "
        "prediction), or a file (default: 1f1b)",
    )
    parser.add_argument(
        "--batch-statistics",
        choices=BATCH_STATISTICS,
        default=BATCH_STATISTICS[0],
        help="what batch normalisation takes its statistics over: the batch (default), or one "
        "microbatch of all ranks, which is another model",
    )


def _stages(text: str) -> int | Literal["auto"]:
    if text == AUTO:
        return AUTO
    try:
        return int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is neither a number nor auto") from None


def pipeline_of(options: argparse.Namespace) -> Pipeline | Literal["auto"] | None:
    """Return the pipeline that the arguments ask for; None if there is none.

    Raises:
        TfparError: no such schedule, or numbers that it does not have.
    """
    stages, microbatches, schedule = options.stages, options.microbatches, options.schedule
    exact = options.batch_statistics == BATCH_STATISTICS[0]
    if stages != AUTO and (options.search is not None or options.seed is not None):
        raise TfparError("--search and --seed are for --stages auto: add it, or leave them out.")
    if stages is None and microbatches is None and schedule is None and exact:
        return None
    if stages == AUTO:
        if microbatches is not None or schedule is not None or not exact:
            raise TfparError(
                "--stages auto finds microbatches and schedule itself: leave out --microbatches, "
                "--schedule and --batch-statistics, or give a number of stages."
            )
        search, seed = options.search, options.seed
        if search is None and seed is None:
            return AUTO
        return Pipeline(AUTO, search=search or SEARCHES[0], seed=seed or 0)
    if schedule is not None and schedule not in (*FAMILIES, AUTO):
        try:
            return Pipeline(
                stages,
                microbatches,
                Schedule.load(schedule),
                batch_statistics=options.batch_statistics,
            )
        except ScheduleError as error:
            if not isinstance(error.__cause__, UnreadableError):
                raise
            raise TfparError(
                f"--schedule {schedule!r} is neither one of {', '.join((*FAMILIES, AUTO))} nor a "
                f"file that can be read: {error.__cause__}."
            ) from None
    if microbatches is None:
        raise TfparError(
            "A pipeline needs --microbatches: in how many pieces a rank's batch runs through it."
        )
    return Pipeline(
        stages, microbatches, schedule or "1f1b", batch_statistics=options.batch_statistics
    )
