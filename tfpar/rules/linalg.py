"""Contractions: MatMul, BatchMatMul, Einsum, BiasAdd's gradient."""

from __future__ import annotations

from tfpar.ir.constants import Constants
from tfpar.ir.graph import Op
from tfpar.rules.registry import rule
from tfpar.rules.rule import OpRule, make_rule

_EITHER = ((0,), (1,))


@rule("MatMul")
def _matmul(op: Op, constants: Constants) -> OpRule:
    left = "k i" if op.attrs.get("transpose_a") else "i k"
    right = "j k" if op.attrs.get("transpose_b") else "k j"
    return make_rule(op, f"{left}, {right} -> i j", reduce={"k": "sum"}, linear=_EITHER)


@rule("BatchMatMul", "BatchMatMulV2", "BatchMatMulV3")
def _batch_matmul(op: Op, constants: Constants) -> OpRule:
    left = "k i" if op.attrs.get("adj_x") else "i k"
    right = "j k" if op.attrs.get("adj_y") else "k j"
    return make_rule(op, f"... {left}, ... {right} -> ... i j", reduce={"k": "sum"}, linear=_EITHER)


@rule("Einsum")
def _einsum(op: Op, constants: Constants) -> OpRule | None:
    equation = op.attrs["equation"]
    if isinstance(equation, bytes):
        equation = equation.decode()
    left, right = equation.replace(" ", "").split("->")
    operands = [*left.split(","), right]
    if any(len(set(o.replace("...", ""))) != len(o.replace("...", "")) for o in operands):
        return None  # a diagonal: its dims do not split on their own
    labels = set("".join(operands).replace(".", ""))
    notation = [" ".join("..." if c == "." else c for c in o.replace("...", ".")) for o in operands]
    reduced = {c: "sum" for c in labels - set(right)}
    return make_rule(
        op,
        f"{', '.join(notation[:-1])} -> {notation[-1]}",
        reduce=reduced,
        linear=tuple((i,) for i in range(len(op.inputs))),
    )


def _channels_first(op: Op) -> bool:
    return op.attrs.get("data_format", b"NHWC") in (b"NCHW", b"NCDHW", "NCHW", "NCDHW")


@rule("BiasAdd")
def _bias_add(op: Op, constants: Constants) -> OpRule:
    if _channels_first(op):
        rank = len(op.inputs[0].shape)
        rest = " ".join(f"s{i}" for i in range(rank - 2))
        return make_rule(op, f"b c {rest}, c -> b c {rest}", linear=((0, 1),))
    return make_rule(op, "... c, c -> ... c", linear=((0, 1),))


@rule("BiasAddV1")
def _bias_add_v1(op: Op, constants: Constants) -> OpRule:
    return make_rule(op, "... c, c -> ... c", linear=((0, 1),))


@rule("BiasAddGrad")
def _bias_add_grad(op: Op, constants: Constants) -> OpRule:
    rank = len(op.inputs[0].shape)
    rest = [f"r{i}" for i in range(rank - 1)]
    at = 1 if _channels_first(op) else rank - 1
    dims = [*rest[:at], "c", *rest[at:]]
    return make_rule(
        op, f"{' '.join(dims)} -> c", reduce=dict.fromkeys(rest, "sum"), linear=((0,),)
    )
