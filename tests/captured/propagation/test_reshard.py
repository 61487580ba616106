"""Reshards as programs: every way from one spec to another gives the values that it should."""

import itertools
import math

import numpy as np
import pytest
import tensorflow as tf

import tfpar.rules  # noqa: F401 - registers the rules
from tests.partitioned import devices
from tfpar.compile.local import (
    COLLECTIVE_TYPES,
    ProgramSet,
    build_local_program,
    build_uneven_program,
)
from tfpar.ir import DType, GraphBuilder
from tfpar.propagation import Anchors, prepare, propagate, with_uneven_mesh
from tfpar.spec import (
    Mesh,
    Partial,
    Replicate,
    Shard,
    SpecError,
    UnevenMesh,
    format_spec,
    local_shape,
    replicated_spec,
)
from tfpar.tf.runtime import InProcessProgram


def all_specs(shape, mesh, placements):
    """Every combination of `placements` that fits."""
    found = []
    for spec in itertools.product(placements, repeat=mesh.num_axes):
        if len({p for p in spec if isinstance(p, Partial)}) > 1:
            continue  # reductions do not commute
        try:
            local_shape(shape, spec, mesh)
        except SpecError:
            continue
        found.append(spec)
    return found


def chain(shape, layouts):
    """x + 1, kept as each layout, then passed on as each other one; (graph, anchors, pairs).

    The addition leaves ones in the padding, so that nothing survives that reads it.
    """
    build = GraphBuilder()
    attrs = {"dtype": DType("float32")}
    x = build.emit("Placeholder", (), [(shape, "float32")], attrs, "x").outputs[0]
    build.graph.inputs.append(x)
    one = build.const(1.0, "float32")
    anchors, pairs = {}, []

    def anchored(tensor, spec):
        anchors[tensor.name] = spec
        return tensor

    for source in layouts:
        arriving = tuple(Replicate() if isinstance(p, Partial) else p for p in source)
        kept = anchored(build.unary("Identity", x), arriving)
        kept = anchored(build.binary("AddV2", kept, one), arriving)
        kept = anchored(build.unary("Identity", kept), source)
        for target in layouts:
            if target != source:
                build.graph.outputs.append(anchored(build.unary("Identity", kept), target))
                pairs.append((source, target))
    return build.graph, anchors, pairs


def canonical(spec, mesh):
    """Axes of one rank shard nothing."""
    return tuple(Replicate() if n == 1 else p for p, n in zip(spec, mesh.shape, strict=True))


def check_all_pairs(shape, mesh, placements):
    layouts = all_specs(shape, mesh, placements)
    whole = replicated_spec(mesh.num_axes)
    graph, anchors, pairs = chain(shape, layouts)
    partitioned = propagate(
        prepare(graph),
        mesh.even if isinstance(mesh, UnevenMesh) else mesh,
        Anchors(inputs=[whole], tensors=anchors, outputs=[whole] * len(graph.outputs)),
    )
    for tensor in graph.outputs:
        assert partitioned.specs[tensor] == canonical(anchors[tensor.name], mesh)
    if isinstance(mesh, UnevenMesh):
        program = build_uneven_program(partitioned, [mesh], build_local_program)
        partitioned = with_uneven_mesh(partitioned, mesh.widest)
    else:
        program = build_local_program(partitioned)
    emitted = [
        (op.type.lower(), max(op.inputs[0].num_bytes, op.outputs[0].num_bytes))
        for op in program.graph.ops
        if op.type in COLLECTIVE_TYPES
    ]
    predicted = [(kind.replace("_", ""), size) for kind, _, size in partitioned.collectives()]
    assert sorted(emitted) == sorted(predicted)
    x = np.arange(math.prod(shape), dtype="float32").reshape(shape)
    outputs = InProcessProgram(ProgramSet.of(program), devices(mesh))([tf.constant(x)], [])
    for (source, target), output in zip(pairs, outputs, strict=True):
        label = f"{format_spec(source)} -> {format_spec(target)} of {shape} on {mesh}"
        np.testing.assert_array_equal(output.numpy(), x + 1, err_msg=label)
    return pairs


PLACEMENTS = (Replicate(), Shard(0), Shard(1), Shard(1, 3), Partial("sum"))


@pytest.mark.slow
def test_all_pairs_on_two_axes():
    """Nested and uneven: 5 over 2 over 2, and runs of 3 cut in two."""
    pairs = check_all_pairs((5, 6), Mesh.of([2, 2]), PLACEMENTS)
    assert len(pairs) > 400


def test_all_pairs_where_the_minor_axis_may_keep_its_rows():
    pairs = check_all_pairs((8, 4), Mesh.of([2, 2]), (*PLACEMENTS[:3], Shard(0, 4), Partial("sum")))
    assert len(pairs) > 400


@pytest.mark.parametrize("shape", [(6, 6), (7, 12), (2, 3)])
def test_all_pairs_on_three_ranks(shape):
    placements = (*PLACEMENTS, Shard(0, None, shape[0]), Shard(1, 3, 3), Partial("max"))
    pairs = check_all_pairs(shape, Mesh.of([3]), placements)
    assert len(pairs) == 8 * 7


def test_all_pairs_on_a_mesh_with_an_axis_of_one():
    check_all_pairs((3, 6), Mesh.of([1, 3]), (Replicate(), Shard(0), Shard(1), Partial("sum")))


@pytest.mark.parametrize("shares", [(3, 1), (1, 2, 1)])
def test_all_pairs_of_unequal_shares(shares):
    """In a strided dim, too: 4 entries of each run of 4, of two runs."""
    mesh = UnevenMesh.over(Mesh.of([len(shares)]), 0, shares)
    pairs = check_all_pairs((4, 8), mesh, (*PLACEMENTS[:3], Shard(1, 4), Partial("sum")))
    assert len(pairs) == 5 * 4


@pytest.mark.slow
@pytest.mark.parametrize("axis", [0, 1])
def test_all_pairs_of_unequal_shares_beside_equal_ones(axis):
    mesh = UnevenMesh.over(Mesh.of([2, 2]), axis, (1, 3))
    pairs = check_all_pairs((16, 8), mesh, (*PLACEMENTS[:3], Partial("sum")))
    assert len(pairs) == 16 * 15
