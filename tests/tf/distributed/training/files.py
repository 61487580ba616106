"""What training writes and reads: models, weights, logs, backups."""

from __future__ import annotations

import csv
from collections.abc import Callable

import keras
import numpy as np

import tfpar as tap
from tests import written_models
from tests.cases import is_nightly
from tests.tf.distributed.training.place import (
    Case,
    Place,
    Results,
    floats,
    numbers,
    perceptron,
    precision,
    regression,
    trained,
    weights,
)
from tests.tf.keras.logger_callbacks import AutoLogger, Board, MetricsLogger, Run, Table, Weights

X, Y = regression(20)


def models_and_weights(place: Place) -> Results:
    """Split weights, and an optimizer that has slots; see `test_equivalence` for the files."""
    with place.split():
        model = perceptron(keras.optimizers.Adam(0.01))
    results = trained(model, X, Y, batch_size=4)
    model.save(place.folder / "model.keras")
    model.save_weights(place.folder / "model.weights.h5")
    # The same model goes on, and back to where it was.
    later = trained(model, X, Y, batch_size=4, shuffle=False)
    model.load_weights(place.folder / "model.weights.h5")
    loaded = trained(model, X, Y, batch_size=4, shuffle=False)
    return {
        **results,
        **{f"later {name}": value for name, value in later.items()},
        **{f"loaded {name}": value for name, value in loaded.items()},
    }


WRITTEN_BY_DAY = ("model.keras", "model.weights.h5", "export", "frozen")
"""Forms of models: what the first rank writes alone, by Keras and TensorFlow, and each its own."""


def models_written(place: Place) -> Results:
    """In every form (at night), of which some belong to a rank; see `test_equivalence` for them."""
    with precision("float32"):
        with place.parallel(written_models.SPLIT, [1, place.size], verbose=0):
            model = written_models.trained()
        if place.size > 1:
            for name, row in written_models.ROWS.items():
                if is_nightly() or name in WRITTEN_BY_DAY:
                    row.write(model, row.path(place.folder, name, place.rank))
        return {"outputs": written_models.outputs(model)}


def weights_loaded_before_the_first_step(place: Place) -> Results:
    path = place.folder / "other.weights.h5"
    with place.split():
        other = perceptron()
        model = perceptron()
    other.save_weights(path)
    model.load_weights(path)
    return trained(model, X, Y, batch_size=4)


def weights_got_and_set(place: Place) -> Results:
    with place.split():
        model = perceptron("adam")
    trained(model, X, Y, batch_size=4)
    model.set_weights([0.5 * w for w in model.get_weights()])
    kernel = model.get_layer("fc1").kernel
    kernel.assign_add(numbers(*kernel.shape))
    halved = weights(model)
    results = trained(model, X, Y, batch_size=4)
    return {**results, **{f"halved {name}": value for name, value in halved.items()}}


def callbacks(place: Place) -> Results:
    """Validation gets worse once the rate is too high: the best is kept, training stops early."""
    with place.split():
        model = perceptron(keras.optimizers.SGD(0.05), metrics=["mae"])
    best, log = place.folder / "best.weights.h5", place.folder / "log.csv"
    stop = keras.callbacks.EarlyStopping("val_loss", patience=2, restore_best_weights=True)
    results = trained(
        model,
        X,
        Y,
        batch_size=5,
        epochs=12,
        validation_data=(X[:7], Y[:7]),
        callbacks=[
            keras.callbacks.LearningRateScheduler(lambda e, rate: rate if e < 3 else 3 * rate),
            keras.callbacks.ReduceLROnPlateau("val_loss", factor=0.5, patience=1),
            keras.callbacks.ModelCheckpoint(best, save_best_only=True, save_weights_only=True),
            keras.callbacks.ModelCheckpoint(place.folder / "{epoch}.keras"),
            keras.callbacks.CSVLogger(log),
            stop,
        ],
    )
    model.load_weights(best)
    with open(log) as file:
        rows = list(csv.DictReader(file))
    return {
        **results,
        **{f"best {name}": value for name, value in weights(model).items()},
        **{f"log/{name}": floats([float(row[name]) for row in rows]) for name in rows[0]},
        "stopped": np.array([stop.stopped_epoch, stop.best_epoch]),
        "files": np.array(sorted(file.name for file in place.folder.iterdir())),
    }


class _Checkpointer:
    """Keeps how many weights each checkpoint has, and writes a line of it."""

    def __init__(self, run: Run) -> None:
        self.run = run

    def save_checkpointables(self, step: int, state: dict) -> None:
        sizes = [np.size(value) for value in keras.tree.flatten(state["trainable_variables"])]
        self.run.log({"step": step, "numbers": int(np.sum(sizes))})

    def close(self) -> None:
        self.run.log({"step": "closed"})


class _Adds(Table):
    """Writes, and adds to the logs what those behind it read."""

    def on_epoch_end(self, epoch, logs=None):
        logs["epoch_squared"] = float(epoch**2)
        super().on_epoch_end(epoch, logs)


class _Stops(keras.callbacks.Callback):
    """Ends training by what another callback has added."""

    stopped = -1

    def on_epoch_end(self, epoch, logs=None):
        if logs["epoch_squared"] > 3:
            self.stopped, self.model.stop_training = epoch, True


def loggers(place: Place) -> Results:
    """What logs writes once, whoever wrote it; what ends training does so on every rank."""
    with place.split():
        model = perceptron()
    run, saved = Run(place.folder / "run.txt"), Run(place.folder / "saved.txt")
    table, board, stops = place.folder / "table.csv", place.folder / "board", _Stops()
    results = trained(
        model,
        X,
        Y,
        batch_size=5,
        epochs=9,
        callbacks=[
            MetricsLogger(run, 2),
            AutoLogger(run),
            Weights(_Checkpointer(saved)),
            Weights(_Checkpointer(saved), 5),
            _Adds(table),
            Board(board),
            keras.callbacks.LambdaCallback(on_train_end=lambda logs: run.log({"step": "end"})),
            stops,
        ],
    )
    return {
        **results,
        "stopped": np.array(stops.stopped),
        "lines": np.array([len(path.read_text().splitlines()) for path in (run.path, table)]),
        "saved": np.array(saved.path.read_text().splitlines()),
        "boards": np.array([len(f.read_text().splitlines()) for f in board.iterdir()]),
    }


class _Interrupted(Exception):
    pass


class _Interrupt(keras.callbacks.Callback):
    def on_epoch_begin(self, epoch, logs=None):
        if epoch == 2:
            raise _Interrupted


def _resumed(place: Place, backup: Callable[[str], keras.callbacks.Callback]) -> Results:
    """Four epochs; ranks are interrupted before the third, and another model goes on."""

    def build() -> keras.Model:
        with place.split():
            return perceptron(keras.optimizers.Adam(name="adam"))  # not adam_1 in another model

    def fit(model: keras.Model, *more: keras.callbacks.Callback) -> None:
        model.fit(X, Y, batch_size=8, epochs=4, shuffle=False, verbose=0, callbacks=more)

    model = build()
    if place.size == 1:
        fit(model)
        return weights(model)
    folder = str(place.folder / "backup")
    try:
        fit(model, backup(folder), _Interrupt())
    except _Interrupted:
        pass
    keras.utils.set_random_seed(1)
    again = build()
    fit(again, backup(folder))
    assert int(again.optimizer.iterations) == 12
    return {name: w for name, w in zip(weights(model), weights(again).values(), strict=True)}


def backups(place: Place) -> Results:
    return _resumed(place, keras.callbacks.BackupAndRestore)


def checkpoints(place: Place) -> Results:
    return _resumed(place, tap.Checkpoint)


CASES: list[Case] = [
    models_and_weights,
    models_written,
    weights_loaded_before_the_first_step,
    weights_got_and_set,
    callbacks,
    loggers,
    backups,
    checkpoints,
]
