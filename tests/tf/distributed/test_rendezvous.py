"""Ranks of launchers that do not know Horovod: where they meet, and that they do."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import textwrap
import threading
from collections.abc import Sequence
from pathlib import Path

import pytest

pytest.importorskip("horovod.tensorflow")

from tests import preloaded
from tests.time_limits import time_limit
from tfpar.jobs.launch import free_ports
from tfpar.spec import TfparError
from tfpar.tf.distributed import rendezvous
from tfpar.tf.distributed.job import Job
from tfpar.tf.distributed.rendezvous import join, meeting_point

pytestmark = pytest.mark.xdist_group("processes")

ROOT = Path(__file__).parents[3]
SLURM = {"SLURM_JOB_ID": "123", "SLURM_STEP_ID": "0", "SLURM_JOB_NODELIST": "gpu[07-09]"}


@pytest.fixture
def clean(monkeypatch):
    """The variables that this process has, without those of launchers."""
    for name in list(os.environ):
        if name.startswith(("HOROVOD_", "SLURM_", "OMPI_", "PMI", "MASTER_", "TFPAR_")):
            monkeypatch.delenv(name)
    # Put back at the end, whatever `join` adds.
    monkeypatch.setattr(os, "environ", os.environ.copy())


def test_slurm_ranks_meet_on_the_first_node_at_a_port_of_their_step():
    job = Job(1, 6, 0, 2, "Slurm")
    host, port = meeting_point(job, SLURM)
    assert host == "gpu07" and 20_000 <= port < 29_000
    assert meeting_point(Job(5, 6, 1, 2, "Slurm"), SLURM) == (host, port)
    assert meeting_point(job, SLURM | {"SLURM_STEP_ID": "1"}) != (host, port)


def test_a_steps_own_nodes_count():
    job = Job(0, 4, 0, 2, "Slurm")
    assert meeting_point(job, SLURM | {"SLURM_STEP_NODELIST": "gpu[08-09]"})[0] == "gpu08"
    assert meeting_point(job, SLURM | {"SLURM_STEP_NODELIST": "gpu08"})[0] == "127.0.0.1"


def test_one_machine_meets_on_its_loopback():
    job = Job(1, 2, 1, 2, "Open MPI")
    assert meeting_point(job, {"OMPI_MCA_ess_base_jobid": "77"})[0] == "127.0.0.1"


def test_what_the_user_names_comes_first():
    named = {"MASTER_ADDR": "10.0.0.5", "MASTER_PORT": "4000"}
    assert meeting_point(Job(0, 6, 0, 2, "Slurm"), SLURM | named) == ("10.0.0.5", 4000)


def test_addresses_of_ranks_serve_where_they_are_known():
    job = Job(1, 2, 0, 1, "TF_CONFIG", addresses=("worker-0:2222", "worker-1:2222"))
    assert meeting_point(job, {}) == ("worker-0", 2222)


@pytest.mark.parametrize(
    "environ, missing",
    [
        ({}, "MASTER_ADDR and MASTER_PORT"),
        ({"PMIX_NAMESPACE": "7"}, "Set MASTER_ADDR on"),
        ({"MASTER_ADDR": "a"}, "Set MASTER_PORT on"),
        ({"MASTER_ADDR": "a", "MASTER_PORT": "http"}, "Set MASTER_PORT to a port"),
    ],
)
def test_what_is_missing_is_named(environ, missing):
    with pytest.raises(TfparError, match=missing):
        meeting_point(Job(1, 4, 0, 1, "MPICH"), environ)


def test_launchers_that_know_horovod_are_left_alone(clean):
    os.environ["HOROVOD_GLOO_RENDEZVOUS_ADDR"] = "127.0.0.1"
    before = dict(os.environ)
    join(Job(1, 2, 1, 2, "horovodrun"))
    assert dict(os.environ) == before


def test_mpi_connects_ranks_where_horovod_is_built_with_it(clean, monkeypatch):
    monkeypatch.setattr(rendezvous.hvd, "mpi_built", lambda: True)
    before = dict(os.environ)
    join(Job(1, 2, 1, 2, "Open MPI"))
    assert dict(os.environ) == before


def test_rank_0_that_does_not_come_is_an_error_in_time(clean, monkeypatch):
    monkeypatch.setattr(rendezvous, "_WAIT_S", 0.3)
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_ports(1)[0])}
    with pytest.raises(TfparError, match="nobody answers at 127.0.0.1:.* where rank 0 should be"):
        join(Job(1, 2, 1, 2, "Slurm"))


def test_another_rank_that_does_not_come_is_named_in_time(clean, monkeypatch):
    monkeypatch.setattr(rendezvous, "_WAIT_S", 0.3)
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_ports(1)[0])}
    with pytest.raises(TfparError, match="rank 1 of 2 has not come"):
        join(Job(0, 2, 0, 2, "Slurm"))


def test_a_port_that_is_taken_is_an_error_of_rank_0(clean):
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        with pytest.raises(TfparError, match=f"cannot listen on port {port}"):
            join(Job(0, 2, 0, 2, "Slurm"))


def test_another_program_at_the_port_is_an_error(clean, monkeypatch):
    monkeypatch.setattr(rendezvous, "_WAIT_S", 0.3)
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(other.getsockname()[1])}
        threading.Thread(target=_answer, args=(other,), daemon=True).start()
        with pytest.raises(TfparError, match="another program"):
            join(Job(1, 2, 1, 2, "Slurm"))


def _answer(listening: socket.socket) -> None:
    """Close every connection after some words that are not HTTP."""
    while True:
        try:
            connection, _ = listening.accept()
        except OSError:
            return
        connection.sendall(b"220 ready\r\n")
        connection.close()


PROGRAM = """
import horovod.tensorflow as hvd
from tfpar.tf.distributed.world import this_world
world = this_world()
said = world.exchange.messages(f"{hvd.rank()} {hvd.local_rank()}/{hvd.local_size()}")
print(world.job.launcher, said, flush=True)
"""


def outputs(command: Sequence[str]) -> list[str]:
    """What each of two ranks prints, which are told of each other as Slurm would."""
    base = {n: v for n, v in os.environ.items() if not n.startswith(("HOROVOD_", "TFPAR_"))}
    base |= {
        "SLURM_JOB_ID": str(os.getpid()),
        "SLURM_STEP_ID": "0",
        "SLURM_JOB_NODELIST": "anywhere",
        "SLURM_NTASKS": "2",
        "SLURM_NTASKS_PER_NODE": "2",
        "TFPAR_BACKEND": "horovod",
        "TFPAR_TIMEOUT": f"{time_limit(40):g}",
        "PYTHONPATH": str(ROOT),
        "CUDA_VISIBLE_DEVICES": "-1",
        "TF_CPP_MIN_LOG_LEVEL": "3",
    }
    processes = [
        subprocess.Popen(
            command,
            env=base | {"SLURM_PROCID": str(rank), "SLURM_LOCALID": str(rank)},
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
        )
        for rank in range(2)
    ]
    found = []
    try:
        for process in processes:
            out, err = process.communicate(timeout=time_limit(90))
            assert process.returncode == 0, err
            found.append(out)
    finally:
        for process in processes:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.communicate()
    return found


@pytest.mark.slow
def test_ranks_of_slurm_meet_and_exchange(tmp_path):
    program = tmp_path / "program.py"
    program.write_text(textwrap.dedent(PROGRAM))
    assert outputs(preloaded.ranks(program)) == ["Slurm ['0 0/2', '1 1/2']\n"] * 2


@pytest.mark.slow
def test_the_program_of_the_page_trains_alike_on_all_ranks():
    command = [sys.executable, str(ROOT / "docker/train.py")]
    first, second = (text.splitlines() for text in outputs(command))
    assert first[0].startswith("tfpar: ")  # the first rank says what is planned
    assert first[1:] == second and second[0].startswith("losses [")
