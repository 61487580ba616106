"""Kernels that XLA can compile, by TensorFlow's registry."""

from __future__ import annotations

import functools
from typing import Any

import tensorflow as tf
from tensorflow.core.framework import kernel_def_pb2
from tensorflow.python.framework import kernels

from tfpar.ir.graph import DType, Op


class XlaKernels:
    """The kernels that XLA has for a kind of device.

    Args:
        device: a device's name, or its kind: `CPU` or `GPU`.
    """

    def __init__(self, device: str) -> None:
        kind = device.rpartition("device:")[2].partition(":")[0]
        self._kind = f"XLA_{kind}_JIT"
        _registered()

    def __call__(self, op: Op) -> bool:
        """Whether there is a kernel for the type and the dtypes of `op`."""
        return any(_takes(kernel, op) for kernel in _kernels(op.type, self._kind))


@functools.cache
def _registered() -> None:
    """XLA's kernels are registered when something is compiled for the first time."""
    tf.function(lambda: tf.zeros(()), jit_compile=True)()


@functools.cache
def _kernels(op_type: str, kind: str) -> list[kernel_def_pb2.KernelDef]:
    found = kernels.get_registered_kernels_for_op(op_type).kernel
    return [kernel for kernel in found if kernel.device_type == kind]


def _takes(kernel: kernel_def_pb2.KernelDef, op: Op) -> bool:
    return all(
        dtype.as_datatype_enum in constraint.allowed_values.list.type
        for constraint in kernel.constraint
        for dtype in _dtypes(op.attrs.get(constraint.name))
    )


def _dtypes(value: Any) -> list[tf.DType]:
    values = value if isinstance(value, list) else [value]
    return [tf.dtypes.as_dtype(str(v)) for v in values if isinstance(v, DType)]
