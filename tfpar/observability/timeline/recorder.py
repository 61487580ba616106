"""`Recorder`: runs the profiler in the chosen steps of this process, and writes their timeline.

Nothing is measured, and nothing of a program is other, in all other steps: what a step's functions
run is seen by TensorFlow's own profiler. After the last chosen step the ranks send what they saw
to the first, which writes the file.
"""

from __future__ import annotations

import atexit
import contextlib
import dataclasses
import functools
import logging
import os
import time
from collections.abc import Iterator, Sequence

import tensorflow as tf

import tfpar
from tfpar.cluster.description import Cluster
from tfpar.compile import CompiledStep
from tfpar.ir.graph import Tensor
from tfpar.jobs.launch import environment
from tfpar.observability.timeline.measured import measured_trace
from tfpar.observability.timeline.nodes import Nodes
from tfpar.observability.timeline.recorded import StepWindow, steps_of_ranks
from tfpar.observability.timeline.records import RankTrace, StepOfRank, decode_traces, encode_traces
from tfpar.observability.timeline.request import TimelineRequest
from tfpar.spec import TfparError
from tfpar.tf.distributed.job import Job
from tfpar.tf.distributed.world import World
from tfpar.tf.interop.profiler import Profile, Profiler, mark, wait_for_devices

logger = logging.getLogger("tfpar")


@dataclasses.dataclass(frozen=True, eq=False)
class Recordable:
    """Compiled step with what is needed to record it.

    Attributes:
        gradients: the tensors that enter the optimizer.
        cluster: by whose figures collectives are predicted, if there is one.
        num_ranks: of the job.
        world: the processes, where each rank is one.
    """

    compiled: CompiledStep
    gradients: Sequence[Tensor]
    cluster: Cluster | None
    num_ranks: int
    world: World | None


class Recorder:
    """Recorder of this process, which has one profiler.

    Attributes:
        count: steps that ran since it was asked.
    """

    def __init__(self) -> None:
        self.count = 0
        self._asked: TimelineRequest | None = None
        self._profiler: Profiler | None = None
        self._ran: list[tuple[int, int, Recordable]] = []  # number, time of its start, step

    def ask(self, asked: TimelineRequest) -> None:
        """Record these steps, counted from now on.

        Raises:
            TfparError: others are to be recorded already.
        """
        if self._asked is not None:
            raise TfparError(
                f"A timeline of this program is to be written to {self._asked.path!r} already, of "
                f"steps {self._asked.steps_text}. Leave out one of the two: the callback or "
                f"--timeline-filename."
            )
        self.count, self._asked = 0, asked

    def give_up(self, asked: TimelineRequest) -> None:
        """Training has ended: what is left to be recorded of `request` is not."""
        if self._asked is not asked:
            return  # it is written
        seen = [number for number, *_ in self._ran]
        self.drop()
        if not asked.writes:
            return
        what = f"; of them only {', '.join(map(str, seen))} ran" if seen else ""
        logger.warning(
            "The timeline %r is not written: training ended after %d steps, and it was to be of "
            "steps %s%s. Choose steps that are reached.",
            asked.path,
            self.count,
            asked.steps_text,
            what,
        )

    def drop(self) -> None:
        """Record nothing more, and write nothing: training has failed."""
        profiler = self._profiler
        self._asked, self._profiler, self._ran = None, None, []
        if profiler is not None:
            profiler.drop()

    @contextlib.contextmanager
    def step(self, step: Recordable) -> Iterator[None]:
        """Around a run of a step."""
        asked = self._asked
        if asked is None:
            yield
            return
        self.count += 1
        if not asked.first <= self.count <= asked.last:
            yield
            return
        if self.count == asked.first:
            self._start(asked)
        try:
            with mark(str(self.count)):
                self._ran.append((self.count, time.time_ns(), step))
                yield
                wait_for_devices()
        except BaseException:
            self.drop()
            raise
        if self.count == asked.last:
            self._finish(asked, step.world)

    def _start(self, asked: TimelineRequest) -> None:
        self._ran, self._profiler = [], Profiler()
        try:
            self._profiler.start()
        except tf.errors.OpError as error:
            self._profiler = None
            logger.warning(
                "No timeline %r: TensorFlow's profiler cannot start: %s Does a TensorBoard "
                "callback profile the same steps (profile_batch)?",
                asked.path,
                error.message,
            )

    def _finish(self, asked: TimelineRequest, world: World | None) -> None:
        """Bring together what all ranks saw, and write it."""
        profiler, ran = self._profiler, self._ran
        self._asked, self._profiler, self._ran = None, None, []
        records: list[RankTrace] = []
        if profiler is not None:
            try:
                records = _records(profiler.stop(), ran)
            except (OSError, tf.errors.OpError) as error:  # the other ranks are told all the same
                logger.warning("The profile of a timeline cannot be read: %s", error)
        if world is not None:
            with world.at("bringing the timeline together"):
                told = world.exchange.messages(encode_traces(records))
            if world.rank:
                return
            records = [record for text in told for record in decode_traces(text)]
        size = 1 if world is None else world.size
        if not records or (world is not None and len(records) < size):
            logger.warning("The timeline %r is not written: a rank has no profile.", asked.path)
            return
        notes = {"tfpar": tfpar.__version__, "timeline": "measured", "steps": asked.steps_text}
        try:
            measured_trace(records, notes).save(asked.path)
        except TfparError as error:  # which is no reason to end a training
            logger.warning("%s", error)
            return
        logger.info("The timeline of steps %s is in %r.", asked.steps_text, asked.path)


def _records(profile: Profile, ran: Sequence[tuple[int, int, Recordable]]) -> list[RankTrace]:
    """Extract the traces of this process's ranks for the steps that ran."""
    windows = {
        mark.name: StepWindow(int(mark.name), mark.start, mark.end) for mark in profile.marks
    }
    known: dict[int, Nodes] = {}
    steps: dict[int, list[StepOfRank]] = {}
    for number, begun, step in ran:
        window = windows.get(str(number))
        if window is None:
            continue
        if id(step) not in known:
            known[id(step)] = _nodes(step)
        nodes = known[id(step)]
        ranks = range(step.num_ranks) if step.world is None else [step.world.rank]
        found = steps_of_ranks(window, profile.ops, nodes, ranks, begun - window.start)
        for rank, each in found.items():
            steps.setdefault(rank, []).append(each)
    return [RankTrace(rank, _clock(), each) for rank, each in steps.items()]


def _nodes(step: Recordable) -> Nodes:
    alone = None if step.world is None else step.world.rank
    return Nodes(step.compiled, step.gradients, step.cluster, alone)


def _clock() -> str:
    """The machine whose clock this process reads: of containers, that of their host."""
    try:
        with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
            return file.read().strip()
    except OSError:
        return os.uname().nodename


@functools.cache
def this_recorder() -> Recorder:
    """The recorder of this process; it is asked already if `tfpar run --timeline-filename` or the
    environment says so."""
    recorder, path = Recorder(), os.environ.get(environment.TIMELINE)
    if path:
        steps = os.environ.get(environment.TIMELINE_STEPS)
        job = Job.of(os.environ)
        asked = TimelineRequest.of(path, steps or None, writes=job is None or job.rank == 0)
        recorder.ask(asked)
        if asked.writes:
            atexit.register(recorder.give_up, asked)
    return recorder
