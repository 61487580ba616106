"""Options of `tfpar run`, checked."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from tfpar.spec.errors import TfparError

BACKENDS = ("horovod", "tensorflow")


@dataclass(frozen=True, slots=True, kw_only=True)
class RunOptions:
    """One run of `command`, a process a rank.

    Attributes:
        command: the program of every rank and its arguments.
        num_ranks: how many ranks; all slots of the hosts if None.
        hosts: `host1:2,host2:2`; excludes `hostfile`.
        hostfile: path of a file of `host slots=N` or `host:N` lines.
        backend: `horovod` or `tensorflow`; Horovod if it is installed, where None.
        mpi: ranks are started by Open MPI's `mpirun` instead of this process.
        insecure_grpc: any host may reach the servers of the backend `tensorflow`.
        network_interface: the one that ranks talk over; found if None.
        start_timeout_s: from the first rank that reports to the last, seconds.
        timeout_s: without any progress, seconds.
        grace_s: from SIGTERM to SIGKILL when the run itself is told to end, seconds.
        min_ranks: after a loss of ranks go on with as few as these; None ends the run.
        restarts: how often at most.
        output_dir: gets `rank.N.out` and `rank.N.err`.
        env: variables set for every rank.
        verbose: say what is started, and where.

    Raises:
        TfparError: an option that cannot be.
    """

    command: tuple[str, ...]
    num_ranks: int | None = None
    hosts: str | None = None
    hostfile: str | None = None
    backend: str | None = None
    mpi: bool = False
    insecure_grpc: bool = False
    network_interface: str | None = None
    ssh_port: int | None = None
    ssh_identity_file: str | None = None
    start_timeout_s: float = 120.0
    timeout_s: float = 600.0
    grace_s: float = 30.0
    min_ranks: int | None = None
    restarts: int = 10
    output_dir: str | None = None
    env: Mapping[str, str] = field(default_factory=dict)
    verbose: bool = False

    def __post_init__(self) -> None:
        if not self.command:
            raise TfparError("No program to run. Name it last: tfpar run -np 2 python train.py")
        if self.hosts is not None and self.hostfile is not None:
            raise TfparError("Both -H and --hostfile name the hosts. Give one of them.")
        if self.backend is not None and self.backend not in BACKENDS:
            raise TfparError(f"--backend {self.backend!r} is none of {', '.join(BACKENDS)}.")
        for name, count in (("-np", self.num_ranks), ("--min-np", self.min_ranks)):
            if count is not None and count < 1:
                raise TfparError(f"{name} is {count}; a run has at least 1 rank.")
        for name, seconds in (
            ("--start-timeout", self.start_timeout_s),
            ("--timeout", self.timeout_s),
        ):
            if not (seconds > 0 and math.isfinite(seconds)):
                raise TfparError(
                    f"{name} is {seconds:g}; it has to be a number of seconds above 0."
                )
        if not (self.grace_s >= 0 and math.isfinite(self.grace_s)):
            raise TfparError(f"--grace is {self.grace_s:g}; it has to be 0 or more seconds.")
        if self.restarts < 0:
            raise TfparError(f"--restarts is {self.restarts}; it has to be 0 or more.")
        if self.mpi and self.min_ranks is not None:
            raise TfparError(
                "--min-np restarts ranks, which mpirun cannot. Leave out --mpi or --min-np."
            )
