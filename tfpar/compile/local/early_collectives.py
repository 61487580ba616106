"""Collectives that are waited for start early: what could run before them runs behind (ATP §4.2).

The backward pass of `Y = X W` has two products of the same gradient `dY`:

    dX = dY W^T       all-reduced, and all the layers before wait for it
    dW = X^T dY       only the update reads it

Nothing in the graph says which runs first. With a control edge from dX to dW, dX is made first, and
dW is computed while dX is reduced.
"""

from __future__ import annotations

from tfpar.compile.local.reshard import COLLECTIVE_TYPES
from tfpar.ir.graph import Graph, Op, Tensor
from tfpar.ir.order import sort_topologically
from tfpar.ir.traits import ADDITIONS, CONVOLUTIONS, MATRIX_PRODUCTS, REARRANGED, origin

PRODUCTS = MATRIX_PRODUCTS | CONVOLUTIONS
"""Op types that take long enough to hide a collective behind."""

_SHOWN = REARRANGED | {"Cast", "Pad"}
"""Op types through which the result of a product is seen: uneven dims are padded."""


def start_collectives_early(graph: Graph) -> Graph:
    """Add control edges to `graph`, in place; returns it.

    A product is made to wait for the operand of a collective if both are computed from the same
    tensor, and if more ops follow the collective than the product. The latter also excludes cycles:
    along every edge, old or new, the number of ops that are still to follow decreases.
    """
    left = _ops_left(graph)
    readers: dict[Tensor, list[Op]] = {}
    for op in graph.ops:
        if op.type in PRODUCTS:
            for tensor in dict.fromkeys(map(_viewed, op.inputs)):
                readers.setdefault(tensor, []).append(op)
    beside: dict[Op, set[Op]] = {}  # by the op whose result a collective carries
    for op in graph.ops:
        for operand in op.inputs if op.type in COLLECTIVE_TYPES else ():
            beside.setdefault(operand.op, set()).update(
                other
                for product in _products(operand)
                for tensor in product.inputs
                for other in readers[_viewed(tensor)]
                if left[operand.op] > left[other]
            )
    reached = _reached(graph, list(beside))
    for i, (maker, others) in enumerate(beside.items()):
        for other in sorted(others, key=lambda op: op.name):
            if not reached[other] >> i & 1:
                other.control.append(maker)
    graph.ops = sort_topologically(graph.ops)
    return graph


def _viewed(tensor: Tensor) -> Tensor:
    """Return the tensor of which `tensor` is a view or a cast."""
    return origin(tensor, _SHOWN)


def _products(tensor: Tensor) -> list[Op]:
    """The products that `tensor` is the result of, or the sum of the results; else none."""
    op = _viewed(tensor).op
    made = [_maker(t) for t in op.inputs] if op.type in ADDITIONS else [_maker(tensor)]
    return made if all(maker.type in PRODUCTS for maker in made) else []


def _maker(tensor: Tensor) -> Op:
    """The op whose result `tensor` shows, or its sum over some dims."""
    op = _viewed(tensor).op
    return _viewed(op.inputs[0]).op if op.type == "Sum" else op


def _ops_left(graph: Graph) -> dict[Op, int]:
    """The length of the longest path from each op to the end, in ops."""
    left = dict.fromkeys(graph.ops, 0)
    for op in reversed(graph.ops):
        for before in op.predecessors:
            left[before] = max(left[before], left[op] + 1)
    return left


def _reached(graph: Graph, sources: list[Op]) -> dict[Op, int]:
    """By op, which of `sources` lead to it: a bit each, in their order."""
    bits = {op: 1 << i for i, op in enumerate(sources)}
    reached: dict[Op, int] = {}
    for op in graph.ops:
        mask = bits.get(op, 0)
        for before in op.predecessors:
            mask |= reached[before]
        reached[op] = mask
    return reached
