"""What XLA can compile is asked of TensorFlow itself."""

from __future__ import annotations

import pytest

from tfpar.ir import DType, Op, traits
from tfpar.tf.interop import XlaKernels


@pytest.mark.parametrize("device", ["CPU", "/job:localhost/replica:0/task:0/device:CPU:1"])
@pytest.mark.parametrize(
    ("op_type", "dtype", "compiles"),
    [
        ("MatMul", "float32", True),
        ("MatMul", "int32", True),
        ("Tanh", "int32", False),
        ("ReadVariableOp", "float32", True),
        ("StringJoin", "string", False),
        ("PyFunc", "float32", False),
        ("AllReduce", "float32", False),
    ],
)
def test_by_type_and_dtype(device, op_type, dtype, compiles):
    op = Op("op", op_type, (), {"T": DType(dtype)})
    assert XlaKernels(device)(op) == compiles


@pytest.mark.parametrize("device", ["CPU", "GPU"])
def test_what_is_priced_as_fused_is_what_xla_has_kernels_for(device):
    """The cost model knows it without TensorFlow."""
    compiles = XlaKernels(device)
    types = traits.ELEMENTWISE | traits.REDUCTIONS | traits.ASSIGNMENTS
    assert [t for t in types if not compiles(Op("op", t, (), {}))] == []
