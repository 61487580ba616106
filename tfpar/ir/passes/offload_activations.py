"""Activations in the memory of the host from the forward to the backward pass (TAP §IV-H).

    y = Relu(x)                            y = Relu(x)
    ...                                    k = Identity(y)      on the host, as soon as y is there
    d = ReluGrad(g, y)        becomes      ...
                                           f = Identity(k)      on the host, when g is near
                                           d = ReluGrad(g, f)

A block is a set of forward ops. What they make and the backward pass reads is copied to the host;
what enters and what leaves the block stays, since the forward pass goes on with it. The way back
begins on the host: TensorFlow sends what an op has made to another device at once, and so the
second Identity waits, by a control edge, for the gradient that arrives at the block behind this
one. Then its copies run while the backward pass of that block does, and two blocks have theirs on
the device.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterator, Mapping, Sequence

from tfpar.ir.graph import DType, Graph, Op, Tensor
from tfpar.ir.passes.rereads import find_arrival, is_reread, rewire_backward
from tfpar.ir.passes.trim import clone_op
from tfpar.ir.roles import FORWARD, Roles
from tfpar.ir.traits import CONSTANTS, GIVES, ON_HOST, REFERENCES, TAKES, VIEWS, forwarded_input

LEAST_PART = 0.01
"""The part of a block's largest tensor below which others stay on the device (a guess): they save
less than it takes to start a copy."""

_VIEWS = VIEWS - {"IdentityN"}


def offload_activations(graph: Graph, blocks: Sequence[Collection[Op]], roles: Roles) -> Graph:
    """Return a copy of `graph` that has in host memory what its backward pass reads of `blocks`.

    Args:
        blocks: forward ops of `graph`; no two share one. One that the backward pass reads nothing
            of, or whose gradient depends on nothing that follows it, stays as it is.
        roles: of `graph`.
    """
    kept = _Kept(graph, roles)
    found = [block for ops in blocks if (block := kept.of(ops)) is not None]
    found.sort(key=lambda block: kept.position[block.arrival])
    following = dict(zip(graph.ops, graph.ops[1:], strict=False))
    instead: dict[Tensor, Tensor] = {}
    added: dict[Op, list[Op]] = {}
    before: Op | None = None
    for block in found:
        after = block.arrival
        # Nothing up to the first op that needs the block hangs on it: no circle is closed.
        if before is not None and kept.position[before] < kept.position[block.first]:
            after = before
        for root, views in block.tensors.items():
            down, back = _copies(root, after)
            added.setdefault(following[root.op], []).append(down)
            late = added.setdefault(block.first, [])
            late.append(back)
            read = {root: back.outputs[0]}
            for view in views:
                late += _again(view, read)
            instead.update(read)
        before = block.arrival
    return rewire_backward(graph, added, instead, roles)


@dataclasses.dataclass(frozen=True, eq=False)
class _Block:
    """Tensors of a block that are copied to the host, and the ops between which they come back.

    Attributes:
        tensors: each with those of its views, itself included, that are read again.
        arrival: the op that makes the gradient which arrives at the block.
        first: the first op of the backward pass that needs what is copied.
    """

    tensors: Mapping[Tensor, Sequence[Tensor]]
    arrival: Op
    first: Op


def _copies(tensor: Tensor, after: Op) -> tuple[Op, Op]:
    """The ops that bring a tensor to the host, and back after another op."""
    name = tensor.op.name + (f"/result_{tensor.index}" if tensor.index else "")
    down = Op(f"{name}/offload", "Identity", [tensor])
    held = down.add_output(tensor.shape, tensor.dtype)
    back = Op(f"gradient_tape/{name}/fetch", "Identity", [held], control=[after])
    back.add_output(tensor.shape, tensor.dtype)
    for op, side in ((down, TAKES), (back, GIVES)):
        op.attrs = {"T": DType(tensor.dtype), ON_HOST: side}
    return down, back


def _again(view: Tensor, read: dict[Tensor, Tensor]) -> Iterator[Op]:
    """The ops that give of what has come back what `view` was of it, which is added to `read`."""
    if view not in read:
        yield from _again(forwarded_input(view), read)
        clone = clone_op(view.op, [read[forwarded_input(view)], *view.op.inputs[1:]])
        clone.name = f"gradient_tape/{view.op.name}/fetched"
        read[view] = clone.outputs[0]
        yield clone


class _Kept:
    """Tensors that a step saves for its backward pass, with the views that share their memory.

    Attributes:
        position: of each op in the graph.
    """

    def __init__(self, graph: Graph, roles: Roles) -> None:
        self.position = {op: i for i, op in enumerate(graph.ops)}
        self._graph, self._roles = graph, roles
        self._readers = graph.consumers()
        self._returned = set(graph.outputs)
        self._of_weights = _of_weights(graph)
        self._views: dict[Tensor, list[Tensor]] = {}  # by what holds them, itself included
        roots: dict[Tensor, Tensor] = {}
        for op in graph.ops:
            for tensor in op.outputs:
                source = forwarded_input(tensor) if op.type in _VIEWS else tensor
                roots[tensor] = roots.get(source, source)
                self._views.setdefault(roots[tensor], []).append(tensor)

    def of(self, ops: Collection[Op]) -> _Block | None:
        """Return the tensors of a block to copy; None if there are none."""
        inside = frozenset(ops)
        ordered = sorted(inside, key=self.position.__getitem__)
        found = {
            root: views
            for op in ordered
            for root in op.outputs
            if root in self._views and (views := self._reread(root, inside))
        }
        largest = max((root.num_bytes for root in found), default=0)
        found = {r: views for r, views in found.items() if r.num_bytes >= LEAST_PART * largest}
        following = self._graph.ops[self.position[ordered[0]] :]
        read = {t for views in found.values() for t in views}
        arrival = find_arrival(following, inside - self._of_weights, read, self._roles)
        return None if arrival is None else _Block(found, *arrival)

    def _reread(self, root: Tensor, inside: Collection[Op]) -> list[Tensor]:
        """The views of what a block makes that the backward pass reads again; none if it stays: the
        forward pass goes on with it, or it is no plain tensor."""
        phase = self._roles.phase
        if not root.is_static or root.dtype in REFERENCES or not root.num_bytes:
            return []
        if root.op in self._of_weights:
            return []
        views = [view for view in self._views[root] if phase[view.op] == FORWARD]
        for view in views:
            readers = self._readers.get(view, ())
            if view in self._returned:
                return []
            if any(phase[r] == FORWARD and r not in inside for r in readers):
                return []
        return [v for v in views if is_reread(self._readers.get(v, ()), inside, self._roles)]


def _of_weights(graph: Graph) -> frozenset[Op]:
    """The ops that compute something of weights and constants alone: it is there all the time, or
    made of what is."""
    weights = {v.handle for v in graph.variables if v.trainable}
    found: set[Op] = set()
    for op in graph.ops:
        made = [t.op for t in op.inputs if t.op.type not in CONSTANTS]
        is_read = op.type == "ReadVariableOp" and op.inputs[0] in weights
        if is_read or (made and all(o in found for o in made)):
            found.add(op)
    return frozenset(found)
