"""Spec that the consumers of a tensor prefer.

`preferred_shard` is asked when a tensor is made Partial: shall it be reduced whole, or scattered?
Here is a gradient `g` whose sum over "data" is to be taken, and an optimizer slot `m` that the plan
has split, as ZeRO-1 does:

    %g:     float32[8,4] = MatMul(...)         // made as P(sum)
    %scaled = Mul(%g, 0.1)
    %old    = ReadVariableOp(%m)               // S(0)
    %new    = AddV2(%old, %scaled)

`AddV2` reads S(0) beside what comes of `g`, so `g` had better be S(0): a reduce-scatter moves half
as much as an all-reduce. If another reader wanted all of `g`, the wish would be Replicate; if
all that comes of it is reduced away again, there is none. The search goes through ops dim by dim,
at most `_LOOKAHEAD` of them, to variables, anchors and tensors that have a spec already.

`nearest` is asked for what an open weight makes, one that the plan leaves to propagation. The rows
of an embedding are multiplied with a matrix that is split along the hidden dim: then the rows are
wanted split there, and so is the table.
"""

from __future__ import annotations

import dataclasses
import heapq
from collections.abc import Iterator, Mapping, Sequence

from tfpar.ir.graph import Op, Tensor
from tfpar.propagation.factors import splits_of
from tfpar.propagation.prepared_graph import PreparedGraph
from tfpar.propagation.view import View, known_spec, settled_spec
from tfpar.rules.rule import PLAIN, Dims, OpRule
from tfpar.spec import Replicate, Shard, Spec

_LOOKAHEAD = 12
"""Largest number of ops that `preferred_shard` goes through: enough for Adam's arithmetic, from a
gradient to its slots."""

Wish = Shard | Replicate | None
"""Split so; whole, or readers that do not agree; None: no reader cares."""


def preferred_shard(
    view: View,
    tensor: Tensor,
    axis: int,
    made: Spec,
    depth: int = _LOOKAHEAD,
    even: bool = True,
) -> Wish:
    """Return the Shard along `axis` on which all readers of `tensor` (made as `made`) agree.

    Args:
        depth: through how many more ops to look.
        even: wish only for splits into equal parts.
    """
    wanted: Shard | None = None
    for op in view.prepared.consumers.get(tensor, ()):
        of_reader = _wish_of(view, op, tensor, axis, depth, even)
        if isinstance(of_reader, Replicate) or (
            wanted is not None and of_reader not in (None, wanted)
        ):
            return Replicate()
        wanted = of_reader or wanted
    if wanted is not None and any(
        isinstance(p, Shard) and p.dim == wanted.dim for a, p in enumerate(made) if a != axis
    ):
        return Replicate()
    return wanted


def _wish_of(view: View, op: Op, tensor: Tensor, axis: int, depth: int, even: bool) -> Wish:
    rule = view.prepared.rules[op]
    mesh = view.mesh
    dims_here = rule.inputs[op.inputs.index(tensor)]
    mine = {dim[0]: d for d, dim in enumerate(dims_here) if len(dim) == 1}
    for other, dims in zip(op.inputs, rule.inputs, strict=True):
        spec = None if other is tensor else settled_spec(view, other)
        if spec is None:
            continue
        if isinstance(spec[axis], Shard):
            split = splits_of(dims, spec, rule.sizes, mesh.shape)[axis]
            if split is None or split[0] not in mine:
                return Replicate()
            if even and rule.sizes[split[0]] % mesh.shape[axis]:
                return Replicate()
            return Shard(mine[split[0]], *split[1])
        if other.dtype == "resource":
            return Replicate()
    if depth == 0 or not mine:
        return Replicate()
    wanted: Shard | None = None
    for out, dims in zip(op.outputs, rule.outputs, strict=True):
        back = {d: mine[dim[0]] for d, dim in enumerate(dims) if len(dim) == 1 and dim[0] in mine}
        if not back:
            if dims or not all(f in rule.reduce for f in mine):
                return Replicate()
            continue  # the op reduces the dims away: it does not matter how they are split
        further = _wish_of_output(view, out, axis, depth - 1, even)
        if further is None:
            continue
        if isinstance(further, Replicate) or further.dim not in back:
            return Replicate()
        here = Shard(back[further.dim], further.stride, further.unit)
        if wanted is not None and wanted != here:
            return Replicate()
        wanted = here
    return wanted


def _wish_of_output(view: View, tensor: Tensor, axis: int, depth: int, even: bool) -> Wish:
    anchor = view.anchor_of(tensor)
    if anchor is not None and axis < len(anchor):
        placement = anchor[axis]
        return placement if isinstance(placement, Shard) else Replicate()
    return preferred_shard(view, tensor, axis, (), depth, even)


_REACH = 48
"""Largest number of ops that `nearest` looks at: enough to get past a normalisation to the next
matrices."""


def nearest(view: View, tensor: Tensor, axis: int) -> Shard | None:
    """Return the plain Shard of `tensor` along `axis` that what comes of it wants, if anything
    does.

    The first op, in the graph's order, that reads both something made of `tensor` and something
    split along `axis` decides: forward comes before backward, the next matrix before later ones.
    """
    for op in _reached(view.prepared, tensor):
        for other, dims in op.others:
            spec = known_spec(view, other)
            if spec is not None and isinstance(spec[axis], Shard):
                split = splits_of(dims, spec, op.rule.sizes, view.mesh.shape)[axis]
                if split is not None and split[0] in op.mine and split[1] == PLAIN:
                    return Shard(op.mine[split[0]])
                return None
        for out, onward in op.outputs:
            anchor = view.anchor_of(out)
            if anchor is not None:
                placement = anchor[axis]
                if isinstance(placement, Shard) and placement.dim in onward:
                    return Shard(onward[placement.dim])
                return None
    return None


@dataclasses.dataclass(frozen=True)
class ReachedConsumer:
    """An op that reads what was made of a tensor, with some of its dims still there.

    Attributes:
        mine: for factors of the op's rule, the dims of the tensor that they are.
        others: inputs whose spec can be known before the tensor is made, with their dims.
        outputs: the op's results; for dims of each, the dims of the tensor that they are.
    """

    rule: OpRule
    mine: Mapping[int, int]
    others: Sequence[tuple[Tensor, Dims]]
    outputs: Sequence[tuple[Tensor, Mapping[int, int]]]


def _reached(prepared: PreparedGraph, tensor: Tensor) -> Sequence[ReachedConsumer]:
    """The ops that `tensor` reaches, in the graph's order: the same for all plans."""
    known = prepared.caches.reached
    if tensor not in known:
        known[tensor] = list(_walk(prepared, tensor))
    return known[tensor]


def _walk(prepared: PreparedGraph, tensor: Tensor) -> Iterator[ReachedConsumer]:
    position = prepared.position
    home = {tensor: {d: d for d in range(len(tensor.shape or ()))}}  # dim -> dim of `tensor`
    waiting: list[tuple[int, Op]] = []
    seen: set[Op] = set()

    def reach(made: Tensor) -> None:
        for op in prepared.consumers.get(made, ()):
            if op not in seen:
                seen.add(op)
                heapq.heappush(waiting, (position[op], op))

    reach(tensor)
    for _ in range(_REACH):
        if not waiting:
            break
        _, op = heapq.heappop(waiting)
        rule = prepared.rules[op]
        read = list(zip(op.inputs, rule.inputs, strict=True))
        mine = {
            dim[0]: home[at][d]
            for at, dims in read
            for d, dim in enumerate(dims)
            if len(dim) == 1 and d in home.get(at, ())
        }
        others = [
            (other, dims)
            for other, dims in read
            if other in prepared.weights or position.get(other.op, -1) < position[tensor.op]
        ]
        outputs = []
        for out, made in zip(op.outputs, rule.outputs, strict=True):
            alone = {d: dim[0] for d, dim in enumerate(made) if len(dim) == 1}
            onward = {d: mine[f] for d, f in alone.items() if f in mine}
            outputs.append((out, onward))
            if onward:
                home[out] = onward
                reach(out)
        yield ReachedConsumer(rule, mine, others, outputs)
