"""HiGHS says its name to nobody."""

import os
import subprocess
import sys

import highspy

from tests.time_limits import time_limit
from tfpar.planning import quiet_highs

PROGRAM = """
import numpy as np
from tfpar.planning.deadline import Deadline
from tfpar.planning.solver import LinearProgram, minimise
one = np.ones(1)
entry = np.zeros(1, int)
program = LinearProgram(one, one, one > 0, one / 2, one, entry, entry, one)
print("solved", minimise(program, Deadline(None)).x)
"""


def test_a_process_that_solves_a_program_prints_what_it_prints_itself():
    ran = subprocess.run(
        [sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=time_limit(60)
    )
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout == "solved [1.]\n"


def test_what_others_print_meanwhile_is_kept(monkeypatch, capfd):
    lines = b"Running HiGHS 9.9\nIncludes third-party software\nstep 7\n"
    monkeypatch.setattr(highspy, "Highs", lambda: os.write(1, lines))
    quiet_highs._make_first.cache_clear()
    quiet_highs.hush_highs()
    quiet_highs.hush_highs()
    assert capfd.readouterr().out == "step 7\n"
