"""TensorFlow's profiler: when each op of a function ran.

What it collects is an XSpace. Of the host it holds, for each op, an event `node:Type`; of ops that
hand over and come back later (collectives, calls) two, `ProcessAsync::Start` and `::Done`. Of GPUs
it holds their kernels, with the op that started each.
"""

from __future__ import annotations

import functools
import glob
import os
import re
import tempfile
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import tensorflow as tf
from tensorflow.tsl.profiler.protobuf import xplane_pb2


class OpEvent(NamedTuple):
    """An op from start to end, in nanoseconds of the profile's own clock.

    Attributes:
        waits: it handed over and came back: it may have waited for something.
    """

    node: str
    op_type: str
    start: int
    end: int
    waits: bool = False


class Mark(NamedTuple):
    """Span of time that was marked by `mark`, with start and end like those of `OpEvent`."""

    name: str
    start: int
    end: int


class Profile(NamedTuple):
    """Result of profiling: the ops that ran, and the marked spans."""

    ops: list[OpEvent]
    marks: list[Mark]


class Profiler:
    """The profiler of this process, which is one.

    Raises:
        tf.errors.OpError: in `start`: it runs already.
    """

    def start(self) -> None:
        """Begin to collect."""
        self._folder = tempfile.TemporaryDirectory(prefix="tfpar_profile_")
        try:
            tf.profiler.experimental.start(self._folder.name)
        except BaseException:
            self._folder.cleanup()
            raise

    def stop(self) -> Profile:
        """End, and read what was collected."""
        time.sleep(_LINGER_S)
        try:
            tf.profiler.experimental.stop()
            pattern = os.path.join(self._folder.name, "**", "*.xplane.pb")
            files = glob.glob(pattern, recursive=True)
            space = xplane_pb2.XSpace()
            for file in files:
                with open(file, "rb") as opened:
                    space.MergeFromString(opened.read())
        finally:
            self._folder.cleanup()
        return read_profile(space)

    def drop(self) -> None:
        """End without reading."""
        try:
            tf.profiler.experimental.stop(save=False)
        finally:
            self._folder.cleanup()


def mark(name: str) -> tf.profiler.experimental.Trace:
    """A context that the profile shows as `Mark`."""
    return tf.profiler.experimental.Trace(f"{_MARK}{name}")


def wait_for_devices() -> None:
    """Wait until what GPUs were given to compute is done; CPUs are, when a function returns."""
    if tf.config.list_logical_devices("GPU"):
        tf.test.experimental.sync_devices()


def read_profile(space: xplane_pb2.XSpace) -> Profile:
    """The ops and marks of an XSpace, by their starts."""
    plain: list[OpEvent] = []
    marks: list[Mark] = []
    started: dict[int, OpEvent] = {}
    waited: list[OpEvent] = []
    done: dict[int, int] = {}
    for plane in space.planes:
        on_device = plane.name.startswith("/device:GPU")
        for name, start, end, stats in _events(plane):
            if name.startswith(_MARK):
                marks.append(Mark(name[len(_MARK) :].partition("#")[0], start, end))
            elif name == _START:
                told = stats()
                node, op_type = str(told.get("name", "")), str(told.get("kernel_type", ""))
                started[told.get("_p", 0)] = OpEvent(node, op_type, start, start, True)
            elif name == _DONE:
                done[stats().get("_c", 0)] = start
            elif on_device:
                node, _, op_type = str(stats().get("tf_op", "")).rpartition(":")
                if node:
                    plain.append(OpEvent(node, op_type, start, end))
            elif found := _OP.fullmatch(name):
                plain.append(OpEvent(found[1], found[2], start, end))
    for number, begun in started.items():
        # A thread that ends a step may not have told so yet when the profiler stops.
        ends = [m.end for m in marks if m.start <= begun.start <= m.end]
        if number in done or ends:
            waited.append(begun._replace(end=done[number] if number in done else min(ends)))
    twice = {event.node for event in waited}  # such an op may also say when it began to work
    kept = [event for event in plain if event.node not in twice]
    return Profile(sorted(kept + waited, key=lambda e: (e.start, e.end)), sorted(marks))


_LINGER_S = 0.02  # an op tells that it has come back only once all that follows from it is begun
_MARK = "tfpar: "
_START, _DONE = "ExecutorState::ProcessAsync::Start", "ExecutorState::ProcessAsync::Done"
_OP = re.compile(r"([^:]+):(\w+)(?:#.*)?")


def _events(plane: Any) -> Iterator[tuple[str, int, int, Callable[[], dict[str, Any]]]]:
    """The name, start and end of each event of a plane, and what reads its stats."""
    names = {number: data.name for number, data in plane.event_metadata.items()}
    stat_names = {number: data.name for number, data in plane.stat_metadata.items()}
    for line in plane.lines:
        for event in line.events:
            start = line.timestamp_ns + event.offset_ps // 1000
            stats = functools.partial(_stats, event, stat_names)
            yield names[event.metadata_id], start, start + event.duration_ps // 1000, stats


def _stats(event: Any, stat_names: dict[int, str]) -> dict[str, Any]:
    found = {}
    for stat in event.stats:
        kind = stat.WhichOneof("value")
        value = None if kind is None else getattr(stat, kind)
        if kind == "ref_value":
            value = stat_names.get(stat.ref_value, "")
        found[stat_names[stat.metadata_id]] = value
    return found
