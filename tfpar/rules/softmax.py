"""Softmax and cross entropy: batch dims split directly, classes by decomposition.

Logits stay where they are when their classes are split (a vocabulary of 50,257 over 8
ranks): per row only a maximum, a sum of exponentials and the label's logit are exchanged.
"""

from __future__ import annotations

import numpy as np

from tfpar.ir.builder import GraphBuilder
from tfpar.ir.constants import Constants
from tfpar.ir.graph import Graph, Op, Tensor
from tfpar.rules.local import LocalOp
from tfpar.rules.pseudo import begin_decomposition, blocks, less_label, take_last, whole
from tfpar.rules.registry import rule
from tfpar.rules.rule import OpRule, make_rule


@rule("Softmax", "LogSoftmax")
def _softmax(op: Op, constants: Constants) -> OpRule:
    return make_rule(op, "... c -> ... c", expand={"c": _expand_softmax})


@rule("SoftmaxCrossEntropyWithLogits")
def _cross_entropy(op: Op, constants: Constants) -> OpRule:
    return make_rule(op, "b c, b c -> b, b c", expand={"c": _expand_cross_entropy})


@rule("SparseSoftmaxCrossEntropyWithLogits")
def _sparse_cross_entropy(op: Op, constants: Constants) -> OpRule:
    return make_rule(
        op,
        "b c, b -> b, b c",
        lower=_lower_sparse_cross_entropy,
        any_pattern=True,
        expand={"c": _expand_sparse_cross_entropy},
    )


def _lower_sparse_cross_entropy(local: LocalOp) -> list[Tensor]:
    # The CPU kernel raises on a label that is none, even where it is padding.
    return local.copy([local.inputs[0], local.filled(1, 0)]).outputs


class _Normalized:
    """Logits minus their maximum, exponentials and the sums of those, in the graph `build`.

    Half precision is computed in float32, as the sum runs over many classes.
    """

    def __init__(self, build: GraphBuilder, logits: Tensor) -> None:
        self.build = build
        self.dtype = logits.dtype
        wide = logits.dtype if logits.dtype in ("float32", "float64") else "float32"
        x = build.cast(logits, wide)
        last = [len(x.shape) - 1]
        self.shifted = build.binary("Sub", x, build.reduce("Max", x, last, keep_dims=True))
        self.exp = build.unary("Exp", self.shifted)
        self.sum = build.reduce("Sum", self.exp, last, keep_dims=True)

    def row_sum(self, x: Tensor) -> Tensor:
        return self.build.reduce("Sum", x, [len(x.shape) - 1])

    def narrow(self, x: Tensor) -> Tensor:
        return self.build.cast(x, self.dtype)


def _expand_softmax(op: Op, parts: int) -> Graph:
    build, (logits,) = begin_decomposition(op)
    n = _Normalized(build, logits)
    if op.type == "LogSoftmax":
        out = build.binary("Sub", n.shifted, build.unary("Log", n.sum))
    else:
        out = build.binary("RealDiv", n.exp, n.sum)
    build.graph.outputs = [n.narrow(out)]
    return build.graph


def _expand_cross_entropy(op: Op, parts: int) -> Graph:
    build, (logits, labels) = begin_decomposition(op)
    n = _Normalized(build, logits)
    labels = build.cast(labels, n.sum.dtype)
    surprise = build.binary("Sub", build.unary("Log", n.sum), n.shifted)
    # A class of probability zero and label zero costs nothing.
    loss = n.row_sum(build.binary("MulNoNan", surprise, labels))
    backprop = build.binary("Sub", build.binary("RealDiv", n.exp, n.sum), labels)
    build.graph.outputs = [n.narrow(loss), n.narrow(backprop)]
    return build.graph


def _expand_sparse_cross_entropy(op: Op, parts: int) -> Graph:
    """Each block of classes has its own maximum and sum, so that one exchange is enough.

    As the GPU kernel, a label that is no class makes its row NaN.
    """
    build, (logits, labels) = begin_decomposition(op)
    wide = logits.dtype if logits.dtype in ("float32", "float64") else "float32"
    rows, classes = logits.shape
    lowest = build.const(np.finfo(wide).min, wide)
    view, starts, counts = blocks(build, build.cast(logits, wide), parts, np.finfo(wide).min)
    # Where all of a block is minus infinity, its share of the whole sum has to be 0.
    peak = build.binary("Maximum", build.reduce("Max", view, [2]), lowest)
    exp = build.unary("Exp", build.binary("Sub", view, build.expand_dims(peak, -1)))
    at = build.expand_dims(build.cast(labels, "int32"), -1)
    at = build.binary("Sub", at, starts)
    inside = build.binary(
        "LogicalAnd",
        build.binary("GreaterEqual", at, build.const(0, "int32")),
        build.binary("Less", at, counts),
    )
    at = build.select(inside, at, build.const(0, "int32"))
    picked = build.select(inside, take_last(build, view, at), build.const(0, wide))
    own = [build.expand_dims(t, 1) for t in (peak, build.reduce("Sum", exp, [2]), picked)]
    known = whole(build, build.concat(own, 1))
    peaks, sums, picks = (build.slice(known, [0, i, 0], [rows, 1, parts]) for i in range(3))
    top = build.reduce("Max", peaks, [2], keep_dims=True)
    shares = build.binary("Mul", sums, build.unary("Exp", build.binary("Sub", peaks, top)))
    total = build.unary("Log", build.reduce("Sum", shares, [2], keep_dims=True))
    total = build.binary("AddV2", total, top)
    valid = build.binary(
        "LogicalAnd",
        build.binary("GreaterEqual", labels, build.const(0, labels.dtype)),
        build.binary("Less", labels, build.const(classes, labels.dtype)),
    )
    valid = build.reshape(valid, (rows, 1, 1))
    total = build.select(valid, total, build.const(np.nan, wide))
    loss = build.binary("Sub", total, build.reduce("Sum", picks, [2], keep_dims=True))
    scale = build.unary("Exp", build.binary("Sub", build.expand_dims(peak, -1), total))
    backprop = less_label(build, build.binary("Mul", exp, scale), at, inside, classes)
    outputs = [build.reshape(loss, (rows,)), backprop]
    build.graph.outputs = [build.cast(t, logits.dtype) for t in outputs]
    return build.graph
