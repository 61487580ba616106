"""Runs that go on with the ranks that are left."""

from __future__ import annotations

import pytest

from tests.jobs.launch.programs import program, run
from tfpar.jobs.launch.blame import RankStatus
from tfpar.jobs.launch.elastic import least_ranks
from tfpar.jobs.launch.supervisor import Signs

pytestmark = pytest.mark.xdist_group("processes")

DIES = """
beacon = report("train step 17")
print("attempt", attempt, size, flush=True)
heard(beacon)
note(f"{{attempt}}.{{rank}}")
if size > {least} and rank == 1:
    noted(*[f"{{attempt}}.{{other}}" for other in range(size)])
    {end}
if size > {least}: hang()
"""
KILL = "os.kill(os.getpid(), signal.SIGKILL)"


@pytest.mark.slow
def test_a_lost_rank_is_left_out_and_the_others_start_anew(capfd, tmp_path):
    assert run(program(tmp_path, DIES.format(least=2, end=KILL)), 3, min_ranks=2) == 0
    out, err = capfd.readouterr()
    assert out.count("attempt 0 3") == 3 and out.count("attempt 1 2") == 2
    assert (
        "rank 1 (host localhost) was lost: SIGKILL at train step 17; restarting with 2 ranks "
        "(attempt 1 of 10)"
    ) in err


def test_too_few_that_are_left_end_the_run(capfd, tmp_path):
    assert run(program(tmp_path, DIES.format(least=1, end=KILL)), 2, min_ranks=2) == 137
    assert "1 slots are left, fewer than --min-np 2" in capfd.readouterr().err


@pytest.mark.slow
def test_restarts_have_an_end(capfd, tmp_path):
    command = program(tmp_path, DIES.format(least=0, end="os._exit(75)"))
    assert run(command, 2, hosts="localhost:9", min_ranks=1, restarts=1) == 75
    out, err = capfd.readouterr()
    assert out.count("attempt 1 2") == 2  # spare slots take the place of lost ones
    assert "restarted 1 times" in err


def test_an_exception_is_no_loss(capfd, tmp_path):
    command = program(tmp_path, DIES.format(least=0, end="raise ValueError('mine')"))
    assert run(command, 2, min_ranks=1) == 1
    out, err = capfd.readouterr()
    assert "attempt 1" not in out and "ValueError: mine" in err


@pytest.mark.slow
def test_a_rank_that_hangs_is_left_out(capfd, tmp_path):
    command = program(
        tmp_path,
        """
        if size == 1: sys.exit(0)
        if rank == 0: noted("reads")
        beacon = report("reading data" if rank else "train step 3", bounded=rank == 0)
        note("reads")
        hang()
        """,
    )
    assert run(command, 2, min_ranks=1, timeout_s=1.5) == 0
    assert "rank 1 (host localhost) was lost: did not come along" in capfd.readouterr().err


@pytest.mark.slow
def test_output_files_hold_all_attempts(tmp_path, capfd):
    folder = tmp_path / "out"
    command = program(tmp_path, DIES.format(least=1, end=KILL))
    assert run(command, 2, min_ranks=1, output_dir=str(folder)) == 0
    assert (folder / "rank.0.out").read_text() == "attempt 0 2\nattempt 1 1\n"


def in_stages(least: int, then: str) -> str:
    return f"""
beacon = report("train step 17")
beacon.needs_at_least({least})
print("attempt", attempt, size, flush=True)
heard(beacon)
note(f"{{attempt}}.{{rank}}")
if size == 4 and rank == 1:
    noted(*[f"{{attempt}}.{{other}}" for other in range(size)])
    {KILL}
{then}
"""


def test_stages_go_on_with_all_ranks_that_are_left(capfd, tmp_path):
    command = program(tmp_path, in_stages(2, "if size == 4: hang()"))
    assert run(command, 4, min_ranks=1) == 0
    out, err = capfd.readouterr()
    assert out.count("attempt 0 4") == 4 and out.count("attempt 1 3") == 3
    assert "restarting with 3 ranks (attempt 1 of 10)" in err


def test_fewer_ranks_than_stages_end_the_run(capfd, tmp_path):
    command = program(tmp_path, in_stages(4, "hang()"))
    assert run(command, 4, min_ranks=1) == 137
    err = capfd.readouterr().err
    assert "3 slots are left" in err and "4 sets of ranks, runs with 4 ranks at least" in err


def test_the_most_that_any_rank_needs_counts():
    signs = [Signs(0, 0, 0), Signs(0, 0, 0, least_ranks=4), Signs(0, 0, 0, least_ranks=6), None]
    records = [RankStatus(i, "h", False, None, False, said) for i, said in enumerate(signs)]
    assert least_ranks(records) == 6
    assert least_ranks(records[:1] + records[3:]) is None
