"""Nodes: network namespaces, joined by a bridge in one more, the head's.

No device and no address is ever outside of namespaces whose names start with `PREFIX`, and these
take all of it along when they go.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

PREFIX = "tfpar-shaped-"
HEAD = f"{PREFIX}head"
INTERFACE = "tfpar0"
"""Of every node; of the head it is the bridge."""

_SUBNET = "10.231.0"  # private, and known inside of the namespaces only
_HEAD_ADDRESS = f"{_SUBNET}.254"
_BURST_BYTES = 256 * 1024  # a few of the largest packets, which are of 64 KB
# Larger than what all sockets of a node may have under way: a queue that drops would make TCP wait
# for its timers, which is another benchmark.
_QUEUE_BYTES = 64 * 1024 * 1024
_COMMAND_S = 20.0
_END_S = 10.0


class ClusterError(RuntimeError):
    """The cluster cannot be made, or what ran on it has failed."""


@dataclass(frozen=True, slots=True)
class Node:
    """A namespace, and the address of its `INTERFACE`; the head calls the other end `port`."""

    namespace: str
    address: str
    port: str

    @classmethod
    def of(cls, number: int) -> Node:
        """Node 1, 2, ..."""
        return cls(f"{PREFIX}{number}", f"{_SUBNET}.{number}", f"port{number}")


def obstacle() -> str | None:
    """What is missing here; None if a cluster may be tried."""
    if os.geteuid() != 0:
        return "Network namespaces need root. Run it again with sudo."
    missing = [tool for tool in ("ip", "tc") if shutil.which(tool) is None]
    if missing:
        return f"{' and '.join(missing)} cannot be found. Install iproute2."
    return None


@contextlib.contextmanager
def cluster(num_nodes: int) -> Iterator[list[Node]]:
    """Nodes that reach each other and the head, while the context lasts.

    What an earlier run left behind is removed before; nothing, no process either, is left after.

    Raises:
        ClusterError: `ip` refuses, or another cluster is up.
    """
    with _alone():
        remove()
        try:
            yield _make(num_nodes)
        finally:
            with undisturbed():
                remove()


def remove() -> None:
    """End the processes in our namespaces, and delete these."""
    ours = namespaces()
    end = time.monotonic() + _END_S
    while pids := [pid for name in ours for pid in _pids(name)]:
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        if time.monotonic() > end:
            raise ClusterError(f"Processes {pids} in {', '.join(ours)} cannot be ended.")
        time.sleep(0.1)
    for name in ours:
        _command("ip", "netns", "del", name)


def namespaces() -> list[str]:
    """Ours, of this run or of one before it."""
    lines = _command("ip", "netns", "list").splitlines()
    names = [line.split()[0] for line in lines if line.strip()]
    return [name for name in names if name.startswith(PREFIX)]


def inside(namespace: str, command: Sequence[str]) -> list[str]:
    """The command line that runs `command` in a namespace."""
    return ["ip", "netns", "exec", namespace, *command]


def sent_bytes() -> int:
    """What the interface of the node that this process is in has sent so far."""
    with open(f"/sys/class/net/{INTERFACE}/statistics/tx_bytes") as file:
        return int(file.read())


def limit(mbit: float | None) -> None:
    """Let the node that this process is in send at most `mbit` Mbit/s; None lifts the limit.

    Where all nodes are limited alike, it holds for what a node is sent too, as long as the ranks
    send around a ring.
    """
    _limit((), INTERFACE, mbit)


def limit_link(node: Node, mbit: float | None) -> None:
    """Let a node send, and be sent, at most `mbit` Mbit/s; from outside of it."""
    _limit(("-n", node.namespace), INTERFACE, mbit)
    _limit(("-n", HEAD), node.port, mbit)


def _limit(where: Sequence[str], device: str, mbit: float | None) -> None:
    """Limit what a device sends; `where` says to `tc` in which namespace it is."""
    if mbit is None:
        if "tbf" in _command("tc", *where, "qdisc", "show", "dev", device):
            _command("tc", *where, "qdisc", "del", "dev", device, "root")
        return
    burst, queue = str(_BURST_BYTES), str(_QUEUE_BYTES)
    rate = ("tbf", "rate", f"{mbit:g}mbit", "burst", burst, "limit", queue)
    _command("tc", *where, "qdisc", "replace", "dev", device, "root", *rate)


def _make(num_nodes: int) -> list[Node]:
    nodes = [Node.of(number) for number in range(1, num_nodes + 1)]
    _add_namespace(HEAD)
    _command("ip", "-n", HEAD, "link", "add", INTERFACE, "type", "bridge")
    _start(HEAD, INTERFACE, _HEAD_ADDRESS)
    for node in nodes:
        _add_namespace(node.namespace)
        _command(
            "ip",
            "-n",
            HEAD,
            "link",
            "add",
            node.port,
            "type",
            "veth",
            "peer",
            "name",
            INTERFACE,
            "netns",
            node.namespace,
        )
        _command("ip", "-n", HEAD, "link", "set", node.port, "master", INTERFACE)
        _start(HEAD, node.port)
        _start(node.namespace, INTERFACE, node.address)
    return nodes


def _add_namespace(name: str) -> None:
    _command("ip", "netns", "add", name)
    # Reno may be used in any namespace. BBR, the default of some machines, goes by what a link was
    # seconds ago, before it was limited.
    setting = "/proc/sys/net/ipv4/tcp_congestion_control"
    _command(*inside(name, ["sh", "-c", f"echo reno > {setting}"]))
    _command("ip", "-n", name, "link", "set", "lo", "up")


def _start(namespace: str, interface: str, address: str | None = None) -> None:
    """Bring an interface up, without IPv6: it would send by itself, and counts."""
    _command("ip", "-n", namespace, "link", "set", interface, "addrgenmode", "none")
    if address is not None:
        _command("ip", "-n", namespace, "addr", "add", f"{address}/24", "dev", interface)
    _command("ip", "-n", namespace, "link", "set", interface, "up")


def _pids(namespace: str) -> list[int]:
    return [int(pid) for pid in _command("ip", "netns", "pids", namespace).split()]


def _command(*words: str) -> str:
    try:
        done = subprocess.run(words, capture_output=True, text=True, timeout=_COMMAND_S)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise ClusterError(f"{' '.join(words)}: {error}") from error
    if done.returncode != 0:
        raise ClusterError(f"{' '.join(words)}: {done.stderr.strip()}")
    return done.stdout


@contextlib.contextmanager
def _alone() -> Iterator[None]:
    """A socket's abstract name is the lock: it goes with the process, however that ends."""
    with socket.socket(socket.AF_UNIX) as lock:
        try:
            lock.bind(f"\0{PREFIX}cluster")
        except OSError as error:
            raise ClusterError("Another shaped cluster is up. Wait for its end.") from error
        yield


@contextlib.contextmanager
def undisturbed() -> Iterator[None]:
    """Signals wait until the context ends."""
    waiting = {signal.SIGINT, signal.SIGTERM, signal.SIGHUP}
    before = signal.pthread_sigmask(signal.SIG_BLOCK, waiting)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
