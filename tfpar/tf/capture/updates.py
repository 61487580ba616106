"""The gradients of a graph that is there already: what its updates of weights are made from.

A Keras step has its gradients marked while it is traced; here they are found by the ops that
change trainable variables. An optimizer op names its gradient. In front of a plain assignment it is
sought among what `tf.gradients` made: ops under a name scope `gradients`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from tfpar.ir.graph import Gradient, Graph, Op, Tensor, Variable, is_floating
from tfpar.ir.traits import ASSIGNMENTS, SCATTERS
from tfpar.tf.interop.graphs import find_op_definition

_GRADIENT_SCOPE = re.compile(r"(^|/)gradients(_\d+)?/")
_GRADIENT_ARGUMENTS = ("grad", "delta", "gradient")


def gradients_of_updates(graph: Graph) -> list[Gradient]:
    """The gradient of each trainable variable that `graph` updates, in graph order.

    Assignments that nothing leads to which the graph is fed, decay or a copy, have none.
    """
    trainable = {v.handle: v for v in graph.variables if v.trainable}
    fed = _fed(graph)
    found: dict[str, Gradient] = {}
    for op in graph.ops:
        variable = trainable.get(op.inputs[0]) if op.inputs else None
        if variable is None or variable.name in found:
            continue
        gradient = None
        if "Apply" in op.type:
            gradient = _of_optimizer(op, variable)
        elif op.type in ASSIGNMENTS | SCATTERS and op in fed:
            gradient = _of_assignment(op, variable)
        if gradient is not None:
            found[variable.name] = gradient
    return list(found.values())


def _fed(graph: Graph) -> set[Op]:
    """The ops that hang on what the graph is fed; a slot is read after it was changed."""
    found = {t.op for t in graph.inputs}
    for op in graph.ops:
        if any(t.op in found for t in op.inputs) or not found.isdisjoint(op.control):
            found.add(op)
    return found


def _of_optimizer(op: Op, variable: Variable) -> Gradient | None:
    """Find the gradient that an op such as `ResourceApplyAdam` takes, and any row indices."""
    definition = find_op_definition(op.type)
    names = [a.name for a in definition.input_arg] if definition is not None else []
    values = next((op.inputs[names.index(n)] for n in _GRADIENT_ARGUMENTS if n in names), None)
    if values is None:
        return None
    indices = op.inputs[names.index("indices")] if "indices" in names else None
    return Gradient(variable.name, values, indices)


def _of_assignment(op: Op, variable: Variable) -> Gradient | None:
    """The gradient behind an assignment; the assigned value where none can be told."""
    candidates = list(dict.fromkeys(_made_by_gradients(op)))
    dense = [t for t in candidates if is_floating(t.dtype) and t.shape == variable.shape]
    if len(dense) == 1:
        return Gradient(variable.name, dense[0])
    rows = _rows(candidates, variable)
    if rows is not None:
        return Gradient(variable.name, *rows)
    if op.type in ASSIGNMENTS and op.inputs[1].shape == variable.shape:
        return Gradient(variable.name, op.inputs[1])
    return None


def _rows(candidates: Sequence[Tensor], variable: Variable) -> tuple[Tensor, Tensor] | None:
    """Values and indices of a sparse gradient, where there is one among `candidates`."""
    row = tuple(variable.shape[1:])
    values = [t for t in candidates if is_floating(t.dtype) and t.shape and t.shape[1:] == row]
    indices = [t for t in candidates if t.dtype in ("int32", "int64") and len(t.shape or ()) == 1]
    if len(values) != 1 or len(indices) != 1 or values[0].shape[0] != indices[0].shape[0]:
        return None
    return values[0], indices[0]


def _made_by_gradients(op: Op) -> Iterator[Tensor]:
    """The tensors of `tf.gradients` that `op` follows, nearest ones only."""
    stack: list[Op] = [op]
    seen = {op}
    while stack:
        at = stack.pop()
        for tensor in at.inputs:
            if _GRADIENT_SCOPE.search(tensor.op.name):
                yield tensor
            elif tensor.op not in seen:
                seen.add(tensor.op)
                stack.append(tensor.op)
        for before in at.control:
            if before not in seen and not _GRADIENT_SCOPE.search(before.name):
                seen.add(before)
                stack.append(before)
