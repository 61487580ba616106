"""`tap.fsdp` trains as one device does, and stores, gathers and scatters what it says."""

from __future__ import annotations

import collections

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfpar as tap
from benchmarks.models import SMALL, batch_of, compile_model
from tests.cases import nightly
from tests.equivalence import assert_equivalent, traced
from tests.planning.test_slots import MACHINES
from tfpar.tf.keras import parallel_model

MEGATRON = [tap.shard(".*fc1/kernel", 1, "model"), tap.shard(".*fc2/kernel", 0, "model")]


def sgd():
    """Reads all gradients for the norm that it clips them by."""
    return keras.optimizers.SGD(0.1, momentum=0.9, global_clipnorm=1.0)


def gpt():
    return compile_model(SMALL["gpt"](vocabulary=60), sgd())


def compiled_gpt():
    return compile_model(SMALL["gpt"](vocabulary=60), sgd(), jit_compile=True)


def wide():
    """Sizes that four ranks do not divide."""
    return compile_model(SMALL["wide"](classes=1001), sgd())


def recurrent():
    inputs = keras.Input((6, 8))
    x = keras.layers.LSTM(12, return_sequences=True)(inputs)
    x = keras.layers.Bidirectional(keras.layers.GRU(6))(x)
    model = keras.Model(inputs, keras.layers.Dense(3, kernel_regularizer="l2")(x))
    model.compile(sgd(), "mse", jit_compile=False)
    return model


def sequences():
    rng = np.random.default_rng(0)
    return rng.random((16, 6, 8), "float32"), rng.random((16, 3), "float32")


def trained(build, mesh, constraints, **options):
    keras.utils.set_random_seed(0)
    data = sequences() if build is recurrent else batch_of(build(), 16)
    return assert_equivalent(build, data, tap.split(mesh), constraints, batch_size=8, **options)[0]


def local_graphs(parallel):
    program = parallel_model(parallel.model).executables["train"].compiled.local
    return list(program.graphs())


def test_weights_are_gathered_block_by_block():
    parallel = trained(gpt, {"data": 2}, [tap.fsdp("data")])
    (graph,) = local_graphs(parallel)
    packed = [
        len(op.inputs) for op in graph.ops if op.type == "AllGather" and "gathered" in op.name
    ]
    # Embedding, two blocks, norm, head; and again, but for embedding and head.
    assert len(packed) == 5 + 3 and max(packed) == 16, packed
    stored = {v.name: v.shape for v in graph.variables if v.trainable}
    assert stored["block_0_fc1/kernel"] == (32, 64)
    assert parallel.model.get_layer("block_0_fc1").kernel.shape == (32, 128)


def test_microbatches_gather_and_scatter_for_themselves():
    pipeline = tap.Pipeline(stages=1, microbatches=2)
    parallel = trained(gpt, {"data": 2}, [tap.fsdp("data")], options=dict(pipeline=pipeline))
    step, *bodies = local_graphs(parallel)
    within = collections.Counter(op.type for body in bodies for op in body.ops)
    once = collections.Counter(op.type for op in step.ops)
    assert within["AllGather"] == 8 and within["ReduceScatter"] >= 1
    assert once["ReduceScatter"] == 0, "the rows of an embedding's gradient, too"


@pytest.mark.slow
def test_a_search_stores_weights_in_parts_where_nothing_cheaper_fits():
    keras.utils.set_random_seed(0)
    batch = batch_of(gpt(), 8)
    machines = dict(cluster=MACHINES, planner="tap")
    asked = dict(pipeline=tap.Pipeline(1, 1), recompute=False, offload=False)
    sharded = tap.plan(gpt, batch, {"data": 2}, constraints=FSDP, **machines, **asked)
    limit = 1.01 * sharded.cost.memory_bytes  # vectors, which the planner leaves open, stay whole
    options = {**asked, "memory_limit": limit}
    parallel = trained(gpt, [2], [], options=options, **machines)
    plan = tap.plan_of(parallel.model)
    assert plan.cost.memory_bytes <= limit
    assert sum(v.gathered is not None for v in plan.variables.values()) >= 15
    assert "shard weights" in {tried.name for tried in plan.findings.attempts}


@pytest.mark.slow
def test_names_of_the_users_own_ops_mean_nothing():
    """What gathers is told by a mark, not by its name."""

    def named():
        inputs = keras.Input((8,))
        x = keras.layers.Dense(16, "relu", name="gathered")(inputs)
        for name in ("gathered", "stored_part", "scattered"):
            x = keras.layers.Lambda(lambda t, name=name: tf.identity(t, name=name))(x)
        model = keras.Model(inputs, keras.layers.Dense(4, name="scattered")(x))
        model.compile(sgd(), "mse", jit_compile=False)
        return model

    rng = np.random.default_rng(0)
    data = rng.random((16, 8), "float32"), rng.random((16, 4), "float32")
    assert_equivalent(named, data, tap.split({"data": 2}), [tap.fsdp("data")], batch_size=8)


FSDP = [tap.fsdp("data")]
ON_TWO = {"data": 2}
CASES = {
    "uneven": (wide, {"data": 4}, FSDP, {}),
    "recomputed": (gpt, ON_TWO, FSDP, dict(options=dict(recompute=True))),
    "compiled by XLA": (compiled_gpt, ON_TWO, FSDP, dict(plainly=traced)),
    "stages": (gpt, ON_TWO, FSDP, dict(options=dict(pipeline=tap.Pipeline(2, 2)))),
    "beside Megatron": (gpt, {"data": 2, "model": 2}, [*FSDP, *MEGATRON], {}),
    "copies of shards": (gpt, {"data": 2, "shards": 2}, [tap.fsdp("shards")], {}),
    "optimizer state alone": (gpt, ON_TWO, [tap.fsdp("data", stage=1)], {}),
    "loops": (recurrent, ON_TWO, FSDP, {}),
    "kept": (gpt, ON_TWO, [tap.fsdp("data", keep=True)], {}),
    "chunks": (gpt, ON_TWO, FSDP, dict(options=dict(chunks=2))),
    "convolutions": (lambda: compile_model(SMALL["resnet"](), "sgd"), ON_TWO, FSDP, {}),
    "searched by Rhino": (gpt, ON_TWO, FSDP, dict(planner="rhino", cluster="dgx-a100")),
}
BY_DAY = ("uneven", "recomputed", "compiled by XLA", "stages", "beside Megatron")


@pytest.mark.slow
@pytest.mark.parametrize("case", [name if name in BY_DAY else nightly(name) for name in CASES])
def test_it_trains_as_on_one_device(case):
    build, mesh, constraints, options = CASES[case]
    trained(build, mesh, constraints, **options)
