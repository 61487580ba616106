"""Hooks into the writing of TensorFlow graphs: SavedModels and frozen graphs."""

from __future__ import annotations

import functools
import types
from collections.abc import Callable
from typing import Any

import tensorflow as tf
from tensorflow.core.framework import graph_pb2
from tensorflow.python.framework import convert_to_constants
from tensorflow.python.saved_model import save


def wrap_writer(wrap: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
    """Put `wrap(writer)` in the place of the function that `tf.saved_model.save` ends in.

    The writer takes the object and the folder, and what else `tf.saved_model.save` does.
    """
    original = save.save_and_return_nodes
    save.save_and_return_nodes = functools.wraps(original)(wrap(original))


def change_written_graphs(change: Callable[[graph_pb2.GraphDef], bool]) -> None:
    """Have `change` change the graphs of SavedModels, and graphs before their variables are frozen.

    Args:
        change: changes a graph in place, and tells whether it did.
    """
    _change_saved_graphs(change)
    _change_frozen_graphs(change)


def _change_saved_graphs(change: Callable[[graph_pb2.GraphDef], bool]) -> None:
    original = save._build_meta_graph

    @functools.wraps(original)
    def build(*args: Any, **kwargs: Any) -> Any:
        meta_graph, *others = original(*args, **kwargs)
        change(meta_graph.graph_def)
        return meta_graph, *others

    save._build_meta_graph = build


def _change_frozen_graphs(change: Callable[[graph_pb2.GraphDef], bool]) -> None:
    """Hook into the inlining of calls, which comes first whenever a function is frozen."""
    original = convert_to_constants._run_inline_graph_optimization

    @functools.wraps(original)
    def inline(func: Any, *args: Any, **kwargs: Any) -> graph_pb2.GraphDef:
        graph_def = func.graph.as_graph_def()
        if not change(graph_def):
            return original(func, *args, **kwargs)
        with tf.Graph().as_default() as graph:
            tf.import_graph_def(graph_def, name="")
        changed = types.SimpleNamespace(graph=graph, inputs=func.inputs, outputs=func.outputs)
        return original(changed, *args, **kwargs)

    convert_to_constants._run_inline_graph_optimization = inline
