"""What cannot be trained together is refused on every rank, and names what to do."""

from __future__ import annotations

from collections.abc import Callable

import keras
import numpy as np

import tfpar as tap
from tests.tf.distributed.training.place import Case, Place, Results, perceptron, regression
from tfpar.spec import RuntimeMismatchError, TfparError

X, Y = regression(8)


def refused(kind: type[TfparError], action: Callable[[], object]) -> Results:
    """The error's message.

    Raises:
        AssertionError: there was none.
    """
    try:
        action()
    except kind as error:
        return {"message": np.array(str(error))}
    raise AssertionError("nothing was refused")


def data_of_its_own(place: Place) -> Results:
    with place.parallel():
        model = perceptron()
    x = np.random.default_rng().normal(size=X.shape)
    return refused(RuntimeMismatchError, lambda: model.fit(x, Y, batch_size=8, verbose=0))


def another_model(place: Place) -> Results:
    with place.parallel():
        inputs = keras.Input((6,))
        activation = "relu" if place.rank else "tanh"
        model = keras.Model(inputs, keras.layers.Dense(2, activation, name="fc")(inputs))
        model.compile("sgd", "mse")
    return refused(RuntimeMismatchError, lambda: model.fit(X, Y, batch_size=8, verbose=0))


def another_width(place: Place) -> Results:
    """Searched, so that the plan of the one model would have to do for the other."""
    with place.parallel(planner="tap"):
        inputs = keras.Input((6,))
        model = keras.Model(inputs, keras.layers.Dense(2 + place.rank, name="fc")(inputs))
        model.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    labels = np.zeros(len(X), "int64")
    return refused(RuntimeMismatchError, lambda: model.fit(X, labels, batch_size=8, verbose=0))


def another_option(place: Place) -> Results:
    chunks = None if place.rank else 2
    return refused(RuntimeMismatchError, lambda: tap.auto_parallel([place.size], chunks=chunks))


def another_size_of_batch(place: Place) -> Results:
    with place.parallel():
        model = perceptron()
    size = 8 - place.rank
    return refused(RuntimeMismatchError, lambda: model.train_on_batch(X[:size], Y[:size]))


def a_mesh_of_another_size(place: Place) -> Results:
    return refused(TfparError, lambda: tap.auto_parallel([place.size + 1]))


def _pipelines(name: str, first: tap.Pipeline | None, other: tap.Pipeline | None) -> Case:
    """Rank 1 asks for another pipeline than rank 0."""

    def case(place: Place) -> Results:
        asked = other if place.rank else first
        return refused(
            RuntimeMismatchError, lambda: tap.auto_parallel([place.size], pipeline=asked)
        )

    case.__name__ = name
    return case


TWO = tap.Pipeline(2, 4)
SWAPPED = tap.Schedule.parse("0F0,0F1,0F2,0B0,0B1,0B2\n1F0,1F1,1B0,1F2,1B1,1B2")
KEPT = tap.Schedule.parse("0F0,0F1,0F2,0B0,0B1,0B2\n1F0,1F1,1B0,1B1,1F2,1B2")
another_schedule = _pipelines("another_schedule", TWO, tap.Pipeline(2, 4, "gpipe"))
other_microbatches = _pipelines("other_microbatches", TWO, tap.Pipeline(2, 2))
fewer_stages = _pipelines("fewer_stages", TWO, tap.Pipeline(1, 4))
no_pipeline = _pipelines("no_pipeline", tap.Pipeline(microbatches=4), None)
other_statistics = _pipelines(
    "other_statistics", TWO, tap.Pipeline(2, 4, batch_statistics="microbatch")
)
another_order = _pipelines(
    "another_order", tap.Pipeline(schedule=KEPT), tap.Pipeline(schedule=SWAPPED)
)


class _Evaluates(keras.callbacks.Callback):
    def on_epoch_end(self, epoch, logs=None):
        self.model.evaluate(X, Y, verbose=0)


def a_step_on_the_first_rank_only(place: Place) -> Results:
    with place.parallel():
        model = perceptron()
    callbacks = [tap.on_first_rank(_Evaluates())]
    return refused(TfparError, lambda: model.fit(X, Y, verbose=0, callbacks=callbacks))


def training_goes_on(place: Place) -> Results:
    """After all of that."""
    with place.parallel():
        model = perceptron()
    losses = model.fit(X, Y, batch_size=8, epochs=2, verbose=0).history["loss"]
    return {"losses": np.array(losses)}


MESSAGES: dict[Case, str] = {
    data_of_its_own: r"fed different batches.*Every rank has to read the same data.*seed",
    another_model: r"different programs.*in '.*fc.*', rank 0 has .*Tanh.*Relu.*same model",
    another_width: r"in the train step: in '.*fc', kernel is float64\[6, 2\] on rank 0 and float64"
    r"\[6, 3\] on rank 1; bias is float64\[2\] on rank 0 and .* same model",
    another_size_of_batch: r"it gets float64\[8, 6\].* on rank 0 and float64\[7, 6\].* on rank 1",
    another_option: r"Ranks differ in their options: chunks=2 on rank 0 and None on rank 1\. Give",
    a_mesh_of_another_size: r"mesh has 3 ranks and the job 2 processes.*Start as many",
    another_schedule: "schedule='1f1b' on rank 0 and 'gpipe' on rank 1.*same pipeline=",
    other_microbatches: "differ in their pipelines: microbatches=4 on rank 0 and 2 on rank 1",
    fewer_stages: "stages=2 on rank 0 and 1 on rank 1, sets of ranks=2",
    no_pipeline: "microbatches=4 on rank 0 and 1 on rank 1",
    other_statistics: "batch_statistics='exact' on rank 0 and 'microbatch' on rank 1",
    a_step_on_the_first_rank_only: r"_Evaluates\.on_epoch_end runs on rank 0 only, and takes a "
    r"test step, which all ranks take together\. Let every rank run it: tap\.on_every_rank",
    another_order: "set of ranks 1 runs 1B1 on rank 0 where rank 1 has 1F2",
}
CASES: list[Case] = [*MESSAGES, training_goes_on]
