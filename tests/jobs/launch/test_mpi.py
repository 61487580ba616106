"""Ranks started by `mpirun`, which a stand-in makes of a shell."""

from __future__ import annotations

import os

import pytest

from tests.jobs.launch.programs import program, run
from tests.time_limits import time_limit

pytestmark = pytest.mark.xdist_group("processes")

# Starts the command as often as `-np` says, and ends with the last non-zero exit code.
MPIRUN = """#!/bin/sh
echo "$@" > "$MPIRUN_CALL"
while [ "$1" != -np ]; do shift; done
size=$2
while [ "$1" != -x ]; do shift; done
while [ "$1" = -x ]; do shift 2; done
rank=0
while [ $rank -lt $size ]; do
    OMPI_COMM_WORLD_RANK=$rank OMPI_COMM_WORLD_SIZE=$size "$@" &
    pids="$pids $!"; rank=$((rank + 1))
done
code=0
for pid in $pids; do wait $pid || code=$?; done
exit $code
"""


@pytest.fixture
def mpirun(tmp_path, monkeypatch):
    folder = tmp_path / "bin"
    folder.mkdir()
    (folder / "mpirun").write_text(MPIRUN)
    (folder / "mpirun").chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
    monkeypatch.setenv("MPIRUN_CALL", str(tmp_path / "call"))
    return tmp_path / "call"


PROGRAM = r"""
import os, sys
from tfpar.tf.distributed import Job
from tfpar.jobs.launch.beacon import Beacon
beacon = Beacon.connect(Job.of(os.environ).rank, os.environ)
beacon.at("train step 1")
line = f"rank {beacon._rank} {os.environ['TFPAR_TIMEOUT']} {'TFPAR_RANK' in os.environ}\n"
os.write(1, line.encode())  # at once: both ranks write to the one output
if len(sys.argv) > 1 and beacon._rank == 1:
    beacon.failed("error", "ValueError: mine")
    sys.exit(4)
"""


def test_ranks_of_mpirun_report_by_its_numbers(mpirun, capfd, tmp_path):
    command = program(tmp_path, "")
    (tmp_path / "program.py").write_text(PROGRAM)
    assert run(command, 2, mpi=True, timeout_s=9) == 0
    lines = sorted(capfd.readouterr().out.splitlines())
    assert lines == [f"rank {rank} {time_limit(9):g} False" for rank in (0, 1)]
    assert "-np 2 -H localhost:2 " in mpirun.read_text() and "-x TFPAR_TOKEN" in mpirun.read_text()


def test_who_failed_under_mpirun_is_told(mpirun, capfd, tmp_path):
    command = program(tmp_path, "")
    (tmp_path / "program.py").write_text(PROGRAM)
    assert run((*command, "fail"), 2, mpi=True) == 4
    err = capfd.readouterr().err
    assert "mpirun ended with exit code 4" in err
    assert "rank 1 (host localhost) failed at train step 1: ValueError: mine." in err
