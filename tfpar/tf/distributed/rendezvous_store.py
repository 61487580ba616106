"""Key-value store for messages between ranks before Horovod connects them, served by rank 0."""

from __future__ import annotations

import contextlib
import http.client
import json
import time
from collections.abc import Iterator
from http import HTTPStatus
from typing import Any

from tfpar.jobs.launch import environment as names
from tfpar.jobs.launch.environment import Rendezvous
from tfpar.spec.errors import TfparError

_PAUSE_S = 0.1
_REQUEST_S = 5.0

_SCOPE = "tfpar"  # of the server's store; Horovod's own have other names
_NOT_THERE = (
    "has every rank been started, and does it reach that port? The ranks' own output may say more."
)
_REFUSED = (
    f"the ranks of another job do, or this rank has another {names.TOKEN} than rank 0. Give all "
    f"ranks the same, or name a free port with MASTER_PORT."
)


class RendezvousStore:
    """JSON values by name in rank 0's server.

    Args:
        limit_s: for all calls together, seconds from now on.
    """

    def __init__(self, rendezvous: Rendezvous, limit_s: float) -> None:
        self.rendezvous = rendezvous
        self._limit_s = limit_s
        self._end = time.monotonic() + limit_s

    def own_address(self) -> str:
        """Return this machine's address towards the server."""
        with self._connected() as connection:
            own: str = connection.sock.getsockname()[0]
        return own

    def put(self, name: str, value: Any) -> None:
        """Store a value; raises TfparError when no server comes in time, or takes it."""
        self._ask("PUT", name, json.dumps(value), "the value of this rank was not taken")

    def get(self, name: str, without: str) -> Any:
        """A value, which is waited for; the error says `without` when it does not come in time."""
        return json.loads(self._ask("GET", name, None, without))

    def _ask(self, method: str, name: str, body: str | None, without: str) -> bytes:
        while True:
            with self._connected() as connection:
                connection.request(method, self.rendezvous.path(_SCOPE, name), body)
                response = connection.getresponse()
                said = response.read()
            if response.status == HTTPStatus.OK:
                return said
            if time.monotonic() > self._end:
                refused = response.status == HTTPStatus.FORBIDDEN
                raise TfparError(
                    f"After {self._limit_s:.0f} s {without}. Horovod's ranks meet at "
                    f"{self._place}: {_REFUSED if refused else _NOT_THERE}"
                )
            time.sleep(_PAUSE_S)

    @property
    def _place(self) -> str:
        return f"{self.rendezvous.address}:{self.rendezvous.port}"

    @contextlib.contextmanager
    def _connected(self) -> Iterator[http.client.HTTPConnection]:
        """A connection for one request."""
        while True:
            address, port = self.rendezvous.address, self.rendezvous.port
            connection = http.client.HTTPConnection(address, port, timeout=_REQUEST_S)
            try:
                connection.connect()
                break
            except OSError as error:
                connection.close()
                if time.monotonic() > self._end:
                    raise TfparError(
                        f"For {self._limit_s:.0f} s nobody answers at {self._place}, "
                        f"where rank 0 should be ({error}). Is it running there? MASTER_ADDR and "
                        f"MASTER_PORT name another place."
                    ) from error
                time.sleep(_PAUSE_S)
        try:
            yield connection
        except (OSError, http.client.HTTPException) as error:
            raise TfparError(
                f"The rendezvous of Horovod's ranks at {self._place} broke: "
                f"{error!r}. Has rank 0 ended, or does another program have that port?"
            ) from error
        finally:
            connection.close()
