"""Runs on this machine: how they end, what is said, and that nothing is left."""

from __future__ import annotations

import signal

import pytest

from tests.jobs.launch.programs import kill_marked, marked, program, run, running, start
from tests.time_limits import time_limit, wait_until
from tfpar.jobs import launch
from tfpar.jobs.launch import RunOptions
from tfpar.jobs.launch.supervisor import Supervisor
from tfpar.spec import TfparError

pytestmark = pytest.mark.xdist_group("processes")


def test_all_ranks_run_and_the_run_ends_with_them(capfd, tmp_path):
    command = program(
        tmp_path,
        """
        import socket
        for address in os.environ["TFPAR_ADDRESSES"].split(","):
            assert address.startswith("127.0.0.1:")
        beacon = report()
        print(rank, size, os.environ["TFPAR_LOCAL_RANK"], os.environ["MINE"], sys.argv[1:])
        """,
    )
    assert run((*command, "--x", "a b"), 3, env={"MINE": "me"}) == 0
    lines = sorted(capfd.readouterr().out.splitlines())
    assert lines == [f"[{r}] {r} 3 {r} me ['--x', 'a b']" for r in range(3)]


def test_ranks_need_not_report(capfd):
    assert run(("sh", "-c", "echo $TFPAR_RANK"), 2) == 0


def test_a_program_that_is_not_there_is_said(capfd):
    assert run(("no-such-program",), 1) == 127
    assert "no-such-program" in capfd.readouterr().err


def test_an_exit_code_ends_all_and_is_passed_on(capfd):
    script = "if [ $TFPAR_RANK = 1 ]; then echo last words >&2; exit 3; fi; sleep 30"
    assert run(("sh", "-c", script)) == 3
    err = capfd.readouterr().err
    assert "rank 1 (host localhost) ended with exit code 3." in err
    assert "The last lines of rank 1's stderr:\n  last words" in err


def test_a_killed_rank_ends_all_with_its_signal_and_activity(capfd, tmp_path):
    command = program(
        tmp_path,
        """
        beacon = report("train step 17")
        heard(beacon)
        note(f"on {rank}")
        if rank == 1:
            noted("on 0")
            os.kill(os.getpid(), signal.SIGKILL)
        hang()
        """,
    )
    assert run(command) == 137
    err = capfd.readouterr().err
    assert "rank 1 (host localhost) was killed by SIGKILL at train step 17." in err
    assert "ended by tfpar run (SIGTERM)" in err


def test_what_ranks_said_before_they_exited_counts_though_it_is_read_late(
    capfd, monkeypatch, tmp_path
):
    hear = Supervisor.hear

    def hear_late(self, rank, message):
        if message.get("say") == "failed":
            wait_until(lambda: not running(command), 10)  # both ranks have exited
        hear(self, rank, message)

    monkeypatch.setattr(Supervisor, "hear", hear_late)
    command = program(
        tmp_path,
        """
        beacon = report("train step 4", bounded=True)
        if rank == 0:
            noted("hung")
            beacon.failed("peer", "connection reset")
            sys.exit(1)
        heard(beacon)
        beacon._send({"say": "hung", "seconds": 8.0})
        note("hung")
        os._exit(70)
        """,
    )
    assert run(command) == 70
    err = capfd.readouterr().err
    assert "hung at train step 4, while the others waited or had ended." in err
    assert "waited 8 s in vain (exit code 70)" in err


def test_who_raises_is_blamed_though_others_fail_of_it_before(capfd, tmp_path):
    command = program(
        tmp_path,
        """
        beacon = report("train step 4")
        if rank == 0:
            noted("raised")
            beacon.failed("peer", "connection reset")
            note("ends")
            sys.exit(1)
        beacon.failed("error", "ValueError: no such class")
        note("raised")
        noted("ends")
        ended("ends")
        sys.exit(7)
        """,
    )
    assert run(command) == 7
    err = capfd.readouterr().err
    assert "rank 1 (host localhost) failed at train step 4 (exit code 7): ValueError: no" in err
    assert "connection reset (after another rank's end)" in err


@pytest.mark.slow
def test_a_rank_that_hangs_is_found_by_those_that_wait(capfd, tmp_path):
    command = program(
        tmp_path,
        """
        def read_forever():
            hang()
        if rank == 1:
            beacon = report("reading data")
            note("reads")
            read_forever()
        noted("reads")
        beacon = report("train step 17", bounded=True)
        hang()
        """,
    )
    assert run(command, 3, timeout_s=2) == 70
    err = capfd.readouterr().err
    assert "rank 1 (host localhost) hung at reading data" in err
    assert "in read_forever" in err  # its stacks
    assert "rank 0 made no progress in 'train step 17'" in err
    assert "s in vain (exit code 70)" in err


@pytest.mark.slow
def test_a_stopped_rank_gives_no_sign_of_life(capfd, tmp_path):
    command = program(
        tmp_path,
        """
        beacon = report("train step 2")
        if rank == 1:
            os.kill(os.getpid(), signal.SIGSTOP)
        for step in range(100):
            beacon.at(f"train step {step}")
            time.sleep(0.1)
        """,
    )
    assert run(command, timeout_s=3, grace_s=0.5) == 70
    assert "rank 1 (host localhost) gives no sign of life" in capfd.readouterr().err


def test_a_rank_that_leaves_early_is_named(capfd, tmp_path):
    command = program(
        tmp_path,
        """
        beacon = report("train step 5")
        if rank == 0: hang()
        """,
    )
    assert run(command, timeout_s=1) == 70
    err = capfd.readouterr().err
    assert "rank 1 (host localhost) came to its end at train step 5, while other" in err


def test_a_rank_that_does_not_start_is_named_once_others_have(capfd, tmp_path):
    command = program(tmp_path, "if rank == 0: report()\nhang()")
    assert run(command, 3, start_timeout_s=1) == 70
    err = capfd.readouterr().err
    assert "rank 1 (host localhost) has not reported in time" in err
    assert "The same holds for rank 2." in err


def test_nothing_is_left_of_what_ranks_have_started(tmp_path):
    script = "sleep 30 & sh -c 'trap \"\" TERM; sleep 31' & [ $TFPAR_RANK = 0 ] || exit 4; sleep 32"
    assert run(("sh", "-c", script), grace_s=0.3) == 4  # `run` looks for what is left
    assert run(("sh", "-c", "sleep 30 & exit 0")) == 0


@pytest.mark.parametrize(
    "options, message",
    [
        ({"num_ranks": 5, "hosts": "localhost:2"}, "5 ranks .* have 2 "),
        ({"num_ranks": 0}, "-np is 0"),
        ({"hosts": "localhost:0"}, "no slots"),
        ({"min_ranks": 3, "num_ranks": 2}, "--min-np 3"),
        ({"min_ranks": 1, "mpi": True}, "--mpi"),
        ({"timeout_s": 0}, "--timeout is 0"),
        ({"backend": "nccl"}, "--backend 'nccl'"),
        ({"hosts": "a", "hostfile": "b"}, "one of them"),
        ({"mpi": True}, "mpirun"),
    ],
)
def test_what_cannot_be_run_is_refused(options, message):
    with pytest.raises(TfparError, match=message):
        options = {"backend": "tensorflow", **options}
        launch.run(RunOptions(command=("true",), **options), {"PATH": "/nowhere"})


SLOW = """
def save(number, frame):
    print("saved", rank, flush=True)
    sys.exit(%s)
signal.signal(signal.SIGTERM, save)
signal.signal(signal.SIGINT, signal.default_int_handler)
beacon = report()
print("on", flush=True)
hang()
"""


def interrupted(command: tuple[str, ...], number: int, *options: str) -> tuple[int, str]:
    """Exit code and output of a run that gets a signal when its two ranks are on."""
    process, mark = start(command, "-np", "2", *options)
    try:
        lines = [process.stdout.readline() for _ in range(2)]
        assert sorted(lines) == ["[0] on\n", "[1] on\n"]
        process.send_signal(number)
        out, _ = process.communicate(timeout=time_limit(15))
        assert wait_until(lambda: not marked(mark), 5), marked(mark)
        return process.returncode, out
    finally:
        process.kill()
        process.communicate()
        kill_marked(mark)


@pytest.mark.slow
def test_sigterm_reaches_the_ranks_which_save_and_decide(tmp_path):
    code, out = interrupted(program(tmp_path, SLOW % "0"), signal.SIGTERM)
    assert code == 0 and "[0] saved 0" in out and "[1] saved 1" in out
    code, out = interrupted(program(tmp_path, SLOW % "75 if rank else 0"), signal.SIGTERM)
    assert code == 75


def test_ranks_that_a_signal_ends_give_its_exit_code(tmp_path):
    text = "print('on', flush=True); hang()"
    assert interrupted(program(tmp_path, text), signal.SIGTERM)[0] == 143


@pytest.mark.slow
def test_an_interrupt_reaches_the_ranks(tmp_path):
    code, out = interrupted(program(tmp_path, SLOW % "0"), signal.SIGINT)
    assert code != 0 and out.count("KeyboardInterrupt") >= 2


def test_ranks_that_ignore_a_signal_are_killed_after_the_grace(tmp_path):
    text = "signal.signal(15, signal.SIG_IGN); print('on', flush=True); hang()"
    code, out = interrupted(program(tmp_path, text), signal.SIGTERM, "--grace", "0.5")
    assert code == 143 and "ended by tfpar run (SIGKILL)" in out


@pytest.mark.parametrize("reports", [True, False])
def test_nothing_is_left_when_the_launcher_is_killed(tmp_path, reports):
    text = f"""
        import subprocess
        subprocess.Popen(["sleep", "30"])
        if {reports}: beacon = report()
        print("on", flush=True)
        hang()
        """
    process, mark = start(program(tmp_path, text), "-np", "2", "--grace", "1")
    try:
        for _ in range(2):
            assert process.stdout.readline()
        assert len(marked(mark)) >= 5
        process.send_signal(signal.SIGKILL)
        assert wait_until(lambda: not marked(mark), 6), marked(mark)
    finally:
        process.kill()
        process.communicate()
        kill_marked(mark)


def test_the_ranks_have_process_groups_of_their_own(tmp_path):
    text = "print(os.getpgrp() == os.getpid(), flush=True)"
    process, _ = start(program(tmp_path, text), "-np", "1")
    out, _ = process.communicate(timeout=time_limit(15))
    assert out == "[0] True\n" and process.returncode == 0
