"""Somebody who is on the network: `python -I -S stranger.py SECONDS HOST:PORT ...`.

Prints for each place, as JSON, what came of connecting to it: `refused`, `silent`, or the answers
to what it was sent.
"""

import contextlib
import json
import socket
import sys

SAID = {
    "get": b"GET /global/0 HTTP/1.0\r\n\r\n",
    "put": b"PUT /global/0 HTTP/1.0\r\nContent-Length: 8\r\n\r\nstranger",
    "delete": b"DELETE /global/0 HTTP/1.0\r\n\r\n",
    "head": b"HEAD /pyproject.toml HTTP/1.0\r\n\r\n",
    "huge": b"PUT /global/0 HTTP/1.0\r\nContent-Length: 999999999999\r\n\r\n" + b"x" * (1 << 20),
    "hello": b'{"say": "hello", "token": "0123456789abcdef", "rank": 0}\n',
    "no token": b'{"say": "hello", "rank": 1}\n',
    "done": b'{"say": "done"}\n',
    "garbage": bytes(range(256)) * 64 + b"\n",
    "line without end": b"[" * (1 << 20),
    # HTTP/2, as gRPC speaks it: its greeting, and an empty frame of settings.
    "grpc": b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes([0, 0, 0, 4, 0, 0, 0, 0, 0]),
}
IDLE = 150  # connections that stay open and say nothing


def attack(place: str, seconds: float) -> "str | dict[str, str]":
    host, _, port = place.rpartition(":")
    address = host.strip("[]"), int(port)
    try:
        socket.create_connection(address, timeout=seconds).close()
    except ConnectionRefusedError:
        return "refused"
    except OSError:
        return "silent"
    idle = []
    for _ in range(IDLE):
        with contextlib.suppress(OSError):
            idle.append(socket.create_connection(address, timeout=seconds))
    KEPT.extend(idle)
    return {name: ask(address, words, seconds) for name, words in SAID.items()}


KEPT: "list[socket.socket]" = []


def ask(address: "tuple[str, int]", words: bytes, seconds: float) -> str:
    answer = b""
    with contextlib.suppress(OSError):
        with socket.create_connection(address, timeout=seconds) as connection:
            with contextlib.suppress(OSError):  # it need not read to the end
                connection.sendall(words)
            while data := connection.recv(1 << 16):
                answer += data
    return answer.decode("latin-1")


for place in sys.argv[2:]:
    print(json.dumps([place, attack(place, float(sys.argv[1]))]), flush=True)
sys.stdin.read()  # the idle connections stay until it ends
