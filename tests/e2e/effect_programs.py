"""Random graphs of TensorFlow 1 that read and assign a few variables while they train.

TensorFlow itself gives each graph one result: whatever conflicts is ordered, but mostly by a path
through ops that compute nothing or something else (groups, constants, the loss of the batch).
"""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

v1 = tf.compat.v1

BATCH, WIDTH, STATEMENTS = 8, 4, 9


@dataclasses.dataclass(frozen=True, eq=False)
class EffectProgram:
    """A graph to be run step by step.

    Attributes:
        fetches: what each step gives: the loss and all that is read of variables.
        train: all effects of a step.
    """

    graph: tf.Graph
    feeds: dict[str, np.ndarray]
    fetches: list[str]
    train: str
    init: tf.Operation

    def in_session(self, steps: int) -> np.ndarray:
        """By step, what TensorFlow gives; without its optimizers, which lose some control edges."""
        config = v1.ConfigProto()
        config.graph_options.rewrite_options.disable_meta_optimizer = True
        with v1.Session(graph=self.graph, config=config) as session:
            session.run(self.init)
            return self._run(lambda *args: session.run(*args), steps)

    def on_mesh(self, program: Any, steps: int) -> np.ndarray:
        """By step, what a `GraphProgram` gives."""
        return self._run(program.run, steps)

    def _run(self, run: Callable[..., Any], steps: int) -> np.ndarray:
        names = [*self.fetches, self.train]
        return np.array([run(names, self.feeds)[:-1] for _ in range(steps)], np.float64)


def effect_program(seed: int) -> EffectProgram:
    """The graph of a seed, the same in every process."""
    with tf.Graph().as_default() as graph:
        return _Writer(graph, seed).write()


class _Writer:
    def __init__(self, graph: tf.Graph, seed: int) -> None:
        self._graph = graph
        self._random = random.Random(seed)
        rng = np.random.default_rng(seed)
        self._feeds = {
            "x:0": rng.normal(size=(BATCH, WIDTH)).astype("float32"),
            "y:0": rng.normal(size=(BATCH, 1)).astype("float32"),
        }
        self._x = v1.placeholder(tf.float32, [None, WIDTH], "x")
        self._y = v1.placeholder(tf.float32, [None, 1], "y")
        self._weights = [
            _variable(f"w{i}", rng.normal(size=shape) / 2)
            for i, shape in enumerate([(WIDTH, WIDTH)] * 3 + [(WIDTH, 1)])
        ]
        self._slots = [
            _variable(f"{w.op.name}/momentum", np.zeros(w.shape), trainable=False)
            for w in self._weights
        ]
        self._state = [_variable(f"c{i}", 0.1 * i, trainable=False) for i in range(4)]
        self._last: dict[str, tf.Operation] = {}  # by variable, its last write so far
        self._reads: dict[str, list[tf.Operation]] = {}  # and its reads since then
        self._ops: list[tf.Operation] = []
        self._loss = tf.constant(0.0)
        self._values: list[tf.Tensor] = [tf.constant(0.5), tf.constant(1.0)]
        self._results: list[tf.Tensor] = []

    def write(self) -> EffectProgram:
        hidden = self._x
        for i, weight in enumerate(self._weights[:-1]):
            with tf.name_scope(f"block_{i}"):
                hidden = tf.tanh(2.0 * tf.tanh(hidden @ weight))
        loss = tf.reduce_mean((hidden @ self._weights[-1] - self._y) ** 2, name="loss")
        gradients = tf.gradients(loss, self._weights)
        for weight in self._weights:
            self._reads[weight.name] = [
                op for op in self._graph.get_operations() if _reads(op, weight)
            ]
        self._loss = loss
        self._values.append(loss)
        train_at = self._random.randrange(STATEMENTS)
        for i in range(STATEMENTS):
            if i == train_at:
                self._update(gradients)
            if self._random.random() < 0.45:
                self._read(self._random.choice([*self._state, self._weights[1]]))
            else:
                self._assign(self._random.choice(self._state))
        train = tf.group(*self._ops, name="train")
        fetches = [loss.name, *(t.name for t in self._results)]
        init = v1.global_variables_initializer()
        return EffectProgram(self._graph, self._feeds, fetches, train.name, init)

    def _update(self, gradients: Sequence[tf.Tensor]) -> None:
        """Train, at a rate made of a counter; then count, behind a constant."""
        rate = 0.05 * (1.0 + tf.tanh(self._read(self._state[0])))
        updates = []
        for weight, slot, gradient in zip(self._weights, self._slots, gradients, strict=True):
            moved = self._value_of(slot) * 0.5 + gradient
            updates += [
                self._write(slot, "assign", moved),
                self._write(weight, "assign_sub", rate * moved),
            ]
        with tf.control_dependencies(updates):
            one = tf.constant(1.0)
        self._write(self._state[0], "assign_add", one)

    def _read(self, variable: Any) -> tf.Tensor:
        value = tf.reduce_sum(self._value_of(variable))
        self._results.append(value)
        self._values.append(tf.tanh(value))
        return value

    def _value_of(self, variable: Any) -> tf.Tensor:
        with self._after([*filter(None, [self._last.get(variable.name)])]):
            value = tf.identity(variable.read_value())
        read = value.op
        while not _reads(read, variable):
            read = read.inputs[0].op
        self._reads.setdefault(variable.name, []).append(read)
        self._ops.append(value.op)
        return value

    def _assign(self, variable: Any) -> None:
        value = self._random.choice(self._values) * 0.5 + self._random.choice(self._values)
        kind = self._random.choice(["assign", "assign_add", "assign_sub"])
        self._write(variable, kind, tf.tanh(value))

    def _write(self, variable: Any, kind: str, value: tf.Tensor) -> tf.Operation:
        last = filter(None, [self._last.get(variable.name)])
        with self._after([*self._reads.get(variable.name, ()), *last]):
            op = getattr(variable, kind)(tf.identity(value), read_value=False)
        self._last[variable.name], self._reads[variable.name] = op, []
        self._ops.append(op)
        return op

    def _after(self, ops: Sequence[tf.Operation]) -> Any:
        """What is made within comes after `ops`, and after some other op."""
        others = self._random.sample(self._ops, min(len(self._ops), self._random.randrange(2)))
        return tf.control_dependencies([self._carried(op) for op in (*ops, *others)])

    def _carried(self, op: tf.Operation) -> Any:
        """What runs after an op, in the place of it."""
        kind = self._random.choice(["itself", "group", "constant", "loss", "batch"])
        if kind == "itself":
            return op
        with tf.control_dependencies([op]):
            if kind == "group":
                return tf.no_op()
            if kind == "constant":
                return tf.constant(1.0) * self._random.choice(self._values)
            if kind == "loss":
                return tf.identity(self._loss)
            return tf.reduce_sum(tf.exp(self._x[:, 0]))


def _variable(name: str, value: Any, trainable: bool = True) -> Any:
    initial = np.asarray(value, "float32")
    return v1.get_variable(name, initializer=initial, trainable=trainable, use_resource=True)


def _reads(op: tf.Operation, variable: Any) -> bool:
    return op.type == "ReadVariableOp" and op.inputs[0] is variable.handle
