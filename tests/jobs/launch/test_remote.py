"""Ranks on other machines, which a stand-in for ssh makes of this one."""

from __future__ import annotations

import os
import signal

import pytest

from tests.jobs.launch.programs import program, run

pytestmark = pytest.mark.xdist_group("processes")

# Runs the command with a bare environment, as sshd does, and notes how it was called.
SSH = """#!/bin/sh
while [ $# -gt 2 ]; do shift; done
echo "$1" >> "$SSH_CALLS"
[ "$1" != dead ] || exit 255
[ "$1" != new ] || { echo "Host key verification failed." >&2; exit 255; }
exec env -i HOME=/ PATH=/usr/bin:/bin SSH_HOST="$1" sh -c "$2"
"""


@pytest.fixture
def ssh(tmp_path, monkeypatch):
    folder = tmp_path / "bin"
    folder.mkdir()
    (folder / "ssh").write_text(SSH)
    (folder / "ssh").chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
    monkeypatch.setenv("SSH_CALLS", str(tmp_path / "calls"))
    monkeypatch.setenv("TF_TOLD", 'two  words \'n "quotes" $HOME')
    monkeypatch.setenv("SECRET", "of mine")
    return tmp_path / "calls"


def remote(command: tuple[str, ...], hosts: str, num_ranks: int, **options) -> int:
    return run(command, num_ranks, hosts=hosts, network_interface="lo", **options)


@pytest.mark.slow
def test_ranks_run_on_other_hosts_as_here(ssh, capfd, tmp_path):
    command = program(
        tmp_path,
        """
        beacon = report()
        told = [os.environ.get(n) for n in ("SSH_HOST", "TF_TOLD", "SECRET", "MINE")]
        print(rank, os.environ["TFPAR_LOCAL_RANK"], *told, os.getcwd(), sys.argv[1:])
        print(os.environ["TFPAR_ADDRESSES"].split(",")[1:])
        """,
    )
    hosts = "localhost:1,one.invalid:2,two.invalid:1"
    assert remote((*command, "a 'b"), hosts, 4, env={"MINE": "x y"}) == 0
    lines = sorted(capfd.readouterr().out.splitlines())
    told = f"""two  words 'n "quotes" $HOME None x y {os.getcwd()} ["a 'b"]"""
    assert f"[1] 1 0 one.invalid {told}" in lines
    assert f"[2] 2 1 one.invalid {told}" in lines
    assert f"[3] 3 0 two.invalid {told}" in lines
    addresses = "['one.invalid:29500', 'one.invalid:29501', 'two.invalid:29500']"
    assert f"[0] {addresses}" in lines
    assert sorted(ssh.read_text().split()) == ["one.invalid", "one.invalid", "two.invalid"]


def test_a_rank_killed_elsewhere_is_told_by_its_signal(ssh, capfd, tmp_path):
    command = program(
        tmp_path,
        """
        beacon = report("train step 3")
        heard(beacon)
        note(f"on {rank}")
        if rank == 1:
            noted("on 0", "on 2")
            os.kill(os.getpid(), signal.SIGKILL)
        hang()
        """,
    )
    assert remote(command, "localhost:1,one.invalid:1,two.invalid:1", 3) == 137
    assert "rank 1 (host one.invalid) was killed by SIGKILL at train" in capfd.readouterr().err


def test_an_exit_code_comes_back_and_what_runs_elsewhere_is_ended(ssh, capfd):
    script = "[ $TFPAR_RANK = 1 ] && exit 9; sleep 30 & sleep 31"
    assert remote(("sh", "-c", script), "localhost:1,one.invalid:1,two.invalid:1", 3) == 9


def test_a_host_out_of_reach_is_told(ssh, capfd):
    assert remote(("sleep", "30"), "localhost:1,dead:1", 2) == 255
    assert "rank 1 (host dead) cannot be reached" in capfd.readouterr().err


def test_a_host_that_ssh_does_not_trust_is_told_with_what_to_do(ssh, capfd):
    assert remote(("sleep", "30"), "localhost:1,new:1", 2) == 255
    said = capfd.readouterr().err
    assert "[1] Host key verification failed." in said
    assert "ssh does not know the key of new, or it has changed. Log in once" in said


def test_a_host_out_of_reach_is_left_out_with_all_its_slots(ssh, capfd):
    script = 'test "$TFPAR_SIZE" != 3 || sleep 30'
    assert remote(("sh", "-c", script), "localhost:1,dead:2", 3, min_ranks=1) == 0
    assert "restarting with 1 ranks (attempt 1 of 10)" in capfd.readouterr().err


def test_ranks_elsewhere_get_the_time_to_save(ssh, capfd, tmp_path):
    command = program(
        tmp_path,
        """
        def save(number, frame):
            print("saved", rank, flush=True)
            sys.exit(0)
        signal.signal(signal.SIGTERM, save)
        beacon = report()
        if rank == 0:
            noted("on")
            os.kill(os.getpid(), signal.SIGKILL)
        note("on")
        hang()
        """,
    )
    assert remote(command, "localhost:1,one.invalid:1", 2) == 128 + signal.SIGKILL
    assert "[1] saved 1" in capfd.readouterr().out
