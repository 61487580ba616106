"""Supervisor of ranks: a small TCP server in the launcher, to which ranks report as JSON lines.

A rank says `hello` with the job's token and its rank, then what it is doing whenever that has
changed, and a sign of life in between. Whoever has not the token is refused, and keeps nobody else
out: not by many connections, nor by long or slow ones.
"""

from __future__ import annotations

import contextlib
import hmac
import json
import secrets
import socket
import socketserver
import threading
import time
from dataclasses import dataclass, replace
from typing import Any

from tfpar.jobs.launch.beacon import TaskProgress
from tfpar.jobs.launch.bounded_server import BoundedServer

_HELLO_S = 10.0
_LONGEST_HELLO = 1 << 12  # bytes
_LONGEST = 1 << 16  # bytes of any other line


@dataclass(frozen=True, slots=True)
class Failure:
    """Exception that a rank reported: its own (`error`), or one that another's end caused."""

    kind: str
    message: str
    at: float


@dataclass(frozen=True, slots=True)
class Signs:
    """Signs of life of a rank: its last report. All times are this process's `time.monotonic()`.

    Attributes:
        since: when the activity began.
        stages: of a pipeline, which its last step runs on this rank.
        steps: that it has taken.
        reached: how far it has got in a step of a pipeline.
        heard_at: when anything came from it.
        hung_after: how long it waited before it gave up, seconds.
        done_at: when its program came to its end.
        left: it has ended in good order.
        lost_at: the connection ended, and it had not left.
        least_ranks: that its program runs with; None before it knows.
    """

    connected_at: float
    heard_at: float
    since: float
    activity: str = "starting"
    bounded: bool = False
    failure: Failure | None = None
    hung_after: float | None = None
    done_at: float | None = None
    left: bool = False
    lost_at: float | None = None
    stages: tuple[int, ...] = ()
    steps: int = 0
    reached: TaskProgress | None = None
    least_ranks: int | None = None


class Supervisor:
    """Listens on `address` from the start until `close`.

    Args:
        address: of this machine, as the ranks reach it.
        size: how many ranks there are.
        news: set whenever a rank has something to tell that may end the job.
    """

    def __init__(self, address: str, size: int, news: threading.Event) -> None:
        self.token = secrets.token_hex(16)
        self._size, self._news = size, news
        self._lock = threading.Lock()
        self._signs: dict[int, Signs] = {}
        self._connections: dict[int, socket.socket] = {}
        self._come_from: dict[int, list[str]] = {}
        self._server = _Server(address, size, self)
        self.address = f"{address}:{self._server.server_address[1]}"
        self._thread = threading.Thread(
            target=self._server.serve_forever, args=(0.1,), name="tfpar-supervisor", daemon=True
        )
        self._thread.start()

    def signs(self) -> dict[int, Signs]:
        """Return the signs of life of each rank that has connected."""
        with self._lock:
            return dict(self._signs)

    def ask_for_stacks(self, rank: int) -> None:
        """Have the rank write where it is, its Python stacks, to its stderr."""
        with self._lock:
            connection = self._connections.get(rank)
        if connection is not None:
            with contextlib.suppress(OSError):
                connection.sendall(b'{"say": "stacks"}\n')

    def close(self) -> None:
        """Stop listening, and end all connections."""
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()
        with self._lock:
            connections = list(self._connections.values())
        for connection in connections:
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)

    # --- the threads of connections ------------------------------------------------------

    def admit(self, hello: Any, connection: socket.socket) -> tuple[int | None, str]:
        """The rank that may go on, or None and why not."""
        if not isinstance(hello, dict) or not hmac.compare_digest(
            str(hello.get("token")).encode(), self.token.encode()
        ):
            return None, "the token is not this job's"
        rank, now = hello.get("rank"), time.monotonic()
        if not isinstance(rank, int) or not 0 <= rank < self._size:
            return None, f"the job has no rank {rank}, but {self._size} ranks from 0"
        with self._lock:
            if rank in self._signs:
                return None, f"rank {rank} has been here: one process is a rank, its children not"
            self._signs[rank] = Signs(connected_at=now, heard_at=now, since=now)
            self._connections[rank] = connection
        return rank, ""

    def greeted(self, rank: int, come_from: list[str]) -> None:
        """Note the addresses from which a rank reaches others; once all are known, tell all."""
        with self._lock:
            self._come_from[rank] = come_from
            connections = list(self._connections.values())
            known = sorted({a for addresses in self._come_from.values() for a in addresses})
            if len(self._come_from) < self._size:
                return
        line = json.dumps({"say": "peers", "addresses": known}).encode() + b"\n"
        for connection in connections:
            with contextlib.suppress(OSError):
                connection.sendall(line)

    def hear(self, rank: int, message: dict[str, Any]) -> None:
        """Note one message."""
        now, say = time.monotonic(), message.get("say")
        with self._lock:
            signs = replace(self._signs[rank], heard_at=now)
            if say == "at":
                signs = replace(
                    signs,
                    activity=str(message["activity"]),
                    bounded=bool(message["bounded"]),
                    since=now - float(message["age"]),
                    stages=tuple(map(int, message["stages"])),
                    steps=int(message["steps"]),
                    reached=TaskProgress(*message["reached"]) if message["reached"] else None,
                )
            elif say == "least":
                signs = replace(signs, least_ranks=max(1, int(message["ranks"])))
            elif say == "failed":
                failure = Failure(str(message["kind"]), str(message["message"]), now)
                signs = replace(signs, failure=failure)
            elif say == "hung":
                signs = replace(signs, hung_after=float(message["seconds"]))
            elif say == "done":
                signs = replace(signs, done_at=now)
            elif say == "bye":
                signs = replace(signs, left=True)
            self._signs[rank] = signs
        if say in ("failed", "hung"):
            self._news.set()

    def drop(self, rank: int) -> None:
        """Note that the connection has ended."""
        with self._lock:
            self._connections.pop(rank, None)
            signs = self._signs[rank]
            if not signs.left:
                self._signs[rank] = replace(signs, lost_at=time.monotonic())
        self._news.set()


class _Server(BoundedServer, socketserver.TCPServer):
    allow_reuse_address = True

    def __init__(self, address: str, size: int, supervisor: Supervisor) -> None:
        self.supervisor = supervisor
        super().__init__((address, 0), _Connection, expected=size)


class _Connection(socketserver.StreamRequestHandler):
    server: _Server
    rfile: Any

    def handle(self) -> None:
        supervisor = self.server.supervisor
        self.connection.settimeout(_HELLO_S)
        hello = self._read(_LONGEST_HELLO)
        rank, refused = supervisor.admit(hello, self.connection)
        self.wfile.write(json.dumps({"refused": refused} if refused else {"ok": True}).encode())
        self.wfile.write(b"\n")
        if rank is None:
            return
        self.server.admit(self.connection)
        try:
            self.connection.settimeout(None)
            supervisor.greeted(rank, [str(address) for address in hello.get("from", [])])
            while (message := self._read(_LONGEST)) is not None:
                supervisor.hear(rank, message)
        except (OSError, ValueError, KeyError, TypeError):
            pass  # broken, or no message of ours: either way it is no longer heard
        finally:
            supervisor.drop(rank)

    def _read(self, longest: int) -> Any:
        """One message; None at the end, or of a longer one."""
        line = self.rfile.readline(longest)
        if not line.endswith(b"\n"):
            return None
        return json.loads(line)
