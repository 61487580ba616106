"""`tfpar timeline`: a step of a saved plan as it is predicted, for ui.perfetto.dev."""

from __future__ import annotations

import argparse
import os

from tfpar.cli.problem import TRACEBACK
from tfpar.writable import check_writable


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command, its options, and `run` as what it does."""
    parser = commands.add_parser(
        "timeline",
        help="write the predicted timeline of a saved plan",
        description="Write a step of a saved plan as it is predicted, as Chrome trace JSON, which "
        "https://ui.perfetto.dev shows: what each rank computes, communicates and waits for. "
        "tap.Timeline and `tfpar run --timeline-filename` measure one.",
    )
    parser.add_argument("plan", metavar="PLAN.JSON", help="written by `tfpar plan -o`")
    parser.add_argument(
        "-o", "--output", required=True, metavar="T.JSON", help="write the timeline to this file"
    )
    parser.add_argument("--traceback", action="store_true", help=TRACEBACK)
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Write the file; returns the exit code.

    Raises:
        PlanError: the plan cannot be read, or has no prices or no report.
        TfparError: the timeline cannot be written.
    """
    from tfpar.observability.report.data.schema import read_report
    from tfpar.observability.timeline.predicted import predicted_trace
    from tfpar.plans import Plan
    from tfpar.spec.quantities import format_seconds

    check_writable("timeline", options.output)
    plan = Plan.load(options.plan)
    report = read_report(plan.report_data(), os.path.basename(options.plan))
    trace = predicted_trace(report)
    trace.save(options.output)
    shown = trace.notes["shown"]
    print(
        f"{options.output}: a step of {format_seconds(trace.notes['seconds'])} on "
        f"{report.facts.ranks} ranks, {shown}. Open it at https://ui.perfetto.dev."
    )
    return 0
