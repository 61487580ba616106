"""Rank programs and runs of them, and what is left of their processes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import uuid
from pathlib import Path

import psutil

from tests.time_limits import time_limit, wait_until
from tfpar.jobs import launch
from tfpar.jobs.launch import RunOptions

ROOT = Path(__file__).parents[3]
OF_RANKS = {
    "PYTHONPATH": str(ROOT),
    "TF_CPP_MIN_LOG_LEVEL": "3",
    "CUDA_VISIBLE_DEVICES": "-1",
    # In milliseconds; looking for work a thousand times a second took a third of a rank's time.
    "HOROVOD_CYCLE_TIME": "5",
}
"""Variables under which ranks find tfpar, say little, and take less of a machine."""

MARK = "TFPAR_TEST_MARK"
LIMITS = ("timeout_s", "start_timeout_s", "grace_s")
"""Options of a run, in seconds of the reference machine."""

PREAMBLE = """
import os, signal, sys, time
rank, size = int(os.environ["TFPAR_RANK"]), int(os.environ["TFPAR_SIZE"])
attempt = int(os.environ["TFPAR_ATTEMPT"])
def report(activity="train step 1", bounded=False):
    from tfpar.jobs.launch.beacon import Beacon
    beacon = Beacon.connect(rank, os.environ)
    beacon.at(activity, bounded)
    return beacon
def until(holds, seconds=20):
    end = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < end, "it never came"
        time.sleep(0.01)
def heard(beacon):
    until(lambda: beacon._told[0] is beacon._now)
def beside(name):
    return os.path.join(os.path.dirname(__file__), name)
def note(name):
    with open(beside(name), "w") as file:
        file.write(str(os.getpid()))
def noted(*names):
    until(lambda: all(os.path.exists(beside(name)) for name in names))
def ended(name):
    with open(beside(name)) as file:
        pid = file.read()
    until(lambda: not os.path.exists(f"/proc/{pid}"))
def hang():
    time.sleep(30)
"""
"""What programs of ranks begin with.

`heard` waits until the launcher has been told, `noted` for what other ranks have noted by name, and
`ended` until the launcher knows of the end of one that did; `hang` is longer than any run lasts.
"""


def program(folder: Path, text: str) -> tuple[str, ...]:
    """The command of a rank that runs this Python text, which begins with `PREAMBLE`."""
    path = folder / "program.py"
    path.write_text(PREAMBLE + textwrap.dedent(text))
    return sys.executable, str(path)


def variables() -> dict[str, str]:
    """What ranks inherit."""
    return {**os.environ, **OF_RANKS}


def environ() -> dict[str, str]:
    """The same with a mark, by which all that they start can be told."""
    return {**variables(), MARK: uuid.uuid4().hex}


def run(command: tuple[str, ...], num_ranks: int = 2, **options) -> int:
    """The exit code of a run here, after which none of its processes lives."""
    marking = environ()
    options = {"backend": "tensorflow", "grace_s": 2.0, **options}
    options |= {name: time_limit(options[name]) for name in LIMITS if name in options}
    code = launch.run(RunOptions(command=command, num_ranks=num_ranks, **options), marking)
    assert wait_until(lambda: not marked(marking[MARK]), 3), marked(marking[MARK])
    return code


def start(command: tuple[str, ...], *options: str) -> tuple[subprocess.Popen, str]:
    """`tfpar run` as a process of its own, and the mark of what it starts."""
    variables = environ()
    run = [sys.executable, "-m", "tests.cli.launcher", "run", "--backend", "tensorflow"]
    process = subprocess.Popen(
        [*run, *options, *command],
        env=variables,
        cwd=ROOT,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        preexec_fn=_heed_interrupts,
    )
    return process, variables[MARK]


def _heed_interrupts() -> None:
    """In a shell's background interrupts are ignored, and its children inherit that."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def marked(mark: str) -> list[str]:
    """The processes that live and were started with this mark."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.status() != psutil.STATUS_ZOMBIE and process.environ().get(MARK) == mark:
                found.append(f"{process.pid} {' '.join(process.cmdline())[:80]}")
        except psutil.Error:
            continue
    return found


def running(command: tuple[str, ...]) -> list[int]:
    """The processes that live and run this command."""
    every = psutil.process_iter(["pid", "cmdline"])
    return [process.info["pid"] for process in every if process.info["cmdline"] == [*command]]


def kill_marked(mark: str) -> None:
    """End whatever a failed test has left."""
    for line in marked(mark):
        try:
            psutil.Process(int(line.split()[0])).kill()
        except psutil.Error:
            continue
