"""Environment variables of ranks: their names, used by launcher and ranks, and their values."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass

from tfpar.jobs.launch.hosts import Slot
from tfpar.jobs.launch.options import RunOptions

RANK = "TFPAR_RANK"
SIZE = "TFPAR_SIZE"
LOCAL_RANK = "TFPAR_LOCAL_RANK"
LOCAL_SIZE = "TFPAR_LOCAL_SIZE"
BACKEND = "TFPAR_BACKEND"
TIMEOUT = "TFPAR_TIMEOUT"  # seconds without progress
GRACE = "TFPAR_GRACE"  # seconds from SIGTERM to SIGKILL
SUPERVISOR = "TFPAR_SUPERVISOR"  # host:port
TOKEN = "TFPAR_TOKEN"
ATTEMPT = "TFPAR_ATTEMPT"
ADDRESSES = "TFPAR_ADDRESSES"  # host:port of each rank, for TensorFlow's own collectives
HEARTBEAT = "TFPAR_HEARTBEAT"  # a file
INSECURE_GRPC = "TFPAR_INSECURE_GRPC"  # 1: any host may reach TensorFlow's servers
TIMELINE = "TFPAR_TIMELINE"  # the file, absolute
TIMELINE_STEPS = "TFPAR_TIMELINE_STEPS"  # 10-12

HUNG = 70  # exit code of a rank that made no progress
TEMPORARY_FAILURE = 75  # exit code (EX_TEMPFAIL) of a rank that may be left out

DEFAULT_TIMEOUT_S = 600.0
DEFAULT_GRACE_S = 30.0
FIRST_REMOTE_PORT = 29500
_LOOPBACK = "lo"  # the interface
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")  # of what a shell takes for a variable

_EXPORTED_PREFIXES = (
    "TFPAR_",
    "HOROVOD_",
    "TF_",
    "KERAS_",
    "NCCL_",
    "CUDA_",
    "OMP_",
    "PYTHON",
)
_EXPORTED = ("PATH", "LD_LIBRARY_PATH", "VIRTUAL_ENV")


@dataclass(frozen=True, slots=True)
class Rendezvous:
    """Address and secret of the server at which ranks over Gloo find each other.

    Attributes:
        secret: the first part of every path; letters and digits, and dashes.
    """

    address: str
    port: int
    secret: str

    @property
    def variables(self) -> dict[str, str]:
        """Environment variables that give Horovod the address.

        Horovod's clients in C++ ask for `http://ADDRESS:PORT/scope/key`, and know of no secret: it
        is put behind an address that has the port already.
        """
        return {
            "HOROVOD_GLOO_RENDEZVOUS_ADDR": f"{self.address}:{self.port}/{self.secret}",
            "HOROVOD_GLOO_RENDEZVOUS_PORT": str(self.port),
        }

    def path(self, scope: str, key: str) -> str:
        """The path that follows from it."""
        return f"/{self.secret}:{self.port}/{scope}/{key}"


@dataclass(frozen=True, slots=True)
class AttemptEnvironment:
    """Environment that all ranks of one attempt have in common.

    Attributes:
        backend: only if the user named one.
        addresses: `host:port` of each rank.
        interface: the network interface among ranks.
        rendezvous: Horovod's; None without Horovod over Gloo.
        insecure_grpc: any host may reach TensorFlow's servers.
    """

    backend: str | None
    timeout_s: float
    grace_s: float
    start_timeout_s: float
    supervisor: str
    token: str
    attempt: int
    addresses: tuple[str, ...]
    interface: str
    rendezvous: Rendezvous | None
    insecure_grpc: bool = False

    @classmethod
    def of(
        cls,
        options: RunOptions,
        supervisor: str,
        token: str,
        attempt: int,
        addresses: tuple[str, ...],
        interface: str,
        rendezvous: Rendezvous | None = None,
    ) -> AttemptEnvironment:
        """Return that of an attempt with the options of `tfpar run`."""
        return cls(
            options.backend,
            options.timeout_s,
            options.grace_s,
            options.start_timeout_s,
            supervisor,
            token,
            attempt,
            addresses,
            interface,
            rendezvous,
            options.insecure_grpc,
        )


def rank_environment(
    base: Mapping[str, str], slot: Slot, shared: AttemptEnvironment
) -> dict[str, str]:
    """The whole environment of one rank, started from `base`."""
    placed = {
        RANK: slot.rank,
        SIZE: slot.size,
        LOCAL_RANK: slot.local_rank,
        LOCAL_SIZE: slot.local_size,
    }
    environment = job_environment(base, shared) | {k: str(v) for k, v in placed.items()}
    if shared.rendezvous is not None:
        environment |= _gloo(slot, shared.rendezvous)
        environment.setdefault("HOROVOD_GLOO_IFACE", shared.interface)
    return environment


def job_environment(base: Mapping[str, str], shared: AttemptEnvironment) -> dict[str, str]:
    """Return the variables that all ranks share; the user's override defaults of libraries."""
    told = {
        TIMEOUT: f"{shared.timeout_s:g}",
        GRACE: f"{shared.grace_s:g}",
        SUPERVISOR: shared.supervisor,
        TOKEN: shared.token,
        ATTEMPT: str(shared.attempt),
        ADDRESSES: ",".join(shared.addresses),
        "PYTHONUNBUFFERED": "1",
    }
    if shared.backend is not None:
        told[BACKEND] = shared.backend
    if shared.insecure_grpc:
        told[INSECURE_GRPC] = "1"
    return {**_defaults(shared), **base, **told}


def exported_environment(
    environment: Mapping[str, str], names: Mapping[str, str]
) -> dict[str, str]:
    """The variables that go to another machine: known prefixes, and those that the user named."""
    return {
        name: value
        for name, value in environment.items()
        if name in names or (_is_for_ranks(name) and is_variable(name))
    }


def is_variable(name: str) -> bool:
    """Whether a shell can set a variable of this name: an environment may have others."""
    return _NAME.fullmatch(name) is not None


def _is_for_ranks(name: str) -> bool:
    return name.startswith(_EXPORTED_PREFIXES) or name in _EXPORTED


def _gloo(slot: Slot, rendezvous: Rendezvous) -> dict[str, str]:
    return {
        "HOROVOD_RANK": str(slot.rank),
        "HOROVOD_SIZE": str(slot.size),
        "HOROVOD_LOCAL_RANK": str(slot.local_rank),
        "HOROVOD_LOCAL_SIZE": str(slot.local_size),
        "HOROVOD_CROSS_RANK": str(slot.cross_rank),
        "HOROVOD_CROSS_SIZE": str(slot.cross_size),
        "HOROVOD_HOSTNAME": slot.hostname,
        "HOROVOD_CONTROLLER": "gloo",
        "HOROVOD_CPU_OPERATIONS": "gloo",
        **rendezvous.variables,
    }


def _defaults(shared: AttemptEnvironment) -> dict[str, str]:
    """Horovod warns of a stall well before, and gives up shortly after the ranks' own watchdogs.

    On one machine NCCL's ports are on the loopback, as all others.
    """
    timeout = math.ceil(shared.timeout_s)
    # Of what it has done before it speaks after up to four times as long.
    warn = max(1, min(60, timeout // 5))
    on_one_machine = shared.interface == _LOOPBACK
    return {
        **({"NCCL_SOCKET_IFNAME": f"={_LOOPBACK}"} if on_one_machine else {}),
        "HOROVOD_GLOO_TIMEOUT_SECONDS": str(max(timeout, math.ceil(shared.start_timeout_s))),
        "HOROVOD_STALL_CHECK_TIME_SECONDS": str(warn),
        "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS": str(timeout + max(10, timeout // 10)),
        "CUDA_DEVICE_MAX_CONNECTIONS": "1",
    }
