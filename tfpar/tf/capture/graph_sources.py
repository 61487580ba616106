"""Graphs that exist already: `tf.compat.v1` graphs, MetaGraphs, SavedModel signatures."""

from __future__ import annotations

from collections.abc import Mapping

import tensorflow as tf
from tensorflow.core.framework import graph_pb2, variable_pb2
from tensorflow.core.protobuf import meta_graph_pb2

from tfpar.spec import CaptureError
from tfpar.tf.capture.graph_def import set_variable_handle, split_name
from tfpar.tf.capture.v1 import GraphSource

_VARIABLE_COLLECTIONS = ("variables", "trainable_variables", "local_variables")


def from_graph(graph: tf.Graph) -> GraphSource:
    """A `tf.compat.v1` graph."""
    with graph.as_default():
        collections = {
            name: [v.to_proto() for v in graph.get_collection(name) if hasattr(v, "to_proto")]
            for name in _VARIABLE_COLLECTIONS
        }
    return _from_collections(graph.as_graph_def(), collections)


def from_meta_graph(meta_graph: meta_graph_pb2.MetaGraphDef | str) -> GraphSource:
    """A MetaGraph, or the `.meta` file that a Saver wrote."""
    if isinstance(meta_graph, str):
        with tf.io.gfile.GFile(meta_graph, "rb") as file:
            meta_graph = meta_graph_pb2.MetaGraphDef.FromString(file.read())
    collections = {
        name: [
            variable_pb2.VariableDef.FromString(serialized)
            for serialized in meta_graph.collection_def[name].bytes_list.value
        ]
        for name in _VARIABLE_COLLECTIONS
        if name in meta_graph.collection_def
    }
    return _from_collections(meta_graph.graph_def, collections)


def _from_collections(
    graph_def: graph_pb2.GraphDef, collections: Mapping[str, list[variable_pb2.VariableDef]]
) -> GraphSource:
    trainable, initial = set(), {}
    for collection, variables in collections.items():
        for variable in variables:
            node = split_name(variable.variable_name)[0]
            if variable.initial_value_name:
                initial[node] = variable.initial_value_name
            if collection == "trainable_variables":
                trainable.add(node)
    return GraphSource(graph_def, trainable=trainable, initial=initial)


def from_saved_model(path: str, signature: str = "serving_default") -> GraphSource:
    """A signature of a SavedModel of either version, with the values saved in it.

    Feeds are the signature's arguments and fetches its results, by name.

    Raises:
        CaptureError: there is no such signature.
    """
    loaded = tf.saved_model.load(path)
    if signature not in loaded.signatures:
        raise CaptureError(
            f"The SavedModel at {path!r} has no signature {signature!r}; it has "
            f"{', '.join(map(repr, loaded.signatures)) or 'none'}."
        )
    function = loaded.signatures[signature]
    by_handle = {id(v.handle): v for v in function.variables}
    graph_def = function.graph.as_graph_def()
    nodes = {node.name: node for node in graph_def.node}
    held: dict[str, tf.Variable] = {}
    num_arguments = len(function.inputs) - len(function.captured_inputs)
    for external, inside in zip(
        function.captured_inputs, function.inputs[num_arguments:], strict=True
    ):
        node = nodes[inside.op.name]
        variable = by_handle.get(id(external))
        if variable is not None:
            set_variable_handle(node, variable.dtype, variable.shape)
            held[node.name] = variable
        elif external.dtype != tf.resource:
            node.op = "Const"
            node.attr.clear()
            node.attr["dtype"].type = external.dtype.as_datatype_enum
            node.attr["value"].tensor.CopyFrom(tf.make_tensor_proto(external.numpy()))
    results = sorted(function.structured_outputs)
    return GraphSource(
        graph_def,
        names=_unique_names(held),
        trainable={name for name, v in held.items() if v.trainable},
        values={name: v.read_value for name, v in held.items()},
        arguments={
            keyword: tensor.name
            for keyword, tensor in zip(
                function._arg_keywords, function.inputs[:num_arguments], strict=True
            )
        },
        results={name: tensor.name for name, tensor in zip(results, function.outputs, strict=True)},
        effects=[op.name for op in function.graph.control_outputs],
    )


def _unique_names(held: Mapping[str, tf.Variable]) -> dict[str, str]:
    """Map each node to its variable's name; `name#2` for the second of one name."""
    used: dict[str, int] = {}
    names = {}
    for node, variable in held.items():
        name = split_name(variable.name)[0]
        used[name] = used.get(name, 0) + 1
        names[node] = name if used[name] == 1 else f"{name}#{used[name]}"
    return names
