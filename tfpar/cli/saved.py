"""`tfpar show`, `explain` and `diff`: plans in files. None of them traces a model."""

from __future__ import annotations

import argparse
import json

from tfpar.cli.problem import TRACEBACK

SAME, DIFFERENT = 0, 1


def add_parsers(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the commands, their options, and `run` as what each does."""
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
