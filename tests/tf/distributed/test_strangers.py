"""Running jobs, attacked from another machine of their network."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests import preloaded
from tests.jobs.launch.programs import ROOT, variables
from tests.tf.distributed.jobs import Ended, printed
from tests.tf.distributed.namespaces import Machine, network
from tests.time_limits import time_limit, wait_until

pytestmark = [pytest.mark.xdist_group("processes"), pytest.mark.slow]

ALL = ("0.0.0.0", "::")
LOOPBACK = "127.0.0.1"
BACKENDS = [
    pytest.param(
        "horovod",
        marks=pytest.mark.skipif(
            importlib.util.find_spec("horovod") is None, reason="Horovod is not installed"
        ),
    ),
    "tensorflow",
]

# Runs the command on the machine of that address.
SSH = """#!/bin/sh
while [ $# -gt 2 ]; do shift; done
eval namespace=\\$NAMESPACE_${1##*.}
exec nsenter --net=$namespace env -i PATH="$PATH" NAMESPACE=$namespace sh -c "$2"
"""
SILENT_S = 0.7


_LOOK_S = 0.1  # a look takes 5 ms; Gloo's listen for some tenths of a second


class Watched:
    """Every socket that has listened on a machine, sooner or later, while the context lasts."""

    def __init__(self, machine: Machine) -> None:
        self.addresses: set[str] = set()
        self._machine, self._over = machine, threading.Event()
        self._thread = threading.Thread(target=self._look)

    def __enter__(self) -> Watched:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    def _look(self) -> None:
        while not self._over.wait(_LOOK_S):
            self.addresses |= {address for address, _ in self._machine.listening()}


@pytest.fixture(scope="module")
def machines() -> Iterator[list[Machine]]:
    with network(3) as made:
        yield made


class Besieged:
    """A job of two ranks that goes on until it is told that the siege is over."""

    def __init__(self, machines: list[Machine], backend: str, hosts: str, folder: Path) -> None:
        self._folder = folder
        ssh = folder / "ssh"
        ssh.write_text(SSH)
        ssh.chmod(0o755)
        told = {f"NAMESPACE_{m.address.rpartition('.')[2]}": m.path for m in machines}
        told |= {"NAMESPACE": machines[0].path, "PATH": f"{folder}:{os.environ['PATH']}"}
        launcher = [
            sys.executable,
            "-m",
            "tests.cli.launcher",
            "run",
            "-np",
            "2",
            "-H",
            hosts,
        ]
        options = ["--backend", backend, "--timeout", f"{time_limit(40):g}"]
        # The processes that ranks are forked from are reached in this namespace alone.
        rank = preloaded.ranks("-m", "tests.tf.distributed.besieged_ranks", folder)
        outside = ["nsenter", f"--net=/proc/{os.getpid()}/ns/net", *rank]
        self._process = subprocess.Popen(
            [*machines[0].command(*launcher), *options, *outside],
            cwd=ROOT,
            env={**variables(), **told},
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )

    def wait_until_it_runs(self) -> None:
        here = [self._folder / "rank0", self._folder / "rank1"]
        ended = lambda: self._process.poll() is not None  # noqa: E731
        came = wait_until(lambda: ended() or all(path.exists() for path in here), 60)
        if not came or ended():
            self._process.kill()
            pytest.fail(f"the job did not start:\n{self._process.communicate()[0]}")

    def ended(self) -> Ended:
        (self._folder / "over").touch()
        output, _ = self._process.communicate(timeout=time_limit(60))
        return Ended(2, self._process.returncode, output)

    def __enter__(self) -> Besieged:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.terminate()  # which ends the ranks
        self._process.wait()
        self._process.stdout.close()


def places(machine: Machine, listening: set[tuple[str, int]]) -> list[str]:
    """Where a stranger may try to reach what listens on a machine."""
    addresses = (machine.address, f"[{machine.address6}]")
    return [f"{address}:{port}" for address in addresses for _, port in listening]


def attack(stranger: Machine, known: list[str], job: Besieged) -> tuple[dict, Ended]:
    """What comes of each place, and of the job, while idle connections of the attack stay open."""
    script = Path(__file__).with_name("stranger.py")
    command = stranger.command(sys.executable, "-I", "-S", str(script), str(SILENT_S), *known)
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as attacker:
        said = dict(json.loads(attacker.stdout.readline()) for _ in known)
        ended = job.ended()
        attacker.stdin.close()
    return said, ended


def went_on(ended: Ended) -> None:
    """The job came to its right end."""
    ranks = printed(ended)
    assert [rank["right"] for rank in ranks] == [True, True]
    assert all(rank["rounds"] > 3 for rank in ranks)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_job_on_one_machine_is_open_to_none(backend, machines, tmp_path):
    machine, _, stranger = machines
    with Watched(machine) as watched, Besieged(machines, backend, "localhost:2", tmp_path) as job:
        job.wait_until_it_runs()
        listening = machine.listening()
        # TensorFlow's servers listen on all addresses, and the kernel keeps strangers from them.
        on_all = {port for address, port in listening if address in ALL}
        assert len(on_all) == (2 if backend == "tensorflow" else 0)
        places = [
            f"{a}:{p}" for a in (machine.address, f"[{machine.address6}]") for _, p in listening
        ]
        said, ended = attack(stranger, places, job)
    assert watched.addresses - set(ALL) == {LOOPBACK}
    for place, answer in said.items():
        assert answer == ("silent" if int(place.rpartition(":")[2]) in on_all else "refused")
    went_on(ended)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_job_of_two_machines_lets_in_its_own_alone(backend, machines, tmp_path):
    first, second, stranger = machines
    hosts = f"{first.address}:1,{second.address}:1"
    with (
        Watched(first) as at_first,
        Watched(second) as at_second,
        Besieged(machines, backend, hosts, tmp_path) as job,
    ):
        job.wait_until_it_runs()
        listening = {m: m.listening() for m in (first, second)}
        known = [place for m, sockets in listening.items() for place in places(m, sockets)]
        said, ended = attack(stranger, known, job)
    for machine, watched in ((first, at_first), (second, at_second)):
        assert watched.addresses - set(ALL) <= {machine.address}
    for machine, sockets in listening.items():
        on_all = {port for address, port in sockets if address in ALL}
        assert len(on_all) == (1 if backend == "tensorflow" else 0)
        for port in on_all:
            assert said[f"{machine.address}:{port}"] == "silent"
            assert said[f"[{machine.address6}]:{port}"] == "silent"
    # The launcher's own two at most are reached, over IPv4, and admit nobody without a secret.
    reached = {place: answers for place, answers in said.items() if isinstance(answers, dict)}
    assert len(reached) == (1 if backend == "tensorflow" else 2)
    for place, answers in reached.items():
        assert place.startswith(f"{first.address}:")
        for answer in answers.values():
            assert '"ok"' not in answer and "200 OK" not in answer
    went_on(ended)
