"""Links between optimizer slots and the weights whose specs they follow.

A slot (momentum, second moment, a row mean, an average of the weights) has the
spec of its weight unless the plan says otherwise. The link is read off the graph,
not off names: starting from the ops that assign a variable, dimensions that
share a factor are the same dimension, back to the reads of other variables.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from tfpar.ir.graph import Graph, Op, Tensor, Variable
from tfpar.ir.traits import SPARSE_OPTIMIZERS, WHOLE_UPDATES
from tfpar.propagation.deferral import is_product
from tfpar.rules.rule import OpRule
from tfpar.spec import Placement, Replicate, Shard, Spec

Follow = tuple[Variable, tuple[int | None, ...]]
"""(weight, for each dim of the slot the weight's dim or None)."""


_TensorDim = tuple[Tensor, int]
_WeightDims = dict[_TensorDim, list[tuple[Variable, int]]]
"""By root, the dims of weights that are one with it."""


class _Union:
    """Union-find over (tensor, dim)."""

    def __init__(self) -> None:
        self.parent: dict[_TensorDim, _TensorDim] = {}

    def find(self, x: _TensorDim) -> _TensorDim:
        root = x
        while self.parent.get(root, root) != root:
            root = self.parent[root]
        while self.parent.get(x, x) != root:
            self.parent[x], x = root, self.parent[x]
        return root

    def join(self, a: _TensorDim, b: _TensorDim) -> None:
        a, b = self.find(a), self.find(b)
        if a != b:
            self.parent[a] = b


def followed_weights(graph: Graph, rules: Mapping[Op, OpRule]) -> dict[Variable, Follow]:
    """Find for each non-trainable variable that is updated along with a weight the link to it."""
    handles = graph.variable_of()
    weights = {h for h, v in handles.items() if v.trainable}
    if not weights or len(weights) == len(handles):
        return {}
    joined = _Union()
    visited: set[Op] = set()
    stack = [op for op in graph.ops if op.inputs and op.inputs[0] in handles and _updates(op)]
    while stack:
        op = stack.pop()
        if op in visited:
            continue
        visited.add(op)
        rule = rules[op]
        if not is_product(rule):  # whose result is a tensor of its own
            _join_factors(op, rule, joined)
            if not rule.reduce:  # past a reduction lies the gradient's own tensor
                stack.extend(t.op for t in op.inputs if t not in handles)
    by_root: _WeightDims = {}
    for handle in weights:
        for d in range(len(handle.shape or ())):
            by_root.setdefault(joined.find((handle, d)), []).append((handles[handle], d))
    return {
        variable: link
        for handle, variable in handles.items()
        if not variable.trainable and (link := _link(handle, joined, by_root)) is not None
    }


def followed_spec(spec: Spec, mapping: Sequence[int | None]) -> Spec:
    """Return the spec of a slot whose weight has `spec`; `mapping` as in `Follow`."""
    return _renumbered(spec, {w: d for d, w in enumerate(mapping)})


def leading_spec(spec: Spec, mapping: Sequence[int | None]) -> Spec:
    """Return the spec of the weight whose slot has `spec`, as far as the slot has its dims."""
    return _renumbered(spec, dict(enumerate(mapping)))


def _renumbered(spec: Spec, dims: Mapping[int | None, int | None]) -> Spec:
    """`spec` for a tensor that has dim `dims[d]` in place of dim d, and nothing of others."""
    found: list[Placement] = []
    for placement in spec:
        dim = dims.get(placement.dim) if isinstance(placement, Shard) else None
        if isinstance(placement, Shard) and dim is not None:
            found.append(Shard(dim, placement.stride, placement.unit))
        else:
            found.append(Replicate())
    return tuple(found)


def _updates(op: Op) -> bool:
    return op.type in WHOLE_UPDATES or op.type in SPARSE_OPTIMIZERS


def _join_factors(op: Op, rule: OpRule, joined: _Union) -> None:
    first: dict[int, _TensorDim] = {}
    operands = [
        *zip(op.inputs, rule.inputs, strict=True),
        *zip(op.outputs, rule.outputs, strict=True),
    ]
    for tensor, dims in operands:
        for d, dim in enumerate(dims):
            if len(dim) == 1:
                if dim[0] in first:
                    joined.join(first[dim[0]], (tensor, d))
                else:
                    first[dim[0]] = (tensor, d)


def _link(handle: Tensor, joined: _Union, by_root: _WeightDims) -> Follow | None:
    """The one weight that shares the most dims with `handle`; ties give none."""
    hits: dict[Variable, dict[int, int]] = {}
    for d in range(len(handle.shape or ())):
        for weight, wd in by_root.get(joined.find((handle, d)), ()):
            hits.setdefault(weight, {}).setdefault(d, wd)
    if not hits:
        return None
    most = max(len(m) for m in hits.values())
    best = [(w, m) for w, m in hits.items() if len(m) == most]
    same = [(w, m) for w, m in best if w.shape == handle.shape]
    if len(same) == 1:
        best = same
    if len(best) != 1:
        return None
    weight, mapping = best[0]
    return weight, tuple(mapping.get(d) for d in range(len(handle.shape or ())))
