"""Machines of a small network, made of network namespaces, and what runs on them."""

from __future__ import annotations

import contextlib
import ctypes
import os
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.time_limits import time_limit

_CLONE_NEWNET = 0x40000000  # of linux/sched.h
_LISTENS = "0A"  # a state, as Linux' /proc has it


@dataclass(frozen=True)
class Machine:
    """One of them; it lives as long as the process that holds its namespace.

    Attributes:
        path: of its namespace.
        address, address6: in the network that all share.
    """

    path: str
    address: str
    address6: str

    def command(self, *words: str) -> list[str]:
        """A command that runs there."""
        return ["nsenter", f"--net={self.path}", *words]

    def run(self, *words: str) -> str:
        """What a command says that runs there."""
        done = subprocess.run(
            self.command(*words), capture_output=True, text=True, timeout=time_limit(60)
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    def listening(self) -> set[tuple[str, int]]:
        """The address and the port of each TCP socket that listens there now."""
        process = Path(self.path).parents[1]  # of the one that holds the namespace
        tables = [(process / "net" / name).read_text() for name in ("tcp", "tcp6")]
        rows = [line.split() for table in tables for line in table.splitlines()[1:]]
        ends = [row[1].split(":") for row in rows if row[3] == _LISTENS]
        return {(_dotted(address), int(port, 16)) for address, port in ends}


@contextlib.contextmanager
def network(num_machines: int) -> Iterator[list[Machine]]:
    """Machines that reach each other, and no other machine.

    Skips the test where namespaces cannot be made.
    """
    missing = [name for name in ("ip", "nsenter", "unshare") if shutil.which(name) is None]
    if missing:
        pytest.skip(f"no network namespaces: {', '.join(missing)} is not installed")
    with contextlib.ExitStack() as stack:
        holders = [stack.enter_context(_holder()) for _ in range(num_machines)]
        paths = [f"/proc/{holder.pid}/ns/net" for holder in holders]
        machines = [
            Machine(path, f"10.201.0.{i}", f"fd00:201::{i}") for i, path in enumerate(paths, 1)
        ]
        try:
            _connect(machines, holders)
        except (AssertionError, OSError) as error:
            pytest.skip(f"no network namespaces: {error}")
        yield machines


def enter(path: str) -> None:
    """Move this process, which must have one thread, to the machine with this namespace."""
    libc = ctypes.CDLL(None, use_errno=True)
    with open(path) as namespace:
        if libc.setns(namespace.fileno(), _CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), f"setns to {path}")


@contextlib.contextmanager
def _holder() -> Iterator[subprocess.Popen[bytes]]:
    """A process in a namespace of its own, until the context ends."""
    command = ["unshare", "--net", "sh", "-c", "echo; exec cat"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as holder:
        assert holder.stdout is not None
        try:
            if not holder.stdout.readline():
                pytest.skip("no network namespaces: unshare --net is not permitted")
            yield holder
        finally:
            holder.kill()


def _connect(machines: Sequence[Machine], holders: Sequence[subprocess.Popen[bytes]]) -> None:
    """Cables from a switch, in the first machine, to a card `job0` in each."""
    first = machines[0]
    first.run("ip", "link", "add", "name", "job0", "type", "bridge")
    for i, holder in enumerate(holders[1:], 1):
        cable = ["ip", "link", "add", "name", f"port{i}", "type", "veth", "peer", "name", "job0"]
        first.run(*cable, "netns", str(holder.pid))
        first.run("ip", "link", "set", f"port{i}", "master", "job0", "up")
    for machine in machines:
        machine.run("ip", "link", "set", "lo", "up")
        machine.run("ip", "link", "set", "job0", "up")
        machine.run("ip", "address", "add", f"{machine.address}/24", "dev", "job0")
        machine.run("ip", "address", "add", f"{machine.address6}/64", "dev", "job0", "nodad")


def _dotted(digits: str) -> str:
    """`0100007F` is 127.0.0.1; of IPv6 only `::` is read, and other digits stay."""
    if len(digits) == 8:
        return ".".join(str(byte) for byte in reversed(bytes.fromhex(digits)))
    return "::" if not digits.strip("0") else digits


def own_machine() -> None:
    """Enter the machine that `NAMESPACE` names: ranks are forked elsewhere."""
    if "NAMESPACE" in os.environ:
        enter(os.environ["NAMESPACE"])
