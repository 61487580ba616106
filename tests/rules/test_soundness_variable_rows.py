"""Lookups in variables and writes to their rows, sharded every way, against plain variables."""

import numpy as np
import pytest
import tensorflow as tf

from tests.partitioned import MESHES, devices, record
from tests.rules.test_soundness_layout import f
from tfpar.compile import CompileOptions, compile_step
from tfpar.propagation import Anchors
from tfpar.spec import Replicate, Shard, replicated_spec
from tfpar.tf.capture import argument_specs, capture_step
from tfpar.tf.runtime import Executable, Ranks
from tfpar.tf.variables import ParallelVariable

IDS = np.array([4, 0, 6, 2], "int32")


def compare(function, value, args, dims=(0, 1), meshes=MESHES):
    """Run `function(variable, *args)` with the variable in many layouts; returns the programs."""
    plain = tf.Variable(value)
    expected = tf.nest.flatten(function(plain, *map(tf.constant, args)))
    programs = []
    for mesh in meshes:
        layouts = [(Shard(d), *replicated_spec(mesh.num_axes)[1:]) for d in dims]
        layouts += [(Shard(d), Shard(e)) for d in dims for e in dims if mesh.num_axes == 2]
        layouts += [(Replicate(), Shard(d)) for d in dims if mesh.num_axes == 2]
        for spec in layouts:
            made = ParallelVariable(
                shape=value.shape,
                dtype=value.dtype,
                name="table",
                initial_value=lambda: tf.constant(value),
            )
            captured = capture_step(
                lambda *a, v=made: function(v, *a), argument_specs(tuple(args)), name="rows"
            )
            anchors = Anchors(
                variables={captured.graph.variables[0].name: spec},
                inputs=[replicated_spec(mesh.num_axes)] * len(args),
            )
            compiled = compile_step(captured, CompileOptions(mesh, anchors))
            program = Executable(captured, compiled, Ranks(devices(mesh)))
            outputs = tf.nest.flatten(program(tuple(map(tf.constant, args))))
            for got, want in zip(outputs, expected, strict=True):
                np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6, err_msg=str(spec))
            np.testing.assert_allclose(made.numpy(), plain.numpy(), rtol=1e-5, err_msg=str(spec))
            record(program.partitioned)
            programs.append(program)
    return programs


def splits(programs, op_type):
    """Names of the factors that some op of `op_type` was split by."""
    found = set()
    for program in programs:
        for op, decision in program.partitioned.decisions.items():
            if op.type == op_type:
                names = program.partitioned.prepared.rules[op].names
                found |= {names[f] for f, _ in decision.strategy.splits if f >= 0}
    return found


def test_lookup_in_a_variable():
    def function(v, i):
        return v.sparse_read(i), tf.raw_ops.ResourceGather(
            resource=v.handle, indices=tf.stack([i, i]), dtype=tf.float32
        )

    assert splits(compare(function, f(7, 3), [IDS]), "ResourceGather") == {"v", "q1"}


def test_batched_lookup_in_a_variable():
    def function(v, i):
        return tf.raw_ops.ResourceGather(
            resource=v.handle, indices=i, dtype=tf.float32, batch_dims=1
        )

    index = np.array([[1, 4], [0, 2], [3, 3]], "int32")
    programs = compare(function, f(3, 5, 4), [index], dims=(0, 1, 2))
    assert splits(programs, "ResourceGather") == {"b0", "v", "q2"}


def test_lookup_by_index_vectors_in_a_variable():
    def function(v, i):
        return v.gather_nd(tf.stack([i, i // 3], -1))

    programs = compare(function, f(7, 3, 4), [IDS], dims=(0, 1, 2))
    assert splits(programs, "ResourceGatherNd") == {"v0", "v1", "q2"}


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["add", "sub", "update", "max", "min", "mul", "div"])
def test_scatter_to_rows_of_a_variable(kind):
    def function(v, i, u):
        getattr(v, f"scatter_{kind}")(tf.IndexedSlices(u, i))
        return u

    dims = (1,) if kind in ("mul", "div") else (0, 1)
    programs = compare(function, f(7, 3), [IDS, 1 + np.abs(f(4, 3))], dims=dims)
    found = splits(programs, f"ResourceScatter{kind.capitalize()}")
    assert found == ({"v", "r1"} if 0 in dims else {"r1"})


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["add", "sub", "update", "max", "min"])
def test_scatter_by_index_vectors_to_a_variable(kind):
    def function(v, i, u):
        getattr(v, f"scatter_nd_{kind}")(tf.stack([i, i // 3], -1), u)
        return u

    programs = compare(function, f(7, 3, 4), [IDS, f(4, 4)], dims=(0, 1, 2))
    assert splits(programs, f"ResourceScatterNd{kind.capitalize()}") == {"v0", "v1", "r2"}


def test_assignment_to_a_slice_of_a_variable():
    def function(v, u):
        v[:, 1:3].assign(u)
        v[1:].assign(tf.sin(v[1:]))
        return u

    programs = compare(function, f(7, 3, 5), [f(7, 2, 5)], dims=(2,))
    assert splits(programs, "ResourceStridedSliceAssign") == {"d2"}


def test_assignment_to_a_variable():
    def function(v, u):
        v.assign_add(u)
        v.assign_sub(tf.reduce_mean(v, 0) * u)
        v.assign(tf.tanh(v) + u @ tf.ones([3, 3]))
        return tf.reduce_sum(v)

    programs = compare(function, f(7, 3), [f(7, 3)])
    for op_type in ("AssignAddVariableOp", "AssignSubVariableOp", "AssignVariableOp"):
        assert splits(programs, op_type) == {"_0", "_1"}, op_type


def test_initialisation_is_known_everywhere():
    programs = compare(lambda v: tf.raw_ops.VarIsInitializedOp(resource=v.handle), f(7, 3), [])
    assert len(programs) > 0


def test_shape_of_a_variable_is_global():
    compare(lambda v: tf.raw_ops.VariableShape(input=v.handle) + 0, f(7, 3), [])
