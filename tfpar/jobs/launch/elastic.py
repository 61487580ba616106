"""Elastic run of a job: attempts, each with the slots that earlier attempts have left."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence

from tfpar.jobs.launch.blame import Cause, RankStatus
from tfpar.jobs.launch.hosts import Host, allocate, find_hosts, without
from tfpar.jobs.launch.job import AttemptResult, run_attempt
from tfpar.jobs.launch.mpi import run_mpi
from tfpar.jobs.launch.options import RunOptions
from tfpar.jobs.launch.output import say
from tfpar.jobs.launch.report import loss, report
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
    attempt, size, least = 0, num_ranks, 1
    while True:
        outcome = run_attempt(options, allocate(hosts, size), attempt, signals, environ)
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
        least = least_ranks(outcome.records) or least
        size = min(num_ranks, left)
        if size < least:
            say(
                f"{lost}; {left} slots are left, and the program, whose pipeline has {least} sets "
                f"of ranks, runs with {least} ranks at least."
            )
            return outcome.code
        if attempt == options.restarts:
            say(f"{lost}; it has been restarted {attempt} times (--restarts) and ends.")
            return outcome.code
        attempt += 1
        say(f"{lost}; restarting with {size} ranks (attempt {attempt} of {options.restarts})")


def least_ranks(records: Iterable[RankStatus]) -> int | None:
    """Return the number of ranks that the program runs with at least; None if unknown."""
    told = [r.signs.least_ranks for r in records if r.signs is not None]
    return max((least for least in told if least is not None), default=None)


def _lost_slots(outcome: AttemptResult, hosts: Sequence[Host]) -> list[str]:
    """The host of each slot that is lost, once for each.

    Besides the culprit's these are of ranks that ended at the same moment in a way that no
    other rank's end brings about; an abort may be a consequence. A host out of reach loses all.
    """
    first = outcome.blamed[0]
    lost = [b for b in outcome.blamed if b is first or (b.is_loss and b.is_like(first))]
    unreachable = {b.record.host for b in lost if b.cause is Cause.UNREACHABLE}
    one_each = [b.record.host for b in lost if b.record.host not in unreachable]
    return one_each + [h.name for h in hosts if h.name in unreachable for _ in range(h.slots)]


# --- Signals to the launcher, noted instead of ending it, so that its ranks end first ---

_CAUGHT = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@contextlib.contextmanager
def caught_signals() -> Iterator[list[signal.Signals]]:
    """The list grows with each signal that comes; in another thread than the first none comes."""
    caught: list[signal.Signals] = []
    if threading.current_thread() is not threading.main_thread():
        yield caught
        return

    def note(number: int, _frame: object) -> None:
        caught.append(signal.Signals(number))

    # What is ignored stays so: `nohup`, or a shell's background job.
    before = {s: h for s in _CAUGHT if (h := signal.getsignal(s)) is not signal.SIG_IGN}
    for number in before:
        signal.signal(number, note)
    try:
        yield caught
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
