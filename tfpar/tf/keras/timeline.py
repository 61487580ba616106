"""`Timeline`: a callback that records some training steps of all ranks."""

from __future__ import annotations

import os

import keras

from tfpar.observability.timeline.picture import draw_step
from tfpar.observability.timeline.recorder import Recorder
from tfpar.observability.timeline.request import DEFAULT_STEPS, TimelineRequest
from tfpar.tf.distributed.job import Job


class Timeline(keras.callbacks.Callback):
    """Callback that records what every rank does in a few training steps.

    https://ui.perfetto.dev shows its file.

        model.fit(dataset, callbacks=[tap.Timeline("t.json", steps=(10, 12))])

    The file is Chrome trace JSON: a process for each rank, with threads for what it computes and
    for what it communicates. Slices bear the Keras path of their layer. Where ranks wait for one
    that comes late to a collective, a slice says for which. Clocks of several machines are
    aligned at collectives. The first rank writes the file once the last of the steps is over; it
    appears whole or not at all. Nothing is measured in other steps. In a notebook, the callback is
    shown as a picture of the last of these steps.

    Args:
        path: of the file, on the machine of the first rank.
        steps: the first and the last step, counted from 1 as the progress bar counts batches,
            through all epochs of `fit`.

    Raises:
        ArgumentError: not a path, or not steps.
        TfparError: the file cannot be written; in `fit`: the model is not parallel, or another
            timeline is being recorded.
    """

    def __init__(
        self, path: str | os.PathLike[str], steps: tuple[int, int] = DEFAULT_STEPS
    ) -> None:
        super().__init__()
        job = Job.of(os.environ)
        self._asked = TimelineRequest.of(path, steps, writes=job is None or job.rank == 0)

    def _repr_svg_(self) -> str | None:
        """Return the picture that notebooks show; None without a file."""
        return draw_step(self._asked.path)

    def on_train_begin(self, logs=None):
        self._recorder.ask(self._asked)

    def on_train_end(self, logs=None):
        self._recorder.give_up(self._asked)

    @property
    def _recorder(self) -> Recorder:
        from tfpar.tf.keras.adapter import state_of  # which knows the callbacks

        return state_of(self.model).session.recorder
