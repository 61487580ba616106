"""Horovod's rendezvous server, where ranks over Gloo find each other."""

from __future__ import annotations

import contextlib
import importlib.util
from collections.abc import Iterator, Sequence

from tfpar.launch.hosts import Slot
from tfpar.spec.errors import TfparError


def horovod_installed() -> bool:
    return importlib.util.find_spec("horovod") is not None


@contextlib.contextmanager
def rendezvous(slots: Sequence[Slot]) -> Iterator[int]:
    """The port of a server for these ranks, while the context lasts.

    Raises:
        TfparError: Horovod is not installed, or its launcher cannot be imported.
    """
    try:
        from horovod.runner.http.http_server import RendezvousServer
    except ImportError as error:
        raise TfparError(
            f"--backend horovod needs Horovod in the Python that runs `tfpar run` ({error}). "
            f"Install it, or give --backend tensorflow."
        ) from error
    server = RendezvousServer()
    port = server.start()
    try:
        server.init(list(slots))
        yield port
    finally:
        server.stop()
        server._httpd.server_close()  # `stop` leaves the port open
