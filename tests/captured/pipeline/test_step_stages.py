"""Whole training steps, as Keras's optimizers update: each variable has one stage."""

from __future__ import annotations

import keras
import numpy as np
import pytest
from keras import layers

import tfpar as tap
from tfpar.compile import simplify_step
from tfpar.ir import UPDATE, Roles
from tfpar.pipeline import assignable, stages_of_step
from tfpar.tf.capture import argument_specs
from tfpar.tf.keras import parallel_model

OPTIMIZERS = {
    "adam": lambda: keras.optimizers.Adam(1e-3, global_clipnorm=1.0, use_ema=True),
    "scheduled": lambda: keras.optimizers.AdamW(keras.optimizers.schedules.CosineDecay(1e-3, 9)),
    "scaled": lambda: keras.optimizers.LossScaleOptimizer(keras.optimizers.Adam()),
    "accumulating": lambda: keras.optimizers.SGD(0.1, 0.9, gradient_accumulation_steps=2),
    "adafactor": keras.optimizers.Adafactor,
    "lamb": keras.optimizers.Lamb,
}


def model(optimizer: keras.optimizers.Optimizer) -> keras.Model:
    """Blocks of a dense layer, dropout and batch normalisation, with penalties."""
    x = inputs = keras.Input((8,))
    for i in range(3):
        h = layers.Dense(8, "relu", kernel_regularizer="l2", name=f"dense_{i}")(x)
        x = layers.Add()([x, layers.BatchNormalization(name=f"norm_{i}")(layers.Dropout(0.5)(h))])
    found = keras.Model(inputs, layers.Dense(3, name="head")(x))
    found.compile(optimizer, "mse", metrics=["mae"], jit_compile=False)
    return found


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_every_variable_lies_in_one_stage(optimizer):
    keras.utils.clear_session(free_memory=False)
    with tap.auto_parallel([1], planner=None):
        built = model(OPTIMIZERS[optimizer]())
    batch = (np.zeros((4, 8), "float32"), np.zeros((4, 3), "float32"))
    step = parallel_model(built).step("train").capture(argument_specs((batch,)))
    simplify_step(step)
    graph = step.graph
    roles = Roles.of(graph, step.gradient_tensors)
    ops = assignable(graph, roles)
    stages = stages_of_step(graph, roles, {op: i * 3 // len(ops) for i, op in enumerate(ops)})
    assert list(stages) == graph.ops
    consumers = graph.consumers()
    home = {}
    for variable in graph.variables:
        handle = variable.handle
        lie = {stages[op] for op in (handle.op, *consumers.get(handle, ()))}
        assert len(lie) == 1, variable.name
        (home[variable.name],) = lie
    assert home["dense_0/kernel"] == 0 and home["head/kernel"] == 2
    slots = [v.name for v in graph.variables if "dense_1_kernel" in v.name]
    assert {home[name] for name in slots} <= {home["dense_1/kernel"]}
    assert home["loss/total"] == home["loss/count"] == 2
    between = {
        tensor
        for op in graph.ops
        for tensor in op.inputs
        if roles.phase[op] == UPDATE and stages[tensor.op] != stages[op]
    }
    assert all(tensor.shape == () for tensor in between), "updates send scalars only"
