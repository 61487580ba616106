"""The batch scripts: what they ask Slurm for, and that a job goes on once it is queued again."""

from __future__ import annotations

import os
import re
import signal
import subprocess
from pathlib import Path

import numpy as np
import pytest

from tests import preloaded
from tests.docker import resumed
from tests.docker.files import DOCKER, ROOT, options_of, text, tfpar_runs
from tests.time_limits import time_limit, wait_until

NAMES = ["slurm_srun.sh", "slurm_tfpar_run.sh"]
JOB = "4711"

# Two tasks of a step on this machine; SIGTERM goes to both, as --signal has it.
SRUN = """#!/usr/bin/env bash
while [[ $1 == --* ]]; do shift; done
export SLURM_STEP_ID=0 SLURM_NTASKS=2 SLURM_NTASKS_PER_NODE=2
for rank in 0 1; do
  SLURM_PROCID=$rank SLURM_LOCALID=$rank "$@" &
  tasks[rank]=$!
done
trap 'kill -TERM "${tasks[@]}"' TERM
echo $$ >"$NOTES/srun"
worst=0
for task in "${tasks[@]}"; do
  status=
  until [[ -n $status ]] && ! kill -0 "$task" 2>/dev/null; do
    status=0
    wait "$task" || status=$?
  done
  if ((status > worst)); then worst=$status; fi
done
exit "$worst"
"""
# Ranks that save, which takes a while, and end.
TFPAR = """#!/usr/bin/env bash
trap 'sleep 0.3; exit 143' TERM
echo "$*" >"$NOTES/tfpar.part"
mv "$NOTES/tfpar.part" "$NOTES/tfpar"
[[ -z ${SLURM_RESTART_COUNT:-} ]] || exit 0
while true; do sleep 0.1; done
"""
SCONTROL = """#!/usr/bin/env bash
echo "$*" >>"$NOTES/scontrol"
"""


@pytest.fixture
def job(tmp_path):
    """A function that starts a batch script as Slurm would, and the folder of notes."""
    started = []
    commands = tmp_path / "bin"
    commands.mkdir()
    for name, script in (("srun", SRUN), ("tfpar", TFPAR), ("scontrol", SCONTROL)):
        (commands / name).write_text(script)
        (commands / name).chmod(0o755)

    def start(name: str, *arguments: str | Path, **variables: str) -> subprocess.Popen:
        env = {n: v for n, v in os.environ.items() if not n.startswith(("HOROVOD_", "TFPAR_"))}
        env |= {
            "PATH": f"{commands}{os.pathsep}{env['PATH']}",
            "PYTHONPATH": str(ROOT),
            "CUDA_VISIBLE_DEVICES": "-1",
            "NOTES": str(tmp_path),
            "SLURM_JOB_ID": JOB,
            "SLURM_JOB_NODELIST": "anywhere",
            "SLURM_CPUS_PER_TASK": "1",
            "TFPAR_TIMEOUT": f"{time_limit(60):g}",
            "TFPAR_HEARTBEAT": str(tmp_path / "heartbeat"),
        }
        process = subprocess.Popen(
            ["bash", str(DOCKER / name), *map(str, arguments)],
            env=env | variables,
            cwd=tmp_path,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        started.append(process)
        return process

    yield start, tmp_path
    for process in started:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.communicate()


def lines(path: Path) -> list[str]:
    return path.read_text().splitlines() if path.exists() else []


@pytest.mark.parametrize("name", NAMES)
def test_slurm_gives_each_rank_a_gpu(name):
    asked = dict(re.findall(r"^#SBATCH --([\w-]+)=(.*)$", text(name), re.MULTILINE))
    # Without tasks per node a rank does not know how many it shares its machine with.
    assert asked["ntasks-per-node"] == asked["gpus-per-node"]
    last_comment = text(name).rindex("#SBATCH")
    assert text(name).index("set -euo") > last_comment, "Slurm reads no further than a command"


@pytest.mark.parametrize("name", NAMES)
def test_slurm_may_queue_the_job_again_and_keeps_what_it_has_said(name):
    assert "\n#SBATCH --requeue\n#SBATCH --open-mode=append\n" in text(name)


def test_slurm_leaves_ranks_time_to_save():
    (words,) = tfpar_runs(text("slurm_tfpar_run.sh"))
    seconds = int(re.search(r"--signal=B:TERM@(\d+)", text("slurm_tfpar_run.sh"))[1])
    assert options_of(words).grace < seconds


@pytest.mark.slow
@pytest.mark.xdist_group("processes")
def test_a_job_that_is_out_of_time_is_queued_again_and_goes_on_from_its_checkpoint(job):
    start, notes = job
    preloaded.executable(notes / "bin")
    program = Path(resumed.__file__)

    first = start("slurm_srun.sh", program, notes)
    assert wait_until(lambda: len(lines(notes / "steps.0")) > 5, 120)
    os.kill(int(lines(notes / "srun")[0]), signal.SIGTERM)
    said, _ = first.communicate(timeout=time_limit(60))
    assert first.returncode == 143, said
    assert lines(notes / "scontrol") == [f"requeue {JOB}"]
    assert (notes / "heartbeat").exists()  # as the probes of docker/indexed_job.yaml ask for
    (checkpoint,) = (notes / "checkpoints").glob("step-*")

    again = start("slurm_srun.sh", program, notes, SLURM_RESTART_COUNT="1")
    said, _ = again.communicate(timeout=time_limit(120))
    assert again.returncode == 0, said
    assert lines(notes / "scontrol") == [f"requeue {JOB}"]
    done = int(checkpoint.name.removeprefix("step-"))
    before, after = ([int(n) for n in lines(notes / f"steps.{i}")] for i in range(2))
    assert before == list(range(1, done + 1))
    # Batches of the epoch that were trained on before are read, and passed over.
    assert sorted(set(after) - {done}) == list(range(done + 1, 81))
    alone = resumed.train(resumed.build(), [])
    for rank in range(2):
        weights = np.load(notes / f"weights.{rank}.npy")
        np.testing.assert_allclose(weights, alone, rtol=1e-4, atol=1e-6)


def test_a_job_of_tfpar_run_is_queued_again_once_its_ranks_have_saved(job):
    start, notes = job
    first = start("slurm_tfpar_run.sh", "train.py")
    assert wait_until(lambda: (notes / "tfpar").exists(), 20)
    os.kill(first.pid, signal.SIGTERM)
    said, _ = first.communicate(timeout=time_limit(20))
    assert (first.returncode, lines(notes / "scontrol")) == (143, [f"requeue {JOB}"]), said
    assert f"--output-dir tfpar-{JOB}-0 python train.py" in lines(notes / "tfpar")[0]

    again = start("slurm_tfpar_run.sh", "train.py", SLURM_RESTART_COUNT="1")
    said, _ = again.communicate(timeout=time_limit(20))
    assert (again.returncode, lines(notes / "scontrol")) == (0, [f"requeue {JOB}"]), said


@pytest.mark.parametrize("name, command", zip(NAMES, ("srun", "tfpar"), strict=True))
def test_a_job_that_fails_is_not_queued_again(job, name, command):
    start, notes = job
    (notes / "bin" / command).write_text("#!/bin/sh\nexit 9\n")
    failed = start(name, "train.py")
    failed.communicate(timeout=time_limit(20))
    assert failed.returncode == 9 and not (notes / "scontrol").exists()
