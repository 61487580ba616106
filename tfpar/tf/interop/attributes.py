"""TensorFlow attribute values to Python values of the IR, and back."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import tensorflow as tf
from tensorflow.core.framework import attr_value_pb2

from tfpar.ir.graph import DType, FunctionRef, ShapeAttr, UnknownShape


@functools.cache
def dtype_name(number: int) -> str:
    """`float32` for `DT_FLOAT`; reference types count as their base."""
    return tf.dtypes.as_dtype(number).base_dtype.name


def _shape(proto) -> ShapeAttr | UnknownShape:
    if proto.unknown_rank:
        return UnknownShape()
    return ShapeAttr(d.size for d in proto.dim)


def read_attr(value: attr_value_pb2.AttrValue) -> Any:
    """The Python value of a TensorFlow attribute."""
    kind = value.WhichOneof("value")
    if kind == "s":
        return value.s
    if kind in ("i", "f", "b"):
        return getattr(value, kind)
    if kind == "type":
        return DType(dtype_name(value.type))
    if kind == "shape":
        return _shape(value.shape)
    if kind == "tensor":
        return tf.make_ndarray(value.tensor)
    if kind == "func":
        return FunctionRef(value.func.name)
    if kind == "list":
        items = value.list
        for field in ("s", "i", "f", "b"):
            if getattr(items, field):
                return list(getattr(items, field))
        if items.type:
            return [DType(dtype_name(t)) for t in items.type]
        if items.shape:
            return [_shape(s) for s in items.shape]
        if items.func:
            return [FunctionRef(f.name) for f in items.func]
        if items.tensor:
            return [tf.make_ndarray(t) for t in items.tensor]
        return []
    return None


def write_attr(value: Any) -> attr_value_pb2.AttrValue:
    """The TensorFlow attribute of a Python value; inverse of `read_attr`."""
    out = attr_value_pb2.AttrValue()
    _write(out, value)
    return out


def _write(out: attr_value_pb2.AttrValue, value: Any) -> None:
    if isinstance(value, DType):
        out.type = tf.dtypes.as_dtype(str(value)).as_datatype_enum
    elif isinstance(value, FunctionRef):
        out.func.name = str(value)
    elif isinstance(value, bytes):
        out.s = value
    elif isinstance(value, str):
        out.s = value.encode()
    elif isinstance(value, (bool, np.bool_)):
        out.b = bool(value)
    elif isinstance(value, (int, np.integer)):
        out.i = int(value)
    elif isinstance(value, (float, np.floating)):
        out.f = float(value)
    elif isinstance(value, UnknownShape):
        out.shape.unknown_rank = True
    elif isinstance(value, ShapeAttr):
        out.shape.SetInParent()
        for size in value:
            out.shape.dim.add().size = size
    elif isinstance(value, np.ndarray):
        out.tensor.CopyFrom(tf.make_tensor_proto(value))
    elif isinstance(value, (list, tuple)):
        out.list.SetInParent()
        for item in value:
            _append(out.list, item)
    elif value is not None:
        raise TypeError(f"no attribute type for {value!r}")


def _append(items, item: Any) -> None:
    single = write_attr(item)
    kind = single.WhichOneof("value")
    target = getattr(items, kind)
    if kind in ("shape", "func", "tensor"):
        target.add().CopyFrom(getattr(single, kind))
    else:
        target.append(getattr(single, kind))
