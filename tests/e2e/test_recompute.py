"""Activations that the backward pass computes again: the same numbers from less memory."""

from __future__ import annotations

import collections
import dataclasses
import functools
import os
import subprocess

import keras
import numpy as np
import pytest
from keras import layers

import tfpar as tap
from tests import preloaded
from tests.cases import nightly
from tests.clusters import device, two_levels
from tests.equivalence import Trained, assert_same, op_by_op, train
from tests.jobs.launch.programs import variables
from tests.planning.problems import Captured, price
from tests.time_limits import time_limit
from tfpar.cluster import Cluster, Link
from tfpar.planning import find_plan
from tfpar.planning.intra_op import find_planner
from tfpar.planning.memory import recomputed_problem
from tfpar.plans import Plan
from tfpar.spec import PlanError, SpecError, TfparError
from tfpar.tf.keras import parallel_model

LENGTH, VOCABULARY = 8, 40
MEGATRON = [
    tap.shard(r".*attention/(query|key|value)/kernel", dim=1, axis="model"),
    tap.shard(r".*fc1/kernel", dim=1, axis="model"),
]


def gpt(num_layers: int = 2) -> keras.Model:
    """With dropout in attention and on the residual stream."""
    ids = keras.Input((LENGTH,), dtype="int32")
    x = layers.Embedding(VOCABULARY, 16, name="tokens")(ids)
    for i in range(num_layers):
        h = layers.LayerNormalization(name=f"block_{i}_ln1")(x)
        attention = layers.MultiHeadAttention(2, 8, dropout=0.2, name=f"block_{i}_attention")
        x = x + attention(h, h, use_causal_mask=True)
        h = layers.LayerNormalization(name=f"block_{i}_ln2")(x)
        h = layers.Dense(64, activation="gelu", name=f"block_{i}_fc1")(h)
        x = x + layers.Dropout(0.2)(layers.Dense(16, name=f"block_{i}_fc2")(h))
    model = keras.Model(ids, layers.Dense(VOCABULARY, name="head")(x))
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.SGD(0.1, momentum=0.9), loss, jit_compile=False)
    return model


def normalized() -> keras.Model:
    """Blocks with moving statistics."""
    x = inputs = keras.Input((6,))
    for i in range(3):
        h = layers.Dense(12, name=f"block_{i}_in")(x)
        h = layers.BatchNormalization(momentum=0.5, name=f"block_{i}_norm")(h)
        x = x + layers.Dense(6, "tanh", name=f"block_{i}_out")(layers.Activation("relu")(h))
    model = keras.Model(inputs, layers.Dense(2, name="head")(x))
    model.compile("sgd", "mse", jit_compile=False)
    return model


def tokens(n: int = 8) -> tuple[np.ndarray, np.ndarray]:
    ids = np.random.default_rng(0).integers(0, VOCABULARY, (n, LENGTH + 1)).astype("int32")
    return ids[:, :-1], ids[:, 1:]


def numbers(n: int = 8) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(0)
    return rng.normal(size=(n, 6)).astype("float32"), rng.normal(size=(n, 2)).astype("float32")


def recomputed_ops(run: Trained) -> list:
    return [o for o in run.executable().partitioned.graph.ops if "/recompute" in o.name]


CASES = {
    "both": (gpt, tokens, [2, 2], MEGATRON),
    "data parallel": (gpt, tokens, [2], ()),
    "tensor parallel": (gpt, tokens, [1, 2], MEGATRON),
    "moving statistics": (normalized, numbers, [2], ()),
}


@functools.cache
def runs(case: str) -> tuple[Trained, Trained, Trained]:
    """A case on one device, and on a mesh with activations stored and computed again."""
    build, data, mesh, constraints = CASES[case]
    plain = train(op_by_op(build), data())
    stored, again = (
        train(
            build,
            data(),
            mesh=tap.split(mesh),
            constraints=constraints,
            start=plain.start,
            options={"recompute": recompute},
        )
        for recompute in (False, True)
    )
    return plain, stored, again


@pytest.mark.slow
@pytest.mark.parametrize("case", ["both", *(nightly(case) for case in CASES if case != "both")])
def test_recomputing_changes_no_number(case):
    plain, stored, again = runs(case)
    assert_same(again, plain)
    np.testing.assert_allclose(again.losses, stored.losses, rtol=1e-6)
    for got, wanted in zip(again.weights, stored.weights, strict=True):
        # TensorFlow fuses ops of which nothing but the end is read: they round differently.
        np.testing.assert_allclose(got, wanted, rtol=1e-5, atol=1e-6)
    assert recomputed_ops(again) and not recomputed_ops(stored)


@pytest.mark.slow
def test_what_is_recomputed_selectively_keeps_products_with_weights():
    plain, stored, whole = runs("data parallel")
    again = train(
        gpt, tokens(), mesh=tap.split([2]), start=plain.start, options={"recompute": "selective"}
    )
    assert_same(again, plain)
    plan = parallel_model(again.model).plan
    assert plan.recompute and all(name.endswith("/selective") for name in plan.recompute)
    some, all_ = (collections.Counter(op.type for op in recomputed_ops(r)) for r in (again, whole))
    assert some["Softmax"] == all_["Softmax"] and some["MatMul"] == 0 < all_["MatMul"]
    assert 0 < some["BatchMatMulV2"] < all_["BatchMatMulV2"], "attention's own products"


@pytest.mark.slow
def test_tensor_parallel_blocks_repeat_their_collectives():
    _, stored, again = runs("both")
    size = 4 * LENGTH * 16 * 4
    before, after = ([s for _, _, s in run.collectives()].count(size) for run in (stored, again))
    # What attention adds to the residual stream is read again; what fc2 adds ends the block.
    assert after == before + 2


@pytest.mark.slow
def test_nothing_random_and_nothing_with_an_effect_runs_twice():
    clones = recomputed_ops(runs("both")[2])
    assert {"Softmax", "SelectV2"} <= {op.type for op in clones}
    assert not [op for op in clones if op.stateful or "Random" in op.type]


@pytest.mark.slow
def test_what_is_recomputed_waits_for_the_backward_pass():
    again = runs("both")[2]
    clones = recomputed_ops(again)
    entries = {op for op in clones if "/enter_" in op.name}
    assert entries and all(op.type == "Identity" and op.control for op in entries)
    late = set(entries)
    for op in clones:
        if any(t.op in late for t in op.inputs):
            late.add(op)
    assert late == set(clones)
    local = again.executable().local.graph
    waiting = [op for op in local.ops if op.name.rsplit("_", 1)[0].endswith("/enter")]
    assert len(waiting) == len(entries) and all(op.control for op in waiting)


# --- which blocks ---------------------------------------------------------------------------------


@functools.cache
def plan_of(*recompute) -> Plan:
    """Of a step whose blocks with these names are computed again; all blocks without a name."""
    with tap.auto_parallel([2], planner=None, recompute=list(recompute) or True):
        model = normalized()
    model.fit(*numbers(8), batch_size=8, verbose=0)
    return tap.plan_of(model)


@pytest.mark.slow
def test_blocks_are_chosen_by_name(tmp_path):
    assert plan_of(r"block_1").recompute == ("block_1",)
    plan = plan_of()
    assert plan.recompute == ("block_0", "block_1", "block_2")
    assert "Computed again in the backward pass, to store less: 3 blocks" in plan.summary()
    plan.save(tmp_path / "plan.json")
    loaded = Plan.load(tmp_path / "plan.json")
    assert loaded.recompute == plan.recompute
    keras.utils.set_random_seed(7)
    with tap.auto_parallel([2], plan=loaded):
        model = normalized()
    model.fit(*numbers(8), batch_size=8, verbose=0)
    partitioned = parallel_model(model).executables["train"].partitioned
    assert any("/recompute" in op.name for op in partitioned.graph.ops)
    assert not loaded.diff(plan)
    assert "computed again: block_0" in dataclasses.replace(plan, recompute=()).diff(plan)


@pytest.mark.slow
def test_a_scope_is_a_block_too():
    (name,) = plan_of(r"block_0_norm").recompute
    assert name.endswith("/block_0_norm")


@pytest.mark.slow
def test_what_matches_nothing_is_an_error():
    with pytest.raises(SpecError, match="'layer_.*' matches no block .* There are 'block_0', 'bl"):
        plan_of("layer_.*")
    with pytest.raises(SpecError, match=r"recompute='\('.* not a regular expression"):
        tap.auto_parallel([2], recompute=["("])
    plan = plan_of()
    with pytest.raises(TfparError, match="a plan or recompute, not both"):
        tap.auto_parallel([2], plan=plan, recompute=True)
    with tap.auto_parallel([2], plan=dataclasses.replace(plan, recompute=("layer_0",))):
        model = normalized()
    with pytest.raises(PlanError, match="no such block. There are 'block_0', 'block_1'"):
        model.fit(*numbers(8), batch_size=8, verbose=0)


# --- chosen for memory ----------------------------------------------------------------------------


def cluster(memory_bytes: float) -> Cluster:
    small = device(1e12, 1e12, memory_bytes, 1e12, 0.0)
    return two_levels("small", 1, 2, small, Link(1e8, 1e-5), Link(1e8, 1e-5))


@pytest.mark.nightly
def test_the_planner_recomputes_only_where_memory_asks_for_it():
    captured = Captured.of(lambda: gpt(4), 64)
    ample = captured.problem([2], cluster(1e12))
    plan = find_plan(ample, find_planner("tap"))
    assert plan.recompute == ()
    needed = plan.cost.memory_bytes
    tight = captured.problem([2], cluster(0.7 * needed))
    chosen = find_plan(tight, find_planner("tap"))
    assert {name.partition("/")[0] for name in chosen.recompute} >= {f"block_{i}" for i in range(4)}
    assert chosen.cost.memory_bytes <= 0.7 * needed
    assert chosen.cost.activation_bytes < 0.5 * plan.cost.activation_bytes
    assert chosen.cost.compute_s[1] > plan.cost.compute_s[1]
    assert chosen.fingerprint == plan.fingerprint
    again = recomputed_problem(tight, chosen.recompute)
    whole = price(
        again, dataclasses.replace(chosen, recompute=())
    )  # of which the search has priced a folded one
    assert whole.seconds == pytest.approx(chosen.cost.seconds, rel=1e-6)
    assert whole.activation_bytes == pytest.approx(chosen.cost.activation_bytes)


SCRIPT = """
import sys, threading, time
import keras, numpy as np, tensorflow as tf
import tfpar as tap
from keras import layers
from tfpar.tf.keras import parallel_model

ROWS, WIDTH, INNER, LAYERS = 4096, 128, 1024, 5

def resident():
    return int(open("/proc/self/statm").read().split()[1]) * 4096

with tap.auto_parallel([1], planner=None, recompute=sys.argv[1] == "True"):
    x = inputs = keras.Input((WIDTH,))
    for i in range(LAYERS):
        h = layers.LayerNormalization(name=f"block_{i}_norm")(x)
        h = layers.Dense(INNER, activation="gelu", name=f"block_{i}_fc1")(h)
        x = x + layers.Dense(WIDTH, name=f"block_{i}_fc2")(layers.Dropout(0.1)(h))
    model = keras.Model(inputs, layers.Dense(4, name="head")(x))
    model.compile("sgd", "mse", jit_compile=False)
batch = tf.ones((ROWS, WIDTH)), tf.zeros((ROWS, 4))
step = parallel_model(model).step("train").executable((batch,))
before, peak, running = resident(), 0, True

def watch():
    global peak
    while running:
        peak = max(peak, resident())
        time.sleep(0.001)

thread = threading.Thread(target=watch)
thread.start()
for _ in range(3):
    step((batch,))
running = False
thread.join()
print("grown by", peak - before)
"""


def grown_bytes(recompute: bool) -> int:
    """What the memory of a process grows by in a training step."""
    done = subprocess.run(
        preloaded.python("-c", SCRIPT, recompute),
        env=variables(),
        capture_output=True,
        text=True,
        timeout=time_limit(300),
    )
    assert done.returncode == 0, done.stderr
    return int(done.stdout.rpartition(" ")[2])


@pytest.mark.nightly
@pytest.mark.xdist_group("processes")
@pytest.mark.skipif(not os.path.exists("/proc/self/statm"), reason="reads Linux's /proc")
def test_the_running_program_needs_less_memory():
    # 5 blocks hold some 70 MB each; computed again, one at a time does.
    assert grown_bytes(True) < 0.6 * grown_bytes(False)
