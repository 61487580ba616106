"""What a rank tells, who is listened to, and what ends a rank that hangs."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import threading
import time

import pytest

from tests.jobs.launch.programs import environ
from tests.time_limits import time_limit, wait_until
from tfpar.jobs.launch.beacon import Beacon, TaskProgress
from tfpar.jobs.launch.supervisor import Supervisor
from tfpar.spec import TfparError


@pytest.fixture
def supervisor():
    made = Supervisor("127.0.0.1", 2, threading.Event())
    yield made
    made.close()


def variables(supervisor: Supervisor) -> dict[str, str]:
    return {"TFPAR_SUPERVISOR": supervisor.address, "TFPAR_TOKEN": supervisor.token}


def test_without_a_launcher_there_is_nobody_to_connect_to():
    assert Beacon.connect(0, {}) is None


def test_the_launcher_hears_what_a_rank_is_at(supervisor):
    beacon = Beacon.connect(1, variables(supervisor))
    for step in range(5):
        beacon.at(f"train step {step}", bounded=True)
    assert wait_until(lambda: supervisor.signs()[1].activity == "train step 4", 3)
    sign = supervisor.signs()[1]
    assert sign.bounded and time.monotonic() - sign.since < time_limit(5)
    beacon.close()
    assert wait_until(lambda: supervisor.signs()[1].left, 3)
    assert supervisor.signs()[1].lost_at is None


def test_once_all_have_come_each_rank_knows_from_where_all_reach_each_other(
    supervisor, monkeypatch
):
    beacons = []
    for rank, sources in enumerate((["10.0.0.1", "192.168.0.1"], ["10.0.0.2"])):
        monkeypatch.setattr("tfpar.jobs.launch.beacon.sources_towards", lambda _, s=sources: s)
        assert all(not beacon._peers_are_known.is_set() for beacon in beacons)
        beacons.append(Beacon.connect(rank, variables(supervisor)))
    for beacon in beacons:
        assert beacon.peers() == ["10.0.0.1", "10.0.0.2", "192.168.0.1"]
        beacon.close()


def test_how_many_ranks_are_needed_at_least_is_heard(supervisor):
    beacon = Beacon.connect(1, variables(supervisor))
    assert supervisor.signs()[1].least_ranks is None
    for sets, least in ((2, 2), (3, 3), (1, 3)):
        beacon.needs_at_least(sets)
        assert wait_until(lambda n=least: supervisor.signs()[1].least_ranks == n, 3)
    beacon.close()


def test_how_far_a_rank_has_got_is_heard_while_it_goes_on(supervisor):
    beacon, task = Beacon.connect(1, variables(supervisor)), ["1F0"]
    beacon.at("train step 5", bounded=True, within=lambda: TaskProgress(task[0], "runs"))
    for name in ("1F0", "1B3"):
        task[0] = name
        assert wait_until(lambda: supervisor.signs()[1].reached == (task[0], "runs"), 3)
    assert supervisor.signs()[1].activity == "train step 5"
    beacon.at("after train step 5")
    assert wait_until(lambda: supervisor.signs()[1].activity == "after train step 5", 3)
    assert supervisor.signs()[1].reached is None
    beacon.close()


def test_a_look_that_fails_ends_nothing(supervisor):
    beacon = Beacon.connect(1, variables(supervisor))
    beacon.at("train step 5", within=lambda: TaskProgress(*[][0]))
    assert wait_until(lambda: supervisor.signs()[1].activity == "train step 5", 3)
    beacon.at("train step 6")
    assert wait_until(lambda: supervisor.signs()[1].activity == "train step 6", 3)
    beacon.close()


def test_a_failure_is_heard_at_once_with_where_it_was(supervisor):
    beacon = Beacon.connect(0, variables(supervisor))
    beacon.at("train step 9")
    beacon.failed("peer", "the other is gone")
    assert wait_until(lambda: supervisor.signs()[0].failure is not None, 1.5)
    known = supervisor.signs()[0]
    assert (known.failure.kind, known.activity) == ("peer", "train step 9")
    beacon.close()


def test_a_wrong_token_or_rank_is_refused(supervisor):
    with pytest.raises(TfparError, match="token"):
        Beacon.connect(0, {**variables(supervisor), "TFPAR_TOKEN": "guess"})
    with pytest.raises(TfparError, match="no rank 7"):
        Beacon.connect(7, variables(supervisor))
    assert supervisor.signs() == {}


def test_a_second_process_of_a_rank_is_refused(supervisor):
    first = Beacon.connect(0, variables(supervisor))
    with pytest.raises(TfparError, match="rank 0 has been here"):
        Beacon.connect(0, variables(supervisor))
    first.close()


@pytest.mark.parametrize(
    "said", [b"GET / HTTP/1.1\r\n\r\n", b"[]\n", b"{}\n", b"x" * 100_000], ids=[*"abcd"]
)
def test_strangers_change_nothing(supervisor, said):
    host, port = supervisor.address.split(":")
    with socket.create_connection((host, int(port)), timeout=time_limit(5)) as stranger:
        try:
            stranger.sendall(said)
            stranger.shutdown(socket.SHUT_WR)
            answer = stranger.recv(1000)
        except OSError:  # the connection was closed before all was said
            answer = b""
        assert b'"ok"' not in answer
    assert supervisor.signs() == {}


def test_nonsense_of_a_rank_ends_its_connection(supervisor):
    host, port = supervisor.address.split(":")
    with socket.create_connection((host, int(port)), timeout=time_limit(5)) as rank:
        hello = {"say": "hello", "token": supervisor.token, "rank": 1}
        rank.sendall(json.dumps(hello).encode() + b'\n{"say": "at"}\n')
        assert wait_until(lambda: 1 in supervisor.signs() and supervisor.signs()[1].lost_at, 3)


def test_a_launcher_that_is_not_there_is_named():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        with pytest.raises(TfparError, match=address):
            Beacon.connect(0, {"TFPAR_SUPERVISOR": address})


def test_limits_that_are_no_numbers_are_refused():
    with pytest.raises(TfparError, match="TFPAR_TIMEOUT=soon"):
        Beacon.alone(0, {"TFPAR_TIMEOUT": "soon"})


def test_the_heartbeat_begins_with_the_first_step_and_is_as_old_as_the_last_progress(tmp_path):
    file = tmp_path / "heartbeat"
    file.touch()  # by a run before
    beacon = Beacon.alone(0, {"TFPAR_HEARTBEAT": str(file)})
    beacon.at("joined the job")
    assert wait_until(lambda: beacon._told[0] is beacon._now, 3) and not file.exists()
    beacon.took(1)
    for step in range(1, 3):
        beacon.at(f"after train step {step}")
        assert wait_until(lambda: file.exists() and file.stat().st_mtime > 1, 3)
        os.utime(file, (1, 1))
    beacon.close()
    assert file.stat().st_mtime == 1


def test_a_heartbeat_that_cannot_be_written_is_named(supervisor, tmp_path):
    nowhere = {"TFPAR_HEARTBEAT": str(tmp_path / "no" / "heartbeat")}
    with pytest.raises(TfparError, match="TFPAR_HEARTBEAT=.*/no/heartbeat cannot be written: No"):
        Beacon.connect(0, {**variables(supervisor), **nowhere})
    assert supervisor.signs() == {}


def ended(text: str, others: dict[str, str]) -> subprocess.CompletedProcess:
    code = f"import os, time\nfrom tfpar.jobs.launch.beacon import Beacon\n{text}"
    return subprocess.run(
        [sys.executable, "-c", code],
        env={**environ(), **others},
        capture_output=True,
        text=True,
        timeout=time_limit(20),
    )


def test_the_watchdog_ends_what_is_bounded_without_a_launcher():
    text = "b = Beacon.alone(3, os.environ); b.at('all_reduce dense', bounded=True); time.sleep(15)"
    done = ended(text, {"TFPAR_TIMEOUT": "0.5"})
    assert done.returncode == 70
    assert "rank 3 made no progress in 'all_reduce dense'" in done.stderr
    assert 'File "<string>", line 3' in done.stderr  # where it hangs


@pytest.mark.slow
def test_the_watchdog_spares_what_goes_on_or_has_no_bound():
    text = """
b = Beacon.alone(3, os.environ)
for step in range(6):
    b.at("train", bounded=True); time.sleep(0.2)
b.at("reading data"); time.sleep(1)
"""
    assert ended(text, {"TFPAR_TIMEOUT": "0.5"}).returncode == 0


def test_a_rank_that_has_lost_its_launcher_ends(supervisor):
    text = "b = Beacon.connect(0, os.environ); print('on', flush=True); time.sleep(15)"
    code = f"import os, time\nfrom tfpar.jobs.launch.beacon import Beacon\n{text}"
    rank = subprocess.Popen(
        [sys.executable, "-c", code],
        env={**environ(), **variables(supervisor)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        assert rank.stdout.readline() == "on\n"
        supervisor.close()
        assert rank.wait(5) == -15
        assert "has lost `tfpar run`" in rank.stderr.read()
    finally:
        rank.kill()
        rank.communicate()


def test_a_forked_child_is_not_the_rank(supervisor):
    beacon = Beacon.connect(0, variables(supervisor))
    child = os.fork()
    if child == 0:
        beacon.close()
        os._exit(0)
    os.waitpid(child, 0)
    beacon.at("train step 5")  # which comes after whatever the child has said
    assert wait_until(lambda: supervisor.signs()[0].activity == "train step 5", 3)
    assert not supervisor.signs()[0].left and supervisor.signs()[0].lost_at is None
    beacon.close()
