"""Random ops that are functions of a key: the numbers are one device's, whatever the mesh.

Philox counts: a shard of the leading dim is the same op with its counter moved on, so a rank
draws no more than its part. Other draws are made whole by every rank, which takes its
part. Stateful generators have no rule: one rank runs them for all.
"""

from __future__ import annotations

import math

import numpy as np

from tfpar.ir.builder import GraphBuilder
from tfpar.ir.constants import Constants
from tfpar.ir.graph import DType, Op, Tensor, itemsize
from tfpar.rules.local import LocalOp
from tfpar.rules.pointwise import pointwise
from tfpar.rules.registry import rule
from tfpar.rules.rule import OpRule, make_rule, replicate_rule

# Philox, and the kernels' own choice, which is Philox on CPU and GPU.
_PHILOX_ALGORITHMS = (1, 3)

_RESERVED = 256
"""Draws of 32 bits that the kernels set aside for each truncated number, of which they keep the
first that lies within the bounds."""


@rule(
    "StatelessRandomGetKeyCounter",
    "StatelessRandomGetAlg",
    "StatelessRandomGetKeyCounterAlg",
    "StatelessRandomUniform",
    "StatelessRandomNormal",
    "StatelessTruncatedNormal",
    "StatelessRandomUniformInt",
    "StatelessRandomUniformFullInt",
)
def _whole(op: Op, constants: Constants) -> OpRule:
    return replicate_rule(op)


@rule(
    "StatelessRandomUniformV2",
    "StatelessRandomNormalV2",
    "StatelessTruncatedNormalV2",
    "StatelessRandomUniformIntV2",
    "StatelessRandomUniformFullIntV2",
)
def _draw(op: Op, constants: Constants) -> OpRule:
    rank = len(op.outputs[0].shape)
    algorithm = constants.value(op.inputs[3])
    if not rank or algorithm is None or int(algorithm) not in _PHILOX_ALGORITHMS:
        return replicate_rule(op)
    dims = " ".join(["n", *["."] * (rank - 1)])
    return make_rule(op, f"., ., ., -> {dims}", lower=_lower_draw, drawn=True)


def _lower_draw(local: LocalOp) -> list[Tensor]:
    """Draw from where the shard starts; a start inside a group drops what comes before it."""
    build, (result,) = local.build, local.op.outputs
    shape = local.local_output_shape()
    count, row = math.prod(shape), math.prod(shape[1:])
    # One step of the counter gives 128 bits; no number takes fewer than 32 of them.
    group = 2 if itemsize(result.dtype) == 8 else 4
    steps = _RESERVED * group // 4 if local.op.type == "StatelessTruncatedNormalV2" else 1
    starts = [start * row for start in local.starts("n")]
    _, key, counter, *rest = local.inputs
    counter = _advance(build, counter, [s // group * steps for s in starts])
    dropped = [s % group for s in starts]
    drawn = shape if not any(dropped) else (count + group - 1,)
    inputs = [build.shape_const(drawn), key, counter, *rest]
    attrs = {**local.op.attrs, "Tshape": DType("int32")}
    x = build.emit(local.op.type, inputs, [(drawn, result.dtype)], attrs).outputs[0]
    if any(dropped):
        begins = build.per_rank([np.array([d], np.int32) for d in dropped])
        x = build.reshape(build.slice(x, begins, (count,)), shape)
    return [x]


def _advance(build: GraphBuilder, counter: Tensor, steps: list[int]) -> Tensor:
    """The 128-bit counter (low word, high word) moved on by `steps`, one per rank."""
    if not any(steps):
        return counter
    step = build.per_rank([np.array([s], np.uint64) for s in steps])
    low = build.binary("AddV2", build.slice(counter, [0], [1]), step)
    carry = build.cast(build.binary("Less", low, step), "uint64")
    high = build.binary("AddV2", build.slice(counter, [1], [1]), carry)
    return build.concat([low, high], 0)


@rule("RandomGammaGrad")
def _gamma_grad(op: Op, constants: Constants) -> OpRule:
    return pointwise(op)
