"""Access control of a rank's TensorFlow server, which carries TensorFlow's own collectives.

TensorFlow's server asks nobody who he is: whoever reaches it runs graphs here, which read and write
files. So only the hosts of the job do (`PeerFilter`), or the user has agreed to more.
"""

from __future__ import annotations

import contextlib
import ctypes
import ipaddress
import logging
import os
import socket
import struct
import time
from collections.abc import Callable, Collection, Iterator, Mapping

from tfpar.jobs.launch import environment as names
from tfpar.jobs.launch.host_network import is_local, is_loopback, sources_towards
from tfpar.spec import TfparError
from tfpar.tf.distributed.job import Job

logger = logging.getLogger("tfpar")

_RISK = (
    "TensorFlow's server has no password: every host that reaches it could read and write files "
    "here with your rights"
)
_WAYS_OUT = (
    "Use --backend horovod (`tfpar install-horovod` builds it); or, in a network that nobody else "
    f"reaches, agree to the risk with --insecure-grpc ({names.INSECURE_GRPC}=1)."
)


def choose_filter(
    job: Job,
    told: Callable[[], Collection[str] | None],
    environ: Mapping[str, str] = os.environ,
) -> PeerFilter | None:
    """A filter that lets in the hosts of the job; None to let in everybody.

    Args:
        told: the addresses from which the ranks connect, as their launcher knows them; it may wait
            for all ranks. None without such a launcher.

    Raises:
        TfparError: the job's hosts cannot be told from others, and the user has not agreed to that.
    """
    if environ.get(names.INSECURE_GRPC, "0") not in ("", "0"):
        return None
    hosts = {address.rpartition(":")[0].strip("[]") for address in job.addresses}
    here = all(is_loopback(host) or is_local(host) for host in hosts)
    peers = sources_towards(hosts) if here else told()
    if peers is None:
        raise TfparError(
            f"{_RISK}, and {job.launcher} does not say from which addresses the ranks of the other "
            f"machines come, as `tfpar run` does. {_WAYS_OUT}"
        )
    try:
        return PeerFilter({ipaddress.ip_address(peer) for peer in peers})
    except OSError as error:
        why = f"{_RISK}; Linux, which could keep all but the job's out, refuses to: {error}"
        if not here:
            raise TfparError(f"{why}. {_WAYS_OUT}") from error
        if job.rank == 0:
            logger.warning("%s. See docs/security.md.", why)
        return None


# --- packet filter --------------------------------------------------------------------------
# TensorFlow's server has no password, listens on all interfaces, and runs any graph that it is
# handed, with the rights of the user. It cannot be bound to an address. But whoever owns a socket
# may attach a filter to it: a few instructions (classic BPF, see Linux' `socket(7)`) that the
# kernel runs on each packet. One that looks at the sender's address lets in the hosts of the job
# and nobody else; others find the port mute. Connections inherit the filter of the socket that
# accepts them.

Address = ipaddress.IPv4Address | ipaddress.IPv6Address

_SO_ATTACH_FILTER = 26  # of Linux' asm-generic/socket.h
_NETWORK_HEADER = -0x100000  # SKF_NET_OFF of linux/filter.h: from here offsets count
_IPV4_SENDER, _IPV6_SENDER = _NETWORK_HEADER + 12, _NETWORK_HEADER + 8

# Operations of linux/bpf_common.h, put together.
_LOAD_BYTE, _LOAD_WORD = 0x30, 0x20
_SHIFT_RIGHT, _AND = 0x74, 0x54
_JUMP_IF_EQUAL, _JUMP = 0x15, 0x05
_RETURN = 0x06
_ALL, _NOTHING = 0xFFFFFFFF, 0  # bytes of a packet that pass

# Until who was connected before there was a filter has a socket in this process.
_ACCEPTED_S = 0.05


class PeerFilter:
    """Passes packets of `peers` and of this machine's loopback, and no others.

    Raises:
        OSError: the kernel does not take it: it has no filters, or none for so many peers.
    """

    def __init__(self, peers: Collection[Address]) -> None:
        self._program = _program_for(peers)
        with socket.socket() as unused:
            self._attach(unused)

    def attach(self, port: int) -> None:
        """Filter all that comes to a TCP port of this process, over open connections too.

        Raises:
            OSError: nothing in this process listens there.
        """
        listening = 0
        for wait_s in (_ACCEPTED_S, 0.0):
            for opened in _sockets_at(port):
                self._attach(opened)
                listening += opened.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
            time.sleep(wait_s)
        if not listening:
            raise OSError(f"nothing in this process listens at port {port}")

    def _attach(self, opened: socket.socket) -> None:
        buffer = ctypes.create_string_buffer(self._program, len(self._program))
        value = struct.pack("@HP", len(self._program) // _SIZE, ctypes.addressof(buffer))
        opened.setsockopt(socket.SOL_SOCKET, _SO_ATTACH_FILTER, value)


def _program_for(peers: Collection[Address]) -> bytes:
    four = [int(peer) for peer in peers if peer.version == 4]
    six = [int(peer) for peer in peers if peer.version == 6]
    of_six = _pass_ipv6([*six, int(ipaddress.IPv6Address("::1"))])
    of_four = _pass_ipv4(four)
    return b"".join(
        [
            _instruction(_LOAD_BYTE, _NETWORK_HEADER),
            _instruction(_SHIFT_RIGHT, 4),  # the version
            _instruction(_JUMP_IF_EQUAL, 4, 0, 1),
            _instruction(_JUMP, len(of_six) // _SIZE + 2),
            _instruction(_JUMP_IF_EQUAL, 6, 1, 0),
            _instruction(_RETURN, _NOTHING),
            of_six,
            of_four,
        ]
    )


def _pass_ipv4(senders: Collection[int]) -> bytes:
    loaded = [_instruction(_LOAD_WORD, _IPV4_SENDER)]
    for sender in senders:
        loaded += [_instruction(_JUMP_IF_EQUAL, sender, 0, 1), _instruction(_RETURN, _ALL)]
    return b"".join(
        [
            *loaded,
            _instruction(_AND, 0xFF000000),
            _instruction(_JUMP_IF_EQUAL, 127 << 24, 0, 1),
            _instruction(_RETURN, _ALL),
            _instruction(_RETURN, _NOTHING),
        ]
    )


def _pass_ipv6(senders: Collection[int]) -> bytes:
    made = []
    for sender in senders:
        for i, word in enumerate(struct.unpack("!4I", sender.to_bytes(16, "big"))):
            after = 2 * (3 - i) + 1  # the rest of this sender, and its return
            made += [
                _instruction(_LOAD_WORD, _IPV6_SENDER + 4 * i),
                _instruction(_JUMP_IF_EQUAL, word, 0, after),
            ]
        made.append(_instruction(_RETURN, _ALL))
    return b"".join([*made, _instruction(_RETURN, _NOTHING)])


_FORMAT = "=HBBI"  # struct sock_filter
_SIZE = struct.calcsize(_FORMAT)


def _instruction(operation: int, value: int, if_true: int = 0, if_false: int = 0) -> bytes:
    return struct.pack(_FORMAT, operation, if_true, if_false, value & 0xFFFFFFFF)


def _sockets_at(port: int) -> Iterator[socket.socket]:
    """The sockets of this process that are bound to a TCP port."""
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError), contextlib.ExitStack() as stack:
            if os.readlink(f"/proc/self/fd/{name}").startswith("socket:"):
                opened = stack.enter_context(socket.socket(fileno=os.dup(int(name))))
                tcp = opened.type == socket.SOCK_STREAM
                internet = opened.family in (socket.AF_INET, socket.AF_INET6)
                if tcp and internet and opened.getsockname()[1] == port:
                    yield opened
