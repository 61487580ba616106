"""Linear algebra and Fourier transforms on batches of matrices: batch dims split."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from tfpar.ir.constants import Constants
from tfpar.ir.graph import Op, Tensor
from tfpar.rules.local import LocalOp
from tfpar.rules.registry import rule
from tfpar.rules.rule import SAME, OpRule, make_rule

_MATRIX = "... . ."


def _lower_on_identity(local: LocalOp) -> list[Tensor]:
    """The op with identity matrices in the padding: decompositions fail on arbitrary ones."""
    inputs = list(local.inputs)
    for position, tensor in enumerate(local.op.inputs):
        if len(tensor.shape) < 2 or any(local.rule.inputs[position][-2:]):
            continue
        eye = np.eye(*tensor.shape[-2:])
        for dim in range(len(tensor.shape) - 2):
            inputs[position] = local.mask_padding(inputs[position], position, dim, eye)
    return local.copy(inputs).outputs


def _on_matrices(
    op: Op,
    notation: str,
    linear: tuple[tuple[int, ...], ...] = (),
    reduce: Mapping[str, str] | None = None,
) -> OpRule:
    return make_rule(
        op, notation, reduce=reduce, linear=linear, lower=_lower_on_identity, any_pattern=True
    )


@rule("Cholesky", "MatrixInverse", "MatrixLogarithm", "MatrixSquareRoot")
def _square(op: Op, constants: Constants) -> OpRule:
    return _on_matrices(op, f"{_MATRIX} -> {_MATRIX}")


@rule("CholeskyGrad")
def _cholesky_grad(op: Op, constants: Constants) -> OpRule:
    return _on_matrices(op, f"{_MATRIX}, {_MATRIX} -> {_MATRIX}", linear=((1,),))


@rule("MatrixDeterminant")
def _determinant(op: Op, constants: Constants) -> OpRule:
    return _on_matrices(op, f"{_MATRIX} -> ...")


@rule("LogMatrixDeterminant")
def _log_determinant(op: Op, constants: Constants) -> OpRule:
    return _on_matrices(op, f"{_MATRIX} -> ..., ...")


@rule("MatrixSolve", "MatrixTriangularSolve")
def _solve(op: Op, constants: Constants) -> OpRule:
    return _on_matrices(op, f"{_MATRIX}, ... . k -> ... . k", linear=((1,),))


@rule("MatrixSolveLs")
def _solve_least_squares(op: Op, constants: Constants) -> OpRule:
    return _on_matrices(op, f"{_MATRIX}, ... . k,  -> ... . k", linear=((1,),))


@rule("TridiagonalSolve")
def _tridiagonal_solve(op: Op, constants: Constants) -> OpRule | None:
    if len(op.inputs[0].shape) != len(op.inputs[1].shape):
        return None
    return _on_diagonals(op, main=1)


@rule("BandedTriangularSolve")
def _banded_solve(op: Op, constants: Constants) -> OpRule:
    return _on_diagonals(op, main=0 if op.attrs.get("lower", True) else -1)


def _on_diagonals(op: Op, main: int) -> OpRule:
    """A solve whose matrix comes as rows of diagonals; `main` is the row of the main one."""

    def lower(local: LocalOp) -> list[Tensor]:
        """The diagonals of padding are those of the identity: others may be refused."""
        inputs = list(local.inputs)
        shape = local.op.inputs[0].shape
        identity = np.zeros(shape[-2:])
        identity[main] = 1.0
        for dim in range(len(shape) - 2):
            inputs[0] = local.mask_padding(inputs[0], 0, dim, identity)
        return local.copy(inputs).outputs

    return make_rule(
        op, f"{_MATRIX}, ... . k -> ... . k", linear=((1,),), lower=lower, any_pattern=True
    )


@rule("TridiagonalMatMul")
def _tridiagonal_product(op: Op, constants: Constants) -> OpRule:
    return make_rule(op, f"{_MATRIX}, {_MATRIX}, {_MATRIX}, ... . k -> ... . k", linear=((3,),))


@rule("Qr", "Svd", "SelfAdjointEigV2", "Eig", "Lu")
def _decomposition(op: Op, constants: Constants) -> OpRule:
    """Results that the op was told not to compute are empty vectors, which have no batch."""
    batch = len(op.inputs[0].shape) - 2
    outputs = []
    for tensor in op.outputs:
        rest = len(tensor.shape) - batch
        outputs.append("... " + ". " * rest if rest > 0 or tensor.num_elements else ".")
    reduce = {f"_{i}": SAME for i in range(batch)}
    return _on_matrices(op, f"{_MATRIX} -> {', '.join(outputs)}", reduce=reduce)


@rule("Cross")
def _cross(op: Op, constants: Constants) -> OpRule:
    return make_rule(op, "... ., ... . -> ... .", linear=((0,), (1,)))


_FOURIER_DIMS = {
    "FFT": 1,
    "IFFT": 1,
    "RFFT": 1,
    "IRFFT": 1,
    "FFT2D": 2,
    "IFFT2D": 2,
    "RFFT2D": 2,
    "IRFFT2D": 2,
    "FFT3D": 3,
    "IFFT3D": 3,
    "RFFT3D": 3,
    "IRFFT3D": 3,
}


@rule(*_FOURIER_DIMS)
def _fourier(op: Op, constants: Constants) -> OpRule:
    dims = "... " + ". " * _FOURIER_DIMS[op.type]
    return make_rule(op, f"{dims} -> {dims}", linear=((0,),))
