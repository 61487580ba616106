"""Diagonals and bands of matrices: batches pass, the matrices stay whole."""

from __future__ import annotations

from tfpar.ir.constants import Constants
from tfpar.ir.graph import Op
from tfpar.rules.registry import rule
from tfpar.rules.rule import OpRule, make_rule


@rule("MatrixBandPart")
def _band(op: Op, constants: Constants) -> OpRule:
    return make_rule(op, "... . . -> ... . .", linear=((0,),))


def _batch(rank: int, batch: int) -> str:
    return " ".join([*(f"b{d}" for d in range(batch)), *["."] * (rank - batch)])


_DIAG_PARTS = ("MatrixDiagPart", "MatrixDiagPartV2", "MatrixDiagPartV3")


@rule("MatrixDiag", "MatrixDiagV2", "MatrixDiagV3", *_DIAG_PARTS)
def _matrix_diag(op: Op, constants: Constants) -> OpRule:
    x, y = op.inputs[0], op.outputs[0]
    is_part = op.type in _DIAG_PARTS
    batch = len((x if is_part else y).shape) - 2
    # The padding value, which is last, joins in: so Partials pass where there is none.
    padding = 2 if is_part else 4
    linear = ((0, padding),) if len(op.inputs) > padding else ((0,),)
    return make_rule(
        op, f"{_batch(len(x.shape), batch)} -> {_batch(len(y.shape), batch)}", linear=linear
    )


@rule("MatrixSetDiag", "MatrixSetDiagV2", "MatrixSetDiagV3")
def _matrix_set_diag(op: Op, constants: Constants) -> OpRule:
    x, diagonal = op.inputs[:2]
    batch = len(x.shape) - 2
    whole = _batch(len(x.shape), batch)
    return make_rule(
        op, f"{whole}, {_batch(len(diagonal.shape), batch)} -> {whole}", linear=((0, 1),)
    )


@rule("Diag", "DiagPart")
def _diag(op: Op, constants: Constants) -> OpRule:
    return make_rule(
        op,
        f"{_batch(len(op.inputs[0].shape), 0)} -> {_batch(len(op.outputs[0].shape), 0)}",
        linear=((0,),),
    )
