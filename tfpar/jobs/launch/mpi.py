"""Ranks started by Open MPI: `mpirun` ends them all when one fails; here they only report."""

from __future__ import annotations

import contextlib
import shutil
import signal
import threading
import time
from collections.abc import Mapping, Sequence

from tfpar.jobs.launch.blame import Limits, RankStatus, blame
from tfpar.jobs.launch.command import local_command, mpirun_command
from tfpar.jobs.launch.environment import AttemptEnvironment, exported_environment, job_environment
from tfpar.jobs.launch.host_network import find_network, rank_addresses
from tfpar.jobs.launch.hosts import Host, Slot, allocate
from tfpar.jobs.launch.options import RunOptions
from tfpar.jobs.launch.output import Output, say
from tfpar.jobs.launch.processes import Process
from tfpar.jobs.launch.report import report
from tfpar.jobs.launch.supervisor import Supervisor
from tfpar.spec.errors import TfparError

_TICK_S = 0.2


def run_mpi(
    options: RunOptions,
    hosts: Sequence[Host],
    num_ranks: int,
    signals: list[signal.Signals],
    environ: Mapping[str, str],
) -> int:
    """Run the command under `mpirun`; returns its exit code.

    Args:
        signals: those that this process got; it grows.

    Raises:
        TfparError: there is no `mpirun`, or there are fewer slots than ranks.
    """
    if shutil.which("mpirun", path=environ.get("PATH")) is None:
        raise TfparError("--mpi needs Open MPI's mpirun, which is not on PATH. Use --gloo.")
    slots = allocate(hosts, num_ranks)
    network = find_network((slot.hostname for slot in slots), options.network_interface)
    news = threading.Event()
    with contextlib.ExitStack() as stack:
        supervisor = Supervisor(network.address, num_ranks, news)
        stack.callback(supervisor.close)
        addresses = rank_addresses(slots, network, 0)
        shared = AttemptEnvironment.of(
            options, supervisor.address, supervisor.token, 0, addresses, network.interface
        )
        variables = job_environment({**environ, **options.env}, shared)
        names = list(exported_environment(variables, options.env))
        argv = mpirun_command(hosts, num_ranks, names, options)
        if options.verbose:
            say(" ".join(argv))
        process = Process(
            local_command(argv, options.grace_s),
            variables,
            Output(options.output_dir, 0),
            news,
            label=None,
        )
        stack.callback(process.kill)
        while process.running and not signals:
            _wait(news)
        if signals:
            _pass_on(process, signals, options.grace_s, news)
        process.kill()
        if process.exit is None:
            raise TfparError("mpirun does not end, not even by SIGKILL. Look for it with ps.")
        if process.exit.code != 0 and not signals:
            _report(options, slots, supervisor, process.exit.code)
        return process.exit.code if process.exit.code >= 0 else 128 - process.exit.code


def _wait(news: threading.Event) -> None:
    news.wait(_TICK_S)  # signals are looked for as often
    news.clear()


def _pass_on(
    process: Process, signals: list[signal.Signals], grace_s: float, news: threading.Event
) -> None:
    process.send(signals[0])
    end, patience = time.monotonic() + grace_s, len(signals) + 1
    while process.running and time.monotonic() < end and len(signals) < patience:
        _wait(news)


def _report(options: RunOptions, slots: Sequence[Slot], supervisor: Supervisor, code: int) -> None:
    """mpirun knows which process ended first; the ranks have reported what they were at."""
    say(f"mpirun ended with exit code {code}.")
    signs, now = supervisor.signs(), time.monotonic()
    # Which of them mpirun has ended is not known here.
    records = [RankStatus(s.rank, s.hostname, False, None, True, signs.get(s.rank)) for s in slots]
    blamed = blame(records, Limits(options.timeout_s, options.start_timeout_s), now)
    if blamed:
        say(report(blamed, records, now))
