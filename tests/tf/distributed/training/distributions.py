"""`keras.distribution`, whose devices are the ranks of the job."""

from __future__ import annotations

import contextlib

import tensorflow as tf
from keras.distribution import DataParallel, DeviceMesh, LayoutMap, ModelParallel, list_devices

from tests.tf.distributed.training.place import (
    Case,
    Place,
    Results,
    is_split,
    numbers,
    perceptron,
    trained,
)
from tfpar.tf.keras.adapter import parallel_model

X, Y = numbers(21, 6), numbers(21, 2, seed=1)


def layers_split_by_a_layout_map(place: Place) -> Results:
    """Every rank is given the whole dataset, as anywhere: Keras cuts nothing out of it."""
    scope: contextlib.AbstractContextManager = contextlib.nullcontext()
    if place.size > 1:
        assert len(list_devices()) == place.size and list_devices("tpu") == []
        layouts = LayoutMap(DeviceMesh((1, place.size), ("data", "model")))
        layouts[".*fc1.*kernel"] = (None, "model")
        scope = ModelParallel(layout_map=layouts, batch_dim_name="data").scope()
    with scope:
        model = perceptron("adam")
        dataset = tf.data.Dataset.from_tensor_slices((X, Y)).batch(4)
        results = trained(model, dataset, epochs=2)
    assert place.size == 1 or is_split(model.get_layer("fc1").kernel)
    return results


def data_parallel_over_all_devices(place: Place) -> Results:
    scope = DataParallel().scope() if place.size > 1 else contextlib.nullcontext()
    with scope:
        model = perceptron()
        assert (parallel_model(model) is not None) == (place.size > 1)
        return trained(model, X, Y, batch_size=8, epochs=2, shuffle=True)


CASES: list[Case] = [
    layers_split_by_a_layout_map,
    data_parallel_over_all_devices,
]
