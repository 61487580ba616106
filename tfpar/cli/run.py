"""`tfpar run`: a program on many ranks, one process each."""

from __future__ import annotations

import argparse
import os

from tfpar.jobs import launch
from tfpar.jobs.launch import environment as names
from tfpar.jobs.launch.options import BACKENDS, RunOptions
from tfpar.observability.timeline.request import DEFAULT_STEPS, TimelineRequest
from tfpar.spec.errors import TfparError


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command, its options, and `run` as what it does."""
    parser = commands.add_parser(
        "run",
        help="run a program on many ranks, one process each",
        description="Run a program on many ranks, one process each, on this machine, on hosts "
        "reached by ssh, or on those of a Slurm allocation. When a rank fails, all are ended, and "
        "it is said which one, where and why.",
    )
    parser.add_argument(
        "-np",
        "--num-proc",
        dest="num_ranks",
        type=int,
        metavar="N",
        help="the number of ranks (default: all slots of the hosts)",
    )
    _add_hosts(parser)
    _add_limits(parser)
    parser.add_argument(
        "--output-dir", metavar="DIR", help="also write rank.N.out and rank.N.err into this folder"
    )
    parser.add_argument(
        "--env",
        action="append",
        default=[],
        metavar="NAME[=VALUE]",
        help="set a variable for all ranks, or pass on the one that is set here",
    )
    _add_timeline(parser)
    parser.add_argument("--verbose", action="store_true", help="say what is started, and where")
    parser.add_argument("--traceback", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument(
        "program",
        nargs=argparse.REMAINDER,
        metavar="COMMAND [ARGS...]",
        help="what each rank runs, as in: python train.py",
    )
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Run the program until all ranks have ended; returns the exit code.

    Raises:
        TfparError: the ranks cannot be started as asked.
    """
    return launch.run(_options(options))


def _add_hosts(parser: argparse.ArgumentParser) -> None:
    hosts = parser.add_mutually_exclusive_group()
    hosts.add_argument(
        "-H",
        "--hosts",
        metavar="HOST:SLOTS,...",
        help="the hosts and how many ranks each may have (default: those of the Slurm allocation, "
        "else this machine)",
    )
    hosts.add_argument(
        "-hostfile",
        "--hostfile",
        metavar="FILE",
        help="a file with a line for each host: host slots=N, or host:N",
    )
    parser.add_argument(
        "--backend",
        choices=BACKENDS,
        help="what the ranks exchange tensors with (default: horovod if it is installed)",
    )
    parser.add_argument(
        "--insecure-grpc",
        action="store_true",
        help="with --backend tensorflow, let every host that reaches a rank read and write files "
        "as you: only where the job's own hosts cannot be told from others",
    )
    starter = parser.add_mutually_exclusive_group()
    starter.add_argument(
        "--gloo", action="store_false", dest="mpi", help="start the ranks here and by ssh (default)"
    )
    starter.add_argument("--mpi", action="store_true", help="start the ranks by Open MPI's mpirun")
    parser.set_defaults(mpi=False)
    parser.add_argument(
        "--network-interface",
        metavar="IF",
        help="what the ranks talk over (default: found; the loopback on one machine)",
    )
    parser.add_argument("-p", "--ssh-port", type=int, metavar="N", help="of the hosts")
    parser.add_argument("-i", "--ssh-identity-file", metavar="FILE", help="the private key for ssh")


def _add_timeline(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--timeline-filename",
        metavar="T.JSON",
        help="write what all ranks did in a few training steps to this file, for ui.perfetto.dev",
    )
    parser.add_argument(
        "--timeline-steps",
        metavar="FIRST-LAST",
        help="in which, counted from 1 (default: "
        f"{DEFAULT_STEPS[0]}-{DEFAULT_STEPS[1]}); nothing is measured in the others",
    )


def _add_limits(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--start-timeout",
        type=float,
        default=120.0,
        metavar="S",
        help="seconds from the first rank that reports to the last (default: %(default)g)",
    )
    parser.add_argument(
        "--timeout",
        type=float,
        default=600.0,
        metavar="S",
        help="seconds without progress after which the job has failed (default: %(default)g)",
    )
    parser.add_argument(
        "--grace",
        type=float,
        default=30.0,
        metavar="S",
        help="seconds that ranks have to end when this command is told to (default: %(default)g)",
    )
    parser.add_argument(
        "--min-np",
        type=int,
        dest="min_ranks",
        metavar="N",
        help="when ranks are lost, restart with those that are left, if they are at least N",
    )
    parser.add_argument(
        "--restarts",
        type=int,
        default=10,
        metavar="N",
        help="how often at most (default: %(default)s)",
    )


def _options(given: argparse.Namespace) -> RunOptions:
    program = given.program[1:] if given.program[:1] == ["--"] else given.program
    return RunOptions(
        command=tuple(program),
        num_ranks=given.num_ranks,
        hosts=given.hosts,
        hostfile=given.hostfile,
        backend=given.backend,
        mpi=given.mpi,
        insecure_grpc=given.insecure_grpc,
        network_interface=given.network_interface,
        ssh_port=given.ssh_port,
        ssh_identity_file=given.ssh_identity_file,
        start_timeout_s=given.start_timeout,
        timeout_s=given.timeout,
        grace_s=given.grace,
        min_ranks=given.min_ranks,
        restarts=given.restarts,
        output_dir=given.output_dir,
        env={**dict(map(_variable, given.env)), **_timeline(given)},
        verbose=given.verbose,
    )


def _timeline(given: argparse.Namespace) -> dict[str, str]:
    """The variables by which ranks know of a timeline."""
    path, steps = given.timeline_filename, given.timeline_steps
    if path is None:
        if steps is not None:
            raise TfparError("--timeline-steps says of no --timeline-filename where they go.")
        return {}
    here = given.hosts is None and given.hostfile is None  # else the first rank has the folder
    asked = TimelineRequest.of(path, steps, writes=here)
    return {names.TIMELINE: asked.path, names.TIMELINE_STEPS: f"{asked.first}-{asked.last}"}


def _variable(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not name or not (equals or name in os.environ):
        raise TfparError(f"--env {text!r}: write NAME=VALUE, or the name of a variable set here.")
    return name, value if equals else os.environ[name]
