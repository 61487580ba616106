"""What strangers cannot do to the servers of a launcher."""

from __future__ import annotations

import http.client
import json
import socket
import threading

import pytest

from tests.time_limits import time_limit, wait_until
from tfpar.jobs.launch.environment import Rendezvous
from tfpar.jobs.launch.hosts import Host, allocate
from tfpar.jobs.launch.supervisor import Supervisor


@pytest.fixture
def supervisor():
    made = Supervisor("127.0.0.1", 2, threading.Event())
    yield made
    made.close()


def connected(address: str) -> socket.socket:
    host, _, port = address.rpartition(":")
    return socket.create_connection((host, int(port)), timeout=time_limit(5))


def hello(connection: socket.socket, token: str, rank: int = 0) -> dict:
    connection.sendall(json.dumps({"say": "hello", "token": token, "rank": rank}).encode() + b"\n")
    return json.loads(connection.makefile("rb").readline() or "{}")


def test_many_idle_connections_keep_no_rank_out_and_do_not_pile_up(supervisor):
    idle = [connected(supervisor.address) for _ in range(100)]
    for one in idle[::2]:
        one.sendall(b"{")  # and never the rest
    with connected(supervisor.address) as rank:
        assert hello(rank, supervisor.token) == {"ok": True}
        more = [connected(supervisor.address) for _ in range(100)]
        rank.sendall(b'{"say": "done"}\n')
        assert wait_until(lambda: supervisor.signs()[0].done_at is not None, 5)
        served = [t for t in threading.enumerate() if "process_request_thread" in t.name]
        assert len(served) < 80
    for one in idle + more:
        one.close()


@pytest.mark.parametrize(
    "said",
    [
        b"\x00\xff" * 300 + b"\n",
        b"[" * 4000 + b"\n",
        b'{"say": "hello", "token": "' + b"a" * 100_000,
        b'{"say": "hello", "token": "\\ud800", "rank": 0}\n',
        b"GET / HTTP/1.1\r\n\r\n",
        b"null\n",
    ],
    ids=["no text", "nested", "too long", "no token", "http", "null"],
)
def test_garbage_ends_its_own_connection_alone(supervisor, said):
    with connected(supervisor.address) as stranger:
        try:
            stranger.sendall(said)
            answer = stranger.makefile("rb").readline()
        except ConnectionError:
            answer = b""
    assert b'"ok"' not in answer
    with connected(supervisor.address) as rank:
        assert hello(rank, supervisor.token) == {"ok": True}


class TestRendezvous:
    @pytest.fixture
    def server(self):
        pytest.importorskip("horovod")
        from tfpar.jobs.launch.job import rendezvous

        with rendezvous(allocate([Host("localhost", 2)], 2), "127.0.0.1") as made:
            yield made

    @staticmethod
    def ask(server: Rendezvous, method: str, path: str, body: bytes | None = None, **headers):
        connection = http.client.HTTPConnection(server.address, server.port, timeout=time_limit(5))
        connection.request(method, path, body, headers)
        response = connection.getresponse()
        said = response.status, response.read()
        connection.close()
        return said

    def test_who_does_not_know_the_secret_neither_reads_nor_writes(self, server):
        own = server.path("global", "0")
        assert self.ask(server, "PUT", own, b"here") == (200, b"")
        for guess in ("", f"/:{server.port}", f"/{'0' * 32}:{server.port}", f"/{server.secret}:1"):
            for method in ("GET", "PUT", "DELETE"):
                assert self.ask(server, method, f"{guess}/global/0", b"stranger") == (403, b"")
        assert self.ask(server, "GET", own) == (200, b"here")

    def test_paths_that_no_rank_asks_for_are_refused(self, server):
        own = server.path("global", "0").removesuffix("/global/0")
        for path in ("", "/a", "/../../etc/passwd", "/a/b/c/d", "/a/" + "b" * 9999):
            assert self.ask(server, "GET", own + path)[0] == 403

    def test_it_serves_no_files(self, server):
        assert self.ask(server, "HEAD", "/pyproject.toml")[0] == 405

    @pytest.mark.parametrize("length, status", [("-1", 411), ("x", 411), ("9" * 18, 413)])
    def test_values_are_bounded(self, server, length, status):
        own = server.path("global", "0")
        assert self.ask(server, "PUT", own, b"a", **{"Content-Length": length})[0] == status

    def test_it_listens_on_one_address(self, server):
        with socket.socket() as probe:
            probe.bind(("127.0.0.2", server.port))  # free, as nothing listens on all of them

    def test_slow_strangers_delay_neither_ranks_nor_the_end(self, server):
        idle = [connected(f"{server.address}:{server.port}") for _ in range(100)]
        for one in idle:
            one.sendall(b"GET /")
        own = server.path("global", "1")
        assert self.ask(server, "PUT", own, b"here") == (200, b"")
        for one in idle:
            one.close()
