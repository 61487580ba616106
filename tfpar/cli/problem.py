"""Command-line arguments that describe a planning problem: model, search, machines and pipeline."""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterable
from typing import Literal

from tfpar.cli.prices import add_prices
from tfpar.pipeline import AUTO, SEARCHES, Pipeline, Schedule
from tfpar.pipeline.generators import FAMILIES
from tfpar.pipeline.statistics import BATCH_STATISTICS
from tfpar.planning.objective import OBJECTIVES
from tfpar.plans.attention import ATTENTION_MODES
from tfpar.readable import UnreadableError
from tfpar.spec import Mesh, ScheduleError, SpecError, TfparError

TRACEBACK = "on failure also show where, as Python does"
CLUSTER = (
    "a preset (`tfpar clusters` lists them) or a cluster file (default: local, machines like this "
    "one)"
)


def add_problem(parser: argparse.ArgumentParser) -> None:
    """The arguments that say what is to be planned, how, and for which machines."""
    add_model(parser)
    parser.add_argument(
        "--mesh", required=True, help="the ranks: 2x8 (nodes x devices), 16, or data=2,model=8"
    )
    parser.add_argument("--cluster", help=f"the machines: {CLUSTER}")
    add_prices(parser)
    add_search(parser)


def add_model(parser: argparse.ArgumentParser) -> None:
    """The arguments that say which model trains on which batch."""
    parser.add_argument(
        "build",
        metavar="SCRIPT.PY:FUNCTION",
        help="a function without arguments, in a file or as package.module:function, that returns "
        "a compiled Keras model, or (model, batch)",
    )
    batch = parser.add_mutually_exclusive_group()
    batch.add_argument(
        "--data",
        metavar="SCRIPT.PY:FUNCTION",
        help="a function without arguments that returns one global batch, (x, y) or (x, y, "
        "sample_weight): arrays or tf.TensorSpecs",
    )
    batch.add_argument(
        "--batch-size",
        type=int,
        metavar="N",
        help="make a global batch of N up from the model's inputs, outputs and loss",
    )


def add_search(parser: argparse.ArgumentParser) -> None:
    """The arguments that say how plans are searched, and what they may use."""
    parser.add_argument(
        "--planner",
        default="auto",
        help="tap, rhino, exhaustive (small models), or auto, which picks tap or rhino "
        "(default: %(default)s)",
    )
    parser.add_argument("--level", type=int, help="of Rhino's planner: 2 or 3 (default: 3)")
    parser.add_argument(
        "--search-seconds", type=float, help="take the best plan found by then (default: no end)"
    )
    parser.add_argument(
        "--objective",
        choices=OBJECTIVES,
        default=OBJECTIVES[0],
        help="what the plan is to be best at: the time of a training step (default), the latency "
        "of the forward pass, or the samples that a dollar of rent computes, on the devices of the "
        "mesh that are worth it (by the prices of `tfpar clusters NAME`, or --price)",
    )
    parser.add_argument(
        "--memory-limit",
        metavar="SIZE",
        help="what a plan may use of a device, such as 16GiB, or, with --stages, of those of each "
        "stage, such as 16GiB,24GiB (default: all it has)",
    )
    parser.add_argument(
        "--recompute",
        metavar="BLOCKS",
        action="append",
        help="what to compute again in the backward pass: all (blocks that repeat), none, or a "
        "regular expression, which may be given several times (default: what memory asks for)",
    )
    parser.add_argument(
        "--attention",
        choices=ATTENTION_MODES,
        help="run attention whole, or on blocks of its scores, which are never stored whole "
        "(default: what memory asks for)",
    )
    parser.add_argument(
        "--offload",
        choices=("all", "none", "optimizer", "activations"),
        help="what lies in host memory between its uses: optimizer slots, what blocks that repeat "
        "keep for the backward pass, both, or nothing (default: what memory asks for)",
    )
    parser.add_argument(
        "--plan-cache",
        metavar="DIR",
        help="keep plans in this folder, and search each problem once (default: $TFPAR_PLAN_CACHE)",
    )
    parser.add_argument(
        "--constraints",
        metavar="HINTS.TOML",
        help="a file of constraints: tables such as [[shard]], with the arguments of tap.shard",
    )
    add_pipeline(parser)
    parser.add_argument("--traceback", action="store_true", help=TRACEBACK)


def parse_mesh(text: str) -> Mesh:
    """The mesh of `2x8`, `16`, `2x2x4` or `data=2,model=8`.

    Raises:
        TfparError: it is none of these.
    """
    sizes = re.fullmatch(r"\d+(x\d+)*", text)
    named = re.fullmatch(r"\w+=\d+(,\w+=\d+)*", text)
    try:
        if sizes:
            return Mesh.of([int(n) for n in text.split("x")])
        if named:
            names, counts = zip(*(axis.split("=") for axis in text.split(",")), strict=True)
            return Mesh(names, tuple(map(int, counts)))
    except SpecError as error:
        raise TfparError(f"--mesh {text!r}: {error}") from error
    raise TfparError(
        f"--mesh {text!r} is no mesh. Write sizes (2x8, 16, 2x2x4) or axes (data=2,model=8)."
    )


def parse_meshes(texts: Iterable[str]) -> list[Mesh]:
    """The meshes of `8,2x8` or `8,data=2,model=8`, each once.

    Axes with names that follow each other are one mesh, until one of them comes again:
    `data=2,model=8,data=16` are two.

    Raises:
        TfparError: one of them is no mesh.
    """
    found: list[list[str]] = []
    for text in texts:
        named = False
        for part in text.split(","):
            name, equals, _ = part.partition("=")
            known = {axis.partition("=")[0] for axis in found[-1]} if named else set()
            if equals and named and name not in known:
                found[-1].append(part)
            else:
                found.append([part])
            named = bool(equals)
    return list(dict.fromkeys(parse_mesh(",".join(parts)) for parts in found))


# --- pipeline -------------------------------------------------------------------------------


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
        "--tolerance",
        type=float,
        metavar="PART",
        help="by how much, as a part of the average, a stage may compute longer so that less is "
        "sent (default: 0.1, or up to 0.5 where a link limits the step)",
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
    tolerance = options.tolerance
    exact = options.batch_statistics == BATCH_STATISTICS[0]
    if stages != AUTO and (options.search is not None or options.seed is not None):
        raise TfparError("--search and --seed are for --stages auto: add it, or leave them out.")
    if stages is None and tolerance is not None:
        raise TfparError("--tolerance is for stages: add --stages, or leave it out.")
    if stages is None and microbatches is None and schedule is None and exact:
        return None
    if stages == AUTO:
        if microbatches is not None or schedule is not None or not exact:
            raise TfparError(
                "--stages auto finds microbatches and schedule itself: leave out --microbatches, "
                "--schedule and --batch-statistics, or give a number of stages."
            )
        search, seed = options.search, options.seed
        if search is None and seed is None and tolerance is None:
            return AUTO
        return Pipeline(AUTO, tolerance=tolerance, search=search or SEARCHES[0], seed=seed or 0)
    if schedule is not None and schedule not in (*FAMILIES, AUTO):
        try:
            return Pipeline(
                stages,
                microbatches,
                Schedule.load(schedule),
                batch_statistics=options.batch_statistics,
                tolerance=tolerance,
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
        stages,
        microbatches,
        schedule or "1f1b",
        batch_statistics=options.batch_statistics,
        tolerance=tolerance,
    )
