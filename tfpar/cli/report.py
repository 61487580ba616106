"""`tfpar report`: a plan as a page for browsers."""

from __future__ import annotations

import argparse
import os
import webbrowser
from pathlib import Path

from tfpar.cli.problem import TRACEBACK
from tfpar.spec import PlanError


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command, its options, and `run` as what it does."""
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
    parser.add_argument("--open", action="store_true", help="open the page in a browser")
    parser.add_argument("--traceback", action="store_true", help=TRACEBACK)
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Write the page; returns the exit code.

    Raises:
        PlanError: there is no such plan, it holds no report, or one of another version; or the page
            cannot be written.
    """
    from tfpar.plans import Plan

    plan = Plan.load(options.plan)
    if plan.report is None:
        raise PlanError(
            f"The plan file {options.plan!r} holds no report: it was saved without the graph of "
            f"its step. Make the plan again with `tfpar plan SCRIPT.PY:FUNCTION -o {options.plan}`."
        )
    page = options.output or os.path.splitext(options.plan)[0] + ".html"
    plan.to_html(page)
    print(f"Wrote {page} ({os.path.getsize(page) / 1024:.0f} KiB).")
    if options.open:
        webbrowser.open(Path(page).resolve().as_uri())
    return 0
