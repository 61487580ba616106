"""Horovod's rendezvous server behind a secret, at one address.

Horovod's own listens on every interface and serves whoever comes. The clients in Horovod's C++ part
sign nothing; they ask for what `environment.Rendezvous` makes of the address that they are told.
"""

from __future__ import annotations

import hmac
import re
import socketserver
from http import HTTPStatus

from horovod.runner.http.http_server import RendezvousHandler, RendezvousHTTPServer

from tfpar.jobs.launch.bounded_server import BoundedServer

_PATH = re.compile(r"/([^/]*)(/[\w.@-]{1,300}/\w{1,100})", re.ASCII)
_LONGEST_VALUE = 16 << 20  # bytes; a rank puts about a hundred for each other one


class SecretRendezvousServer(BoundedServer, RendezvousHTTPServer):  # type: ignore[misc]
    """Listens from the start; `serve_forever` answers those who know the secret.

    Args:
        address: of an interface of this machine; empty for all of them.
        port: 0 for any.
        secret: what `Rendezvous.secret` is.
        size: how many ranks come.

    Raises:
        OSError: the address or the port cannot be had.
    """

    def __init__(self, address: str, port: int, secret: str, size: int) -> None:
        self._secret = secret
        super().__init__((address, port), _Handler, 0, expected=size)

    @property
    def port(self) -> int:
        return int(self.server_address[1])

    def server_bind(self) -> None:
        # Not `HTTPServer`'s, which asks the name service for the address's name: seconds, at times.
        socketserver.TCPServer.server_bind(self)
        self.server_name, self.server_port = str(self.server_address[0]), self.port

    def knows(self, given: str) -> bool:
        """Whether the first part of a path shows the secret."""
        return hmac.compare_digest(given.encode(), f"{self._secret}:{self.port}".encode())


class _Handler(RendezvousHandler):  # type: ignore[misc]
    server: SecretRendezvousServer
    path: str

    def do_GET(self) -> None:
        if self._may_pass():
            super().do_GET()

    def do_PUT(self) -> None:
        if not self._may_pass():
            return
        length = self.headers.get("Content-Length", "")
        if not re.fullmatch(r"\d{1,18}", length, re.ASCII):
            self.send_status_code(HTTPStatus.LENGTH_REQUIRED)
        elif int(length) > _LONGEST_VALUE:
            self.send_status_code(HTTPStatus.REQUEST_ENTITY_TOO_LARGE)
        else:
            super().do_PUT()

    def do_DELETE(self) -> None:
        if self._may_pass():
            super().do_DELETE()

    def do_HEAD(self) -> None:
        """Refused: Python's handler, which Horovod's extends, answers for files of the folder."""
        self.send_status_code(HTTPStatus.METHOD_NOT_ALLOWED)

    def _may_pass(self) -> bool:
        """Check the secret, and leave the path that Horovod's handler expects."""
        found = _PATH.fullmatch(self.path)
        if found is None or not self.server.knows(found[1]):
            self.send_status_code(HTTPStatus.FORBIDDEN)
            return False
        self.path = found[2]
        return True
