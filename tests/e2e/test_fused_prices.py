"""Plans of steps that XLA compiles: what it fuses is priced so, and kept apart in plan caches."""

from __future__ import annotations

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfpar as tap
from tests.clusters import device, two_levels
from tests.planning.test_cache import Counting
from tfpar.cluster import Link

LINK = Link(1e9, 1e-6)
# A product of this model takes 10 us of arithmetic, and what lies between them is memory's.
SLOW_MEMORY = two_levels("slow memory", 1, 2, device(1e12, 1e12, 1e9, 1e9, 1e-6), LINK, LINK)
X, Y = np.ones((64, 32), "float32"), np.ones((64, 2), "float32")


def build(jit_compile):
    keras.utils.clear_session(free_memory=False)
    block = [keras.layers.Dense(256, "gelu"), keras.layers.LayerNormalization()]
    model = keras.Sequential([keras.Input((32,)), *block, keras.layers.Dense(2)])
    model.compile("adam", "mse", jit_compile=jit_compile)
    return model


def planned(jit_compile, **options):
    return tap.plan(lambda: build(jit_compile), (X, Y), [2], SLOW_MEMORY, planner="tap", **options)


@pytest.mark.slow
def test_a_compiled_step_is_predicted_to_take_less():
    plain, compiled = planned(False), planned(True)
    for phase in range(3):
        assert compiled.cost.compute_s[phase] < 0.8 * plain.cost.compute_s[phase]
    assert compiled.cost.seconds < 0.8 * plain.cost.seconds
    assert compiled.summary() != plain.summary()


@pytest.mark.slow
@pytest.mark.parametrize("stages", [1, 2])
def test_in_microbatches_and_stages_too(stages):
    asked = {"pipeline": tap.Pipeline(stages, microbatches=2)}
    plain, compiled = (planned(jit, **asked).cost for jit in (False, True))
    assert compiled.seconds < 0.8 * plain.seconds
    assert sum(compiled.compute_s) < 0.8 * sum(plain.compute_s)


@pytest.mark.slow
def test_what_keras_decides_by_itself_is_priced_so():
    auto = build("auto").jit_compile
    assert planned("auto").cost.seconds == planned(auto).cost.seconds


@pytest.mark.slow
def test_a_plan_of_a_step_without_xla_is_not_taken_for_one_with_it(tmp_path):
    kept = str(tmp_path)

    def plans() -> int:
        return len(list(tmp_path.glob("*.json")))

    first = [planned(jit, plan_cache=kept).cost for jit in (False, True)]
    assert plans() == 2 and first[0] != first[1]
    assert [planned(jit, plan_cache=kept).cost for jit in (False, True)] == first
    assert plans() == 2


@pytest.mark.nightly
def test_a_model_that_trains_is_planned_as_it_runs():
    planner = Counting()
    model = tap.parallelize(build(True), [2], planner=planner, cluster=SLOW_MEMORY)
    model.fit(X, Y, batch_size=64, verbose=0)
    assert {p.step.jit_compile for p in planner.problems} == {True}


@pytest.mark.slow
@pytest.mark.parametrize("jit_compile", [False, True])
def test_a_function_too(jit_compile):
    planner = Counting()
    with tap.auto_parallel([2], planner=planner, cluster=SLOW_MEMORY, verbose=0):
        weight = tf.Variable(tf.ones((8, 8)))

        @tap.function(jit_compile=jit_compile)
        def step(x):
            return tf.reduce_sum(tf.nn.relu(x @ weight) ** 2 + 1)

    step(tf.ones((4, 8)))
    assert {p.step.jit_compile for p in planner.problems} == {jit_compile}
