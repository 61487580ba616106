"""A program of a v1 graph, whose variables ranks save and restore."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf

import tfpar as tap


def graph_source() -> tuple[Any, str, str, str]:
    """A v1 graph of a linear model; (source, input, loss, train op)."""
    from tfpar.tf.capture import graph_sources

    graph = tf.Graph()
    with graph.as_default():
        x = tf.compat.v1.placeholder(tf.float32, [4, 6], name="x")
        with tf.compat.v1.variable_scope("linear", use_resource=True):
            kernel = tf.compat.v1.get_variable("kernel", [6, 8])
        loss = tf.reduce_mean(tf.square(tf.matmul(x, kernel) - 1.0), name="loss")
        tf.compat.v1.train.MomentumOptimizer(0.1, 0.9).minimize(loss, name="train")
        tf.compat.v1.train.Saver()
    return graph_sources.from_graph(graph), "x:0", "loss:0", "train"


def graph_program(mesh: tap.Mesh) -> tuple[Any, Callable[[], float]]:
    from tfpar.tf.graph_program import GraphProgram

    source, x, loss, train = graph_source()
    split = [tap.shard("linear/kernel", dim=1, axis="model")] if "model" in mesh.axis_names else []
    program = GraphProgram(source, mesh, split, planner=None)
    data = np.arange(24, dtype="float32").reshape(4, 6) / 24
    return program, lambda: float(program.run([loss, train], {x: data})[0])
