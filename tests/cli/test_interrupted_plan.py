"""Ctrl-C while `tfpar plan` searches: the best plan so far is printed and written."""

from __future__ import annotations

import signal
import subprocess
from pathlib import Path

import pytest

from tests import preloaded
from tests.cli.train import tfpar
from tests.jobs.launch.programs import variables
from tests.planning.test_incumbent import Interrupted, python_handles_it  # noqa: F401 - a fixture
from tests.time_limits import time_limit
from tfpar.planning.intra_op import PLANNERS, TapPlanner
from tfpar.plans import Plan

COMMAND = "plan train.py:both --mesh 2x2 --cluster v100-ethernet --planner interrupted"


@pytest.fixture
def interrupted(monkeypatch, folder):
    monkeypatch.setitem(PLANNERS, "interrupted", lambda: Interrupted(TapPlanner(), 1))


def test_what_was_found_is_written_and_the_exit_code_says_so(interrupted, capsys):
    assert tfpar(f"{COMMAND} -o p.json --plan-cache plans") == 1
    out, err = capsys.readouterr()
    assert out.startswith("Wrote p.json\nPlan for 'mlp' on mesh ") and "there may be better" in out
    assert err == "tfpar plan: interrupted, taking the best plan so far\n"
    assert Plan.load("p.json").findings.cut_short and not Path("plans").exists()
    assert tfpar(f"{COMMAND} --explain fc1/kernel") == 1
    assert capsys.readouterr().out.startswith("Variable 'mlp/fc1/kernel'")


def test_where_nothing_fits_that_is_said(interrupted, capsys):
    assert tfpar(f"{COMMAND} -o p.json --memory-limit 3kB") == 2
    err = capsys.readouterr().err.splitlines()
    assert err[-1].startswith("tfpar plan: The search was interrupted before it had found")
    assert not Path("p.json").exists()


SLOW_PLANNER = """
import sys
import threading

from tfpar.cli.main import main
from tfpar.planning.intra_op import PLANNERS, TapPlanner


class Endless:
    name = "endless"

    def solve(self, problem):
        TapPlanner().solve(problem)
        print("searching", flush=True)
        threading.Event().wait(600)


PLANNERS["endless"] = Endless
sys.exit(main(sys.argv[1:]))
"""


@pytest.mark.slow
@pytest.mark.xdist_group("processes")
def test_a_signal_from_the_keyboard_does_that(folder):
    """The process is one of its own, whose planner never ends."""
    command = "plan train.py:both --mesh 2 --cluster v100-ethernet --planner endless -o p.json"
    started = subprocess.Popen(
        preloaded.python("-c", SLOW_PLANNER, *command.split()),
        env=variables(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert started.stdout is not None
    assert started.stdout.readline() == "searching\n"
    started.send_signal(signal.SIGINT)
    out, err = started.communicate(timeout=time_limit(120))
    assert started.returncode == 1, err
    assert "interrupted, taking the best plan so far" in err and "Wrote p.json" in out
    assert Plan.load(folder / "p.json").findings.cut_short
