"""What `tfpar` takes on its command line, and what a shell gets back.

Exit code 0, or 1 where `diff` finds a difference or `doctor` something missing, or 2 after one line
on stderr that says what is wrong. Commands import what they need when they run: `tfpar --help`
never loads TensorFlow.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
import tempfile
import traceback
from collections.abc import Iterator, Sequence

import tfpar
from tfpar.cli import calibrate as calibrate_command
from tfpar.cli import doctor as doctor_command
from tfpar.cli import install as install_command
from tfpar.cli import run as run_command
from tfpar.cli import timeline as timeline_command
from tfpar.cli.pipeline import add_pipeline
from tfpar.spec.errors import TfparError

FAILED, DIFFERENT = 2, 1

_TRACEBACK = "on failure also show where, as Python does"


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit code."""
    options = _parser().parse_args(argv)
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


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        "tfpar", description="Plans for parallel Keras models, and jobs of many processes."
    )
    parser.add_argument("--version", action="version", version=f"tfpar {tfpar.__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    _add_plan(commands)
    _add_estimate(commands)
    _add_show(commands)
    _add_diff(commands)
    timeline_command.add_parser(commands)
    run_command.add_parser(commands)
    install_command.add_parser(commands)
    doctor_command.add_parser(commands)
    calibrate_command.add_parser(commands)
    return parser


def _add_plan(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser(
        "plan",
        help="search a plan for the model that a script builds",
        description="Search a plan for the model that a function of a script builds. Neither "
        "devices nor memory for weights are needed.",
    )
    _add_problem(parser)
    parser.add_argument(
        "--plan-cache",
        metavar="DIR",
        help="keep plans in this folder, and search each problem once (default: $TFPAR_PLAN_CACHE)",
    )
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
    parser.set_defaults(run=_plan)


def _add_problem(parser: argparse.ArgumentParser) -> None:
    """What is to be planned, and for which machines."""
    parser.add_argument(
        "build",
        metavar="SCRIPT.PY:FUNCTION",
        help="a function without arguments, in a file or as package.module:function, that returns "
        "a compiled Keras model, or (model, batch)",
    )
    parser.add_argument(
        "--mesh", required=True, help="the ranks: 2x8 (nodes x devices), 16, or data=2,model=8"
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
    parser.add_argument(
        "--cluster",
        help="the machines: a preset (dgx-a100, rhino-m8, v100-ethernet, cpu, ...) or a "
        "cluster file (default: local, machines like this one)",
    )
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
        "--memory-limit",
        metavar="SIZE",
        help="what a plan may use of a device, such as 16GiB (default: all it has)",
    )
    parser.add_argument(
        "--recompute",
        metavar="BLOCKS",
        action="append",
        help="what to compute again in the backward pass: all (blocks that repeat), none, or a "
        "regular expression, which may be given several times (default: what memory asks for)",
    )
    parser.add_argument(
        "--offload",
        choices=("all", "none", "optimizer", "activations"),
        help="what lies in host memory between its uses: optimizer slots, what blocks that repeat "
        "keep for the backward pass, both, or nothing (default: what memory asks for)",
    )
    add_pipeline(parser)
    parser.add_argument("--traceback", action="store_true", help=_TRACEBACK)


def _add_estimate(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser(
        "estimate",
        help="say whether a model fits on machines that need not be there, and how fast it trains",
        description="Plan a model for a cluster and say what its best plan needs and how long a "
        "step takes. Exit code 0: it fits; 1: no plan fits; 2: it cannot be planned.",
    )
    _add_problem(parser)
    parser.set_defaults(run=_estimate)


def _add_show(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser("show", help="print a saved plan")
    parser.add_argument("plan", metavar="PLAN.JSON")
    parser.add_argument(
        "--explain",
        nargs="+",
        action="extend",
        default=[],
        metavar="NAME",
        help="only these variables",
    )
    parser.add_argument("--traceback", action="store_true", help=_TRACEBACK)
    parser.set_defaults(run=_show)


def _add_diff(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser("diff", help="compare two saved plans; exit code 1 if they differ")
    parser.add_argument("first", metavar="A.JSON")
    parser.add_argument("second", metavar="B.JSON")
    parser.add_argument("--traceback", action="store_true", help=_TRACEBACK)
    parser.set_defaults(run=_diff)


def _plan(options: argparse.Namespace) -> int:
    with _quiet_tensorflow():
        from tfpar.cli.plan import run
    return run(options)


def _estimate(options: argparse.Namespace) -> int:
    with _quiet_tensorflow():
        from tfpar.cli.estimate import run
    return run(options)


def _show(options: argparse.Namespace) -> int:
    from tfpar.plans import Plan

    plan = Plan.load(options.plan)
    print("\n".join(map(plan.explain, options.explain)) or plan.summary())
    return 0


def _diff(options: argparse.Namespace) -> int:
    from tfpar.plans import Plan

    lines = Plan.load(options.first).diff(Plan.load(options.second))
    print(*lines, sep="\n", end="\n" if lines else "")
    return DIFFERENT if lines else 0


@contextlib.contextmanager
def _quiet_tensorflow() -> Iterator[None]:
    """TensorFlow is imported without its log, unless TF_CPP_MIN_LOG_LEVEL asks for one.

    What its libraries log as they are loaded heeds no level, so that stderr itself is held back;
    if the import fails, it is shown.
    """
    if "TF_CPP_MIN_LOG_LEVEL" in os.environ or "tensorflow" in sys.modules:
        yield
        return
    os.environ["TF_CPP_MIN_LOG_LEVEL"] = "3"
    sys.stderr.flush()
    stderr = os.dup(2)
    with tempfile.TemporaryFile() as held:
        os.dup2(held.fileno(), 2)
        try:
            yield
        except BaseException:
            sys.stderr.flush()
            held.seek(0)
            os.write(stderr, held.read())
            raise
        finally:
            sys.stderr.flush()
            os.dup2(stderr, 2)
            os.close(stderr)
