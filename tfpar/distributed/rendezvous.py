"""Horovod over Gloo for ranks whose launcher does not know Horovod: `srun`, `mpirun`, Kubernetes.

Rank 0 runs Horovod's rendezvous server. All ranks derive its address and port from their
environment, tell it the machine they are on, and learn from it which ranks share one.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import socket
import threading
import time
import zlib
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import horovod.tensorflow as hvd
from horovod.runner.http.http_server import RendezvousHandler, RendezvousHTTPServer

from tfpar.distributed.job import Job
from tfpar.launch import environment as names
from tfpar.launch.hosts import Slot
from tfpar.launch.network import LOOPBACK, find_network
from tfpar.launch.slurm import expand_nodelist
from tfpar.spec.errors import TfparError

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
_PAUSE_S = 0.1
_REQUEST_S = 5.0


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
    if job.rank == 0:
        server = _serve(address, port)
        store = _Store(LOOPBACK, port, _scope(os.environ), limit_s)
        machines = _welcome(job, store, address, server)
    else:
        store = _Store(address, port, _scope(os.environ), limit_s)
        machines = _report(job, store)
    shared = names.Shared(
        backend=None,
        timeout_s=timeout_s,
        grace_s=names.DEFAULT_GRACE_S,
        start_timeout_s=limit_s,
        supervisor="",
        token="",
        attempt=job.attempt,
        addresses=(),
        interface=_interface(job.rank, machines),
        rendezvous=(store.address, port),
    )
    slot = allotted([machine["host"] for machine in machines])[job.rank]
    told = names.rank_environment(os.environ, slot, shared)
    os.environ.update({n: told[n] for n in told if n.startswith(("HOROVOD_", "CUDA_"))})


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


def allotted(hosts: Sequence[str]) -> list[Slot]:
    """The slot of each rank, given the machine of each: `a b a` has local ranks 0, 0, 1."""
    on_host: dict[str, int] = defaultdict(int)
    across: dict[int, int] = defaultdict(int)
    places = []
    for host in hosts:
        local = on_host[host]
        places.append((host, local, across[local]))
        on_host[host] += 1
        across[local] += 1
    return [
        Slot(rank, len(hosts), host, local, on_host[host], cross, across[local])
        for rank, (host, local, cross) in enumerate(places)
    ]


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


def _scope(environ: Mapping[str, str]) -> str:
    """The part of the server's store for this job: another's ranks may come by mistake."""
    return f"tfpar-{zlib.crc32(_job_id(environ).encode()):x}"


def _job_id(environ: Mapping[str, str]) -> str:
    for variables in _JOB_IDS:
        if environ.get(variables[0]):
            return ".".join(environ.get(variable, "") for variable in variables)
    return ""


def _serve(address: str, port: int) -> RendezvousHTTPServer:
    """A server until this process ends: process sets that are made later meet there too."""
    bound = LOOPBACK if address in (LOOPBACK, "localhost") else ""
    try:
        server = RendezvousHTTPServer((bound, port), RendezvousHandler, 0)
    except OSError as error:
        raise TfparError(
            f"Rank 0 cannot listen on port {port}, where Horovod's ranks are to meet: {error}. "
            f"Set MASTER_PORT to a free port, the same for all ranks."
        ) from error
    threading.Thread(target=server.serve_forever, name="tfpar-rendezvous", daemon=True).start()
    return server


def _welcome(
    job: Job, store: _Store, address: str, server: RendezvousHTTPServer
) -> list[dict[str, str]]:
    """Rank 0's side: wait for all, prepare the server for them, and tell them of each other."""
    machines = [{"host": socket.gethostname(), "address": address}]
    for rank in range(1, job.size):
        machines.append(store.get(f"rank{rank}", f"rank {rank} of {job.size} has not come"))
    server.init(allotted([machine["host"] for machine in machines]))  # empties the store too
    store.put("ranks", machines)
    return machines


def _report(job: Job, store: _Store) -> list[dict[str, str]]:
    """Any other rank's side: tell rank 0 of this one's machine, and learn of all."""
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


class _Store:
    """JSON values by name in rank 0's server.

    Args:
        limit_s: for all calls together, seconds from now on.
    """

    def __init__(self, address: str, port: int, scope: str, limit_s: float) -> None:
        self.address, self._port, self._scope = address, port, scope
        self._limit_s = limit_s
        self._end = time.monotonic() + limit_s

    def own_address(self) -> str:
        """This machine's address towards the server."""
        with self._connected() as connection:
            own: str = connection.sock.getsockname()[0]
        return own

    def put(self, name: str, value: Any) -> None:
        """Raises TfparError when there is no server in time."""
        with self._connected() as connection:
            connection.request("PUT", self._path(name), json.dumps(value))
            connection.getresponse().read()

    def get(self, name: str, without: str) -> Any:
        """A value, which is waited for; the error says `without` when it does not come in time."""
        while True:
            with self._connected() as connection:
                connection.request("GET", self._path(name))
                response = connection.getresponse()
                if response.status == http.HTTPStatus.OK:
                    return json.loads(response.read())
            if time.monotonic() > self._end:
                raise TfparError(
                    f"After {self._limit_s:.0f} s {without}. Horovod's ranks meet at "
                    f"{self.address}:{self._port}: has every rank been started, and does it "
                    f"reach that port? The ranks' own output may say more."
                )
            time.sleep(_PAUSE_S)

    def _path(self, name: str) -> str:
        return f"/{self._scope}/{name}"

    @contextlib.contextmanager
    def _connected(self) -> Iterator[http.client.HTTPConnection]:
        """A connection for one request."""
        while True:
            connection = http.client.HTTPConnection(self.address, self._port, timeout=_REQUEST_S)
            try:
                connection.connect()
                break
            except OSError as error:
                connection.close()
                if time.monotonic() > self._end:
                    raise TfparError(
                        f"For {self._limit_s:.0f} s nobody answers at {self.address}:{self._port}, "
                        f"where rank 0 should be ({error}). Is it running there? MASTER_ADDR and "
                        f"MASTER_PORT name another place."
                    ) from error
                time.sleep(_PAUSE_S)
        try:
            yield connection
        except (OSError, http.client.HTTPException) as error:
            raise TfparError(
                f"The rendezvous of Horovod's ranks at {self.address}:{self._port} broke: "
                f"{error!r}. Has rank 0 ended, or does another program have that port?"
            ) from error
        finally:
            connection.close()
