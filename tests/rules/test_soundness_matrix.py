"""Batches of matrices and Fourier transforms against the plain ops."""

import numpy as np
import pytest
import tensorflow as tf

from tests.partitioned import MESHES, sweep, was_split

rng = np.random.default_rng(0)


def f(*shape):
    return rng.normal(size=shape).astype("float32")


def positive(*batch, n=3):
    x = f(*batch, n, n)
    return (x @ np.swapaxes(x, -1, -2) + 3 * np.eye(n)).astype("float32")


@pytest.mark.slow
def test_square_matrices_in_uneven_batches():
    def function(x):
        with tf.GradientTape() as tape:
            tape.watch(x)
            chol = tf.linalg.cholesky(x)
            sign, log = tf.linalg.slogdet(x)
            loss = tf.reduce_sum(chol) + tf.reduce_sum(log)
        return [
            chol,
            tf.linalg.inv(x),
            tf.linalg.det(x),
            sign,
            log,
            tape.gradient(loss, x),
            tf.linalg.sqrtm(x),
        ]

    # Four on three ranks leave one with padding alone.
    runs = sweep(function, [positive(5, 4)], trials=5, atol=2e-4, rtol=2e-4)
    for op_type in ("Cholesky", "MatrixInverse", "MatrixDeterminant", "LogMatrixDeterminant"):
        assert was_split(runs, op_type, "_0") and was_split(runs, op_type, "_1"), op_type


@pytest.mark.slow
def test_solves():
    runs = sweep(
        lambda a, b: [
            tf.linalg.solve(a, b),
            tf.linalg.triangular_solve(a, b),
            tf.linalg.lstsq(a, b, fast=False),
        ],
        [positive(4, 2), f(4, 2, 3, 5)],
        trials=5,
        atol=1e-3,
        rtol=1e-3,
    )
    for op_type in ("MatrixSolve", "MatrixTriangularSolve"):
        assert all(was_split(runs, op_type, k) for k in ("_0", "_1", "k")), op_type
    runs = sweep(
        lambda d, b: tf.linalg.tridiagonal_solve(d, b, "compact", partial_pivoting=False),
        [np.abs(f(4, 3, 5)) + np.array([[0], [4], [0]], "float32"), f(4, 5, 2)],
        trials=3,
        meshes=MESHES[:2],
        atol=1e-4,
        partial=False,
    )
    assert was_split(runs, "TridiagonalSolve", "_0")


def test_bands():
    def function(d, b):
        main = d + 3.0
        lower = tf.stack([main, d], -2)
        return [
            tf.linalg.banded_triangular_solve(lower, b),
            tf.linalg.banded_triangular_solve(tf.stack([d, main], -2), b, lower=False),
            tf.linalg.banded_triangular_solve(lower, b, adjoint=True),
            tf.linalg.tridiagonal_matmul((d, main, d), b, "sequence"),
        ]

    runs = sweep(function, [f(4, 5) / 4, f(4, 5, 3)], trials=3, atol=1e-4, rtol=1e-4)
    for op_type in ("BandedTriangularSolve", "TridiagonalMatMul"):
        assert was_split(runs, op_type, "_0") and was_split(runs, op_type, "k"), op_type


def test_functions_of_matrices():
    def function(x, g):
        # A logarithm takes complex matrices only.
        log = tf.linalg.logm(tf.complex(x, tf.zeros_like(x)))
        triangle = tf.linalg.cholesky(x)
        # Eigenvectors are known but for a factor; these eigenvalues are distinct.
        values, vectors = tf.linalg.eig(x)
        return [
            tf.math.real(log),
            tf.math.imag(log),
            tf.raw_ops.CholeskyGrad(l=triangle, grad=g),
            tf.abs(values),
            tf.abs(vectors),
            tf.abs(tf.linalg.eigvals(x)),
        ]

    runs = sweep(function, [positive(4), f(4, 3, 3)], trials=2, atol=1e-3, rtol=1e-3)
    for op_type in ("MatrixLogarithm", "CholeskyGrad", "Eig"):
        assert was_split(runs, op_type, "_0"), op_type


def test_decompositions():
    def function(x):
        s, u, v = tf.linalg.svd(x)
        e, w = tf.linalg.eigh(x)
        q, r = tf.linalg.qr(x)
        lu, p = tf.linalg.lu(x)
        return [
            s,
            u @ (s[..., None] * tf.linalg.adjoint(v)),
            e,
            w * w,
            q @ r,
            lu,
            p,
            tf.linalg.svd(x, compute_uv=False),
            tf.linalg.eigvalsh(x),
        ]

    runs = sweep(function, [positive(4)], trials=3, atol=2e-3, rtol=1e-3, meshes=MESHES[:2])
    for op_type in ("Svd", "SelfAdjointEigV2", "Qr", "Lu"):
        assert was_split(runs, op_type, "_0"), op_type


def test_cross_product():
    runs = sweep(lambda a, b: tf.linalg.cross(a, b), [f(5, 3), f(5, 3)], trials=4)
    assert was_split(runs, "Cross", "_0")


@pytest.mark.slow
def test_fourier():
    def function(x):
        z = tf.complex(x, 2 * x)
        out = [
            tf.signal.ifft(tf.signal.fft(z) * z),
            tf.signal.fft2d(z),
            tf.signal.ifft2d(z),
            tf.signal.rfft(x),
            tf.signal.irfft(z),
            tf.signal.rfft2d(x),
            tf.signal.fft3d(z),
            tf.signal.irfft2d(z),
            tf.signal.ifft3d(z),
            tf.signal.rfft3d(x),
            tf.signal.irfft3d(z),
        ]
        return [g(t) for t in out for g in (tf.math.real, tf.math.imag) if t.dtype.is_complex] + [
            t for t in out if not t.dtype.is_complex
        ]

    runs = sweep(function, [f(3, 5, 4, 4)], trials=4, atol=2e-4, rtol=1e-4)
    for kind in ("FFT", "IFFT", "RFFT", "IRFFT"):
        for op_type, batch in ((kind, 3), (kind + "2D", 2), (kind + "3D", 1)):
            assert was_split(runs, op_type, f"_{batch - 1}"), op_type
