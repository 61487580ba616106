"""Entry point of the command `tfpar`: its arguments and its exit codes.

Exit code 0; or 1 where `diff` or `verify` finds a difference, `doctor` something missing and
`estimate` no plan that fits, or where the search of `plan` was interrupted; or 2 after one line on
stderr that says what is wrong. Commands import what they need when they run: `tfpar --help` never
loads TensorFlow.
"""

from __future__ import annotations

import argparse
import os
import sys
import traceback
from collections.abc import Sequence

import tfpar
from tfpar.cli import clusters as clusters_command
from tfpar.cli import estimate as estimate_command
from tfpar.cli import machine as machine_commands
from tfpar.cli import run as run_command
from tfpar.cli import saved as saved_commands
from tfpar.cli import verify as verify_command
from tfpar.cli.problem import add_problem
from tfpar.cli.quiet import quiet_tensorflow
from tfpar.spec.errors import TfparError

FAILED = 2


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit code."""
    options = make_parser().parse_args(argv)
    try:
        code: int = options.run(options)
        sys.stdout.flush()  # a closed pipe is noticed here, not at exit
        return code
    except BrokenPipeError:  # `tfpar show plan.json | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return FAILED
    except KeyboardInterrupt:
        return _fail("interrupted", options)
    except TfparError as error:
        return _fail(str(error), options)
    except Exception as error:  # noqa: BLE001 - a traceback is for those who ask for it
        return _fail(f"{type(error).__name__}: {error} (--traceback shows where)", options)


def _fail(text: str, options: argparse.Namespace) -> int:
    if options.traceback:
        traceback.print_exc()
    print(f"tfpar {options.command}: {' '.join(text.split())}", file=sys.stderr)
    return FAILED


def make_parser() -> argparse.ArgumentParser:
    """Make the parser of all commands."""
    parser = argparse.ArgumentParser(
        "tfpar", description="Plans for parallel Keras models, and jobs of many processes."
    )
    parser.add_argument("--version", action="version", version=f"tfpar {tfpar.__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    _add_plan(commands)
    estimate_command.add_parser(commands)
    saved_commands.add_parsers(commands)
    saved_commands.add_compare(commands)
    saved_commands.add_report(commands)
    saved_commands.add_timeline(commands)
    run_command.add_parser(commands)
    machine_commands.add_install(commands)
    machine_commands.add_doctor(commands)
    machine_commands.add_calibrate(commands)
    clusters_command.add_parser(commands)
    verify_command.add_parser(commands)
    return parser


def _add_plan(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser(
        "plan",
        help="search a plan for the model that a script builds",
        description="Search a plan for the model that a function of a script builds. Neither "
        "devices nor memory for weights are needed.",
    )
    add_problem(parser)
    parser.add_argument("-o", "--output", metavar="PLAN.JSON", help="write the plan to this file")
    parser.add_argument(
        "--explain",
        nargs="+",
        action="extend",
        default=[],
        metavar="NAME",
        help="instead of the summary, say where these variables lie and why",
    )
    parser.add_argument("--quiet", action="store_true", help="no summary")
    saved_commands.add_shown(parser)
    parser.add_argument(
        "--what-if",
        nargs="+",
        action="extend",
        default=[],
        metavar="CLUSTER:MESH",
        help="also find the best plan for other machines, such as dgx-a100:2x8, for the report",
    )
    parser.set_defaults(run=_plan)


def _plan(options: argparse.Namespace) -> int:
    with quiet_tensorflow():
        from tfpar.cli.plan import run
    return run(options)
