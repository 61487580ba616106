"""Fused optimizer updates on sharded variables against the plain ops."""

import numpy as np
import pytest
import tensorflow as tf

import tfpar.rules  # noqa: F401 - registers the rules
from tests.partitioned import MESHES, devices, record
from tfpar.compile.local import ProgramSet, build_local_program
from tfpar.ir import Variable
from tfpar.propagation import Anchors, prepare, propagate
from tfpar.rules.optimizer_ops import _OPERANDS, _SPARSE_OPERANDS
from tfpar.spec import Replicate, Shard, assemble, format_spec, replicated_spec, take_local
from tfpar.tf.interop import convert_func_graph
from tfpar.tf.runtime import InProcessProgram

rng = np.random.default_rng(0)
SHAPE = (5, 6)


def f(*shape):
    return np.abs(rng.normal(size=shape)).astype("float32")


def operands(op_type):
    """(argument name, kind) of each operand; a handle is "v"."""
    signature = tf.raw_ops.__dict__[op_type].__signature__.parameters
    kinds = {**_OPERANDS, **_SPARSE_OPERANDS}[op_type]
    names = list(signature)[: len(kinds)]
    slots = ("var", "accum", "ms", "mg", "mom", "m", "v", "vhat", "linear", "accum_update")
    slots += ("gradient_accumulator", "gradient_squared_accumulator")
    return [(n, "v" if k == "t" and n in slots else k) for n, k in zip(names, kinds, strict=True)]


def update(op_type, spec, mesh):
    """Values of the variables after the update, partitioned and plain."""
    made = {
        "v": lambda: 1 + f(*SHAPE),
        "t": lambda: f(*SHAPE),
        "r": lambda: f(3, *SHAPE[1:]),
        "i": lambda: np.array([4, 0, 2], "int32"),
        "s": lambda: np.float32(0.1 + 0.4 * f()),
    }
    named = [(n, k, made[k]()) for n, k in operands(op_type)]
    if op_type == "ResourceApplyAdagradDA":
        named[-1] = ("global_step", "s", np.int64(2))
    named = [(n, k, np.float32(-0.5) if n == "lr_power" else v) for n, k, v in named]
    fed = [(n, v) for n, k, v in named if k != "v"]
    start = [v for _, k, v in named if k == "v"]
    whole = [tf.Variable(v) for v in start]

    def function(*args):
        handles = iter(v.handle for v in whole)
        given = dict(zip([n for n, _ in fed], args, strict=True))
        getattr(tf.raw_ops, op_type)(
            **{n: next(handles) if k == "v" else given[n] for n, k, _ in named}
        )
        return args[-1]

    concrete = tf.function(function).get_concrete_function(
        *(tf.TensorSpec(np.shape(v), np.asarray(v).dtype) for _, v in fed)
    )
    graph = convert_func_graph(concrete.graph)
    handles = [t for t in graph.inputs if t.dtype == "resource"]
    graph.inputs = [t for t in graph.inputs if t.dtype != "resource"]
    for i, handle in enumerate(handles):
        graph.variables.append(Variable(f"v{i}", SHAPE, "float32", False, handle))
    anchors = Anchors(
        variables={f"v{i}": spec for i in range(len(handles))},
        inputs=[replicated_spec(mesh.num_axes)] * len(fed),
    )
    partitioned = propagate(prepare(graph), mesh, anchors)
    record(partitioned)
    program = build_local_program(partitioned)
    captured = [next(v for v in whole if v.handle is h) for h, _ in concrete.graph.captures]
    places = [mesh.coordinates(r) for r in range(mesh.size)]
    shards = [
        [tf.Variable(take_local(v.numpy(), spec, mesh, at)) for at in places] for v in captured
    ]
    run = InProcessProgram(ProgramSet.of(program), devices(mesh))
    run([tf.constant(v) for _, v in fed], [[s.handle for s in ranks] for ranks in shards])
    concrete(*(tf.constant(v) for _, v in fed))
    got = [assemble([s.numpy() for s in ranks], SHAPE, spec, mesh) for ranks in shards]
    return got, [v.numpy() for v in captured], start


@pytest.mark.slow
@pytest.mark.parametrize("op_type", sorted(_OPERANDS))
def test_update_of_sharded_variables(op_type):
    for mesh, spec in (
        (MESHES[0], (Shard(0),)),
        (MESHES[1], (Shard(1),)),
        (MESHES[2], (Shard(1), Replicate())),
        (MESHES[2], (Shard(1), Shard(0))),
    ):
        got, want, start = update(op_type, spec, mesh)
        for a, b in zip(got, want, strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6, err_msg=format_spec(spec))
        assert any(np.abs(a - b).max() > 1e-4 for a, b in zip(want, start, strict=True))


@pytest.mark.slow
@pytest.mark.parametrize("op_type", sorted(_SPARSE_OPERANDS))
def test_sparse_update_of_sharded_variables(op_type):
    for mesh, spec in (
        (MESHES[1], (Shard(0),)),
        (MESHES[1], (Shard(1),)),
        (MESHES[1], (Replicate(),)),
        (MESHES[2], (Shard(0), Shard(1))),
        (MESHES[2], (Shard(0), Shard(0))),
    ):
        got, want, start = update(op_type, spec, mesh)
        for a, b in zip(got, want, strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6, err_msg=format_spec(spec))
        assert any(np.abs(a - b).max() > 1e-4 for a, b in zip(want, start, strict=True))
