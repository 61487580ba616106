"""A monitored training on processes: figures, checks and new plans are everyone's."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import keras
import pytest

import tfpar as tap
from tests.slow_links import slow_all_reduces
from tests.tf.distributed.training.place import (
    Case,
    Place,
    Results,
    perceptron,
    regression,
    trained,
)
from tfpar.spec import RuntimeMismatchError
from tfpar.tf.distributed.world import this_world
from tfpar.tf.runtime.backends.process import ProcessProgram

X, Y = regression(70)  # the last batch of three is smaller


def slow_devices(size: int) -> tap.Cluster:
    """As if computing were all that takes time: the batch is split."""
    slow = tap.Device({"float32": 1e6, "float64": 1e6}, 1e9, 1e11)
    return tap.Cluster.regular("slow", slow, [tap.Level(size, 1e10, 1e-6)])


def lines(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "monitor.jsonl").read_text().splitlines()]


def a_new_plan_is_taken(place: Place) -> Results:
    """All-reduces take 50 ms more than is known to the plan: it is given up after an epoch."""
    options = {"cluster": slow_devices(place.size), "verbose": 0}
    with place.parallel(mesh=[place.size], planner="tap", **options):
        inputs = keras.Input((6,))
        h = keras.layers.Dense(10, "tanh")(inputs)
        h = keras.layers.Dropout(0.2, seed=1)(h)
        model = keras.Model(inputs, keras.layers.Dense(2)(h))
        model.compile(keras.optimizers.Adam(0.01), "mse", metrics=["mae"], jit_compile=False)
    arguments = {"batch_size": 3, "epochs": 3, "shuffle": False, "validation_data": (X[:9], Y[:9])}
    if place.size == 1:
        return trained(model, X, Y, **arguments)
    monitor = tap.Monitor(place.folder, every=10, replan=0.1)
    with slow_all_reduces(ProcessProgram, 0.05):
        results = trained(model, X, Y, callbacks=[monitor], **arguments)
    world = this_world()
    assert world is not None
    plan = tap.plan_of(model)
    world.agree("plans", plan.to_json(), str)
    world.agree("figures", monitor.figures, str)
    if place.rank == 0:
        written = lines(place.folder)
        assert [line["step"] for line in written if line.get("span") == "epoch"] == [24, 48, 72]
        first = next(line["replan"] for line in written if "replan" in line)
        assert first["taken"] and first["after_s"] < 0.9 * first["before_s"]
    assert not plan.batch_axes or plan.mesh.shape[plan.mesh.axis(plan.batch_axes[0])] == 1
    measured = {"history/" + name for name in monitor.figures}
    assert measured < results.keys()
    return {name: value for name, value in results.items() if name not in measured}


def what_differs_is_found(place: Place) -> Results:
    """Rank 1's copy of a weight is changed after two steps: all ranks learn of it at the next
    report."""
    if place.size == 1:
        return {}
    with place.parallel():
        model = perceptron()

    class Tamper(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            steps.append(batch)
            if batch == 1 and place.rank == 1:
                (shard,) = model.get_layer("fc1").kernel._value.shards.values()
                shard.assign_add(shard.read_value())

    steps: list[int] = []
    callbacks = [Tamper(), tap.Monitor(place.folder, every=4)]
    with pytest.raises(RuntimeMismatchError, match="Ranks 0 and 1 hold different values of .fc1"):
        model.fit(X, Y, batch_size=4, verbose=0, shuffle=False, callbacks=callbacks)
    assert len(steps) in (3, 4)  # the monitor comes before
    return {}


CASES: list[Case] = [a_new_plan_is_taken, what_differs_is_found]
