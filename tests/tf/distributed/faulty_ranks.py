"""A rank that trains a tiny model for real, and may fail on the way: `python faulty_ranks.py JSON`.

See `Task` for what the JSON says. Losses go to a file, a line for each step, as they come.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import json
import os
import random
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

NUM_SAMPLES, BATCH = 96, 12  # divides by 1, 2, 3 and 4 ranks
STEPS_PER_EPOCH = NUM_SAMPLES // BATCH
FOREVER_S = 600.0
MICROBATCHES = 4
LIFE = 2 * STEPS_PER_EPOCH  # steps of an attempt that is to be killed, at most


@dataclasses.dataclass(frozen=True)
class Task:
    """What the ranks do.

    Attributes:
        folder: gets `losses.jsonl` of rank 0 and `ckpt/`, the checkpoints.
        epochs: to train.
        every: steps between checkpoints; 0 for none at all, not even after SIGTERM.
        background: checkpoints are written behind training.
        mesh: of ranks; None leaves it to tfpar.
        stages: of a pipeline with four microbatches; 0 for none.
        searched: the plan is searched; else it is plain data parallelism.
        fault: what happens (see `FAULTS`), on rank `of` before step `at`; `random_kill`: a
            rank is killed at a random moment of its first `LIFE` steps.
            `read_alone`: it reads a weight that the other has. Of `ALONE` it calls what the others
            do not; `short_data`: its data end there.
        inside: within step `at` instead, in this task of a pipeline of two stages: `1B3`.
        attempts: only in that many of the launcher's attempts.
        pause_s: before each step.
    """

    folder: str
    epochs: int = 2
    every: int = 0
    background: bool = False
    mesh: list[int] | None = None
    stages: int = 0
    searched: bool = False
    fault: str = ""
    inside: str = ""
    of: int = 1
    at: int = 4
    attempts: int = 1
    pause_s: float = 0.0


def main(task: Task) -> None:
    import numpy as np
    import tensorflow as tf

    tf.config.threading.set_intra_op_parallelism_threads(1)
    import keras

    import tfpar as tap

    attempt = int(os.environ.get("TFPAR_ATTEMPT", "0"))
    rank = int(os.environ.get("TFPAR_RANK") or os.environ.get("HOROVOD_RANK") or 0)
    fault = task.fault if attempt < task.attempts and (rank == task.of or task.of < 0) else ""
    keras.utils.set_random_seed(7)
    planner = {"planner": "tap"} if task.searched else {"planner": None}
    pipeline = tap.Pipeline(task.stages, MICROBATCHES) if task.stages else None
    if task.inside:
        placed = (("first", 0), ("last", 1), ("mischief", int(task.inside[0])))
        planner["constraints"] = [tap.stage(name, stage) for name, stage in placed]
    with tap.auto_parallel(task.mesh, pipeline=pipeline, **planner):
        layers = [
            keras.Input((8,)),
            keras.layers.Dense(16, activation="relu", name="first"),
            keras.layers.Dropout(0.3, seed=3),
            keras.layers.Dense(4, name="last"),
        ]
        if task.inside:
            layers.insert(4 if task.inside[0] == "1" else 2, mischief(task, fault))
        model = keras.Sequential(layers)
        model.compile(
            keras.optimizers.Adam(0.01),
            keras.losses.SparseCategoricalCrossentropy(from_logits=True),
            metrics=["accuracy"],
        )

    class Watch(keras.callbacks.Callback):
        """Writes down each step's loss, and brings the fault about."""

        def __init__(self) -> None:
            super().__init__()
            self.step: int | None = None
            self.doomed: Doom | None = None

        def on_train_batch_begin(self, batch, logs=None):
            step = self._steps()
            if self.step is None:
                print(f"training from {step}", flush=True)
                self.doomed = doom(rank, attempt, step) if fault == "random_kill" else None
            self.step = step
            if self.doomed is not None and step == self.doomed.step:
                self.doomed.come()
            time.sleep(task.pause_s)
            if self.step + 1 == task.at and fault in FAULTS and not task.inside:
                FAULTS[fault]()
            if self.step + 1 == task.at and fault in ALONE:
                ALONE[fault](self.model, x, y, task.folder)
            if self.step + 1 == task.at and fault == "read_alone":
                self.model.get_layer("last").kernel.numpy()

        def on_train_batch_end(self, batch, logs=None):
            step = self._steps()
            if rank == 0 and task.stages:  # the other, which updates metrics, reads nothing
                rate = float(self.model.optimizer.learning_rate.numpy())
                accuracy = float(self.model.get_metrics_result()["accuracy"])
                print(
                    f"alone: step {self._steps()}, {rate:.2f}, {accuracy == logs['accuracy']}",
                    flush=True,
                )
            if step != self.step and rank == 0:  # else it was passed over
                line = {"step": step, "attempt": attempt, **(logs or {})}
                with open(Path(task.folder) / "losses.jsonl", "a") as file:
                    file.write(json.dumps(line) + "\n")

        def _steps(self) -> int:
            return int(self.model.optimizer.iterations.numpy())

    callbacks: list[keras.callbacks.Callback] = [Watch()]
    if task.every:
        folder = Path(task.folder) / "ckpt"
        callbacks.append(tap.Checkpoint(folder, task.every, background=task.background))
    numbers = np.random.default_rng(0)
    x = numbers.normal(size=(NUM_SAMPLES, 8)).astype("float32")
    y = numbers.integers(0, 4, NUM_SAMPLES)
    if task.fault in ("hang_in_data", "short_data"):
        model.fit(faulty_data(x, y, fault, task.at), epochs=1, callbacks=callbacks, verbose=0)
    else:
        model.fit(x, y, batch_size=BATCH, epochs=task.epochs, callbacks=callbacks, verbose=0)
    print("done", flush=True)


def mischief(task: Task, fault: str):
    """A layer that does nothing, but brings the fault about in one call of an op of its own."""
    import keras
    import tensorflow as tf

    import tfpar as tap

    tap.register_rule("PyFuncStateless", lambda op, _: tap.make_rule(op, "n . -> n ."))
    kind, micro = task.inside[1], int(task.inside[2:])
    calls, last = itertools.count(), (task.at - 1) * MICROBATCHES + micro

    def look(x):
        if next(calls) == last and fault:
            time.sleep(0.5)  # for what it is at to be told
            FAULTS[fault]()
        return x

    def watched(x):
        seen = tf.numpy_function(look, [x], x.dtype, stateful=False)
        seen.set_shape(x.shape)
        return seen

    @tf.custom_gradient
    def passing(x):
        if kind == "F":
            return watched(x), lambda dy: dy
        return tf.identity(x), watched

    return keras.layers.Lambda(passing, output_shape=lambda shape: shape, name="mischief")


def hang() -> None:
    time.sleep(FOREVER_S)


def kill() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def stop() -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


def fail() -> None:
    raise ValueError("the moon is made of cheese")


FAULTS: dict[str, Callable[[], object]] = {
    "hang": hang,
    "kill": kill,
    "stop": stop,
    "raise": fail,
    "exit": sys.exit,
    "exit_3": lambda: sys.exit(3),
}


ALONE: dict[str, Callable[..., object]] = {
    "predict": lambda model, x, y, folder: model.predict(x[:BATCH], verbose=0),
    "evaluate": lambda model, x, y, folder: model.evaluate(x[:BATCH], y[:BATCH], verbose=0),
    "save": lambda model, x, y, folder: model.save(f"{folder}/model.keras"),
}


def faulty_data(x, y, fault: str, at: int):
    """A `tf.data` pipeline whose batch `at` never comes, or that ends before it, where there is a
    fault."""
    import tensorflow as tf

    def batches():
        for i in range(STEPS_PER_EPOCH):
            if fault == "short_data" and i + 1 == at:
                return
            if fault and i + 1 == at:
                wait_for_a_file_server()
            yield x[i * BATCH : (i + 1) * BATCH], y[i * BATCH : (i + 1) * BATCH]

    kinds = (
        tf.TensorSpec((BATCH, *x.shape[1:]), tf.float32),
        tf.TensorSpec((BATCH,), tf.int64),
    )
    return tf.data.Dataset.from_generator(batches, output_signature=kinds)


def wait_for_a_file_server() -> None:
    time.sleep(FOREVER_S)


@dataclasses.dataclass(frozen=True)
class Doom:
    """A kill: some time after the beginning of a step, or in the checkpoint that comes next."""

    step: int
    delay_s: float
    saving: str

    def come(self) -> None:
        if self.saving:
            kill_while_saving(self.saving)
        else:
            threading.Timer(self.delay_s, kill).start()


def doom(rank: int, attempt: int, first: int) -> Doom | None:
    """What happens to this rank; one of two is killed in each attempt, half of them at a save."""
    draw = random.Random(attempt)
    chosen, steps, delay_s = draw.randrange(2), draw.randrange(LIFE), draw.uniform(0.0, 0.1)
    moment = "write" if rank else draw.choice(["write", "fsync", "rename"])  # rank 0 commits
    return Doom(first + steps, delay_s, moment if attempt % 2 else "") if rank == chosen else None


def kill_while_saving(moment: str) -> None:
    """Kill this rank at one of the moments of its next checkpoint."""
    from tfpar.tf.checkpoint import writer

    if moment == "write":
        write = writer.write_part

        def write_half(temporary, rank, saved):
            write(temporary, rank, saved[: len(saved) // 2])
            kill()

        writer.write_part = write_half
        return
    name = "fsync" if moment == "fsync" else "rename"
    call = getattr(os, name)

    def call_once(*arguments):
        with contextlib.suppress(OSError):
            call(*arguments)
        kill()

    setattr(os, name, call_once)


if __name__ == "__main__":
    main(Task(**json.loads(sys.argv[1])))
