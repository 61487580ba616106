"""Addresses of this machine, and the network interface over which ranks communicate.

On this machine alone that is the loopback: it is much faster than a network card, and needs none.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import ipaddress
import socket
import struct
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from tfpar.jobs.launch.environment import FIRST_REMOTE_PORT
from tfpar.jobs.launch.hosts import Slot
from tfpar.spec.errors import TfparError

LOOPBACK = "127.0.0.1"

_GET_INTERFACE_ADDRESS = 0x8915  # SIOCGIFADDR of linux/sockios.h
_DISCARD_PORT = 9
_FAR_AWAY = "198.51.100.1"  # a documentation address: only the route to it is asked for


@dataclass(frozen=True, slots=True)
class HostNetwork:
    """`address`: this machine as the ranks see it; `interface`: what ranks talk over."""

    interface: str
    address: str


def find_network(hosts: Iterable[str], interface: str | None) -> HostNetwork:
    """Find the interface and address by which ranks on `hosts` reach this machine and each other.

    `interface` overrides what is found. A host's own interfaces cannot be seen from here: hosts
    are taken to name them alike.

    Raises:
        TfparError: no interface has that name, none leads to the hosts, or several do.
    """
    names = list(dict.fromkeys(hosts))
    remote = [name for name in names if not is_local(name)]
    if interface is not None:
        return HostNetwork(interface, _address_of(interface))
    if not remote:
        return HostNetwork(_interface_of(LOOPBACK), LOOPBACK)
    address = _towards(remote)
    # All ranks on one other machine: among themselves they use its loopback.
    return HostNetwork(_interface_of(LOOPBACK if len(names) == 1 else address), address)


@functools.cache
def is_local(host: str) -> bool:
    """Whether `host` is this machine: by name, or because an address of it is ours."""
    if host in ("localhost", socket.gethostname(), socket.getfqdn()):
        return True
    address = resolve(host)
    if address is None:
        return False
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.bind((address, 0))  # only an own address can be bound
        except OSError:
            return False
    return True


def is_loopback(address: str) -> bool:
    """Whether an address, of either version, leads nowhere but to this machine."""
    try:
        return ipaddress.ip_address(address).is_loopback
    except ValueError:  # a name
        return address == "localhost"


def resolve(host: str) -> str | None:
    """An IPv4 address of `host`; None where only ssh may know it."""
    try:
        return socket.gethostbyname(host.rpartition("@")[2])
    except (OSError, UnicodeError):
        return None


def sources_towards(hosts: Iterable[str]) -> set[str]:
    """The addresses, of either version, from which this machine reaches `hosts`.

    Of a host that is not known here there is none.
    """
    return {source for host in set(hosts) for source in _sources(host)}


def _sources(host: str) -> Iterator[str]:
    try:
        known = socket.getaddrinfo(host, _DISCARD_PORT, type=socket.SOCK_DGRAM)
    except (OSError, UnicodeError):
        return
    for family, _, _, _, address in known:
        with contextlib.suppress(OSError), socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect(address)  # sends nothing
            yield probe.getsockname()[0].partition("%")[0]


def free_ports(count: int) -> list[int]:
    """Ports that are free on this machine at this moment."""
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for one in sockets:
            one.bind(("", 0))  # of all addresses: TensorFlow's server wants the port on all
        return [one.getsockname()[1] for one in sockets]


def rank_addresses(slots: Sequence[Slot], network: HostNetwork, attempt: int) -> tuple[str, ...]:
    """`host:port` for a server of each rank: a free port here, one that is likely free there.

    Ports differ from one attempt to the next, for the old ones may still be bound.
    """
    free = iter(free_ports(len(slots)))
    first = FIRST_REMOTE_PORT + attempt * max(slot.local_size for slot in slots)
    return tuple(
        f"{network.address}:{next(free)}"
        if is_local(slot.hostname)
        else f"{slot.hostname.rpartition('@')[2]}:{first + slot.local_rank}"
        for slot in slots
    )


def _towards(remote: list[str]) -> str:
    """The address from which the hosts are reached."""
    sources = {host: _source(address) for host in remote if (address := resolve(host))}
    found = {source for source in sources.values() if source is not None}
    if len(found) > 1:
        ways = ", ".join(f"{host} from {source}" for host, source in sources.items())
        raise TfparError(
            f"The hosts are reached over several networks ({ways}). Name the interface that all "
            f"of them share with --network-interface."
        )
    address = found.pop() if found else _source(_FAR_AWAY)
    if address is None:
        raise TfparError(
            f"No network leads from here to {', '.join(remote)}. Check the host names, or name "
            f"the interface with --network-interface ({_known()})."
        )
    return address


def _source(address: str) -> str | None:
    """The address that packets to `address` would leave from; none is sent."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((address, _DISCARD_PORT))
        except OSError:
            return None
        own: str = probe.getsockname()[0]
        return own


def _interface_of(address: str) -> str:
    for name, own in _interfaces().items():
        if own == address:
            return name
    raise TfparError(
        f"No network interface has the address {address}. Name one with --network-interface "
        f"({_known()})."
    )


def _address_of(interface: str) -> str:
    address = _interfaces().get(interface)
    if address is None:
        raise TfparError(
            f"--network-interface {interface!r} is not here, or has no IPv4 address. There are: "
            f"{_known()}."
        )
    return address


def _known() -> str:
    return ", ".join(f"{name} {address}" for name, address in _interfaces().items()) or "none"


def _interfaces() -> dict[str, str]:
    """The IPv4 address of each interface that has one."""
    found = {}
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asked:
        for _, name in socket.if_nameindex():
            request = struct.pack("256s", name.encode()[:15])
            with contextlib.suppress(OSError):  # it has no address
                answer = fcntl.ioctl(asked.fileno(), _GET_INTERFACE_ADDRESS, request)
                found[name] = socket.inet_ntoa(answer[20:24])
    return found
