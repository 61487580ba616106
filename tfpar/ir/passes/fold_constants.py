"""Fold: results that are known without running anything become constants.

What a captured step computes from shapes it computes from the global ones. Folding it before
anything is cut keeps shape arithmetic global, and leaves shape operands where rules
can read them.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from tfpar.ir.constants import Constants
from tfpar.ir.graph import DType, Graph, Op, Tensor
from tfpar.ir.passes.dead_ops import without_dead
from tfpar.ir.traits import SOURCES

# Larger values stay ops: a Range over a vocabulary is cheaper to run than to store.
_MAX_ELEMENTS = 1024


def fold_constants(graph: Graph, constants: Constants) -> None:
    """Turn the ops of `graph` whose results `constants` knows into Consts, in place.

    Ops that nothing reads any more go with them.
    """
    replaced: dict[Tensor, Tensor] = {}
    heirs: dict[Op, list[Op]] = {}
    ops: list[Op] = []
    folded = False
    for op in graph.ops:
        values = _known_values(op, constants)
        if not values:
            ops.append(op)
            continue
        folded = True
        if len(values) == 1:
            op.type, op.inputs, op.control, op.stateful = "Const", [], [], False
            op.attrs = _const_attrs(values[0], op.outputs[0].dtype)
            op.outputs[0].shape = values[0].shape
            ops.append(op)
            continue
        heirs[op] = []
        for tensor, value in zip(op.outputs, values, strict=True):
            attrs = _const_attrs(value, tensor.dtype)
            const = Op(f"{op.name}/value_{tensor.index}", "Const", (), attrs)
            replaced[tensor] = const.add_output(value.shape, tensor.dtype)
            heirs[op].append(const)
        ops.extend(heirs[op])
    if not folded:
        return
    for op in ops:
        op.inputs = [replaced.get(t, t) for t in op.inputs]
        op.control = [h for c in op.control for h in heirs.get(c, (c,))]
    graph.outputs = [replaced.get(t, t) for t in graph.outputs]
    graph.effects = [h for e in graph.effects for h in heirs.get(e, (e,))]
    graph.ops = without_dead(graph, ops)


def _known_values(op: Op, constants: Constants) -> list[np.ndarray]:
    """The values of all outputs of `op`; empty where some are not known or are large."""
    if op.type in SOURCES or not op.outputs:
        return []
    if any(t.num_elements > _MAX_ELEMENTS for t in op.outputs):
        return []
    values = []
    for tensor in op.outputs:
        value = constants.value(tensor)
        if value is None or value.size > _MAX_ELEMENTS:
            return []
        if tensor.is_static and tensor.shape != value.shape:
            return []
        values.append(value)
    return values


def _const_attrs(value: np.ndarray, dtype: str) -> dict[str, Any]:
    return {"value": value, "dtype": DType(dtype)}
