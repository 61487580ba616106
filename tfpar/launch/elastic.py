"""A run: attempts at its job, each with the slots that the ones before have left."""

from __future__ import annotations

import os
import signal
from collections.abc import Mapping, Sequence

from tfpar.launch.blame import Cause
from tfpar.launch.hosts import Host, allocate, find_hosts, without
from tfpar.launch.job import Outcome, run_attempt
from tfpar.launch.mpi import run_mpi
from tfpar.launch.options import RunOptions
from tfpar.launch.output import say
from tfpar.launch.report import loss, report
from tfpar.launch.signals import caught_signals
from tfpar.spec.errors import TfparError


def run(options: RunOptions, environ: Mapping[str, str] | None = None) -> int:
    """Run the command of `options` on all ranks; returns the exit code.

    0 if all ranks end with 0; else the culprit's exit code, 128 + signal of one that a signal
    killed, 70 of one that hung. What went wrong is told on stderr.

    Args:
        environ: what ranks inherit; this process's environment if None.

    Raises:
        TfparError: the ranks cannot be started as asked.
    """
    environ = os.environ if environ is None else environ
    hosts = find_hosts(options, environ)
    num_ranks = options.num_ranks or sum(host.slots for host in hosts)
    if num_ranks == 0:
        raise TfparError("The hosts have no slots. Give them some: -H host:slots")
    if options.min_ranks is not None and options.min_ranks > num_ranks:
        raise TfparError(f"--min-np {options.min_ranks} is more than the {num_ranks} ranks to run.")
    with caught_signals() as signals:
        if options.mpi:
            allocate(hosts, num_ranks)  # refuses too many ranks
            return run_mpi(options, hosts, num_ranks, signals, environ)
        return _run_attempts(options, hosts, num_ranks, signals, environ)


def _run_attempts(
    options: RunOptions,
    hosts: Sequence[Host],
    num_ranks: int,
    signals: list[signal.Signals],
    environ: Mapping[str, str],
) -> int:
    attempt = 0
    while True:
        slots = allocate(hosts, num_ranks)
        outcome = run_attempt(options, slots, attempt, signals, environ)
        if not outcome.blamed:
            return outcome.code
        say(report(outcome.blamed, outcome.records, outcome.at))
        if signals or options.min_ranks is None or not outcome.blamed[0].is_loss:
            return outcome.code
        hosts = without(hosts, _lost_slots(outcome, hosts))
        left = sum(host.slots for host in hosts)
        lost = loss(outcome.blamed[0])
        if left < options.min_ranks:
            say(f"{lost}; {left} slots are left, fewer than --min-np {options.min_ranks}.")
            return outcome.code
        if attempt == options.restarts:
            say(f"{lost}; it has been restarted {attempt} times (--restarts) and ends.")
            return outcome.code
        attempt += 1
        num_ranks = min(num_ranks, left)
        say(f"{lost}; restarting with {num_ranks} ranks (attempt {attempt} of {options.restarts})")


def _lost_slots(outcome: Outcome, hosts: Sequence[Host]) -> list[str]:
    """The host of each slot that is lost, once for each.

    Besides the culprit's these are of ranks that ended at the same moment in a way that no
    other rank's end brings about; an abort may be a consequence. A host out of reach loses all.
    """
    first = outcome.blamed[0]
    lost = [b for b in outcome.blamed if b is first or (b.is_loss and b.is_like(first))]
    unreachable = {b.record.host for b in lost if b.cause is Cause.UNREACHABLE}
    one_each = [b.record.host for b in lost if b.record.host not in unreachable]
    return one_each + [h.name for h in hosts if h.name in unreachable for _ in range(h.slots)]
