"""Starts the ranks of a baseline on this machine and asks them for steps.

    with Ranks("megatron", "gpt", 2) as ranks:
        ranks.ask({"steps": 3})       # {"cpu_s": ..., "wall_s": ..., "peak_mib": ...}

The losses of the first steps are compared with plain Keras's, so that a baseline that
computes something else is noticed.
"""

from __future__ import annotations

import functools
import json
import math
import os
import selectors
import signal
import socket
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

from benchmarks.workers import ROOT

KINDS = ("horovod", "mwms", "megatron", "tfpar-data", "tfpar-model", "tfpar-searched")
POLLING = tuple(kind for kind in KINDS if kind != "mwms")
"""Those whose ranks use a core's tenth each while they wait; they are stopped between turns."""
CHECKED_STEPS = 3
TOLERANCE = 1e-4


@dataclass(frozen=True)
class Result:
    """A step of a baseline.

    Attributes:
        cpu_s: user and system time of all ranks together.
        wall_s: time of the slowest rank.
        peak_mib: memory of all ranks together.
        ranks: what each rank said, its losses included.
    """

    cpu_s: float
    wall_s: float
    peak_mib: float
    ranks: tuple[dict[str, Any], ...]


def run_ranks(
    kind: str, model: str, count: int, *, steps: int = 8, threads: int = 1, timeout: float = 600.0
) -> Result:
    """The figures of `steps` steps after the `CHECKED_STEPS` first; see `Ranks`."""
    with Ranks(kind, model, count, threads=threads, timeout=timeout) as ranks:
        ranks.run(CHECKED_STEPS)
        return ranks.run(steps)


class Ranks:
    """The processes of a baseline; they stay up and take steps when asked.

    Between its turns Horovod is stopped, as others on the machine would feel its polling.
    TensorFlow's own collectives do not poll, and would take a stopped rank for a dead one.

    Args:
        kind: one of `KINDS`, or "keras" for one rank of plain Keras.
        model: a name in `worker.TASKS`.
        count: how many processes.
        threads: of an op in each; 0 leaves it to TensorFlow. One was the better choice for
            all baselines with 2 ranks on 2 cores.
        timeout: seconds that an answer may take.

    A RuntimeError ends all ranks: when one of them ends, when all are not done in time, or
    when the losses are not plain Keras's.
    """

    def __init__(
        self, kind: str, model: str, count: int, *, threads: int = 1, timeout: float = 600.0
    ) -> None:
        self.kind, self.model, self.count = kind, model, count
        self.losses: list[float] = []
        self._timeout = timeout
        self._held = ExitStack()
        self._ranks: list[_Rank] = []
        command = [sys.executable, "-m", "benchmarks.by_hand.worker", kind, model]
        command += ["--threads", str(threads)]
        try:
            for i, environment in enumerate(_environments(kind, count, self._held)):
                self._ranks.append(_Rank(f"rank {i} of {kind}", command, environment))
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Ranks:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def ask(self, request: dict[str, int]) -> dict[str, float]:
        """As of a `benchmarks.workers.Worker`: the figures of `request["steps"]` steps."""
        result = self.run(request["steps"])
        return {"cpu_s": result.cpu_s, "wall_s": result.wall_s, "peak_mib": result.peak_mib}

    def run(self, steps: int) -> Result:
        """Take steps; the very first includes tracing."""
        try:
            answers = self._ask_all({"steps": steps})
            for losses in zip(*(answer["losses"] for answer in answers), strict=True):
                self.losses.append(sum(losses) / self.count)
            self._check_losses()
        except BaseException:
            self.close()
            raise
        return Result(
            cpu_s=sum(answer["cpu_s"] for answer in answers),
            wall_s=max(answer["wall_s"] for answer in answers),
            peak_mib=sum(answer["peak_mib"] for answer in answers),
            ranks=tuple(answers),
        )

    def close(self) -> None:
        """End all ranks at once."""
        for rank in self._ranks:
            rank.kill()
        self._held.close()

    def _ask_all(self, request: dict[str, int]) -> list[dict[str, Any]]:
        for rank in self._ranks:
            if self.kind in POLLING:
                rank.signal(signal.SIGCONT)
            rank.send(request)
        answers: dict[_Rank, dict[str, Any]] = {}
        deadline = time.monotonic() + self._timeout
        with selectors.DefaultSelector() as selector:
            for rank in self._ranks:
                selector.register(rank.output, selectors.EVENT_READ, rank)
            while len(answers) < self.count:
                ready = selector.select(deadline - time.monotonic())
                if not ready:
                    silent = [rank.name for rank in self._ranks if rank not in answers]
                    raise RuntimeError(f"{', '.join(silent)}: no answer in {self._timeout:g} s")
                for key, _ in ready:
                    answer = key.data.receive()
                    if answer is not None:
                        answers[key.data] = answer
        if self.kind in POLLING:
            for rank in self._ranks:
                rank.signal(signal.SIGSTOP)
        return [answers[rank] for rank in self._ranks]

    def _check_losses(self) -> None:
        if self.kind == "keras":
            return
        expected = plain_losses(self.model)
        for step, (loss, plain) in enumerate(zip(self.losses, expected, strict=False)):
            if not math.isclose(loss, plain, rel_tol=TOLERANCE):
                raise RuntimeError(
                    f"{self.kind} of {self.model} on {self.count} ranks: the loss of step {step} "
                    f"is {loss:.6f}, plain Keras's is {plain:.6f}"
                )


@functools.cache
def plain_losses(model: str) -> tuple[float, ...]:
    """The first `CHECKED_STEPS` losses of plain Keras, from a process of its own."""
    with Ranks("keras", model, 1, threads=0) as ranks:
        ranks.run(CHECKED_STEPS)
        return tuple(ranks.losses)


class _Rank:
    """One process, the first of a process group of its own."""

    def __init__(self, name: str, command: list[str], environment: dict[str, str]) -> None:
        path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
        fixed = {
            "KERAS_BACKEND": "tensorflow",
            "TF_CPP_MIN_LOG_LEVEL": "3",
            "PYTHONPATH": path,
            "CUDA_VISIBLE_DEVICES": "-1",
        }
        self.name = name
        self._pending = b""
        self._errors = tempfile.TemporaryFile("w+")
        self._process = subprocess.Popen(
            command,
            env={**os.environ, **fixed, **environment},
            cwd=ROOT,
            text=True,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            start_new_session=True,
        )
        assert self._process.stdin and self._process.stdout
        self._input, self.output = self._process.stdin, self._process.stdout

    def send(self, request: dict[str, int]) -> None:
        """Raises RuntimeError if the process has ended."""
        try:
            self._input.write(json.dumps(request) + "\n")
            self._input.flush()
        except BrokenPipeError:
            raise RuntimeError(f"{self.name} ended: {self.last_words()}") from None

    def receive(self) -> dict[str, Any] | None:
        """An answer, if one has come whole; RuntimeError if the process has ended."""
        chunk = os.read(self.output.fileno(), 1 << 16)
        if not chunk:
            raise RuntimeError(f"{self.name} ended: {self.last_words()}")
        *lines, self._pending = (self._pending + chunk).split(b"\n")
        answers = [line[1:] for line in lines if line.startswith(b"@")]
        return json.loads(answers[0]) if answers else None

    def last_words(self) -> str:
        """The end of what it wrote to standard error."""
        self._errors.seek(0)
        return self._errors.read()[-2000:]

    def signal(self, which: signal.Signals) -> None:
        if self._process.poll() is None:
            os.killpg(self._process.pid, which)

    def kill(self) -> None:
        self.signal(signal.SIGKILL)
        self._process.communicate()
        self._errors.close()


# --- how the ranks find each other --------------------------------------------------------


def _environments(kind: str, count: int, held: ExitStack) -> list[dict[str, str]]:
    """One a rank; what must live as long as the ranks goes to `held`."""
    if kind == "keras":
        return [{}]
    if kind == "mwms":
        return _of_tensorflow(count)
    return _of_horovod(count, held)


def _of_tensorflow(count: int) -> list[dict[str, str]]:
    with ExitStack() as probes:
        sockets = [probes.enter_context(socket.socket()) for _ in range(count)]
        for probe in sockets:
            probe.bind(("127.0.0.1", 0))
        workers = ["{}:{}".format(*probe.getsockname()) for probe in sockets]
    tasks = [{"type": "worker", "index": rank} for rank in range(count)]
    return [
        {"TF_CONFIG": json.dumps({"cluster": {"worker": workers}, "task": task})} for task in tasks
    ]


def _of_horovod(count: int, held: ExitStack) -> list[dict[str, str]]:
    """As of `horovodrun --gloo -np count`, over loopback."""
    from horovod.runner.common.util.hosts import get_host_assignments, parse_hosts
    from horovod.runner.http.http_server import RendezvousServer

    slots = get_host_assignments(parse_hosts(f"localhost:{count}"), count)
    server = RendezvousServer()
    port = server.start()
    held.callback(server.stop)
    server.init(slots)
    shared = {
        "HOROVOD_GLOO_RENDEZVOUS_ADDR": "127.0.0.1",
        "HOROVOD_GLOO_RENDEZVOUS_PORT": str(port),
        "HOROVOD_CONTROLLER": "gloo",
        "HOROVOD_CPU_OPERATIONS": "gloo",
        "HOROVOD_GLOO_IFACE": "lo",
        # A rank that was stopped while it waited for another has not waited in vain.
        "HOROVOD_GLOO_TIMEOUT_SECONDS": "3600",
    }
    return [
        {
            **shared,
            "HOROVOD_HOSTNAME": slot.hostname,
            "HOROVOD_RANK": str(slot.rank),
            "HOROVOD_SIZE": str(slot.size),
            "HOROVOD_LOCAL_RANK": str(slot.local_rank),
            "HOROVOD_LOCAL_SIZE": str(slot.local_size),
            "HOROVOD_CROSS_RANK": str(slot.cross_rank),
            "HOROVOD_CROSS_SIZE": str(slot.cross_size),
        }
        for slot in slots
    ]
