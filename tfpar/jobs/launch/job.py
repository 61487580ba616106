"""One attempt at a job: all ranks started, watched, and every one of them ended."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import secrets
import signal
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from tfpar.jobs.launch.blame import Blame, Cause, Limits, RankStatus, blame, must_end
from tfpar.jobs.launch.command import exporting, local_command, ssh_command
from tfpar.jobs.launch.environment import (
    AttemptEnvironment,
    Rendezvous,
    exported_environment,
    rank_environment,
)
from tfpar.jobs.launch.host_network import find_network, is_local, rank_addresses
from tfpar.jobs.launch.hosts import Slot
from tfpar.jobs.launch.options import RunOptions
from tfpar.jobs.launch.output import Output, say
from tfpar.jobs.launch.processes import Process
from tfpar.jobs.launch.report import table
from tfpar.jobs.launch.supervisor import Supervisor
from tfpar.spec.errors import TfparError

_TICK_S = 0.2
_FAILURE_GRACE_S = 5.0
# How long other ranks' failures are awaited before one is blamed: those that a culprit causes
# come within a moment; with none but consequences or timeouts known, the culprit's own may come.
_SETTLE_S, _LONG_SETTLE_S = 0.5, 2.0


@dataclass(frozen=True, slots=True)
class AttemptResult:
    """Result of an attempt to run the job.

    Attributes:
        code: for the shell.
        blamed: the culprits, the first first; none after success or a signal.
        records: all ranks.
        interrupted: the launcher was told to end.
        at: when, `time.monotonic()`.
    """

    code: int
    blamed: tuple[Blame, ...]
    records: tuple[RankStatus, ...]
    interrupted: bool
    at: float


def run_attempt(
    options: RunOptions,
    slots: Sequence[Slot],
    attempt: int,
    signals: list[signal.Signals],
    environ: Mapping[str, str],
) -> AttemptResult:
    """Run the command once on each slot until all ranks have ended.

    Args:
        attempt: how many came before it.
        signals: those that this process got; it grows.
        environ: of this process.

    Raises:
        TfparError: the ranks cannot be started.
    """
    network = find_network((slot.hostname for slot in slots), options.network_interface)
    output = Output(options.output_dir, attempt)
    news = threading.Event()
    with contextlib.ExitStack() as stack:
        supervisor = Supervisor(network.address, len(slots), news)
        stack.callback(supervisor.close)
        meets = None
        if _over_horovod(options):
            meets = stack.enter_context(rendezvous(slots, network.address))
        shared = AttemptEnvironment.of(
            options,
            supervisor.address,
            supervisor.token,
            attempt,
            rank_addresses(slots, network, attempt),
            network.interface,
            meets,
        )
        if options.verbose:
            say(
                f"attempt {attempt}: {len(slots)} ranks over {network.interface}, {network.address}"
            )
        job = _Job(options, slots, supervisor, signals, news)
        stack.callback(job.kill)
        job.start(environ, shared, output)
        return job.outcome()


class _Job:
    def __init__(
        self,
        options: RunOptions,
        slots: Sequence[Slot],
        supervisor: Supervisor,
        signals: list[signal.Signals],
        news: threading.Event,
    ) -> None:
        self._options, self._slots, self._supervisor = options, slots, supervisor
        self._signals, self._news = signals, news
        self._limits = Limits(options.timeout_s, options.start_timeout_s)
        self._processes: list[Process] = []
        self._stopped: set[int] = set()

    def start(self, environ: Mapping[str, str], shared: AttemptEnvironment, output: Output) -> None:
        for slot in self._slots:
            variables = rank_environment({**environ, **self._options.env}, slot, shared)
            here = is_local(slot.hostname)
            sent = None if here else exporting(exported_environment(variables, self._options.env))
            if here:
                argv = local_command(self._options.command, self._options.grace_s)
            else:
                argv = ssh_command(slot.hostname, self._options.command, os.getcwd(), self._options)
            if self._options.verbose:
                say(f"rank {slot.rank} on {slot.hostname}: {' '.join(argv)}")
            try:
                process = Process(
                    argv,
                    variables if here else environ,
                    output,
                    self._news,
                    label=str(slot.rank),
                    first_line=sent,
                )
            except OSError as error:
                raise TfparError(f"Cannot start rank {slot.rank} ({argv[0]}): {error}.") from error
            self._processes.append(process)

    def outcome(self) -> AttemptResult:
        """Wait for the end of all ranks, and bring it about once it has to be."""
        blamed: list[Blame] = []
        while self._any_running() and not self._signals and not blamed:
            self._wait()
            blamed = self._culprits()
        if self._signals and not blamed:
            return self._interrupted()
        blamed = blamed or self._culprits()  # the last rank may have failed at last
        if not blamed:
            return self._outcome(0, [])
        if blamed[0].cause is Cause.HUNG:
            self._ask_for_stacks(blamed)
        self._stop(signal.SIGTERM, min(_FAILURE_GRACE_S, self._options.grace_s))
        blamed = self._brought_up_to_date(blamed)
        return self._outcome(blamed[0].exit_code, blamed)

    def kill(self) -> None:
        """End what still runs; each process is over, or given up, afterwards."""
        for process in self._processes:
            process.send(signal.SIGKILL)
        for process in self._processes:
            process.kill()

    def _any_running(self) -> bool:
        return any(process.running for process in self._processes)

    def _wait(self) -> None:
        self._news.wait(_TICK_S)  # signals are looked for as often
        self._news.clear()

    def _records(self) -> list[RankStatus]:
        signs = self._supervisor.signs()
        return [
            RankStatus(
                slot.rank,
                slot.hostname,
                not is_local(slot.hostname),
                process.exit,
                slot.rank in self._stopped,
                signs.get(slot.rank),
                process.stderr_tail,
            )
            for slot, process in zip(self._slots, self._processes, strict=True)
        ]

    def _culprits(self) -> list[Blame]:
        """Who is to blame for what is wrong, once all that failed at that moment are heard.

        None if nothing is wrong, or no longer: a rank may be heard of late.
        """
        start = now = time.monotonic()
        if not must_end(self._records(), self._limits, now):
            return []
        while True:
            records = self._records()
            blamed, heard_out = blame(records, self._limits, now), _are_heard_out(records)
            sure = heard_out and self._sure(blamed)
            enough = now - start >= (_SETTLE_S if sure else _LONG_SETTLE_S)
            if enough or (heard_out and not self._any_running()):
                return blamed
            self._wait()
            now = time.monotonic()

    def _sure(self, blamed: Sequence[Blame]) -> bool:
        """Whether the first culprit will stay the first, and has said what it had to."""
        if not blamed or blamed[0].may_follow or blamed[0].cause in (Cause.HUNG, Cause.PEER):
            return False
        return blamed[0].cause is not Cause.RAISED or blamed[0].record.exit is not None

    def _ask_for_stacks(self, blamed: Sequence[Blame]) -> None:
        running = [b.record.rank for b in blamed if self._processes[b.record.rank].running]
        for rank in running:
            self._supervisor.ask_for_stacks(rank)
        if running:
            time.sleep(_SETTLE_S)

    def _stop(self, number: signal.Signals, grace_s: float) -> None:
        """Send all running ranks a signal; after the grace, or on one more signal, SIGKILL."""
        for rank, process in enumerate(self._processes):
            if process.running:
                self._stopped.add(rank)
                process.send(number)
        end = time.monotonic() + grace_s
        patience = len(self._signals) + 1
        while self._any_running() and time.monotonic() < end and len(self._signals) < patience:
            self._wait()
        self.kill()
        for process in self._processes:
            process.finish()

    def _brought_up_to_date(self, blamed: Sequence[Blame]) -> list[Blame]:
        """The same culprits with how they ended, and all of their stderr."""
        records = self._records()
        return [Blame(records[b.record.rank], b.cause, b.at) for b in blamed]

    def _interrupted(self) -> AttemptResult:
        """The ranks get the signal, and time to save what they have; their exit codes decide."""
        number = self._signals[0]
        say(f"{number.name}: told all ranks; they have {self._options.grace_s:g} s to end.")
        self._stop(number, self._options.grace_s)
        records = self._records()
        codes = [r.exit.code for r in records if r.exit is not None and r.signal is None]
        if len(codes) == len(records) and not any(codes):
            return self._outcome(0, [], interrupted=True)
        own = [code for code in codes if code > 0]
        say(f"ended by {number.name}.\n{table(records, time.monotonic())}")
        return self._outcome(own[0] if own else 128 + number, [], interrupted=True)

    def _outcome(
        self, code: int, blamed: Sequence[Blame], *, interrupted: bool = False
    ) -> AttemptResult:
        for process in self._processes:
            process.finish()
        records = tuple(self._records())
        return AttemptResult(code, tuple(blamed), records, interrupted, time.monotonic())


def _over_horovod(options: RunOptions) -> bool:
    if options.backend is None:
        return is_horovod_installed()
    return options.backend == "horovod"


def _are_heard_out(records: Sequence[RankStatus]) -> bool:
    """Whether all is known that ranks said before they exited: their connections have ended, too.

    A rank may say that another one's end is why it fails, and exit before that has been read.
    """
    ended = [r.signs for r in records if r.exit is not None and r.signs is not None]
    return all(signs.left or signs.lost_at is not None for signs in ended)


# --- Horovod's rendezvous ---


def is_horovod_installed() -> bool:
    return importlib.util.find_spec("horovod") is not None


@contextlib.contextmanager
def rendezvous(slots: Sequence[Slot], address: str) -> Iterator[Rendezvous]:
    """A server for these ranks at `address` of this machine, while the context lasts.

    Raises:
        TfparError: Horovod is not installed, or its launcher cannot be imported.
    """
    try:
        from tfpar.jobs.launch.rendezvous_server import SecretRendezvousServer
    except ImportError as error:
        raise TfparError(
            f"--backend horovod needs Horovod in the Python that runs `tfpar run` ({error}). "
            f"Install it, or give --backend tensorflow."
        ) from error
    secret = secrets.token_hex(16)
    server = SecretRendezvousServer(address, 0, secret, len(slots))
    server.init(list(slots))
    thread = threading.Thread(
        target=server.serve_forever, args=(0.1,), name="tfpar-rendezvous", daemon=True
    )
    thread.start()
    try:
        yield Rendezvous(address, server.port, secret)
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
