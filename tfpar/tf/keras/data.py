"""Data that is sharded already: each rank reads its own part of every global batch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf

from tfpar.spec import TfparError
from tfpar.spec.arguments import argument_error
from tfpar.tf.capture.step import argument_specs, batch_size_of
from tfpar.tf.keras.adapter import state_of
from tfpar.tf.keras.batches import batch_as_fit_feeds, check_training_batch, mark_parts


def shard_data(
    model: keras.Model, make: Callable[[int, int], tf.data.Dataset], batch: Any
) -> tf.data.Dataset:
    """Make a dataset for `fit` of which each process reads only what it needs.

        def part(index, count):
            files = tf.data.Dataset.list_files("*.tfrecord", shuffle=False).shard(count, index)
            records = tf.data.TFRecordDataset(files).map(parse)
            return records.batch(256 // count, drop_remainder=True)

        model.fit(tap.shard_data(model, part, (x_spec, y_spec)))

    The plan says into how many parts a batch is split; ranks that hold parts of one model copy read
    the same part. Where all ranks are in this process, stages have unlike meshes, or a rank needs
    all of some input, there is one part, which is everything: "Inputs of the step" in
    `Plan.summary` says what ranks take.

    Args:
        model: compiled and parallel; it is planned now, if it has not been yet.
        make: gives part `index` of `count`, as batches of equal size on all ranks: together they
            are the global batch. Every rank has to give as many batches.
        batch: one global batch, `(x, y)` or `(x, y, sample_weight)`: arrays or `tf.TensorSpec`s.

    Raises:
        TfparError: the model is not parallel or not compiled, or the batch does not divide.
    """
    state = state_of(model, compiled=True)
    if not callable(make):
        raise argument_error(
            "make", make, "a function of (index, count) that gives a tf.data.Dataset"
        )
    batch = batch_as_fit_feeds(model, batch)
    check_training_batch("batch", batch, model)
    world = state.world
    if world is None:
        return make(0, 1)
    specs = argument_specs((batch,))
    if any(isinstance(s, tf.RaggedTensorSpec) for s in tf.nest.flatten(specs)):
        raise TfparError(
            "shard_data cannot read a ragged batch in parts. Give fit the whole dataset, or pad "
            "the batches: tensor.to_tensor()."
        )
    plan = state.step("train").find_plan(specs)
    if len({*plan.meshes}) > 1:  # a part of one stage is none of another
        return make(0, 1)
    at, index, count = plan.coordinates(world.rank), 0, 1
    for axis in sorted(map(plan.mesh.axis, plan.batch_axes)):
        index = index * plan.mesh.shape[axis] + at[axis]
        count *= plan.mesh.shape[axis]
    size = batch_size_of(specs)
    if size is None or size % count:
        raise TfparError(
            f"A global batch of {size} cannot be read in {count} equal parts ({plan.mesh}, batch "
            f"over {', '.join(plan.batch_axes)}). Use a batch size that {count} divides."
        )
    dataset = make(index, count)
    mark_parts(dataset, count)
    return dataset
