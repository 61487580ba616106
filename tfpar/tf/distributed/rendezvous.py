"""Horovod over Gloo for ranks whose launcher does not know Horovod: `srun`, `mpirun`, Kubernetes.

Rank 0 runs Horovod's rendezvous server. All ranks derive its address and port from their
environment, tell it the machine they are on, and learn from it which ranks share one.
"""

from __future__ import annotations

import hashlib
import logging
import os
import socket
import threading
import zlib
from collections.abc import Mapping, Sequence

import horovod.tensorflow as hvd

from tfpar.jobs.launch import environment as names
from tfpar.jobs.launch.environment import Rendezvous
from tfpar.jobs.launch.host_network import LOOPBACK, find_network, is_local, is_loopback, resolve
from tfpar.jobs.launch.hosts import place_ranks
from tfpar.jobs.launch.rendezvous_server import SecretRendezvousServer
from tfpar.jobs.launch.slurm import expand_nodelist
from tfpar.spec.errors import TfparError
from tfpar.tf.distributed.job import Job
from tfpar.tf.distributed.rendezvous_store import RendezvousStore

logger = logging.getLogger("tfpar")

_KNOWN = "HOROVOD_GLOO_RENDEZVOUS_ADDR"
_MPI_LAUNCHERS = ("Open MPI", "MPICH")

# Variables that are the same on all ranks of a job and differ between jobs.
_JOB_IDS = (
    ("SLURM_JOB_ID", "SLURM_STEP_ID"),
    ("PMIX_NAMESPACE",),
    ("OMPI_MCA_ess_base_jobid",),
)
# Below the ports that systems hand out by themselves, and those of `tfpar run`.
_FIRST_PORT, _NUM_PORTS = 20_000, 9_000

_WAIT_S = 120.0  # for the last rank, as `tfpar run --start-timeout`


def join(job: Job) -> None:
    """Tell Horovod of a job whose launcher does not know Horovod.

    Does nothing where the launcher does, or where MPI connects the ranks. Else the environment
    of this process gets what `tfpar run` would have put there; it has to be before `hvd.init()`.

    Raises:
        TfparError: nothing says where rank 0 is, its port is taken, or ranks do not come.
    """
    if _KNOWN in os.environ or _over_mpi(job, os.environ):
        return
    address, port = meeting_point(job, os.environ)
    timeout_s = float(os.environ.get(names.TIMEOUT, names.DEFAULT_TIMEOUT_S))
    # This error says more than the watchdog, which ends a rank after the whole timeout.
    limit_s = min(_WAIT_S, timeout_s / 2)
    secret = _secret(os.environ)
    if job.rank == 0:
        bound = _own_address(address)
        server = _serve(bound, port, secret, job.size)
        _warn_if_open(bound, port, os.environ)
        store = RendezvousStore(Rendezvous(bound or LOOPBACK, port, secret), limit_s)
        machines = _welcome(job, store, address, server)
    else:
        store = RendezvousStore(Rendezvous(address, port, secret), limit_s)
        machines = _report(job, store)
    shared = names.AttemptEnvironment(
        backend=None,
        timeout_s=timeout_s,
        grace_s=names.DEFAULT_GRACE_S,
        start_timeout_s=limit_s,
        supervisor="",
        token="",
        attempt=job.attempt,
        addresses=(),
        interface=_interface(job.rank, machines),
        rendezvous=store.rendezvous,
    )
    slot = place_ranks([machine["host"] for machine in machines])[job.rank]
    told = names.rank_environment(os.environ, slot, shared)
    os.environ.update({n: told[n] for n in told if n.startswith(("HOROVOD_", "CUDA_", "NCCL_"))})


def meeting_point(job: Job, environ: Mapping[str, str]) -> tuple[str, int]:
    """Address and port of rank 0's server, the same on every rank.

    MASTER_ADDR and MASTER_PORT go first, then what the launcher tells: the address of each rank,
    or a job id and the list of its machines.

    Raises:
        TfparError: they cannot be told from `environ`; the message says what to set.
    """
    host, port = "", ""
    if job.addresses:
        host, _, port = job.addresses[0].rpartition(":")
    host = environ.get("MASTER_ADDR") or host or _first_host(job, environ)
    port = environ.get("MASTER_PORT") or port or _derived_port(environ)
    missing = [n for n, value in (("MASTER_ADDR", host), ("MASTER_PORT", port)) if not value]
    if missing:
        raise TfparError(
            f"Horovod's {job.size} ranks, started by {job.launcher}, cannot find each other. Set "
            f"{' and '.join(missing)} on all of them (MASTER_ADDR: the machine of rank 0; "
            f"MASTER_PORT: a free port there), or start them with `tfpar run`."
        )
    if not (port.isascii() and port.isdigit() and 0 < int(port) < 1 << 16):
        raise TfparError(f"The port for Horovod's ranks is {port!r}. Set MASTER_PORT to a port.")
    return host, int(port)


def _over_mpi(job: Job, environ: Mapping[str, str]) -> bool:
    """Whether Horovod's ranks find each other through MPI."""
    asked = environ.get("HOROVOD_CONTROLLER", "").lower()
    return asked == "mpi" or (not asked and job.launcher in _MPI_LAUNCHERS and hvd.mpi_built())


def _first_host(job: Job, environ: Mapping[str, str]) -> str:
    """The machine of rank 0; empty if it is not known."""
    if job.local_size == job.size:
        return LOOPBACK
    for variable in ("SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST"):
        if environ.get(variable):
            machines = expand_nodelist(environ[variable], variable)
            return LOOPBACK if len(machines) == 1 else machines[0]
    return ""


def _derived_port(environ: Mapping[str, str]) -> str:
    """A port for the job that the environment names; empty if it names none."""
    name = _job_id(environ)
    return str(_FIRST_PORT + zlib.crc32(name.encode()) % _NUM_PORTS) if name else ""


def _secret(environ: Mapping[str, str]) -> str:
    """The first part of all paths: of TFPAR_TOKEN; else the job's name, which is no secret.

    It keeps the ranks of another job apart, which may come by mistake.
    """
    token = environ.get(names.TOKEN)
    if token:
        return hashlib.sha256(token.encode()).hexdigest()[:32]
    return f"tfpar-{zlib.crc32(_job_id(environ).encode()):x}"


def _job_id(environ: Mapping[str, str]) -> str:
    for variables in _JOB_IDS:
        if environ.get(variables[0]):
            return ".".join(environ.get(variable, "") for variable in variables)
    return ""


def _own_address(address: str) -> str:
    """Choose the address on which rank 0 listens: the one that ranks are given, if it is local.

    Empty, which is all of them, where that is not known: a name may stand for a service in front of
    this machine, or be known here, and here only, as the loopback's.
    """
    if address in (LOOPBACK, "localhost"):
        return LOOPBACK
    found = resolve(address)
    known = found is not None and is_local(address) and not is_loopback(found)
    return found if found is not None and known else ""


def _warn_if_open(bound: str, port: int, environ: Mapping[str, str]) -> None:
    if bound != LOOPBACK and not environ.get(names.TOKEN):
        logger.warning(
            "Horovod's ranks meet at port %d of %s, which answers every host that reaches it. Set "
            "%s to the same secret on all ranks to close it (docs/security.md).",
            port,
            bound or "all of this machine's addresses",
            names.TOKEN,
        )


def _serve(bound: str, port: int, secret: str, size: int) -> SecretRendezvousServer:
    """A server until this process ends: process sets that are made later meet there too."""
    try:
        server = SecretRendezvousServer(bound, port, secret, size)
    except OSError as error:
        raise TfparError(
            f"Rank 0 cannot listen on port {port}, where Horovod's ranks are to meet: {error}. "
            f"Set MASTER_PORT to a free port, the same for all ranks."
        ) from error
    threading.Thread(target=server.serve_forever, name="tfpar-rendezvous", daemon=True).start()
    return server


def _welcome(
    job: Job, store: RendezvousStore, address: str, server: SecretRendezvousServer
) -> list[dict[str, str]]:
    """Rank 0's side: wait for all, prepare the server for them, and tell them of each other."""
    machines = [{"host": socket.gethostname(), "address": address}]
    for rank in range(1, job.size):
        machines.append(store.get(f"rank{rank}", f"rank {rank} of {job.size} has not come"))
    server.init(place_ranks([machine["host"] for machine in machines]))  # empties the store too
    store.put("ranks", machines)
    return machines


def _report(job: Job, store: RendezvousStore) -> list[dict[str, str]]:
    """Report this machine to rank 0, as any other rank, and return all machines."""
    store.put(f"rank{job.rank}", {"host": socket.gethostname(), "address": store.own_address()})
    machines: list[dict[str, str]] = store.get("ranks", "rank 0 waits for other ranks")
    return machines


def _interface(rank: int, machines: Sequence[Mapping[str, str]]) -> str:
    """The network interface on which this rank meets the others; the loopback on one machine.

    Raises:
        TfparError: several of this machine's lead to them.
    """
    chosen = os.environ.get("HOROVOD_GLOO_IFACE")
    if chosen:
        return chosen
    others = [m["address"] for m in machines if m["host"] != machines[rank]["host"]]
    return find_network(["localhost", *others], None).interface
