"""Server that bounds the connections of strangers.

Of those who have not shown who they are, only the newest stay connected, however many come and
whatever they do not say.
"""

from __future__ import annotations

import contextlib
import socket
import socketserver
import threading
from typing import Any

_SPARE = 64  # a rank shows who it is in milliseconds: it is not the oldest of so many


class BoundedServer(socketserver.ThreadingMixIn):
    """Mixed into a `socketserver` of connections: a thread for each, and an end to their number.

    Args:
        expected: how many may come at once that are meant to; others may be open beside them, not
            admitted, up to a fixed number.
    """

    daemon_threads = True
    block_on_close = False
    request_queue_size = 128

    def __init__(self, *arguments: Any, expected: int) -> None:
        self._most_waiting = expected + _SPARE
        self._waiting: dict[socket.socket, None] = {}  # the oldest first
        self._waiting_lock = threading.Lock()
        super().__init__(*arguments)

    def admit(self, connection: socket.socket) -> None:
        """The other side has shown who it is, and stays."""
        with self._waiting_lock:
            self._waiting.pop(connection, None)

    def process_request(self, request: Any, client_address: Any) -> None:
        with self._waiting_lock:
            self._waiting[request] = None
            if len(self._waiting) > self._most_waiting:
                oldest = next(iter(self._waiting))
                del self._waiting[oldest]
                _shut(oldest)  # its thread then ends
        super().process_request(request, client_address)

    def shutdown_request(self, request: Any) -> None:
        self.admit(request)
        super().shutdown_request(request)  # type: ignore[misc]

    def server_close(self) -> None:
        super().server_close()
        with self._waiting_lock:
            for connection in self._waiting:
                _shut(connection)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Connections break, and strangers say anything: nothing is printed."""


def _shut(connection: socket.socket) -> None:
    with contextlib.suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)
