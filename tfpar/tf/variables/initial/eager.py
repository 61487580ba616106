"""Running the ops of a local program one by one, for one rank.

An initial value is a few ops run for many blocks: linking and optimising a function for them would
cost more than it saves, and its rewrites need not give the same bits.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import tensorflow as tf

from tfpar.ir.graph import DType, Op, Tensor, UnknownShape
from tfpar.tf.interop.runtime import run_op


class EagerProgram:
    """The ops that make `output`.

    Args:
        feeds: the values of placeholders, the same for every rank.
    """

    def __init__(self, output: Tensor, feeds: Mapping[Tensor, tf.Tensor]) -> None:
        self.output = output
        self.ops = needed_ops(output)
        self._constants = {
            op.outputs[0]: tf.constant(op.attrs["value"], op.outputs[0].dtype)
            for op in self.ops
            if op.type == "Const"
        } | dict(feeds)
        self._run = [op for op in self.ops if op.outputs[0] not in self._constants]
        self._attrs = {op: _eager_attrs(op) for op in self._run}
        last = {t: op for op in self._run for t in op.inputs}
        self._dead: dict[Op, list[Tensor]] = {}
        for tensor, op in last.items():
            if tensor not in self._constants:
                self._dead.setdefault(op, []).append(tensor)

    def __call__(self, rank: int) -> tf.Tensor:
        """The value of `output` on `rank`; what is no longer needed is let go at once."""
        values = dict(self._constants)
        for op in self._run:
            if op.type == "RankConst":
                values[op.outputs[0]] = tf.constant(op.attrs["values"][rank], op.outputs[0].dtype)
                continue
            inputs = [values[t] for t in op.inputs]
            results = run_op(op.type, inputs, self._attrs[op], len(op.outputs))
            del inputs
            values.update(zip(op.outputs, results, strict=True))
            for tensor in self._dead.get(op, ()):
                del values[tensor]
        return values[self.output]


def needed_ops(output: Tensor) -> list[Op]:
    """The ops that `output` is computed from, in an order to run them."""
    ordered: dict[Op, None] = {}
    stack = [(output.op, False)]
    while stack:
        op, ready = stack.pop()
        if op in ordered:
            continue
        if ready:
            ordered[op] = None
            continue
        stack.append((op, True))
        stack += [(t.op, False) for t in op.inputs]
    return list(ordered)


def _eager_attrs(op: Op) -> tuple[Any, ...]:
    """Attributes as a flat tuple of names and values."""
    attrs: list[Any] = []
    for name, value in op.attrs.items():
        if not name.startswith("_") and value is not None:
            attrs += [name, _eager_attr(value)]
    return tuple(attrs)


def _eager_attr(value: Any) -> Any:
    if isinstance(value, DType):
        return tf.dtypes.as_dtype(str(value)).as_datatype_enum
    if isinstance(value, UnknownShape):
        return None
    if isinstance(value, list):
        return [_eager_attr(item) for item in value]
    return value
