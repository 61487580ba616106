"""All-reduces by blocks give what all-reduces give."""

from __future__ import annotations

import math

import numpy as np
import pytest
import tensorflow as tf

from tests.partitioned import devices
from tfpar.compile.local import LocalProgram, ProgramSet, decompose_all_reduces
from tfpar.ir import DType, Graph, GraphBuilder
from tfpar.spec import Mesh, replicated_spec
from tfpar.tf.runtime.backends.in_process import InProcessProgram

SHAPES = ((3,), (2, 5), ())  # 14 entries, which 3 and 4 do not divide


def program(mesh: Mesh, dtype: str) -> LocalProgram:
    """Sums over all ranks, in one packed all-reduce."""
    build = GraphBuilder(Graph())
    axes = tuple(range(mesh.num_axes))
    inputs = [
        build.emit("Placeholder", (), [(shape, dtype)], {"dtype": DType(dtype)}).outputs[0]
        for shape in SHAPES
    ]
    attrs = {"axes": axes, "reduction": "sum", "T": DType(dtype)}
    op = build.emit("AllReduce", inputs, [(t.shape, dtype) for t in inputs], attrs)
    build.graph.inputs, build.graph.outputs = inputs, list(op.outputs)
    whole = [replicated_spec(mesh.num_axes)] * len(SHAPES)
    return LocalProgram(build.graph, mesh, list(SHAPES), whole, whole, {})


@pytest.mark.parametrize("shape", [[3], [4], [2, 2]], ids=str)
def test_sums_of_any_shape(shape):
    mesh = Mesh.of(shape)
    local = program(mesh, "bfloat16")
    decompose_all_reduces(local.graph, mesh, {"bfloat16"})
    types = [op.type for op in local.graph.ops]
    assert "AllReduce" not in types and {"ReduceScatter", "AllGather"} <= set(types)
    values = [
        tf.cast(np.arange(math.prod(s)).reshape(s) + i, tf.bfloat16) for i, s in enumerate(SHAPES)
    ]
    for got, value in zip(
        InProcessProgram(ProgramSet.of(local), devices(mesh))(values, []), values, strict=True
    ):
        summed = mesh.size * tf.cast(value, tf.float32)  # every rank is fed the same
        np.testing.assert_array_equal(tf.cast(got, tf.float32), summed)


def test_other_dtypes_stay():
    local = program(Mesh.of([2]), "float32")
    before = list(local.graph.ops)
    assert decompose_all_reduces(local.graph, Mesh.of([2]), {"bfloat16"}).ops == before
