"""The program of one rank of a baseline.

    horovodrun -np 2 python -m benchmarks.by_hand.worker megatron gpt --steps 10

With `--steps` it takes one step, then times as many as said, and prints one line of JSON;
otherwise it takes requests `{"steps": n}` from standard input until that closes.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import resource
import signal
import time
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

import keras
import numpy as np
import tensorflow as tf

from benchmarks import models
from benchmarks.by_hand.launch import KINDS
from benchmarks.workers import endless, serve

if TYPE_CHECKING:
    from benchmarks.by_hand.with_tfpar import WithTfpar

Make = Callable[[], tuple[keras.Model, np.ndarray, np.ndarray]]
"""Builds and compiles the plain model, with the seed of all runs, and its batch."""

TASKS: dict[str, tuple[Callable[..., keras.Model], Callable[..., tuple]]] = {
    "gpt": (models.gpt, models.gpt_batch),
    "wide": (models.wide, models.wide_batch),
    "gpt-small": (models.SMALL["gpt"], partial(models.gpt_batch, length=16, vocabulary=64)),
    "wide-small": (models.SMALL["wide"], partial(models.wide_batch, classes=64)),
}
"""Model and batch by name."""


class Trainer(Protocol):
    """A rank of a baseline; its losses average to that of the whole batch over the ranks."""

    def step(self) -> tf.Tensor | float: ...


class Looped:
    """Steps of a trainer, one after another."""

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer

    def steps(self, count: int) -> list[float]:
        return [float(self._trainer.step()) for _ in range(count)]


class PlainKeras:
    """What the others must agree with."""

    def __init__(self, make: Make) -> None:
        self.model, x, y = make()
        self._batches = endless((x, y))

    def step(self) -> float:
        history = self.model.fit(self._batches, steps_per_epoch=1, verbose=0)
        return history.history["loss"][0]


def trainer_of(kind: str, model: str) -> Looped | WithTfpar:
    """The trainer of a kind; imported here, as Horovod may be missing."""

    def make():
        keras.utils.set_random_seed(0)
        build, batch = TASKS[model]
        return models.compile_model(build()), *batch()

    if kind == "horovod":
        from benchmarks.by_hand.horovod_data_parallel import HorovodDataParallel

        return Looped(HorovodDataParallel(make))
    if kind == "mwms":
        from benchmarks.by_hand.multi_worker_mirrored import MultiWorkerMirrored

        return Looped(MultiWorkerMirrored(make))
    if kind == "megatron":
        from benchmarks.by_hand.megatron import Megatron

        return Looped(Megatron(make))
    if kind.startswith("tfpar-"):
        from benchmarks.by_hand.with_tfpar import WithTfpar

        return WithTfpar(make, model, kind.removeprefix("tfpar-"), int(os.environ["HOROVOD_SIZE"]))
    return Looped(PlainKeras(make))


def timed(trainer: Looped | WithTfpar, request: dict[str, Any]) -> dict[str, Any]:
    """CPU and wall seconds a step of this rank, and the losses."""
    steps = request["steps"]
    cpu, wall = cpu_seconds(), time.perf_counter()
    losses = trainer.steps(steps)
    return {
        "cpu_s": (cpu_seconds() - cpu) / steps,
        "wall_s": (time.perf_counter() - wall) / steps,
        "peak_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
        "losses": losses,
    }


def cpu_seconds() -> float:
    """User and system time of this process and of its children that have ended."""
    both = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(usage.ru_utime + usage.ru_stime for usage in both)


def end_with_parent() -> None:
    """Linux: a rank that is stopped between its turns would not notice that its parent died."""
    parent_death_signal = 1  # PR_SET_PDEATHSIG
    ctypes.CDLL(None).prctl(parent_death_signal, signal.SIGKILL)


def main() -> None:
    parser = argparse.ArgumentParser(description="The program of one rank of a baseline.")
    parser.add_argument("kind", choices=("keras", *KINDS))
    parser.add_argument("model", choices=sorted(TASKS))
    parser.add_argument("--steps", type=int, help="time as many steps and end")
    parser.add_argument("--threads", type=int, default=0, help="of an op; 0: TensorFlow's choice")
    args = parser.parse_args()
    end_with_parent()
    tf.config.threading.set_intra_op_parallelism_threads(args.threads)
    trainer = trainer_of(args.kind, args.model)
    if args.steps is None:
        serve(partial(timed, trainer))
        return
    first = timed(trainer, {"steps": 1})
    row = timed(trainer, {"steps": args.steps})
    print(json.dumps({**row, "losses": first["losses"] + row["losses"]}), flush=True)


if __name__ == "__main__":
    main()
