"""Whether two graphs are the same, part by part."""

from __future__ import annotations

from typing import Any

import numpy as np

from tfpar.ir.graph import Graph, Op, Tensor
from tfpar.ir.step import StepGraph


def assert_same_step(one: StepGraph, other: StepGraph) -> None:
    assert_same(one.graph, other.graph)
    assert one.num_arguments == other.num_arguments
    assert [(g.variable, _names(g.tensors)) for g in one.gradients] == [
        (g.variable, _names(g.tensors)) for g in other.gradients
    ]


def assert_same(one: Graph, other: Graph, seen: frozenset[str] = frozenset()) -> None:
    """Same ops in the same order, attributes to the last bit, and same bodies.

    Args:
        seen: the bodies that these graphs are inside of.
    """
    assert [op.name for op in one.ops] == [op.name for op in other.ops]
    for a, b in zip(one.ops, other.ops, strict=True):
        assert _described(a) == _described(b)
        assert set(a.attrs) == set(b.attrs)
        for key in a.attrs:
            assert same_value(a.attrs[key], b.attrs[key]), (a.name, key, a.attrs[key])
    assert _names(one.inputs) == _names(other.inputs)
    assert _names(one.outputs) == _names(other.outputs)
    assert [e.name for e in one.effects] == [e.name for e in other.effects]
    assert list(map(_variable, one.variables)) == list(map(_variable, other.variables))
    assert list(one.functions) == list(other.functions)
    for name in set(one.functions) - seen:
        inside = seen | set(one.functions)
        assert_same(one.functions[name], other.functions[name], inside)


def _described(op: Op) -> tuple:
    kinds = [(t.shape if t.shape is None else tuple(t.shape), t.dtype) for t in op.outputs]
    return op.type, _names(op.inputs), kinds, [c.name for c in op.control], op.stateful


def _names(tensors) -> list[str]:
    def name(tensor: Tensor) -> str:
        return tensor.name

    return list(map(name, tensors))


def _variable(v) -> tuple:
    return v.name, tuple(v.shape), v.dtype, v.trainable, v.handle.name, v.place


def same_value(a: Any, b: Any) -> bool:
    if type(a) is not type(b):
        return False
    if isinstance(a, np.ndarray) and a.dtype.kind == "O":
        return a.shape == b.shape and a.tolist() == b.tolist()
    if isinstance(a, np.ndarray | np.generic):
        return (a.shape, a.dtype, a.tobytes()) == (b.shape, b.dtype, b.tobytes())
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(same_value, a, b))
    return repr(a) == repr(b)
