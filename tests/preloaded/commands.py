"""Commands of preloaded processes, and the servers that fork these while this process lives."""

from __future__ import annotations

import atexit
import functools
import os
import shlex
import socket
import subprocess
import sys
import uuid
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).parents[2]
_CLIENT = Path(__file__).with_name("client.py")
_END_S = 20.0
_ENVIRON = {
    "TF_CPP_MIN_LOG_LEVEL": "3",
    "OPENBLAS_NUM_THREADS": "1",  # it starts others as it is imported
}


def python(*arguments: object, imports: Sequence[str] = ()) -> tuple[str, ...]:
    """The command of a process that does what Python does with these arguments.

    Args:
        arguments: `-m module`, `-c code` or a script, and what these get.
        imports: modules that its server imports beforehand, and keeps.
    """
    return _command((_server(0),), arguments, imports)


def ranks(*arguments: object, imports: Sequence[str] = ()) -> tuple[str, ...]:
    """The same for the ranks of a job.

    Odd ranks have a server of their own: with it Python's hashes, and so the order of sets, differ
    among ranks as they do among interpreters.
    """
    return _command((_server(0), _server(1)), arguments, imports)


def executable(folder: Path) -> Path:
    """A program in `folder` that stands for Python's, for what starts processes by its name."""
    path = folder / "python"
    path.write_text(f'#!/bin/sh\nexec {shlex.join(ranks())} "$@"\n')
    path.chmod(0o755)
    return path


def _command(
    addresses: Sequence[str], arguments: Sequence[object], imports: Sequence[str]
) -> tuple[str, ...]:
    client = (sys.executable, "-I", "-S", str(_CLIENT), ",".join(addresses), ",".join(imports))
    return *client, *map(str, arguments)


@functools.cache
def _server(number: int) -> str:
    """The address of a server, started now and ended with this process."""
    address = f"tfpar-tests-{os.getpid()}-{number}-{uuid.uuid4().hex}"
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listening:
        listening.bind(f"\0{address}")
        listening.listen(64)  # clients wait here until all is imported
        process = subprocess.Popen(
            [sys.executable, "-m", "tests.preloaded.server", str(listening.fileno())],
            cwd=ROOT,
            env={**os.environ, **_ENVIRON, "PYTHONPATH": _path()},
            stdin=subprocess.PIPE,  # whose end ends the server
            pass_fds=[listening.fileno()],
            start_new_session=True,
        )
    atexit.register(_end, process)
    return address


def _path() -> str:
    """This project first, and whatever else a server is to find (`scripts.mutations`)."""
    return os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))


def _end(process: subprocess.Popen) -> None:
    assert process.stdin is not None
    process.stdin.close()
    try:
        process.wait(_END_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
