"""Ranks in one memory do not repeat each other; ranks in several each do their own part."""

import keras
import numpy as np
import pytest

import tfpar as tap
from tests.equivalence import assert_equivalent
from tfpar.spec import Mesh, Replicate, Shard
from tfpar.tf.runtime.devices import holders

MESH = Mesh.of([2, 2])
CPUS = [f"/job:localhost/replica:0/task:0/device:CPU:{rank}" for rank in range(4)]
GPUS = [device.replace("CPU", "GPU") for device in CPUS]
rng = np.random.default_rng(0)


@pytest.mark.parametrize(
    ("spec", "expected"),
    [
        ((Replicate(), Replicate()), (0, 0, 0, 0)),
        ((Replicate(), Shard(1)), (0, 1, 0, 1)),
        ((Shard(0), Replicate()), (0, 0, 2, 2)),
        ((Shard(0), Shard(1)), (0, 1, 2, 3)),
    ],
)
def test_a_shard_is_held_once_in_a_memory(spec, expected):
    assert holders(spec, MESH, CPUS) == expected
    assert holders(spec, MESH, GPUS) == (0, 1, 2, 3)


def mlp():
    model = keras.Sequential(
        [
            keras.Input((6,)),
            keras.layers.Dense(8, activation="relu", name="fc1"),
            keras.layers.LayerNormalization(),
            keras.layers.Dense(3, name="fc2"),
        ]
    )
    model.compile(keras.optimizers.Adam(0.01), "mse", jit_compile=False)
    return model


DATA = rng.normal(size=(16, 6)).astype("float32"), rng.normal(size=(16, 3)).astype("float32")


def count_nodes(trained, op_type: str) -> int:
    definition = trained.executable().program.function.definition
    return sum(node.op == op_type for node in definition.node_def)


@pytest.mark.slow
def test_replicated_weights_are_stored_and_updated_once():
    parallel, _ = assert_equivalent(mlp, DATA, tap.split([2, 2]))
    for weight in parallel.model.trainable_weights:
        assert len({id(shard) for shard in weight.value.shards.values()}) == 1
    # Weight, momentum and velocity of each.
    updates = count_nodes(parallel, "AssignAddVariableOp") + count_nodes(
        parallel, "AssignSubVariableOp"
    )
    assert updates == 3 * 6


@pytest.mark.slow
def test_what_is_replicated_runs_once():
    constraints = [tap.shard("fc1/kernel", dim=1, axis="model")]
    parallel, _ = assert_equivalent(mlp, DATA, tap.split([1, 4]), constraints)
    whole, _ = assert_equivalent(mlp, DATA, tap.split([1]))
    # Normalisation needs all features: the outputs of fc1 are gathered, it runs on one rank.
    assert count_nodes(parallel, "Rsqrt") == count_nodes(whole, "Rsqrt")
    assert count_nodes(parallel, "Relu") == 4 * count_nodes(whole, "Relu")
