"""Measured steps: a meter of real time, from the end of one to the end of the next, and what
follows
from it: samples and FLOPs a second, and the error of the prediction."""

from __future__ import annotations

import collections
import dataclasses
import math
import resource
import sys
import time
import weakref
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NamedTuple

import tensorflow as tf

from tfpar.cluster.description import Cluster
from tfpar.cost.op_compute import model_flops
from tfpar.plans import Plan
from tfpar.tf.capture.step import batch_size_of
from tfpar.tf.runtime.executable import Executable

WARM_UP = 1
"""Calls left out after one in which something was compiled: what runs for the first time may still
be prepared by the device."""


class Lap(NamedTuple):
    """One call of the train function: of one step, or of several in one execution.

    Attributes:
        ran: what each of its steps ran.
        read_s: how much of it was waited for data.
    """

    seconds: float
    ran: Sequence[Any]
    read_s: float = 0.0


class Tally:
    """Sum over several calls of the train function.

    Attributes:
        seconds: of all of them.
        read_s: how much of it was waited for data.
        ran: how often they ran what.
    """

    def __init__(self) -> None:
        self.seconds = self.read_s = 0.0
        self.ran: collections.Counter[Any] = collections.Counter()
        self._alone: dict[Any, tuple[float, int]] = {}

    def add(self, lap: Lap) -> None:
        """Count one more call."""
        self.seconds += lap.seconds
        self.read_s += lap.read_s
        self.ran.update(lap.ran)
        if len({*lap.ran}) == 1:
            one = lap.ran[0]
            seconds, steps = self._alone.get(one, (0.0, 0))
            self._alone[one] = seconds + lap.seconds, steps + len(lap.ran)

    @property
    def steps(self) -> int:
        """Number of steps that the calls ran."""
        return self.ran.total()

    @property
    def step_s(self) -> float:
        """Seconds of a step; nan if there is none."""
        return self.seconds / self.steps if self.steps else math.nan

    def step_s_of(self, one: Any) -> float:
        """The same of those in calls that ran nothing but `one`."""
        seconds, steps = self._alone.get(one, (0.0, 0))
        return seconds / steps if steps else math.nan


class Meter:
    """Timer of the calls of the train function.

    Reading data and other callbacks count, as training waits for them. What comes between `stop`
    and the next `start` does not, nor a call that runs something for the first time (it was
    compiled in it), nor `WARM_UP` calls after that.

    Args:
        clock: gives seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._since: float | None = None
        self._known: weakref.WeakSet[Any] = weakref.WeakSet()
        self._left_out = 0

    def start(self) -> None:
        """A call begins; where one has ended just before, it began then."""
        if self._since is None:
            self._since = self._clock()

    def stop(self) -> None:
        """Stop timing: what follows is no training."""
        self._since = None

    def lap(self, ran: Sequence[Any], read_s: float = 0.0) -> Lap | None:
        """A call has ended that ran this and waited so long for data; None if it is not to
        count."""
        since, self._since = self._since, self._clock()
        if any(one not in self._known for one in ran):
            self._known.update(ran)
            self._left_out = WARM_UP
            return None
        if self._left_out:
            self._left_out -= 1
            return None
        return Lap(self._since - since, ran, read_s) if ran and since is not None else None


DEVICE_PEAK, PROCESS_PEAK = "device_peak_mb", "process_peak_mb"


@dataclasses.dataclass(frozen=True)
class StepVolume:
    """Volume of a step, independent of its time: samples, FLOPs, bytes moved.

    Attributes:
        samples: of the whole batch; None where no argument has a batch.
        ideal_s: seconds in which the plan's devices, all together, would compute its matrix
            products and convolutions at their peak; None where the plan has no cluster.
        moved_bytes: payload of the collectives and transfers that a rank takes part in, in the
            mean of all ranks.
    """

    samples: int | None
    ideal_s: float | None
    moved_bytes: float

    @classmethod
    def of(cls, executable: Executable, plan: Plan) -> StepVolume:
        """Compute the volume of a compiled step that runs by `plan`."""
        partitioned, machines = executable.partitioned, plan.cluster
        ideal_s = None
        if machines is not None:
            flops = model_flops(partitioned)
            ideal_s = sum(n / _peak(machines, dtype, plan.num_ranks) for dtype, n in flops.items())
        moved = float(sum(num_bytes for _, _, num_bytes in partitioned.collectives()))
        stages = plan.stages
        if stages is not None:
            sent = () if stages.cost is None else stages.cost.stages
            moved = (moved + sum(share.sent_bytes for share in sent)) / stages.num_actors
        return cls(batch_size_of(executable.specs), ideal_s, moved)


def _peak(machines: Cluster, dtype: str, num_ranks: int) -> float:
    """FLOP/s of the devices of all ranks together."""
    rates = [device.flops_of(dtype) for device in machines.devices[:num_ranks]]
    return sum(rates) * num_ranks / len(rates)


class Times(NamedTuple):
    """Measured times of a step, in seconds; nan where none was timed.

    Attributes:
        step_s: of all steps.
        planned_s: of those of the batch that the plan was made for.
        read_s: how long a step waited for data.
    """

    step_s: float
    planned_s: float
    read_s: float


def figures(
    times: Times, ran: Mapping[Any, int], works: Mapping[Any, StepVolume], plan: Plan | None
) -> dict[str, float]:
    """Compute figures by their names in Keras's logs; the names do not depend on the times.

    Args:
        times: as ranks agree on them.
        ran: how often the steps that were timed ran what.
        works: what that does; nothing is known of a model that runs on one device.
    """
    found = {"step_ms": 1e3 * times.step_s}
    if not works:
        return found
    done = [(works[one], n) for one, n in ran.items()] or [(next(iter(works.values())), 1)]
    taken_s = times.step_s * sum(n for _, n in done)
    if all(work.samples is not None for work, _ in done):
        found["samples_per_s"] = sum(n * (work.samples or 0) for work, n in done) / taken_s
    if all(work.ideal_s is not None for work, _ in done):
        found["mfu"] = sum(n * (work.ideal_s or 0.0) for work, n in done) / taken_s
    moved = sum(n * work.moved_bytes for work, n in done)
    found["data_ms"] = 1e3 * times.read_s
    found["moved_mb"] = moved / sum(n for _, n in done) / 1e6
    if plan is not None and plan.cost is not None:
        found["predicted_over_measured"] = plan.cost.seconds / times.planned_s
    return found


def peak_memory(devices: Collection[str]) -> tuple[str, float]:
    """(`DEVICE_PEAK` or `PROCESS_PEAK`, MB): the most that one of these devices has held so far
    where TensorFlow knows it, as of GPUs; else the most that this process has."""
    gpus = [f"GPU:{name.rpartition('GPU:')[2]}" for name in devices if "GPU:" in name]
    if gpus:
        infos = [tf.config.experimental.get_memory_info(gpu) for gpu in gpus]
        return DEVICE_PEAK, max(info["peak"] for info in infos) / 1e6
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss  # Linux counts KiB, macOS bytes
    return PROCESS_PEAK, most * (1 if sys.platform == "darwin" else 1024) / 1e6
