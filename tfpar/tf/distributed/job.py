"""Rank of this process and size of its job, read from the environment that its launcher set."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping

from tfpar.jobs.launch import environment as names
from tfpar.jobs.launch.slurm import expand_tasks
from tfpar.spec.errors import TfparError


@dataclasses.dataclass(frozen=True)
class Job:
    """Job of several processes, as seen from this one.

    Attributes:
        rank, size: among all.
        local_rank, local_size: among those on this machine.
        launcher: who started it, as users know it.
        backend: what was asked to carry collectives; None leaves the choice open.
        addresses: `host:port` of each rank where the launcher tells.
        attempt: how often the job has been restarted.
    """

    rank: int
    size: int
    local_rank: int = 0
    local_size: int = 1
    launcher: str = "tfpar run"
    backend: str | None = None
    addresses: tuple[str, ...] = ()
    attempt: int = 0

    @classmethod
    def of(cls, environ: Mapping[str, str]) -> Job | None:
        """The job that `environ` tells of; None for a process that runs alone.

        Raises:
            TfparError: a variable that is not a number, or a rank outside of the job.
        """
        for launcher, (rank, size, local_rank, local_size) in _LAUNCHERS.items():
            told = _slurm_step(environ) if launcher == "Slurm" else environ
            if told.get(rank) and told.get(size) and _number(told, size) > 1:
                job = cls(
                    rank=_number(told, rank),
                    size=_number(told, size),
                    local_rank=_number(told, local_rank, 0),
                    local_size=_number(told, local_size, 1),
                    launcher=launcher,
                    backend=environ.get(names.BACKEND),
                    addresses=tuple(filter(None, environ.get(names.ADDRESSES, "").split(","))),
                    attempt=_number(environ, names.ATTEMPT, 0),
                )
                return job._checked()
        return _of_tf_config(environ)

    @property
    def nodes(self) -> int:
        """Machines, taken to be equal."""
        return max(1, self.size // max(1, self.local_size))

    def _checked(self) -> Job:
        if not 0 <= self.rank < self.size:
            raise TfparError(
                f"The environment of {self.launcher} says rank {self.rank} of {self.size} ranks."
            )
        return self


# Rank, size, local rank, local size. The first that tells of several ranks counts: `tfpar run` may
# itself start through one of the others.
_LAUNCHERS = {
    "tfpar run": (names.RANK, names.SIZE, names.LOCAL_RANK, names.LOCAL_SIZE),
    "horovodrun": (
        "HOROVOD_RANK",
        "HOROVOD_SIZE",
        "HOROVOD_LOCAL_RANK",
        "HOROVOD_LOCAL_SIZE",
    ),
    "Open MPI": (
        "OMPI_COMM_WORLD_RANK",
        "OMPI_COMM_WORLD_SIZE",
        "OMPI_COMM_WORLD_LOCAL_RANK",
        "OMPI_COMM_WORLD_LOCAL_SIZE",
    ),
    # Before MPICH: `srun --mpi=pmi2` sets PMI's variables too, but no local rank.
    "Slurm": ("SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID", "SLURM_NTASKS_PER_NODE"),
    "MPICH": ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
    "Kubernetes": ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"),
    # An indexed Job knows no size: its manifest tells it, as TFPAR_SIZE. One rank a pod.
    "Kubernetes Job": (
        "JOB_COMPLETION_INDEX",
        names.SIZE,
        names.LOCAL_RANK,
        names.LOCAL_SIZE,
    ),
}
_VARIABLES = {"TF_CONFIG"}.union(*_LAUNCHERS.values())

# From here on step ids stand for what no `srun` has started: batch script, interactive shell, ...
_FIRST_SPECIAL_STEP = 0xFFFFFFF0


def without_job(environ: Mapping[str, str]) -> dict[str, str]:
    """`environ` for a process that runs alone, whoever started this one."""
    return {name: value for name, value in environ.items() if name not in _VARIABLES}


def _slurm_step(environ: Mapping[str, str]) -> Mapping[str, str]:
    """`environ` with the sizes of this process's step; empty if it is not a task of one.

    A batch script has the allocation's SLURM_NTASKS and SLURM_PROCID=0, as if it were the first
    of its ranks; only `srun` sets SLURM_STEP_ID. MPICH's mpiexec starts one task of a step on each
    machine, and its ranks below that.
    """
    step = environ.get("SLURM_STEP_ID") or environ.get("SLURM_STEPID")
    if not step or "MPI_LOCALRANKID" in environ:
        return {}
    if step.isdigit() and int(step) >= _FIRST_SPECIAL_STEP:
        return {}
    told = dict(environ)
    if environ.get("SLURM_STEP_NUM_TASKS"):
        told["SLURM_NTASKS"] = environ["SLURM_STEP_NUM_TASKS"]
    counts = environ.get("SLURM_STEP_TASKS_PER_NODE")
    if counts and environ.get("SLURM_NODEID"):
        tasks = expand_tasks(counts, "SLURM_STEP_TASKS_PER_NODE")
        node = _number(environ, "SLURM_NODEID")
        if not 0 <= node < len(tasks):
            raise TfparError(
                f"The environment of Slurm says node {node}, but SLURM_STEP_TASKS_PER_NODE="
                f"{counts} is for {len(tasks)} nodes."
            )
        told["SLURM_NTASKS_PER_NODE"] = str(tasks[node])
    return told


def _number(environ: Mapping[str, str], name: str, default: int | None = None) -> int:
    text = environ.get(name, "")
    if not text and default is not None:
        return default
    try:
        return int(text)
    except ValueError:
        raise TfparError(f"{name}={text!r} in the environment has to be a number.") from None


def _of_tf_config(environ: Mapping[str, str]) -> Job | None:
    """TF_CONFIG, as Kubeflow's TFJob and MultiWorkerMirroredStrategy have it: workers only."""
    text = environ.get("TF_CONFIG", "")
    if not text:
        return None
    try:
        config = json.loads(text)
        workers = tuple(config.get("cluster", {}).get("worker", ()))
        if len(workers) < 2:
            return None
        rank = int(config["task"]["index"])
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise TfparError(f"TF_CONFIG in the environment cannot be read: {error!r}.") from None
    hosts = [address.rpartition(":")[0] for address in workers]
    if not 0 <= rank < len(workers):
        raise TfparError(f"TF_CONFIG names task {rank} of {len(workers)} workers.")
    own = hosts[rank]
    return Job(
        rank,
        len(workers),
        hosts[:rank].count(own),
        hosts.count(own),
        "TF_CONFIG",
        environ.get(names.BACKEND) or "tensorflow",
        workers,
    )
