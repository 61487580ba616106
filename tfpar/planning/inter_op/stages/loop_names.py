"""Names of loops for messages: the layer that runs one, and the line that makes the layer."""

from __future__ import annotations

import re
from collections.abc import Sequence

from tfpar.ir.graph import Graph, Op, Tensor
from tfpar.ir.step import ModelLayer

_COUNT = re.compile(r"_\d+$")


def describe_loop(loop: Op, graph: Graph, layers: Sequence[ModelLayer]) -> str:
    """Name a loop, its layer and the line of the user's program that makes it, as far as known.

    Args:
        graph: that the loop is in.
        layers: of the model; none where there is no model, as of a graph of TensorFlow 1.
    """
    layer = _layer_of(loop, graph, layers)
    if layer is None:
        return repr(loop.name)
    made = f", made in {layer.source}" if layer.source else ""
    return f"{loop.name!r} of {layer.class_name} {layer.path!r}{made}"


def _layer_of(loop: Op, graph: Graph, layers: Sequence[ModelLayer]) -> ModelLayer | None:
    """The innermost layer in whose scope the loop is, of those that hold all weights that it reads.

    TensorFlow counts up the names of scopes, so that `lstm_1` may be the second call of `lstm` as
    well as the first of `lstm_1`: where weights do not tell them apart, there is none.
    """
    names = {v.handle: v.name for v in graph.variables if v.trainable}
    read = [name for t in loop.inputs if (name := names.get(_read_from(t)))]
    holding = [layer for layer in layers if all(n.startswith(f"{layer.path}/") for n in read)]
    for scope in reversed(loop.scope.split("/")):
        name = _COUNT.sub("", scope)
        found = [layer for layer in holding if layer.path.split("/")[-1] in (scope, name)]
        if found:
            return found[0] if len(found) == 1 else None
    return None


def _read_from(tensor: Tensor) -> Tensor:
    """The variable that a tensor is read from, through casts and the like."""
    while len(tensor.op.inputs) == 1:
        (tensor,) = tensor.op.inputs
    return tensor
