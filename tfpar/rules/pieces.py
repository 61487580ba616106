"""Ops that join tensors along a dim or take one apart: concat, split, pack, unpack.

Where the pieces are whole multiples of a common length, that length is a factor
of its own: the two halves of a fused gate, and Q, K and V of a fused projection, may be
split inside each piece (a strided shard of the whole).
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from tfpar.ir.constants import Constants
from tfpar.ir.graph import Op, Tensor
from tfpar.rules.local import LocalOp
from tfpar.rules.registry import rule
from tfpar.rules.rule import OpRule, make_rule


def common_length(*lengths: int) -> int:
    """Return the largest length of which all `lengths` are multiples."""
    return math.gcd(*lengths)


def piece_token(name: str, length: int, unit: int) -> str:
    """Return the token of a dim of `length` that may be split inside its pieces of length
    `unit`."""
    if unit <= 1:
        return "."
    return name if length == unit else f"(.{length // unit} {name})"


def names_of(tensor: Tensor) -> list[str]:
    return [f"d{d}" for d in range(len(tensor.shape))]


def _pieces(
    whole: Tensor, pieces: Sequence[Tensor], axis: int
) -> tuple[str, list[str], dict[str, int]]:
    """Notation of the whole and of each piece along `axis`, and the factor sizes."""
    names = names_of(whole)
    unit = common_length(*(p.shape[axis] for p in pieces))
    if any(p.shape[axis] == 0 for p in pieces):
        unit = 1

    def side(tensor: Tensor) -> str:
        token = piece_token(names[axis], tensor.shape[axis], unit)
        return " ".join([*names[:axis], token, *names[axis + 1 :]])

    return side(whole), [side(p) for p in pieces], {names[axis]: unit}


@rule("ConcatV2", "Concat")
def _concat(op: Op, constants: Constants) -> OpRule | None:
    first = op.type == "Concat"
    value = constants.value(op.inputs[0 if first else -1])
    if value is None:
        return None
    parts = op.inputs[1:] if first else op.inputs[:-1]
    rank = len(op.outputs[0].shape)
    whole, pieces, sizes = _pieces(op.outputs[0], parts, int(value) % rank)
    operands = ["", *pieces] if first else pieces
    group = tuple(range(int(first), len(operands)))
    return make_rule(op, f"{', '.join(operands)} -> {whole}", sizes=sizes, linear=(group,))


@rule("Split")
def _split(op: Op, constants: Constants) -> OpRule | None:
    axis = constants.value(op.inputs[0])
    if axis is None:
        return None
    x = op.inputs[1]
    whole, pieces, sizes = _pieces(x, op.outputs, int(axis) % len(x.shape))
    return make_rule(op, f", {whole} -> {', '.join(pieces)}", sizes=sizes, monotone=(1,))


@rule("SplitV")
def _split_v(op: Op, constants: Constants) -> OpRule | None:
    value = constants.value(op.inputs[2])
    if value is None:
        return None
    x = op.inputs[0]
    axis = int(value) % len(x.shape)
    whole, pieces, sizes = _pieces(x, op.outputs, axis)

    def lower(local: LocalOp) -> Sequence[Tensor]:
        lengths = [local.local_output_shape(i)[axis] for i in range(len(op.outputs))]
        operand = local.build.const(np.array(lengths), op.inputs[1].dtype)
        return local.copy([local.inputs[0], operand, local.inputs[2]]).outputs

    return make_rule(
        op,
        f"{whole} -> {', '.join(pieces)}",
        sizes=sizes,
        monotone=(0,),
        lower=lower,
        any_pattern=True,
    )


@rule("Pack")
def _pack(op: Op, constants: Constants) -> OpRule:
    names = names_of(op.inputs[0])
    axis = op.attrs.get("axis", 0) % (len(names) + 1)
    piece = " ".join(names)
    whole = " ".join([*names[:axis], ".", *names[axis:]])
    count = len(op.inputs)
    return make_rule(op, f"{', '.join([piece] * count)} -> {whole}", linear=(tuple(range(count)),))


@rule("Unpack")
def _unpack(op: Op, constants: Constants) -> OpRule:
    names = names_of(op.inputs[0])
    axis = op.attrs.get("axis", 0) % len(names)
    piece = " ".join([*names[:axis], *names[axis + 1 :]])
    whole = " ".join([*names[:axis], ".", *names[axis + 1 :]])
    return make_rule(op, f"{whole} -> {', '.join([piece] * len(op.outputs))}", monotone=(0,))
