"""Commands for plans in files: `tfpar show`, `explain`, `diff`, `compare`, `report` and `timeline`.

None of them traces a model, but `compare --measure`, which trains one with both plans."""

from __future__ import annotations

import argparse
import json
import os
import webbrowser
from pathlib import Path

from tfpar.cli.problem import TRACEBACK
from tfpar.cli.quiet import quiet_tensorflow
from tfpar.spec import PlanError, TfparError
from tfpar.spec.arguments import integer
from tfpar.writable import check_writable

SAME, DIFFERENT = 0, 1


def add_parsers(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the commands and their options."""
    _add_show(commands)
    _add_explain(commands)
    _add_diff(commands)


def add_shown(parser: argparse.ArgumentParser) -> None:
    """The arguments that say how a plan is printed."""
    parser.add_argument("--full", action="store_true", help="every layer, variable and table")
    parser.add_argument(
        "--sort", choices=("time", "memory"), help="layers that take most of it first"
    )
    parser.add_argument("--json", action="store_true", help="print the plan's report data")


def _add_show(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser(
        "show",
        help="print a saved plan",
        description="Print a saved plan, with all that its file knows of it.",
    )
    parser.add_argument("plan", metavar="PLAN.JSON")
    add_shown(parser)
    parser.add_argument(
        "--explain",
        nargs="+",
        action="extend",
        default=[],
        metavar="NAME",
        help="only these variables or layers",
    )
    parser.add_argument("--traceback", action="store_true", help=TRACEBACK)
    parser.set_defaults(run=_show)


def _add_explain(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser(
        "explain",
        help="say where variables or layers of a saved plan lie, and why",
        description="Say where variables or layers of a saved plan lie and why, what else was "
        "priced, who reads them and what that moves.",
    )
    parser.add_argument("plan", metavar="PLAN.JSON")
    parser.add_argument("names", nargs="+", metavar="NAME", help="a path, or its end")
    parser.add_argument("--json", action="store_true", help="print JSON instead of text")
    parser.add_argument("--traceback", action="store_true", help=TRACEBACK)
    parser.set_defaults(run=_explain)


def _add_diff(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser("diff", help="compare two saved plans; exit code 1 if they differ")
    parser.add_argument("first", metavar="A.JSON")
    parser.add_argument("second", metavar="B.JSON")
    parser.add_argument("--json", action="store_true", help="print JSON instead of text")
    parser.add_argument("--traceback", action="store_true", help=TRACEBACK)
    parser.set_defaults(run=_diff)


def _show(options: argparse.Namespace) -> int:
    from tfpar.plans import Plan

    plan = Plan.load(options.plan)
    if options.explain:
        print("\n".join(map(plan.explain, options.explain)))
    elif options.json:
        print(json.dumps(plan.report_data()))
    else:
        print(plan.summary(full=options.full, sort=options.sort))
    return 0


def _explain(options: argparse.Namespace) -> int:
    from tfpar.observability.report.data.build import build_report
    from tfpar.observability.report.explain import explain, explain_as_data
    from tfpar.plans import Plan

    report = build_report(Plan.load(options.plan))
    if options.json:
        print(json.dumps([explain_as_data(report, name) for name in options.names]))
    else:
        print("\n".join(explain(report, name) for name in options.names))
    return 0


def _diff(options: argparse.Namespace) -> int:
    from tfpar.plans import Plan

    lines = Plan.load(options.first).diff(Plan.load(options.second))
    if options.json:
        print(json.dumps(lines))
    else:
        print(*lines, sep="\n", end="\n" if lines else "")
    return DIFFERENT if lines else SAME


# --- report ---------------------------------------------------------------------------------
# A plan as a page for browsers.


def add_report(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command and its options."""
    parser = commands.add_parser(
        "report",
        help="write a saved plan as a page for browsers",
        description="Write a plan that `tfpar plan -o` or plan.save wrote as a page for browsers: "
        "one file that asks for no other.",
    )
    parser.add_argument("plan", metavar="PLAN.JSON")
    parser.add_argument(
        "-o",
        "--output",
        metavar="PAGE.HTML",
        help="write the page to this file (default: that of the plan, as .html)",
    )
    parser.add_argument(
        "--timeline",
        metavar="T.JSON",
        help="show a step of this timeline, which tap.Timeline wrote, below the predicted one",
    )
    parser.add_argument("--open", action="store_true", help="open the page in a browser")
    parser.add_argument("--traceback", action="store_true", help=TRACEBACK)
    parser.set_defaults(run=_write_report)


def _write_report(options: argparse.Namespace) -> int:
    """Write the page; returns the exit code.

    Raises:
        PlanError: there is no such plan, it holds no report, or one of another version; or the page
            cannot be written, or the timeline not be read.
    """
    from tfpar.plans import Plan

    plan = Plan.load(options.plan)
    if plan.report is None:
        raise PlanError(
            f"The plan file {options.plan!r} holds no report: it was saved without the graph of "
            f"its step. Make the plan again with `tfpar plan SCRIPT.PY:FUNCTION -o {options.plan}`."
        )
    page = options.output or os.path.splitext(options.plan)[0] + ".html"
    plan.to_html(page, timeline=options.timeline)
    print(f"Wrote {page} ({os.path.getsize(page) / 1024:.0f} KiB).")
    if options.open:
        webbrowser.open(Path(page).resolve().as_uri())
    return 0


# --- timeline -------------------------------------------------------------------------------
# A step of a saved plan as it is predicted, for ui.perfetto.dev.


def add_timeline(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command and its options."""
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
    parser.set_defaults(run=_write_timeline)


def _write_timeline(options: argparse.Namespace) -> int:
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


# --- compare --------------------------------------------------------------------------------
# Two plans beside each other, by prediction or by a run of both.


def add_compare(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command and its options."""
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
    parser.set_defaults(run=_compare)


def _compare(options: argparse.Namespace) -> int:
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
