"""`tfpar compare`: two saved plans beside each other, by prediction or by a run of both."""

from __future__ import annotations

import argparse
import json

from tfpar.cli.problem import TRACEBACK
from tfpar.cli.quiet import quiet_tensorflow
from tfpar.spec import TfparError
from tfpar.spec.arguments import integer


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command, its options, and `run` as what it does."""
    parser = commands.add_parser(
        "compare",
        help="put two saved plans beside each other: time, memory, collectives, placements",
        description="Put two saved plans beside each other: what a step is predicted to take and "
        "store, which collectives it has, and which layers lie otherwise. With --measure, train "
        "the model with both, on this machine in one process, and compare what steps took.",
    )
    parser.add_argument("first", metavar="A.JSON")
    parser.add_argument("second", metavar="B.JSON")
    parser.add_argument(
        "--measure",
        dest="build",
        metavar="SCRIPT.PY:FUNCTION",
        help="the function that makes the model: train it with both plans in turn",
    )
    batch = parser.add_mutually_exclusive_group()
    batch.add_argument(
        "--data",
        metavar="SCRIPT.PY:FUNCTION",
        help="a function without arguments that returns one global batch",
    )
    batch.add_argument(
        "--batch-size", type=int, metavar="N", help="make up a global batch of N samples"
    )
    parser.add_argument(
        "--steps",
        type=int,
        default=10,
        metavar="N",
        help="how many steps of each plan are measured (default: %(default)s)",
    )
    parser.add_argument("--json", action="store_true", help="print JSON instead of text")
    parser.add_argument("--traceback", action="store_true", help=TRACEBACK)
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Print the comparison.

    Raises:
        TfparError: a file that is no plan, or a model that is none of both.
    """
    from tfpar.observability.report.compare import Comparison
    from tfpar.observability.report.data.build import build_report
    from tfpar.plans import Plan

    integer("--steps", options.steps, 1)
    if options.build is None and (options.data or options.batch_size):
        raise TfparError("--data and --batch-size are for --measure SCRIPT.PY:FUNCTION.")
    plans = Plan.load(options.first), Plan.load(options.second)
    measured = None
    if options.build is not None:
        with quiet_tensorflow():
            from tfpar.cli.measure import step_seconds
        measured = step_seconds(options, plans)
    names = options.first, options.second
    found = Comparison.of(names, build_report(plans[0]), build_report(plans[1]), measured)
    print(json.dumps(found.to_builtins()) if options.json else found)
    return 0
