"""Attentions as single ops, which work on blocks of their scores (see `ir.attention`).

    %s = Einsum(%q, %k)                 %o, %max, %sum = TfparAttention(%q, %k, %v, operands)
    %p = Softmax(%s)             ->
    %o = Einsum(%p, %v)                 %dq, %dk, %dv = TfparAttentionGradient(
    ...  seven ops of the gradient          %q, %k, %v, %o, %max, %sum, %do, operands)

Nothing of the scores is kept from the forward to the backward pass, which computes them again.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

from tfpar.ir.attention import ATTENTION, ATTENTION_GRADIENT, TREES
from tfpar.ir.builder import GraphBuilder
from tfpar.ir.graph import Graph, Tensor
from tfpar.ir.order import sort_topologically
from tfpar.ir.passes.attention_entries import Layout
from tfpar.ir.passes.copy import copy_graph
from tfpar.ir.passes.dead_ops import without_dead
from tfpar.ir.passes.find_attention import FEATURES, Attention, find_attentions

_BACKWARD_SCOPE = "gradient_tape/"


def fuse_attention(graph: Graph) -> Graph:
    """Return a copy of `graph` with each attention as one op; `graph` itself if it has none."""
    found = find_attentions(graph)
    if not found:
        return graph
    made, copies = copy_graph(graph)
    writer = _Writer(made)
    for attention in found:
        writer.fuse(_copied(attention, lambda t: copies[t.op].outputs[t.index]))
    writer.finish()
    return made


def _copied(attention: Attention, copy: Callable[[Tensor], Tensor]) -> Attention:
    def of(layout: Layout) -> Layout:
        return Layout(copy(layout.tensor), layout.dims)

    gradient = attention.gradient
    return dataclasses.replace(
        attention,
        softmax=copy(attention.softmax.outputs[0]).op,
        q=of(attention.q),
        k=of(attention.k),
        v=of(attention.v),
        result=of(attention.result),
        operands=[of(each) for each in attention.operands],
        gradient=None if gradient is None else type(gradient)(*map(of, gradient)),
    )


class _Writer:
    """Puts ops in the place of attentions, in a graph."""

    def __init__(self, graph: Graph) -> None:
        self._graph = graph
        self._instead: dict[Tensor, Tensor] = {}
        self._build = GraphBuilder(Graph())
        for op in graph.ops:
            self._build.unique_name(op.name)

    def fuse(self, attention: Attention) -> None:
        """Write the ops of one attention."""
        shape = attention.softmax.outputs[0].shape
        batch = range(len(shape) - 2)
        rows, columns = (*batch, len(shape) - 2, FEATURES), (*batch, len(shape) - 1, FEATURES)
        scope = attention.softmax.scope
        name = f"{scope}/attention" if scope else "attention"
        self._build.name = name
        qkv = [
            self._canonical(each, order)
            for each, order in zip(
                (attention.q, attention.k, attention.v), (rows, columns, columns), strict=True
            )
        ]
        operands = [self._operand(each, len(shape)) for each in attention.operands]
        q, _, v = qkv
        dtype = attention.softmax.outputs[0].dtype
        statistic = ((*shape[:-1], 1), dtype)
        result = (*shape[:-1], v.shape[-1])
        made = self._build.emit(
            ATTENTION,
            [*qkv, *operands],
            [(result, attention.result.tensor.dtype), statistic, statistic],
            {TREES: attention.trees.values()},
            name=name,
        )
        self._replace(attention.result, made.outputs[0], rows)
        if attention.gradient is None:
            return
        self._build.name = f"{_BACKWARD_SCOPE}{name}"
        gradient = attention.gradient
        back = self._build.emit(
            ATTENTION_GRADIENT,
            [*qkv, *made.outputs, self._canonical(gradient.result, rows), *operands],
            [
                (each.shape, layout.tensor.dtype)
                for each, layout in zip(qkv, gradient[1:], strict=True)
            ],
            {TREES: attention.trees.values()},
            name=f"{_BACKWARD_SCOPE}{name}",
        )
        for layout, tensor, order in zip(
            gradient[1:], back.outputs, (rows, columns, columns), strict=True
        ):
            self._replace(layout, tensor, order)

    def _canonical(self, layout: Layout, order: Sequence[int]) -> Tensor:
        """A tensor with its dims in `order`."""
        perm = [layout.dims.index(d) for d in order]
        tensor = layout.tensor
        return tensor if perm == sorted(perm) else self._build.transpose(tensor, perm)

    def _operand(self, layout: Layout, rank: int) -> Tensor:
        """A tensor with as many dims as the scores."""
        dims, tensor = layout.dims, layout.tensor
        perm = sorted(range(len(dims)), key=lambda i: -1 if dims[i] is None else dims[i] or 0)
        if perm != sorted(perm):
            tensor = self._build.transpose(tensor, perm)
        shape = [1] * rank
        for d, n in zip(dims, layout.tensor.shape, strict=True):
            if d is not None:
                shape[d] = n
        return self._build.reshape(tensor, shape)

    def _replace(self, layout: Layout, tensor: Tensor, order: Sequence[int]) -> None:
        """Have whoever reads a tensor read another one, whose dims are in `order`."""
        perm = [order.index(d) for d in layout.dims]
        if perm != sorted(perm):
            tensor = self._build.transpose(tensor, perm)
        self._instead[layout.tensor] = tensor

    def finish(self) -> None:
        """Have the graph read what was written, and drop what nobody reads any more."""
        graph, instead = self._graph, self._instead
        graph.ops += self._build.graph.ops
        for op in graph.ops:
            op.inputs = [instead.get(t, t) for t in op.inputs]
        graph.outputs = [instead.get(t, t) for t in graph.outputs]
        graph.ops = without_dead(graph, sort_topologically(graph.ops))
