"""Horovod's rendezvous, where ranks over Gloo find each other, as the launcher serves it."""

from __future__ import annotations

import contextlib
import importlib.util
import secrets
import threading
from collections.abc import Iterator, Sequence

from tfpar.jobs.launch.environment import Rendezvous
from tfpar.jobs.launch.hosts import Slot
from tfpar.spec.errors import TfparError


def is_horovod_installed() -> bool:
    return importlib.util.find_spec("horovod") is not None


@contextlib.contextmanager
def rendezvous(slots: Sequence[Slot], address: str) -> Iterator[Rendezvous]:
    """A server for these ranks at `address` of this machine, while the context lasts.

    Raises:
        TfparError: Horovod is not installed, or its launcher cannot be imported.
    """
    try:
        from tfpar.jobs.launch.rendezvous_server import SecretRendezvousServer
    except ImportError as error:
        raise TfparError(
            f"--backend horovod needs Horovod in the Python that runs `tfpar run` ({error}). "
            f"Install it, or give --backend tensorflow."
        ) from error
    secret = secrets.token_hex(16)
    server = SecretRendezvousServer(address, 0, secret, len(slots))
    server.init(list(slots))
    thread = threading.Thread(
        target=server.serve_forever, args=(0.1,), name="tfpar-rendezvous", daemon=True
    )
    thread.start()
    try:
        yield Rendezvous(address, server.port, secret)
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
