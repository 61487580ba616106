"""Trial trainings of a tiny model: by two ranks in one process, and by two processes."""

from __future__ import annotations

import os
import re
import shlex
import sys

from tfpar.jobs.doctor.command import run
from tfpar.jobs.doctor.finding import Finding, Status, ok
from tfpar.jobs.doctor.probe import Probe
from tfpar.tf.distributed.job import without_job

_LIMIT_S = 180.0
_NUM_RANKS = 2
_JOB_LIMIT_S = 60  # without progress
_LABEL = re.compile(r"\[\d+\] ")


ONE_PROCESS = "One process"


def over(backend: str) -> str:
    """The name of the trial of a backend."""
    return f"Processes, {backend}"


def try_one_process() -> Finding:
    """Train by two ranks in one process."""
    command = [sys.executable, "-m", "tfpar.jobs.doctor.training"]
    return _tried(ONE_PROCESS, command, Status.MISSING, {})


def try_processes(backend: str, probe: Probe, *, default: bool) -> Finding:
    """Train by two processes on this machine, over one backend.

    Args:
        default: `tfpar run` takes this backend unless it is told another one.
    """
    command = [
        sys.executable,
        "-m",
        "tfpar",
        "run",
        "-np",
        str(_NUM_RANKS),
        "-H",
        f"localhost:{_NUM_RANKS}",
        "--backend",
        backend,
        "--timeout",
        str(_JOB_LIMIT_S),
        "--start-timeout",
        str(_JOB_LIMIT_S),
        "--grace",
        "5",
        sys.executable,
        "-m",
        "tfpar.jobs.doctor.ranks",
    ]
    # One GPU cannot be shared by two ranks.
    hidden = {"CUDA_VISIBLE_DEVICES": "-1"} if 0 < len(probe.gpus) < _NUM_RANKS else {}
    status = Status.MISSING if default else Status.WARNING
    return _tried(over(backend), command, status, hidden)


def _tried(name: str, command: list[str], failed: Status, variables: dict[str, str]) -> Finding:
    environ = without_job(os.environ) | {"TF_CPP_MIN_LOG_LEVEL": "3"} | variables
    ended = run(command, _LIMIT_S, environ)
    if ended.code == 0:
        lines = [line for line in ended.out.splitlines() if line.strip()]
        return ok(name, _unlabelled(lines[-1]) if lines else "works")
    given = [f"{name}={value}" for name, value in variables.items()]
    return Finding(name, failed, ended.reason, f"See all it says: {shlex.join([*given, *command])}")


def _unlabelled(line: str) -> str:
    """A line of a rank without the label that `tfpar run` puts in front."""
    return _LABEL.sub("", line)
