"""Effects come in the order that TensorFlow gives them, however a step is cut up and run.

The programs of `effect_programs` order what conflicts by control edges, mostly through ops that
have no effect. Each is run for `STEPS` steps, since a race does not show in each of them.
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

import tfpar as tap
from tests.cases import is_nightly
from tests.e2e.effect_modes import MODES, STEPS, TWO_STAGES, assert_runs_so
from tests.e2e.effect_programs import EffectProgram, effect_program
from tfpar.compile.local.microbatches import _Writer
from tfpar.spec import CompilerError
from tfpar.tf.steps import CompiledFunction

v1 = tf.compat.v1

SWEPT = 60 if is_nightly() else 2
"""How many programs the long sweep runs."""


@functools.cache
def program_and_results(seed: int) -> tuple[EffectProgram, np.ndarray]:
    program = effect_program(seed)
    return program, program.in_session(STEPS)


def run(seed: int, mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    options = dict(MODES[mode])
    if options.pop("xla", False):  # which graphs of TensorFlow 1 cannot ask for
        plain = CompiledFunction.__init__
        compiled = functools.partialmethod(plain, jit_compile=True)
        monkeypatch.setattr(CompiledFunction, "__init__", compiled)
    source, results = program_and_results(seed)
    mesh = options.pop("mesh")
    program = tap.GraphProgram(source.graph, mesh, planner=None, verbose=0, **options)
    got = source.on_mesh(program, STEPS)
    np.testing.assert_allclose(got, results, atol=1e-3, err_msg=f"program {seed}, {mode}")
    (step,) = program._steps.values()
    (executable,) = step.executables.values()
    assert_runs_so(executable, mode)


@pytest.mark.parametrize("mode", [m for m in MODES if not m.startswith("xla")])
def test_a_random_program_gives_what_tensorflow_gives(mode, monkeypatch):
    run(2, mode, monkeypatch)


@pytest.mark.slow
@pytest.mark.parametrize("mode", MODES)
def test_random_programs_give_what_tensorflow_gives(mode, monkeypatch):
    for seed in range(10, 10 + SWEPT):
        with monkeypatch.context() as patch:
            run(seed, mode, patch)


def decaying_step(clip: bool) -> tuple[tf.Graph, list[Any], dict[Any, np.ndarray], tf.Operation]:
    """A learning rate made of the global step, which is counted behind the updates."""
    rng = np.random.default_rng(0)
    with tf.Graph().as_default() as graph:
        v1.enable_resource_variables()
        x, y = v1.placeholder(tf.float32, [None, 12]), v1.placeholder(tf.float32, [None, 5])
        start = rng.normal(size=(12, 5)).astype("float32")
        loss = tf.reduce_mean((tf.tanh(x @ v1.get_variable("w", initializer=start)) - y) ** 2)
        step = v1.train.get_or_create_global_step()
        rate = v1.train.exponential_decay(1.0, step, 2, 0.5)
        optimizer = v1.train.MomentumOptimizer(rate, 0.9)
        gradients, weights = zip(*optimizer.compute_gradients(loss), strict=True)
        if clip:
            gradients, _ = tf.clip_by_global_norm(gradients, 1.0)
        train = optimizer.apply_gradients(zip(gradients, weights, strict=True), global_step=step)
        init = v1.global_variables_initializer()
    feeds = {x: rng.normal(size=(16, 12)), y: rng.normal(size=(16, 5))}
    return graph, [loss, train], feeds, init


@pytest.mark.parametrize("clip", [False, True])
def test_a_rate_is_that_of_the_step_before_it_is_counted_in_microbatches_too(clip):
    # The count waits for the updates by a constant alone, which waits for nothing in microbatches.
    graph, fetches, feeds, init = decaying_step(clip)
    with v1.Session(graph=graph) as session:
        session.run(init)
        plain = [session.run(fetches, feeds)[0] for _ in range(STEPS)]
    pipeline = tap.Pipeline(microbatches=2)
    program = tap.GraphProgram(graph, 1, planner=None, verbose=0, pipeline=pipeline)
    losses = [program.run(fetches, feeds)[0] for _ in range(STEPS)]
    np.testing.assert_allclose(losses, plain, rtol=1e-4)


def test_a_program_that_has_lost_an_order_is_refused(monkeypatch):
    monkeypatch.setattr(_Writer, "_ran", lambda self, ops: [])
    graph, fetches, feeds, _ = decaying_step(clip=False)
    pipeline = tap.Pipeline(microbatches=2)
    program = tap.GraphProgram(graph, 1, planner=None, verbose=0, pipeline=pipeline)
    with pytest.raises(CompilerError, match=r"'global_step'.*ReadVariableOp.*AssignAddVariableOp"):
        program.run(fetches, feeds)


def test_what_python_is_told_comes_in_order_across_stages():
    log: list[int] = []

    def noted(i: int) -> Any:
        return lambda total: log.append(i) or total

    with tf.Graph().as_default() as graph:
        v1.enable_resource_variables()
        hidden = x = v1.placeholder(tf.float32, [None, 4])
        start = np.eye(4, dtype="float32")
        weights = [v1.get_variable(f"w{i}", initializer=start) for i in range(4)]
        for weight in weights:
            hidden = tf.tanh(hidden @ weight)
        loss = tf.reduce_mean(hidden**2)
        gradients = tf.gradients(loss, weights)
        last = [w.assign_sub(g, read_value=False) for w, g in zip(weights, gradients, strict=True)]
        for i in (3, 0, 2, 1):  # of both stages in turn
            with tf.control_dependencies(last):
                total = tf.reduce_sum(weights[i].read_value())
            with tf.control_dependencies([tf.numpy_function(noted(i), [total], tf.float32)]):
                last = [tf.constant(0.0)]
        train = tf.group(*last)
    program = tap.GraphProgram(graph, [2], planner=None, verbose=0, pipeline=TWO_STAGES)
    for _ in range(3):
        program.run([loss, train], {x: np.ones((8, 4))})
    assert log == [3, 0, 2, 1] * 3


def test_a_reference_is_read_when_its_reader_runs():
    with tf.Graph().as_default() as graph:
        v1.disable_resource_variables()
        try:
            count = v1.get_variable("count", initializer=1.0, use_resource=False)
        finally:
            v1.enable_resource_variables()
        first = v1.assign_add(count, 1.0)
        with tf.control_dependencies([first]):
            second = tf.identity(v1.assign_add(count, 10.0)) * 0.0
        total = first + second  # `first` refers to the variable, which is 12 once `second` is there
        init = v1.global_variables_initializer()
    with v1.Session(graph=graph) as session:
        session.run(init)
        plain = [session.run(total) for _ in range(3)]
    program = tap.GraphProgram(graph, 1, planner=None, verbose=0)
    assert [program.run(total) for _ in range(3)] == plain == [12.0, 23.0, 34.0]


def test_what_is_read_again_in_the_backward_pass_is_read_before_it_is_assigned():
    rng = np.random.default_rng(0)
    with tf.Graph().as_default() as graph:
        v1.enable_resource_variables()
        ids = v1.placeholder(tf.int32, [None])
        start = rng.normal(size=(8, 4)).astype("float32")
        table = v1.get_variable("table", initializer=start, trainable=False)
        hidden = rows = tf.nn.embedding_lookup(table, ids)
        weights = [v1.get_variable(f"w{i}", initializer=np.eye(4, dtype="f")) for i in range(4)]
        for weight in weights:
            hidden = tf.tanh(hidden * rows @ weight)
        loss = tf.reduce_mean(hidden**2)
        train = v1.train.GradientDescentOptimizer(0.1).minimize(loss, var_list=weights)
        with tf.control_dependencies([rows]):  # which stages compute once more
            moved = table.assign_add(tf.ones([8, 4]) * 0.1, read_value=False)
        train = tf.group(train, moved)
        init = v1.global_variables_initializer()
    fetches, feeds = [loss, train], {ids: np.arange(8)}
    with v1.Session(graph=graph) as session:
        session.run(init)
        plain = [session.run(fetches, feeds)[0] for _ in range(STEPS)]
    options = MODES["stages recompute"]
    program = tap.GraphProgram(graph, planner=None, verbose=0, **options)
    losses = [program.run(fetches, feeds)[0] for _ in range(STEPS)]
    np.testing.assert_allclose(losses, plain, rtol=1e-4)
