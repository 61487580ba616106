"""The rank's side of supervision: reports its activity to the launcher, and ends what hangs.

A thread of its own sends the latest activity, so that announcing one costs a rank next to
nothing. The same thread is the watchdog: it works without a launcher too.
"""

from __future__ import annotations

import atexit
import contextlib
import faulthandler
import json
import os
import select
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any, Literal, NamedTuple

from tfpar.jobs.launch import environment as names
from tfpar.jobs.launch.heartbeat import Heartbeat
from tfpar.jobs.launch.host_network import sources_towards
from tfpar.pipeline.tasks import Task
from tfpar.spec.errors import TfparError

_TICK_S = 0.1  # what a killed rank was at is known as exactly
_HEARTBEAT_S = 1.0
_CONNECT_S = 10.0
_SEND_S = 10.0
_JOIN_S = 1.0
_LONGEST_TEXT = 4000  # characters of an activity or a message


class TaskProgress(NamedTuple):
    """Progress of a rank within a step of a pipeline.

    Attributes:
        task: as schedules write it: `1B3`.
        state: whether it waits for what the task reads, runs it, or is through with it and has no
            other left in the step.
    """

    task: str
    state: Literal["waits", "runs", "done"]

    @property
    def described(self) -> str:
        """`in the backward pass of microbatch 3 (1B3)`."""
        task = Task.parse(self.task).described
        return {
            "waits": f"waiting for what {task} reads",
            "runs": f"in {task}",
            "done": f"after its last task, {task}",
        }[self.state]


class _Now(NamedTuple):
    """Current activity of this rank.

    Attributes:
        since: when it began, `time.monotonic()`.
        within: looks how far it has got within that.
        hint: what to look at if it hangs.
    """

    activity: str
    bounded: bool
    since: float
    within: Callable[[], TaskProgress | None] | None = None
    hint: str = ""

    def reached(self) -> TaskProgress | None:
        if self.within is None:
            return None
        try:
            return self.within()
        except Exception:  # noqa: BLE001 - that it cannot be seen must not end the watchdog
            return None


class Beacon:
    """Reporter of this rank's state to the launcher, and its watchdog.

    Use `connect` (under `tfpar run`) or `alone`; the constructor starts the thread.

    Args:
        rank: this process's.
        timeout_s: how long a bounded activity may last, seconds.
        grace_s: from SIGTERM to the end when the launcher is lost, seconds.
        connection: to the launcher, admitted; None without one.
        heartbeat: told of progress once a step has been taken; None if nobody looks.
    """

    def __init__(
        self,
        rank: int,
        timeout_s: float,
        grace_s: float,
        connection: socket.socket | None,
        heartbeat: Heartbeat | None,
    ) -> None:
        self._rank, self._timeout_s, self._grace_s = rank, timeout_s, grace_s
        self._connection, self._heartbeat = connection, heartbeat
        self._send_lock = threading.Lock()
        self._now = _Now("starting", False, time.monotonic())
        self._told: tuple[_Now, TaskProgress | None] = (self._now, None)
        self._stages: tuple[int, ...] = ()
        self._steps = 0
        self._least_ranks = 1
        self._heard_from = b""
        self._peers: list[str] = []
        self._peers_are_known = threading.Event()
        self._closed = threading.Event()
        self._process = os.getpid()
        atexit.register(self.close)
        self._thread = threading.Thread(target=self._watch, name="tfpar-beacon", daemon=True)
        self._thread.start()

    @classmethod
    def connect(cls, rank: int, environ: Mapping[str, str]) -> Beacon | None:
        """Report to the launcher that `environ` names; None if it names none.

        Raises:
            TfparError: it cannot be reached, or refuses this process.
        """
        supervisor = environ.get(names.SUPERVISOR)
        if not supervisor:
            return None
        timeout_s, grace_s = _limits(environ)
        heartbeat = Heartbeat.of(environ)
        connection = _admitted(supervisor, environ, rank)
        # What is sent and not acknowledged for so long: the launcher's machine is gone.
        limit_ms = int(timeout_s * 1000)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, limit_ms)
        return cls(rank, timeout_s, grace_s, connection, heartbeat)

    @classmethod
    def alone(cls, rank: int, environ: Mapping[str, str]) -> Beacon:
        """Make a beacon without a launcher: only the watchdog."""
        return cls(rank, *_limits(environ), None, Heartbeat.of(environ))

    @property
    def timeout_s(self) -> float:
        """Seconds that a bounded activity may last."""
        return self._timeout_s

    @property
    def progress(self) -> float:
        """Start of the present activity, `time.monotonic()`; it differs for each activity."""
        return self._now.since

    def at(
        self,
        activity: str,
        bounded: bool = False,
        within: Callable[[], TaskProgress | None] | None = None,
        hint: str = "",
    ) -> None:
        """Begin `activity` on this rank; a bounded one has to end within the timeout.

        Each call counts as progress, even if it says the same again.

        Args:
            within: tells how far it has got; called from another thread, until the next activity.
            hint: a sentence that says what to look at if this rank hangs in it.
        """
        self._now = _Now(activity, bounded, time.monotonic(), within, hint)

    def runs(self, stages: tuple[int, ...]) -> None:
        """Set the stages of a pipeline that this rank runs next; none without a pipeline."""
        self._stages = stages

    def took(self, steps: int) -> None:
        """Set the number of steps that this rank has taken."""
        self._steps = steps

    def needs_at_least(self, num_ranks: int) -> None:
        """Report that a part of this rank's program runs on so many actors, as a pipeline does."""
        self._least_ranks = max(self._least_ranks, num_ranks)
        self._send({"say": "least", "ranks": self._least_ranks})

    def peers(self) -> list[str] | None:
        """The addresses from which all ranks reach each other; waits until all have come.

        None without a launcher, which knows them. Who waits in vain is in a bounded activity.
        """
        if self._connection is None:
            return None
        self._peers_are_known.wait()
        return self._peers

    def failed(self, kind: str, message: str) -> None:
        """Tell at once of an exception.

        Args:
            kind: `error` for one of this rank's own, `peer` if another rank's end has caused it.
            message: of the exception.
        """
        self._tell_activity()
        self._send({"say": "failed", "kind": kind, "message": message[:_LONGEST_TEXT]})

    def done(self) -> None:
        """Tell that this rank's program has come to its end; the process may wait for others."""
        self._tell_activity()
        self._send({"say": "done"})

    def close(self) -> None:
        """End in good order; nothing is watched from here on."""
        if self._closed.is_set() or os.getpid() != self._process:  # a forked child is no rank
            return
        self._closed.set()
        self._tell_activity()
        self._send({"say": "bye"})
        if self._connection is not None:
            with contextlib.suppress(OSError):
                self._connection.shutdown(socket.SHUT_RDWR)
        if threading.current_thread() is not self._thread:
            self._thread.join(_JOIN_S)  # TensorFlow, which it may be asking, goes next

    # --- the thread ----------------------------------------------------------------------

    def _watch(self) -> None:
        heartbeat = time.monotonic()
        tick = min(_TICK_S, self._timeout_s / 4)
        while not self._closed.is_set():
            self._listen(tick)
            at, now = self._now, time.monotonic()
            if at.bounded and now - at.since > self._timeout_s:
                self._hang(at, now - at.since)
            if not self._tell_activity() and now - heartbeat > _HEARTBEAT_S:
                heartbeat = now
                self._send({"say": "alive"})

    def _listen(self, seconds: float) -> None:
        """Wait; meanwhile do what the launcher asks for, and notice when it is gone."""
        if self._connection is None:
            self._closed.wait(seconds)
            return
        try:
            ready, _, _ = select.select([self._connection], [], [], seconds)
            data = self._connection.recv(4096) if ready else None
        except (OSError, ValueError):
            data = b""
        if data is None or self._closed.is_set():
            return
        if not data:
            self._end_without_launcher()
        *lines, self._heard_from = (self._heard_from + data).split(b"\n")
        for line in lines:
            self._heed(json.loads(line))

    def _heed(self, message: dict[str, Any]) -> None:
        if message.get("say") == "stacks":
            self._print(f"rank {self._rank} is at {self._now.activity!r}. Its Python stacks:")
            _dump_stacks()
        elif message.get("say") == "peers":
            self._peers = message["addresses"]
            self._peers_are_known.set()

    def _hang(self, at: _Now, seconds: float) -> None:
        hint = f"{at.hint} " if at.hint else ""
        self._print(
            f"rank {self._rank} made no progress in {at.activity!r} for {seconds:.0f} s "
            f"({names.TIMEOUT}={self._timeout_s:g}) and ends. {hint}Its Python stacks:"
        )
        _dump_stacks()
        self._tell_activity()
        self._send({"say": "hung", "seconds": seconds})
        os._exit(names.HUNG)

    def _end_without_launcher(self) -> None:
        """No rank outlives its launcher: whoever started it can no longer end it."""
        self._print(f"rank {self._rank} has lost `tfpar run` and ends.")
        os.kill(self._process, signal.SIGTERM)
        time.sleep(self._grace_s)
        os._exit(128 + signal.SIGTERM)

    def _tell_activity(self) -> bool:
        """Tell what this rank is at; False if nothing has changed since."""
        now = self._now
        told, reached = self._told, now.reached()
        if now is told[0] and reached == told[1]:
            return False
        self._told = (now, reached)
        if self._heartbeat is not None and self._steps:
            self._heartbeat.beat()
        age = time.monotonic() - now.since
        text = now.activity[:_LONGEST_TEXT]
        said = {"say": "at", "activity": text, "bounded": now.bounded, "age": age}
        said |= {"stages": self._stages, "steps": self._steps}
        self._send({**said, "reached": reached})
        return True

    def _send(self, message: dict[str, Any]) -> None:
        """Send, unless there is nobody: that is noticed where the thread listens."""
        if self._connection is None or os.getpid() != self._process:
            return
        with self._send_lock, contextlib.suppress(OSError):
            self._connection.sendall(json.dumps(message).encode() + b"\n")

    def _print(self, text: str) -> None:
        with contextlib.suppress(OSError):
            os.write(2, f"tfpar: {text}\n".encode())


def _dump_stacks() -> None:
    with contextlib.suppress(OSError, ValueError):
        faulthandler.dump_traceback(sys.__stderr__ or 2, all_threads=True)


def _limits(environ: Mapping[str, str]) -> tuple[float, float]:
    timeout = environ.get(names.TIMEOUT, names.DEFAULT_TIMEOUT_S)
    grace = environ.get(names.GRACE, names.DEFAULT_GRACE_S)
    try:
        return float(timeout), float(grace)
    except ValueError as error:
        raise TfparError(
            f"{names.TIMEOUT}={timeout} and {names.GRACE}={grace} have to be seconds."
        ) from error


def _admitted(supervisor: str, environ: Mapping[str, str], rank: int) -> socket.socket:
    host, _, port = supervisor.rpartition(":")
    others = filter(None, environ.get(names.ADDRESSES, "").split(","))
    come_from = sources_towards(address.rpartition(":")[0].strip("[]") for address in others)
    connection = None
    try:
        connection = socket.create_connection((host, int(port)), timeout=_CONNECT_S)
        token = environ.get(names.TOKEN, "")
        hello = {"say": "hello", "token": token, "rank": rank, "from": sorted(come_from)}
        connection.sendall(json.dumps(hello).encode() + b"\n")
        answer = _line(connection)
    except (OSError, ValueError) as error:
        if connection is not None:
            connection.close()
        raise TfparError(
            f"Rank {rank} cannot reach `tfpar run` at {supervisor} ({names.SUPERVISOR}): {error}. "
            f"Is it still running, and does a firewall stand between?"
        ) from error
    if "refused" in answer:
        connection.close()
        raise TfparError(f"`tfpar run` at {supervisor} refuses rank {rank}: {answer['refused']}.")
    connection.settimeout(_SEND_S)
    return connection


def _line(connection: socket.socket) -> dict[str, Any]:
    with connection.makefile("rb", buffering=0) as stream:  # what follows stays to be read
        line = stream.readline(4096)
    if not line:
        raise OSError("the connection was closed")
    answer: dict[str, Any] = json.loads(line)
    return answer
