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
from tfpar.rules.pseudo import label_mask
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
        op, "b c, b -> b, b c", lower=_lower_sparse_cross_entropy, any_pattern=True,
        expand={"c": _expand_sparse_cross_entropy},
    )  # fmt: skip


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


def _start(op: Op) -> tuple[GraphBuilder, list[Tensor]]:
    build = GraphBuilder(name=op.type.lower())
    return build, [build.placeholder(t, f"in{i}") for i, t in enumerate(op.inputs)]


def _expand_softmax(op: Op, parts: int) -> Graph:
    build, (logits,) = _start(op)
    n = _Normalized(build, logits)
    if op.type == "LogSoftmax":
        out = build.binary("Sub", n.shifted, build.unary("Log", n.sum))
    else:
        out = build.binary("RealDiv", n.exp, n.sum)
    build.graph.outputs = [n.narrow(out)]
    return build.graph


def _expand_cross_entropy(op: Op, parts: int) -> Graph:
    build, (logits, labels) = _start(op)
    n = _Normalized(build, logits)
    labels = build.cast(labels, n.sum.dtype)
    surprise = build.binary("Sub", build.unary("Log", n.sum), n.shifted)
    # A class of probability zero and label zero costs nothing.
    loss = n.row_sum(build.binary("MulNoNan", surprise, labels))
    backprop = build.binary("Sub", build.binary("RealDiv", n.exp, n.sum), labels)
    build.graph.outputs = [n.narrow(loss), n.narrow(backprop)]
    return build.graph


def _expand_sparse_cross_entropy(op: Op, parts: int) -> Graph:
    """As the GPU kernel, a label that is no class makes its row NaN."""
    build, (logits, labels) = _start(op)
    n = _Normalized(build, logits)
    wide = n.sum.dtype
    classes = logits.shape[-1]
    valid = build.binary(
        "LogicalAnd",
        build.binary("GreaterEqual", labels, build.const(0, labels.dtype)),
        build.binary("Less", labels, build.const(classes, labels.dtype)),
    )
    total = build.select(build.expand_dims(valid, -1), n.sum, build.const(np.nan, wide))
    mask = label_mask(build, labels, n.shifted)
    picked = n.row_sum(build.select(mask, n.shifted, build.const(0, wide)))
    loss = build.binary("Sub", build.reshape(build.unary("Log", total), picked.shape), picked)
    backprop = build.binary("Sub", build.binary("RealDiv", n.exp, total), build.cast(mask, wide))
    build.graph.outputs = [n.narrow(loss), n.narrow(backprop)]
    return build.graph
