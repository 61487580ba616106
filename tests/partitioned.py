"""Run any TensorFlow function partitioned, and compare it with the plain run.

Ground truth for rules: the function's arguments are given specs (sharded any way, or
Partial with everything on the first rank, which no wrong rule survives by symmetry), the
whole pipeline runs, and the gathered results must be those of the plain function.
"""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable, Mapping

import numpy as np
import tensorflow as tf

import tfpar.rules  # noqa: F401 - registers the rules
from tests.cases import is_nightly
from tests.equivalence import without_graph_optimizers
from tfpar.compile.local import (
    COLLECTIVE_TYPES,
    ProgramSet,
    build_local_program,
    build_uneven_program,
    pack_collectives,
)
from tfpar.ir import Graph
from tfpar.propagation import (
    Anchors,
    OpPlan,
    PartitionedGraph,
    PreparedGraph,
    prepare,
    propagate,
    with_uneven_mesh,
)
from tfpar.spec import Mesh, Partial, Replicate, Shard, UnevenMesh, format_spec, replicated_spec
from tfpar.tf.interop import convert_func_graph
from tfpar.tf.runtime import InProcessProgram

Change = Callable[[Graph], Graph]

SEEN_TYPES: set[str] = set()
"""Op types that ran under a rule in this session, and (SPLIT_TYPES) that ran split."""
SPLIT_TYPES: set[str] = set()


def record(partitioned: PartitionedGraph) -> None:
    """Note what ran, for `test_zz_registry`."""
    for op, decision in partitioned.decisions.items():
        SEEN_TYPES.add(op.type)
        if any(factor >= 0 for factor, _ in decision.strategy.splits):
            SPLIT_TYPES.add(op.type)
        for inner in (*decision.bodies.values(), decision.expansion):
            if inner is not None:
                record(inner)


def devices(mesh: Mesh) -> list[str]:
    return [f"/job:localhost/replica:0/task:0/device:CPU:{r % 4}" for r in range(mesh.size)]


@dataclasses.dataclass
class Run:
    """What came of a partitioned run."""

    outputs: list[np.ndarray]
    expected: list[np.ndarray]
    partitioned: PartitionedGraph
    program: InProcessProgram

    def decisions(self, op_type: str) -> list:
        """The decisions taken for the ops of `op_type`."""
        return [d for op, d in self.partitioned.decisions.items() if op.type == op_type]


def trace(function, args):
    """ConcreteFunction of `function` whose arguments pass through ops named `arg<i>`."""
    signature = [tf.TensorSpec(np.shape(a), tf.as_dtype(np.asarray(a).dtype)) for a in args]

    def named(*tensors):
        return function(*(tf.identity(t, name=f"arg{i}") for i, t in enumerate(tensors)))

    return tf.function(named, autograph=False).get_concrete_function(*signature)


@dataclasses.dataclass
class Traced:
    """A function traced for its arguments, and what it gives when run plainly."""

    args: list[np.ndarray]
    prepared: PreparedGraph
    expected: list[np.ndarray]

    @classmethod
    def of(cls, function, args, change: Change = lambda graph: graph) -> Traced:
        """Args: change: a pass over the graph before it is laid out."""
        args = [np.asarray(a) for a in args]
        concrete = trace(function, args)
        with without_graph_optimizers():
            outputs = tf.nest.flatten(concrete(*map(tf.constant, args)))
        prepared = prepare(change(convert_func_graph(concrete.graph)))
        return cls(args, prepared, [t.numpy() for t in outputs])

    def run(self, specs, mesh: Mesh, ops: Mapping[str, OpPlan] | None = None) -> Run:
        """Run with the arguments laid out as `specs` on `mesh`, and `ops` as planned.

        Raises:
            CannotShare: on an `UnevenMesh`, what does not split so.
        """
        whole = replicated_spec(mesh.num_axes)
        anchors = Anchors(
            inputs=[whole] * len(self.args),
            tensors={f"arg{i}:0": spec for i, spec in enumerate(specs)},
            outputs=[whole] * len(self.prepared.graph.outputs),
            ops=ops or {},
        )
        if isinstance(mesh, UnevenMesh):
            partitioned = propagate(self.prepared, mesh.even, anchors)
            local = build_uneven_program(partitioned, [mesh], build_local_program)
            partitioned = with_uneven_mesh(partitioned, mesh.widest)
        else:
            partitioned = propagate(self.prepared, mesh, anchors)
            local = build_local_program(partitioned)
        record(partitioned)
        emitted = [
            (op.type, sum(max(i.num_bytes, o.num_bytes) for i, o in ends(op)))
            for op in local.graph.ops
            if op.type in COLLECTIVE_TYPES
        ]
        predicted = [(OP_TYPES[kind], size) for kind, _, size in partitioned.collectives()]
        assert sorted(emitted) == sorted(predicted), "predicted collectives are not those emitted"
        pack_collectives(local.graph, shapes=local.shapes)
        program = InProcessProgram(ProgramSet.of(local), devices(mesh))
        with without_graph_optimizers():  # which rules have no part in
            outputs = [o.numpy() for o in program([tf.constant(a) for a in self.args], [])]
        return Run(outputs, self.expected, partitioned, program)

    def check(self, specs, mesh: Mesh, rtol=2e-5, atol=2e-5) -> Run:
        """`run`, and assert equality (exact for integers and booleans)."""
        result = self.run(specs, mesh)
        label = f"{mesh} " + " | ".join(format_spec(s) for s in specs)
        assert len(result.outputs) == len(result.expected)
        for i, (got, want) in enumerate(zip(result.outputs, result.expected, strict=True)):
            assert got.shape == want.shape, f"output {i}: {got.shape} != {want.shape} for {label}"
            if want.dtype.kind in "fc" or want.dtype.kind == "V":
                np.testing.assert_allclose(
                    got.astype("complex128" if want.dtype.kind == "c" else "float64"),
                    want.astype("complex128" if want.dtype.kind == "c" else "float64"),
                    rtol=rtol,
                    atol=atol,
                    err_msg=f"output {i} for {label}",
                )
            else:
                np.testing.assert_array_equal(got, want, err_msg=f"output {i} for {label}")
        return result


OP_TYPES = {
    "all_reduce": "AllReduce",
    "all_gather": "AllGather",
    "reduce_scatter": "ReduceScatter",
    "all_to_all": "AllToAll",
    "broadcast": "Broadcast",
    "permute": "Permute",
}


def ends(op):
    """(input, output) of each tensor that a collective moves."""
    return zip(op.inputs, op.outputs, strict=True)


def run(function, args, specs, mesh: Mesh) -> Run:
    """Run `function` on `args` laid out as `specs` on `mesh`, and plainly.

    Args:
        specs: one spec per argument (Shard, Replicate or Partial placements).
    """
    return Traced.of(function, args).run(specs, mesh)


def check(function, args, specs, mesh: Mesh, rtol=2e-5, atol=2e-5) -> Run:
    """`run`, and assert equality (exact for integers and booleans)."""
    return Traced.of(function, args).check(specs, mesh, rtol, atol)


MESHES = (Mesh.of([2]), Mesh.of([3]), Mesh.of([2, 2]))


def random_spec(rng: random.Random, value: np.ndarray, mesh: Mesh, partial: bool = True):
    """A random spec: any dim on any axis, uneven ones included, sometimes Partial."""
    spec = []
    for _ in mesh.shape:
        options: list = [Replicate(), *(Shard(d) for d, n in enumerate(value.shape) if n > 1)]
        if partial and value.dtype.kind == "f":
            options.append(Partial("sum"))
        spec.append(rng.choice(options))
    return tuple(spec)


def sweep(
    function,
    args,
    *,
    trials=8,
    seed=0,
    meshes=MESHES,
    partial=True,
    rtol=2e-5,
    atol=2e-5,
    change: Change = lambda graph: graph,
):
    """Check `function` under `trials` random layouts of its arguments on each mesh.

    The first layouts are systematic: each single dim of each argument alone. But at night, when
    all is tried, these run on the widest mesh of one axis alone, with the first argument that can
    be a Partial as one, and two random ones on each of several axes: a rule treats meshes of one
    axis alike. Returns the runs.
    """
    rng = random.Random(seed)
    traced = Traced.of(function, args, change)
    args = traced.args
    runs = []
    widest = max((m.size for m in meshes if m.num_axes == 1), default=0)
    for mesh in meshes:
        whole = replicated_spec(mesh.num_axes)
        layouts = []
        for i, value in enumerate(args):
            for dim, size in enumerate(value.shape):
                if size > 1:
                    specs = [whole] * len(args)
                    specs[i] = (Shard(dim), *whole[1:])
                    layouts.append(specs)
        layouts = layouts[: 2 * trials]
        drawn = [[random_spec(rng, a, mesh, partial) for a in args] for _ in range(trials)]
        if is_nightly():
            layouts += drawn
        elif mesh.num_axes > 1:
            layouts = drawn[:2] if widest else layouts + drawn[:2]
        elif mesh.size < widest:
            layouts = []
        else:
            first = next((i for i, a in enumerate(args) if a.dtype.kind == "f"), None)
            if partial and first is not None:
                specs = [whole] * len(args)
                specs[first] = (Partial("sum"),)
                layouts.append(specs)
        for specs in layouts:
            runs.append(traced.check(specs, mesh, rtol, atol))
    return runs


def was_split(runs, op_type: str, factor: str) -> bool:
    """Whether some run really split `factor` in an op of `op_type` (and did not gather)."""
    for result in runs:
        for op, decision in result.partitioned.decisions.items():
            if op.type == op_type:
                rule = result.partitioned.prepared.rules[op]
                chosen = {f for f, _ in decision.strategy.splits}
                if factor in rule.names and rule.factor(factor) in chosen:
                    return True
    return False
