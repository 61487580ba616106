"""World of a process: the job that it is a rank of, and the means to work with the other ranks."""

from __future__ import annotations

import atexit
import contextlib
import functools
import hashlib
import importlib.util
import json
import logging
import os
import re
import sys
import threading
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import Any, NoReturn, TypeVar

import tensorflow as tf

from tfpar.jobs.launch.activities import comparing
from tfpar.jobs.launch.beacon import Beacon, TaskProgress
from tfpar.spec import RuntimeMismatchError, TfparError
from tfpar.tf.distributed.exchange import Exchange, PeerLostError
from tfpar.tf.distributed.job import Job
from tfpar.tf.distributed.lead import Lead
from tfpar.tf.distributed.lockstep import Lockstep
from tfpar.tf.runtime.backends.transport import Transport
from tfpar.tf.runtime.devices import own_device

logger = logging.getLogger("tfpar")

T = TypeVar("T")

BACKENDS = ("horovod", "tensorflow")

_LEAVE_S = 60.0  # for the others to come to their end, too


class World:
    """Side of this rank in a job of several processes.

    Use `this_world`.

    Attributes:
        job: its rank and size.
        transport: carries collectives.
        exchange: tensors and messages outside of steps.
        beacon: reports its activity to the launcher, and ends it when it hangs.
        lead: what one rank does for all.
        lockstep: the steps that all ranks take together.
    """

    def __init__(self, job: Job, transport: Transport, beacon: Beacon) -> None:
        self.job = job
        self.transport = transport
        self.beacon = beacon
        self.exchange = Exchange(transport)
        self.lead = Lead(self)
        self.lockstep = Lockstep(self)
        self._at: tuple[str, Callable[[], TaskProgress | None] | None, str] | None = None
        self._leaving, self._all_leave = threading.Event(), threading.Event()
        # Started now: an interpreter that ends starts no threads.
        threading.Thread(target=self._wait_to_leave, name="tfpar-leave", daemon=True).start()

    @property
    def rank(self) -> int:
        return self.job.rank

    @property
    def size(self) -> int:
        return self.job.size

    @property
    def device(self) -> str:
        return self.transport.device

    @contextlib.contextmanager
    def at(
        self,
        activity: str,
        within: Callable[[], TaskProgress | None] | None = None,
        hint: str = "",
    ) -> Iterator[None]:
        """Run a block as an activity that other ranks wait for: the beacon bounds its time.

        A rank that hangs in it is ended.

        Args:
            within: tells, to another thread, how far this rank has got.
            hint: what to look at if this rank waits in vain.

        Raises:
            PeerLostError: another rank has ended.
            TfparError: this rank runs something that the others do not serve.
        """
        self.lead.check_served()
        around, self._at = self._at, (activity, within, hint)
        self.beacon.at(activity, bounded=True, within=within, hint=hint)
        reached = activity
        try:
            yield
            reached, within = f"after {activity}", None
        except tf.errors.OpError as error:
            if _is_of_a_peer(error):
                got = None if within is None else within()
                at = activity if got is None else f"{activity}, {got.described}"
                # It may have hung for want of this one, and reached its time limit first.
                look_at = f" {hint}" if hint else ""
                raise PeerLostError(
                    f"Rank {self.rank} cannot go on in {at}: another rank has ended or left the "
                    f"job. Its own output says why.{look_at}{_waited_for(str(error))}"
                ) from error
            raise
        finally:
            self._at = around
            if around is None:
                self.beacon.at(reached, within=within)
            else:  # what this was a part of stays bounded
                activity, within, hint = around
                self.beacon.at(activity, bounded=True, within=within, hint=hint)

    def leave(self, limit_s: float) -> None:
        """Wait for the others, who may still need this process in collectives, before it ends."""
        self.beacon.done()
        self._leaving.set()
        self._all_leave.wait(limit_s)

    def _wait_to_leave(self) -> None:
        self._leaving.wait()
        with contextlib.suppress(tf.errors.OpError):  # one of them has gone already
            self.exchange.leave()
        self._all_leave.set()

    def first(self, what: str, make: Callable[[], Any]) -> Any:
        """Run `make` on rank 0, and return its JSON value on every rank; all ranks raise its error.

        Raises:
            TfparError: on the other ranks, if `make` failed on the first.
        """
        with self.at(what):
            if self.rank:
                told = self.exchange.message(None)
                if "error" in told:
                    raise TfparError(f"{what} failed on rank 0: {told['error']}")
                return told["made"]
            try:
                made = make()
            except BaseException as error:
                self.exchange.message({"error": f"{type(error).__name__}: {error}"})
                raise
            self.exchange.message({"made": made})
            return made

    def each(self, what: str, act: Callable[[], None]) -> None:
        """Run `act` on every rank; once all have, an error of one is raised on all.

        Raises:
            TfparError: on the ranks that have no error of their own.
        """
        error: BaseException | None = None
        try:
            act()
        except BaseException as raised:  # noqa: BLE001 - raised again, once all know
            error = raised
        with self.at(f"{what} (comparing notes)"):
            told = self.exchange.messages(
                "" if error is None else f"{type(error).__name__}: {error}"
            )
        if error is not None:
            raise error
        failed = next((rank for rank, text in enumerate(told) if text), None)
        if failed is not None:
            raise TfparError(f"{what} failed on rank {failed}: {told[failed]}")

    def agree(self, what: str, value: Any, explain: Callable[[list[Any]], str]) -> None:
        """Check that every rank says the same, a JSON value; only where not is all of it sent.

        Raises:
            RuntimeMismatchError: on every rank, with what `explain` makes of all the values.
        """
        digest = hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()
        with self.at(comparing(what)):
            digests = self.exchange.messages(digest)
            if len(set(digests)) == 1:
                return
            values = self.exchange.messages(value)
        raise RuntimeMismatchError(f"Ranks differ in {what}: {explain(values)}")


@functools.cache
def this_world() -> World | None:
    """The job that this process belongs to, joined at the first call; None if it runs alone.

    Raises:
        TfparError: the launcher's environment cannot be used, or the backend not be started.
    """
    job = Job.of(os.environ)
    if job is None:
        return None
    beacon = Beacon.connect(job.rank, os.environ) or Beacon.alone(job.rank, os.environ)
    beacon.at("joining the job", bounded=True)
    world = World(job, _transport(job, beacon), beacon)
    beacon.at("joined the job")
    _at_the_end(world)
    if job.rank == 0:
        logger.info(
            "%d ranks on %d machine(s) over %s, started by %s.",
            job.size,
            job.nodes,
            world.transport.name,
            job.launcher,
        )
    return world


def joined_world() -> World | None:
    """The job, if this process belongs to one and has joined it yet."""
    return this_world() if this_world.cache_info().currsize else None


def _transport(job: Job, beacon: Beacon) -> Transport:
    horovod = importlib.util.find_spec("horovod") is not None
    backend = job.backend or ("horovod" if horovod else "tensorflow")
    if backend not in BACKENDS:
        raise TfparError(f"No backend {backend!r}; there are {', '.join(BACKENDS)}.")
    if backend == "horovod":
        if not horovod:
            raise TfparError(
                "The backend 'horovod' is not installed: `tfpar install-horovod` builds it, or "
                "use --backend tensorflow."
            )
        from tfpar.tf.distributed.rendezvous import join
        from tfpar.tf.runtime.backends.horovod import HorovodTransport

        join(job)
        return HorovodTransport(own_device(job.local_rank, job.local_size), job.size)
    from tfpar.tf.runtime.backends.tensorflow import TensorFlowTransport

    return TensorFlowTransport(job, beacon.peers)


def _at_the_end(world: World) -> None:
    """End together with the others, or tell the launcher of the exception that ends this rank.

    Whoever ends with an exit code other than 0 ends at once: the others are not to wait for it.
    """
    shown, failed = sys.excepthook, threading.Event()
    exit_, asked_at = sys.exit, [0.0]

    def exit_with(status: Any = None) -> NoReturn:
        if status:
            asked_at[0] = world.beacon.progress
        exit_(status)

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        failed.set()
        # Functions of the user's own, with collectives in them, raise TensorFlow's errors.
        peer = isinstance(error, PeerLostError) or (
            isinstance(error, tf.errors.OpError) and _is_of_a_peer(error)
        )
        world.beacon.failed("peer" if peer else "error", str(error))
        if peer:  # where this rank stood is not what to look at
            print(f"tfpar: {str(error).splitlines()[0]}", file=sys.stderr, flush=True)
        else:
            shown(kind, error, trace)

    def leave() -> None:
        # A program that has caught the exit and gone on ends as any other.
        if not failed.is_set() and asked_at[0] != world.beacon.progress:
            world.leave(min(_LEAVE_S, world.beacon.timeout_s / 2))

    sys.excepthook, sys.exit = hook, exit_with
    atexit.register(leave)


def on_first(world: World | None, what: str, make: Callable[[], Any]) -> Any:
    """Make a value on the first rank and return it on all ranks, or on this one without others."""
    return make() if world is None else world.first(what, make)


def on_each(world: World | None, what: str, act: Callable[[], None]) -> None:
    """Act on every rank, or on this one without others; an error of one is everyone's."""
    act() if world is None else world.each(what, act)


def _is_of_a_peer(error: tf.errors.OpError) -> bool:
    text = str(error)
    return any(sign in text for sign in _SIGNS_OF_A_PEER)


def _waited_for(error: str) -> str:
    """Describe the transfer that failed: the task whose result it carries, and its two ranks."""
    found = _TRANSFER.search(error)
    if found is None:
        return ""
    source, target, kind, stage, micro = found.groups()
    return f" What {stage}{kind}{micro} makes did not get from rank {source} to rank {target}."


# A channel's name, with the call of a task that makes what is sent: `compile.local.microbatches`
# and `compile.local.transfers`.
_TRANSFER = re.compile(r"transfer/(\d+)_to_(\d+)/round\d+/([A-Z])(\d+)/microbatch(\d+)")

# What the transports' errors say when another rank has gone: Horovod; Gloo; TensorFlow.
_SIGNS_OF_A_PEER = (
    "Horovod has been shut down",
    "Connection closed by peer",
    "Connection reset by peer",
    "Broken pipe",
    "Timed out waiting",
    "failed to connect to all addresses",
    "Socket closed",
    "Additional GRPC error information from remote target",
    "Collective has timed out",
)
