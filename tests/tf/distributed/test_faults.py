"""Ranks that fail while they train, for real: how the job ends, what is said, and what goes on."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks import kills
from tests import preloaded
from tests.jobs.launch.programs import (
    OF_RANKS,
    environ,
    kill_marked,
    marked,
    run,
    start,
)
from tests.time_limits import time_limit, wait_until

pytestmark = pytest.mark.xdist_group("processes")

RANKS = Path(__file__).with_name("faulty_ranks.py")
BACKEND = "horovod" if importlib.util.find_spec("horovod") else "tensorflow"
LIMIT_S = time_limit(120)

needs_horovod = pytest.mark.skipif(BACKEND != "horovod", reason="Horovod is not installed")


def task(folder: Path, **fields) -> tuple[str, str]:
    """What a rank runs that does this (see `faulty_ranks.Task`): a script and its argument."""
    return str(RANKS), json.dumps({"folder": str(folder), **fields})


def train(folder: Path, num_ranks: int = 2, *, options: dict | None = None, **fields) -> int:
    """The exit code of a job, which has left no process."""
    return ended_with(preloaded.ranks(*task(folder, **fields)), num_ranks, options)


def ended_with(command: tuple[str, ...], num_ranks: int, options: dict | None) -> int:
    settings = {"backend": BACKEND, "timeout_s": 60.0, "grace_s": 20.0, **(options or {})}
    return run(command, num_ranks, **settings)


def interpreter(*arguments: str) -> tuple[str, ...]:
    """The command of a process that starts anew."""
    return sys.executable, *arguments


def alone(folder: Path, **fields) -> None:
    """Train in one process."""
    command = preloaded.python(*task(folder, **fields))
    subprocess.run(command, env=environ(), check=True, timeout=LIMIT_S)


def losses(folder: Path) -> dict[int, float]:
    """Each step's loss; what was trained again has to be what it was."""
    found: dict[int, float] = {}
    for line in (folder / "losses.jsonl").read_text().splitlines():
        step = json.loads(line)
        assert found.setdefault(step["step"], step["loss"]) == pytest.approx(step["loss"], rel=1e-4)
    return found


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory) -> dict[int, float]:
    """The losses of two epochs in one process that nothing has happened to."""
    folder = tmp_path_factory.mktemp("uninterrupted")
    alone(folder, mesh=[1])
    return losses(folder)


def same(found: dict[int, float], expected: dict[int, float], rel: float = 1e-4) -> bool:
    return found == pytest.approx(expected, rel=rel)


# --- one rank fails --------------------------------------------------------------------


@pytest.mark.slow
def test_a_killed_rank_ends_the_job_and_is_named_with_its_step(stopped, killed):
    assert killed.code == 137
    step = 11 - max(losses(stopped.folder))  # a job counts its own
    said = f"rank 1 (host localhost) was killed by SIGKILL after train step {step}"
    assert said in killed.output
    where_rank_0_was = killed.output.partition("was killed by")[2]
    assert f"train step {step + 1}" in where_rank_0_was


@pytest.mark.slow
@pytest.mark.parametrize(
    "python",
    [
        pytest.param(preloaded.ranks, id="forked"),
        pytest.param(interpreter, id="anew", marks=pytest.mark.nightly),  # as users start it
    ],
)
def test_an_exception_is_told_in_its_own_words(capfd, tmp_path, python):
    assert ended_with(python(*task(tmp_path, fault="raise")), 2, None) == 1
    err = capfd.readouterr().err
    assert "rank 1 (host localhost) failed after train step 3" in err
    assert "the moon is made of cheese" in err.partition("failed after")[2].splitlines()[0]
    assert "The last lines of rank 1's stderr" in err and "  I0000" not in err


@pytest.mark.slow
@needs_horovod
def test_a_rank_that_hangs_is_named_with_its_stack_and_what_waits_for_it(capfd, tmp_path):
    assert train(tmp_path, fault="hang", options={"timeout_s": 10.0}) == 70
    err = capfd.readouterr().err
    assert "rank 1 (host localhost) hung after train step 3" in err
    assert "in hang" in err  # rank 1's stack
    missing = err.partition("Missing ranks:")[2].splitlines()
    assert missing[1].startswith("[0] 1: [compile_loss/") and "AllReduce" in missing[1]
    assert f"rank 0 made no progress in 'train step 4' for {time_limit(10):.0f} s" in err


@pytest.mark.slow
def test_a_rank_whose_data_hang_is_named_with_where(capfd, tmp_path):
    assert train(tmp_path, fault="hang_in_data", options={"timeout_s": 8.0}) == 70
    err = capfd.readouterr().err
    assert "rank 1 (host localhost) hung after train step 3" in err
    assert "in wait_for_a_file_server" in err


@pytest.mark.slow
def test_a_rank_whose_data_end_earlier_is_named_rather_than_who_waits_for_it(capfd, tmp_path):
    assert train(tmp_path, fault="short_data", options={"timeout_s": 5.0}) == 70
    err = capfd.readouterr().err
    said = "rank 1 (host localhost) has had fewer batches than others: it is at end of epoch 1"
    assert f"{said} after 3 steps." in err
    assert "Rank 0 waits for it at train step 4. Every rank has to read as many batches." in err


@pytest.mark.slow
@pytest.mark.parametrize(
    "call, said",
    [
        ("predict", "comparing the predict step of `predict`"),
        pytest.param(
            "evaluate", "comparing the test step of `evaluate`", marks=pytest.mark.nightly
        ),
        pytest.param("save", "save('", marks=pytest.mark.nightly),
    ],
)
def test_a_rank_that_calls_what_others_do_not_is_named_with_it(capfd, tmp_path, call, said):
    assert train(tmp_path, fault=call, options={"timeout_s": 5.0}) == 70
    err = capfd.readouterr().err
    assert f"rank 1 (host localhost) is at {said}" in err
    assert "Rank 0 waits for it at train step 4. Every rank has to call the same" in err


@pytest.mark.slow
def test_a_rank_that_exits_while_others_train_is_named(capfd, tmp_path):
    assert train(tmp_path, fault="exit", options={"timeout_s": 15.0}) == 70
    err = capfd.readouterr().err
    assert "rank 1 (host localhost) came to its end after train step 3" in err
    assert "while other ranks went on." in err


@pytest.mark.slow
@pytest.mark.parametrize(
    "fault, code, said",
    [
        pytest.param(
            "exit",
            70,
            "came to its end after sharing the random state, while other ranks went on",
            marks=pytest.mark.nightly,
        ),
        ("exit_3", 3, "ended with exit code 3 after sharing the random state"),
    ],
)
def test_a_rank_that_exits_while_others_compare_notes_gets_the_blame(
    capfd, tmp_path, fault, code, said
):
    assert train(tmp_path, fault=fault, at=1) == code
    err = capfd.readouterr().err
    assert f"rank 1 (host localhost) {said}" in err
    assert "Traceback" not in err  # of the other rank, whom nothing is wrong with


@pytest.mark.slow
@needs_horovod
def test_the_first_rank_and_tensorflows_own_collectives_are_no_exception(capfd, tmp_path):
    options = {"backend": "tensorflow", "timeout_s": 15.0}
    assert train(tmp_path, fault="kill", of=0, pause_s=0.3, options=options) == 137
    assert "rank 0 (host localhost) was killed by SIGKILL after train" in capfd.readouterr().err


@pytest.mark.slow
@needs_horovod
@pytest.mark.parametrize("fault", [pytest.param("kill", marks=pytest.mark.nightly), "hang"])
def test_under_horovodrun_a_fault_ends_the_job_too(tmp_path, fault):
    limit = round(time_limit(8))
    variables = {**environ(), "TFPAR_TIMEOUT": str(limit)}
    launcher = Path(sys.executable).with_name("horovodrun")
    python = preloaded.ranks if fault == "hang" else interpreter
    command = [sys.executable, str(launcher), "-np", "2", "--gloo", "--network-interfaces", "lo"]
    process = subprocess.Popen(
        [*command, *python(*task(tmp_path, fault=fault))],
        env=variables,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    out = ended(process, variables["TFPAR_TEST_MARK"])
    assert process.returncode != 0
    if fault == "hang":
        assert f"rank 0 made no progress in 'train step 4' for {limit} s" in out


@pytest.mark.slow
@needs_horovod
@pytest.mark.parametrize(
    "backend", ["horovod", pytest.param("tensorflow", marks=pytest.mark.nightly)]
)
def test_a_killed_rank_is_named_with_its_stage_and_what_did_not_come_of_it(
    capfd, tmp_path, backend
):
    options = {"backend": backend, "timeout_s": 20.0}
    assert train(tmp_path, fault="kill", stages=2, pause_s=0.3, options=options) == 137
    out, err = capfd.readouterr()
    assert "rank 1 (host localhost, stage 1) was killed by SIGKILL after train step 3" in err
    for step in (1, 2, 3):
        assert f"[0] alone: step {step}, 0.01, True\n" in out
    # Which transfer fails first differs from run to run; what the rank was at does not.
    assert re.search(
        r"Rank 0 cannot go on in train step 4, (in|waiting for what) the (forward|backward) pass "
        r"of microbatch \d \(0[FB]\d\)",
        err,
    )
    table = err.partition("was killed by")[2]
    assert re.search(r"^ +rank +host +at +stage +task +for", table, re.M)
    assert re.search(r"^ +0 +localhost +train step 4 +0 ", table, re.M)


@pytest.mark.slow
@pytest.mark.nightly
@needs_horovod
def test_a_rank_that_hangs_is_named_with_its_stage(capfd, tmp_path):
    assert train(tmp_path, fault="hang", of=0, stages=2, options={"timeout_s": 10.0}) == 70
    err = capfd.readouterr().err
    assert "rank 0 (host localhost, stage 0) hung after train step 3" in err
    missing = err.partition("Missing ranks:")[2]
    assert "transfer/0_to_1/round" in missing and "F0/microbatch0" in missing


@pytest.mark.slow
def test_a_rank_that_reads_a_weight_of_another_alone_is_told_to_read_it_together(capfd, tmp_path):
    told = {"fault": "read_alone", "of": 0, "stages": 2, "options": {"timeout_s": 8.0}}
    assert train(tmp_path, **told) == 70
    err = capfd.readouterr().err
    # Both ranks wait for 8 s, in vain; the one whose time is up first ends the other's wait.
    assert re.search(
        r"rank 0 (made no progress|cannot go on) in '?gathering sequential/last/kernel:0\b.*\. All "
        r"ranks have to read sequential/last/kernel:0 together",
        err,
        re.I,
    )


# --- one rank of a pipeline fails within a step ----------------------------------------------


def say_of_task(capfd, folder: Path, inside: str, of: int, num_ranks: int = 2, **fields) -> str:
    """What is said of a job of which one rank fails within this task of step 4.

    Args:
        fields: of `faulty_ranks.Task`; `code` is that which the job ends with.
    """
    code, options = fields.pop("code"), fields.pop("options")
    chosen = {"stages": 2, "inside": inside, "of": of, **fields}
    assert train(folder, num_ranks, options=options, **chosen) == code
    return capfd.readouterr().err


@pytest.mark.slow
@needs_horovod
@pytest.mark.parametrize(
    "backend", [pytest.param("horovod", marks=pytest.mark.nightly), "tensorflow"]
)
def test_a_rank_that_is_killed_within_a_step_is_named_with_its_task(capfd, tmp_path, backend):
    options = {"backend": backend, "timeout_s": 20.0}
    told = {"fault": "kill", "code": 137, "options": options}
    err = say_of_task(capfd, tmp_path, "1B3", 1, **told)
    assert (
        "rank 1 (host localhost, stage 1) was killed by SIGKILL at train step 4, in the backward "
        "pass of microbatch 3 (1B3)." in err
    )
    table = err.partition("was killed by")[2]
    assert re.search(r"^ +1 +localhost +train step 4 +1 +1B3 .*SIGKILL", table, re.M)
    assert re.search(r"^ +0 +localhost +train step 4 +0 +0B3 \(waits\) ", table, re.M)


@pytest.mark.slow
@needs_horovod
def test_what_a_task_raises_is_told_with_the_task(capfd, tmp_path):
    told = {"fault": "raise", "code": 1, "options": {"backend": "tensorflow"}}
    err = say_of_task(capfd, tmp_path, "0F2", 0, **told)
    said = err.partition("tfpar run: ")[2].splitlines()[0]
    assert said.startswith(
        "rank 0 (host localhost, stage 0) failed at train step 4, in the forward pass of "
        "microbatch 2 (0F2) (exit code 1): "
    )
    assert "the moon is made of cheese" in said


@pytest.mark.slow
@needs_horovod
@pytest.mark.parametrize(
    "fault, said",
    [
        ("hang", "hung"),
        pytest.param("stop", "(hung|gives no sign of life)", marks=pytest.mark.nightly),
    ],
)
def test_a_rank_that_hangs_within_a_step_is_named_with_its_task(capfd, tmp_path, fault, said):
    told = {"fault": fault, "code": 70, "options": {"timeout_s": 8.0}}
    err = say_of_task(capfd, tmp_path, "1F1", 1, **told)
    where = r" at train step 4, in the forward pass of microbatch 1 \(1F1\)"
    assert re.search(rf"rank 1 \(host localhost, stage 1\) {said}{where}", err)


@pytest.mark.slow
@pytest.mark.nightly
@needs_horovod
@pytest.mark.parametrize(
    "fault, of, inside, code, said",
    [
        ("kill", 1, "0B2", 137, "was killed by SIGKILL at train step 4, in the backward pass"),
        ("hang", 3, "1B2", 70, "hung at train step 4, in the backward pass"),
    ],
)
def test_of_four_ranks_the_one_is_named_whom_all_wait_for(
    capfd, tmp_path, fault, of, inside, code, said
):
    backend = "tensorflow" if fault == "kill" else "horovod"
    options = {"backend": backend, "timeout_s": 12.0}
    told = {"fault": fault, "code": code, "options": options}
    err = say_of_task(capfd, tmp_path, inside, of, 4, **told)
    rank = f"rank {of} (host localhost, stage {of // 2})"
    assert f"{rank} {said} of microbatch 2 ({inside})" in err


# --- training goes on ------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Job:
    """One of two ranks that has come to its end, with what it has written."""

    folder: Path
    code: int
    output: str


@pytest.fixture(scope="module")
def stopped(tmp_path_factory) -> Job:
    """Got SIGTERM in the first epoch, and would have saved nothing yet."""
    folder = tmp_path_factory.mktemp("stopped")
    process, mark = start_two(folder, pause_s=0.5, every=100)
    reached = wait_until(lambda: reached_step(folder) >= 3, 60)
    process.send_signal(signal.SIGTERM)
    out = ended(process, mark)
    assert reached, out
    return Job(folder, process.returncode, out)


@pytest.fixture(scope="module")
def killed(tmp_path_factory, stopped) -> Job:
    """Has gone on where the other was stopped, and lost a rank in the second epoch."""
    folder = tmp_path_factory.mktemp("killed") / "run"
    shutil.copytree(stopped.folder, folder)
    process, mark = start_two(folder, pause_s=0.3, every=2, fault="kill", at=12)
    out = ended(process, mark)
    assert saved_steps(folder)[-1] == 10
    return Job(folder, process.returncode, out)


@pytest.mark.slow
def test_sigterm_saves_and_what_goes_on_is_as_if_nothing_had_happened(
    stopped, killed, uninterrupted
):
    last = max(losses(stopped.folder))
    assert stopped.code == 143 and 3 <= last < 10 and saved_steps(stopped.folder) == [last]
    assert f"[0] training from {last}\n" in killed.output
    assert same(losses(killed.folder), {n: uninterrupted[n] for n in range(1, 12)}, 1e-6)


@pytest.mark.slow
def test_sigterm_saves_while_a_checkpoint_is_being_written(tmp_path, uninterrupted):
    process, mark = start_two(tmp_path, pause_s=0.2, every=1, background=True)
    reached = wait_until(lambda: reached_step(tmp_path) >= 3, 60)
    process.send_signal(signal.SIGTERM)
    out = ended(process, mark)
    assert reached and process.returncode == 143, out
    last = max(losses(tmp_path))
    assert saved_steps(tmp_path) == [last - 1, last] and not list(tmp_path.glob("ckpt/*.tmp-*"))
    alone(tmp_path, every=2, mesh=[2])
    assert same(losses(tmp_path), uninterrupted)


@pytest.mark.slow
@pytest.mark.nightly
def test_one_process_goes_on_where_two_ranks_were(tmp_path, uninterrupted, killed):
    folder = tmp_path / "run"
    shutil.copytree(killed.folder, folder)
    alone(folder, every=2, mesh=[4])  # four ranks in one process
    assert same(losses(folder), uninterrupted)


@pytest.mark.slow
@pytest.mark.nightly
def test_four_ranks_go_on_where_two_were_and_two_where_four_were(tmp_path, uninterrupted, killed):
    folder = tmp_path / "run"
    shutil.copytree(killed.folder, folder)
    assert train(folder, 4, every=2, fault="kill", at=14) == 137
    assert saved_steps(folder)[-1] == 12
    assert train(folder, 2, every=2) == 0
    assert same(losses(folder), uninterrupted)


@pytest.mark.slow
def test_a_lost_rank_is_planned_without(capfd, tmp_path, uninterrupted):
    options = {"min_ranks": 2}
    assert train(tmp_path, 3, every=2, searched=True, fault="kill", at=6, options=options) == 0
    out, err = capfd.readouterr()
    assert "rank 1 (host localhost) was lost: SIGKILL" in err and "restarting with 2 ranks" in err
    assert out.count("training from 4") == 2 and out.count("done") == 2
    assert same(losses(tmp_path), uninterrupted)


@pytest.mark.slow
def test_a_pipeline_goes_on_with_all_ranks_that_are_left(capfd, tmp_path, uninterrupted):
    options = {"min_ranks": 1}
    assert train(tmp_path, 4, every=2, stages=2, fault="kill", at=6, options=options) == 0
    out, err = capfd.readouterr()
    assert "rank 1 (host localhost, stage 0) was lost" in err and "restarting with 3 ranks" in err
    assert out.count("training from 4") == 3 and out.count("done") == 3
    assert same(losses(tmp_path), uninterrupted)


@pytest.mark.slow
@pytest.mark.nightly
@pytest.mark.parametrize("background", [True, False], ids=["behind", "at-once"])
def test_nothing_that_was_saved_is_lost_by_kills_at_random_moments(
    tmp_path, monkeypatch, background
):
    for name, value in OF_RANKS.items():
        monkeypatch.setenv(name, value)
    result = kills.run(4, tmp_path, background=background, python=preloaded.ranks())
    assert result.code == 0 and result.kills == 4 and not result.lost
    assert max(result.behind) <= (2 if background else 1) * kills.EVERY
    assert result.largest_difference < 1e-4


def start_two(folder: Path, **fields) -> tuple[subprocess.Popen, str]:
    """Start two ranks; gives the launcher, and the mark of its processes."""
    limits = ("--grace", "20", "--timeout", f"{time_limit(60):g}")
    options = ("-np", "2", "--backend", BACKEND, *limits)
    return start(preloaded.ranks(*task(folder, **fields)), *options)


def reached_step(folder: Path) -> int:
    """The last step that was written down; 0 before the first."""
    path = folder / "losses.jsonl"
    lines = path.read_text().splitlines() if path.exists() else []
    return json.loads(lines[-1])["step"] if lines else 0


def saved_steps(folder: Path) -> list[int]:
    """The steps of the complete checkpoints."""
    from tfpar.tf.checkpoint import Reader
    from tfpar.tf.checkpoint.folders import checkpoints

    return [Reader(path).info["step"] for path in checkpoints(str(folder / "ckpt"))]


def ended(process: subprocess.Popen, mark: str) -> str:
    """What it has written once it is over, in time, and none of its processes lives."""
    try:
        out, _ = process.communicate(timeout=LIMIT_S)
        assert wait_until(lambda: not marked(mark), 5), marked(mark)
        return out
    finally:
        process.kill()
        process.communicate()
        kill_marked(mark)
