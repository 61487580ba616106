"""`tap.Monitor`: a Keras callback that watches a training."""

from __future__ import annotations

import functools
import importlib.util
import json
import logging
import math
import os
import time
from collections.abc import Mapping, Sequence
from typing import Any

import keras
import tensorflow as tf

from tfpar.observability.monitor.figures import Meter, Tally
from tfpar.observability.monitor.monitored_model import MonitoredModel
from tfpar.planning.objective import UNCERTAINTY
from tfpar.spec import TfparError, arguments
from tfpar.tf.keras import adapter
from tfpar.tf.steps.replanning import check_can_replan

ENOUGH_STEPS = 20
"""How many steps are timed before they are held against the prediction, or a plan is judged."""


class Monitor(keras.callbacks.Callback):
    """Callback that reports the times of training steps, and how far they are from the prediction.

        model.fit(dataset, epochs=10, callbacks=[tap.Monitor("runs/1")])

    Every so many steps, and at the end of each epoch, it adds figures to Keras's logs (where the
    progress bar, `History` and `CSVLogger` find them), and to the folder: a line of
    `monitor.jsonl`, and scalars for TensorBoard where the package `tensorboard` is installed. They
    are means of a step since the last report:

    - `step_ms`: real time from the end of a step to the end of the next, with what training waits
      for: data, other callbacks. Steps that compile something, and the first after them, are left
      out.
    - `samples_per_s`: of the global batch.
    - `mfu`: FLOPs of the model's matrix products and convolutions (what is computed again counts
      once), over what the devices of all ranks reach in that time, as the plan's cluster describes
      them.
    - `data_ms`: how long a step waited for its batch.
    - `moved_mb`: payload of the collectives and transfers of a rank, in MB.
    - `predicted_over_measured`: of the step that the plan was made for.
    - `device_peak_mb`: the most that a device has held so far, where TensorFlow knows it (GPUs),
      else `process_peak_mb`, the most that a process has; of the rank that has most.

    Where nothing is known, as of a plan that was not priced, a figure is left out. A model that
    runs on one device has its times and its memory measured.

    After 20 timed steps one line says which part of a step takes longer than predicted: the dearest
    collectives are timed by themselves for that, once, and all else is the rest of the step. With
    each report ranks compare checksums of what they hold in common.

    Args:
        folder: of the files; the first rank writes them. None: no files.
        every: steps from one report to the next.
        compare: whether ranks compare what they hold in common.
        replan: plan the model again at the end of an epoch, once 20 steps have been timed, for
            machines that are as was measured, and take the new plan if it is predicted to save more
            than this part of a step. Training goes on with the same numbers. None: keep the plan.

    Attributes:
        figures: those of the last report.

    Raises:
        ArgumentError: an argument of another type or out of range.
        TfparError: in `fit`: the folder cannot be written to, or `replan` of a model for which no
            plan is searched.
        RuntimeMismatchError: in `fit`: ranks hold different values of a variable.
    """

    adds_logs = True  # goes before callbacks that read them: `tfpar.tf.keras.callbacks`

    def __init__(
        self,
        folder: str | os.PathLike[str] | None = "monitor",
        every: int = 100,
        compare: bool = True,
        replan: float | None = None,
    ) -> None:
        super().__init__()
        adapter.install()
        self.folder = arguments.optional(arguments.path, "folder", folder)
        self.every = arguments.integer("every", every, 1)
        self.compare = arguments.flag("compare", compare)
        self.replan = arguments.optional(_part, "replan", replan)
        self.figures: dict[str, float] = {}
        self._files: MonitorWriter | None = None
        self._steps = self._since = self._epoch = self._batch = 0
        self._watch(MonitoredModel(None))

    def _watch(self, watched: MonitoredModel) -> None:
        """Watch a model from now on."""
        self._watched, self._meter = watched, Meter()
        self._lately, self._this_epoch = Tally(), Tally()  # since the last report, and the epoch
        self._at_first, self._judged = Tally(), False
        self._to_replan = Tally()
        self._settled_s = math.nan  # a step for which nothing better was found

    # --- what Keras calls ----------------------------------------------------------

    def on_train_begin(self, logs=None):
        state = None if self.model.run_eagerly else adapter.parallel_model(self.model)
        if self.replan is not None:
            if state is None:
                raise TfparError(
                    f"Monitor(replan=...) plans anew, but model {self.model.name!r} runs on one "
                    f"device: build it inside tap.auto_parallel(...), or leave out replan."
                )
            check_can_replan(state.session)
        if self._watched.state is not state:
            self._watch(MonitoredModel(state))
        if self.folder is not None:
            self._files = self._watched.first(
                "opening files", functools.partial(MonitorWriter, self.folder)
            )

    def on_train_end(self, logs=None):
        if self._files is not None:
            self._files.close()

    def on_epoch_begin(self, epoch, logs=None):
        self._epoch, self._batch, self._this_epoch = epoch, -1, Tally()
        self._meter.stop()

    def on_test_begin(self, logs=None):
        self._meter.stop()

    def on_predict_begin(self, logs=None):
        self._meter.stop()

    def on_train_batch_begin(self, batch, logs=None):
        self._meter.start()

    def on_train_batch_end(self, batch, logs=None):
        watched = self._watched
        ran = watched.ran(batch - self._batch)
        self._batch = batch
        self._steps += len(ran)
        self._since += len(ran)
        due = self._since >= self.every
        judges = self._judges(len(ran))
        if due or judges or batch + 1 == self.params.get("steps"):
            tf.test.experimental.sync_devices()  # GPUs may be behind
        lap = self._meter.lap(ran, watched.read_s)
        if lap is not None:
            self._lately.add(lap)
            self._this_epoch.add(lap)
            if not self._judged:
                self._at_first.add(lap)
            if self.replan is not None:
                self._to_replan.add(lap)
        watched.learn(ran)
        if due:
            tally, self._since, self._lately = self._lately, 0, Tally()
            self._report("steps", tally)
            if self.compare:
                watched.compare(ran)
        if judges and lap is not None:
            self._judge()
        if due or judges:
            self._meter.stop()
            self._meter.start()
        if logs is not None:
            logs.update({k: v for k, v in self.figures.items() if math.isfinite(v)})

    def on_epoch_end(self, epoch, logs=None):
        tally, self._lately, self._this_epoch = self._this_epoch, Tally(), Tally()
        self._report("epoch", tally)
        if logs is not None:
            logs.update(self.figures)  # all: the columns of a CSVLogger are those of its first row
        goes_on = epoch + 1 < (self.params.get("epochs") or math.inf)
        if self._to_replan.steps >= ENOUGH_STEPS and goes_on and not self.model.stop_training:
            self._plan_anew()

    # --- what it does ----------------------------------------------------------------

    def _report(self, span: str, tally: Tally) -> None:
        """Say what steps took since the last report, or in an epoch."""
        self.figures = self._watched.figures(tally)
        if tally.steps:
            self._write({"span": span, "timed_steps": tally.steps, **self.figures})

    def _judges(self, steps: int) -> bool:
        """Whether enough have been timed to compare them with the prediction, with some more."""
        return not self._judged and self._at_first.steps + steps >= ENOUGH_STEPS

    def _judge(self) -> None:
        """Say, once, which part of a step takes longer than predicted."""
        text, parts = self._watched.verdict(self._at_first)
        self._watched.tell(text, below_bar=self.params.get("verbose") == 1)
        self._at_first, self._judged = Tally(), True
        self._write({"verdict": text, "parts": [part.as_dict() for part in parts]})

    def _plan_anew(self) -> None:
        """Take a plan that is better for machines that are as they were measured, if there is one.

        What was found at the end of an epoch holds until steps take another time than then.
        """
        watched, tally, self._to_replan = self._watched, self._to_replan, Tally()
        times = watched.agreed(tally)
        step_s = times.planned_s
        if math.isnan(step_s) or abs(step_s / self._settled_s - 1) <= UNCERTAINTY:
            return
        self._settled_s = step_s
        assert self.replan is not None, "or nothing was timed for it"
        found = watched.plan_anew(times, self.replan)
        if found is not None:
            self._write({"replan": found._asdict()})
            if found.taken:
                self._settled_s = math.nan

    def _write(self, found: Mapping[str, Any]) -> None:
        if self._files is not None:
            self._files.add(self._steps, self._epoch, found)


def _part(name: str, value: Any) -> float:
    """A part of a step, from 0 to below 1."""
    expected = "a part of a step, from 0 to below 1, or None"
    found = arguments.number(name, value, least=0, expected=expected)
    if found >= 1:
        raise arguments.argument_error(name, value, expected)
    return found


# --- Files of a monitor: lines of JSON, and scalars for TensorBoard ---

logger = logging.getLogger("tfpar")

LINES = "monitor.jsonl"


class MonitorWriter:
    """The files of one training, in one folder, which is made if need be.

    Lines are added to those that are there: one object each, whole, and on disk at once. Scalars
    are written where the package `tensorboard` is installed. A file that cannot be written later
    on ends the writing, with a warning, and not the training.

    Raises:
        TfparError: the folder cannot be written to.
    """

    def __init__(self, folder: str) -> None:
        self.path = os.path.join(folder, LINES)
        self._writes = True
        try:
            os.makedirs(folder, exist_ok=True)
            with open(self.path, "a", encoding="utf-8"):
                pass
        except OSError as error:
            raise TfparError(
                f"tap.Monitor cannot write to {self.path!r}: {error.strerror}. Name another "
                f"folder, or folder=None to write no files."
            ) from error
        self._scalars: Any = None
        if importlib.util.find_spec("tensorboard") is not None:
            self._scalars = tf.summary.create_file_writer(folder)

    def add(self, step: int, epoch: int, found: Mapping[str, Any]) -> None:
        """Add a line, and scalars of its numbers.

        Args:
            step: training steps that the monitor has seen.
            epoch: from 0, as Keras counts.
        """
        line = {"time": time.time(), "epoch": epoch, "step": step, **found}
        if not self._writes:
            return
        try:
            with open(self.path, "a", encoding="utf-8") as file:
                file.write(json.dumps(_plain(line)) + "\n")
            self._add_scalars(step, found)
        except (OSError, tf.errors.OpError) as error:
            self._writes = False
            logger.warning("tap.Monitor writes no more into %s: %s", self.path, error)

    def _add_scalars(self, step: int, found: Mapping[str, Any]) -> None:
        if self._scalars is None:
            return
        group = "monitor_epoch" if found.get("span") == "epoch" else "monitor"
        with self._scalars.as_default():
            for name, value in found.items():
                if isinstance(value, float) and math.isfinite(value):
                    tf.summary.scalar(f"{group}/{name}", value, step=step)
        self._scalars.flush()

    def close(self) -> None:
        """Close the files: nothing more is added."""
        if self._scalars is not None:
            self._scalars.close()


def _plain(value: Any) -> Any:
    """`value` as JSON has it: null for what is no number."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: _plain(one) for key, one in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, str):
        return [_plain(one) for one in value]
    return value
