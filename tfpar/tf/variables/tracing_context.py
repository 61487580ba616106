"""Context in which a variable is used: a captured step, a graph, or a graph for shapes."""

from __future__ import annotations

import contextlib
import contextvars
from collections.abc import Iterator

import tensorflow as tf

_capturing: contextvars.ContextVar[bool] = contextvars.ContextVar("capturing", default=False)


@contextlib.contextmanager
def capturing() -> Iterator[None]:
    """Read and write variables through their handles in a block that captures a step."""
    token = _capturing.set(True)
    try:
        yield
    finally:
        _capturing.reset(token)


def is_capturing() -> bool:
    """Whether a step is being captured."""
    return _capturing.get()


def is_tracing() -> bool:
    """Whether ops are traced rather than run."""
    return isinstance(tf.compat.v1.get_default_graph(), tf.__internal__.FuncGraph)


def is_inferring_shapes() -> bool:
    """Whether Keras infers shapes: nothing will run."""
    graph = tf.compat.v1.get_default_graph()
    while isinstance(graph, tf.__internal__.FuncGraph):
        if graph.name.startswith("scratch_graph"):
            return True
        graph = graph.outer_graph
    return False
