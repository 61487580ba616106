"""From a partitioned graph to the program that every rank runs.

The result is an `ir.Graph` again, with local shapes, collectives as ops of their own
(`AllReduce`, `AllGather`, `ReduceScatter`, `AllToAll`, with mesh axes as attributes)
and `RankConst` where ranks differ in a constant. A backend turns it into TensorFlow
ops; nothing here knows which.
"""

from __future__ import annotations

import dataclasses
import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from tfpar.compile.local.reshard import ONCE, emit_step
from tfpar.ir.builder import GraphBuilder, neutral
from tfpar.ir.graph import (
    FunctionRef,
    Graph,
    Op,
    Shape,
    ShapeAttr,
    Tensor,
    UnknownShape,
    Variable,
    renamed_functions,
)
from tfpar.ir.traits import CONSTANTS, NEW_LISTS, REGIONS
from tfpar.propagation.lists import remaking
from tfpar.propagation.partitioned_graph import Decision, PartitionedGraph, Reshard
from tfpar.rules.local import LocalOp
from tfpar.rules.rule import SAME
from tfpar.spec import Mesh, Spec, format_spec, local_shape, seen_rank

TASK = "Task"
"""An op that calls a part of the program, the function `body`, in which ranks may meet: all of them
call it together. Of its inputs and outputs, those at the positions `carried` (pairs) go from one
call to the next."""

EFFECT_OF = "_tfpar_effect_of"
"""The attribute of ops with effects, and of reads: the name of the op that they are for. It follows
them through all passes, so that their order can be compared with that of the step."""


class StagePass(NamedTuple):
    """Stage at which an op of a pipeline runs, and pass of that stage."""

    stage: int
    backward: bool = False


class LocalLayout(NamedTuple):
    """Layout of a local tensor: the shape of the whole, and its spec."""

    shape: Shape
    spec: Spec


NOWHERE = StagePass(0)
"""Of an op without one, where only the order of ops is asked for."""


@dataclasses.dataclass(eq=False)
class LocalProgram:
    """The program of every rank.

    Attributes:
        graph: local ops; its variables have local shapes.
        mesh: the ranks.
        input_shapes: the global shape of each graph input.
        input_specs, output_specs: how each graph input is fed and output comes.
        variable_specs: by variable name.
        places: of the ops of a step in stages. An op without one is made wherever it is read:
            constants, inputs, and what comes of these alone.
        origins: of the ops of a program as it was first written: the op of the partitioned graph
            for which each was.
        layouts: of the tensors of a program as it was first written, how they lie, where that is
            known.
        shapes: of tensors whose shapes differ between ranks, that of each rank; see `shape_on`.
    """

    graph: Graph
    mesh: Mesh
    input_shapes: list[Shape]
    input_specs: list[Spec]
    output_specs: list[Spec]
    variable_specs: dict[str, Spec]
    places: dict[Op, StagePass] = dataclasses.field(default_factory=dict)
    origins: dict[Op, Op] = dataclasses.field(default_factory=dict)
    layouts: dict[Tensor, LocalLayout] = dataclasses.field(default_factory=dict)
    shapes: dict[Tensor, Sequence[Shape]] = dataclasses.field(default_factory=dict)

    def shape_on(self, rank: int, tensor: Tensor) -> Shape:
        """Return the shape of a local tensor on `rank`."""
        each = self.shapes.get(tensor)
        return tensor.shape if each is None else each[rank]

    def graphs(self) -> list[Graph]:
        """Return all graphs in which ranks may meet: that of the program, and those of its
        tasks."""
        bodies = dict.fromkeys(op.attrs["body"] for op in self.graph.ops if op.type == TASK)
        return [self.graph, *(self.graph.functions[body] for body in bodies)]

    def __str__(self) -> str:
        """The graph as text, below how its inputs are fed and its outputs come."""
        fed = zip(self.graph.inputs, self.input_shapes, self.input_specs, strict=True)
        lines = [f"// the program of every rank of the mesh {self.mesh}"]
        lines += [f"// {t.name} is fed {s} as {format_spec(p)}" for t, s, p in fed]
        specs = "; ".join(map(format_spec, self.output_specs)) or "nothing"
        return "\n".join([*lines, f"// returned: {specs}", str(self.graph)])


def build_local_program(
    partitioned: PartitionedGraph, places: Mapping[Op, StagePass] | None = None
) -> LocalProgram:
    """Emit the local program of a partitioned graph.

    Args:
        places: of all its ops, if they are in stages. What moves a tensor runs where it is made.
    """
    source = partitioned.graph
    build = GraphBuilder(Graph(functions={}), rank=seen_rank(partitioned.mesh))
    writer = _Writer(partitioned, build, places)
    return LocalProgram(
        _write_graph(writer),
        partitioned.mesh,
        [t.shape for t in source.inputs],
        [partitioned.specs[t] for t in source.inputs],
        list(partitioned.output_specs),
        {v.name: s for v, s in partitioned.variable_specs.items()},
        writer.places,
        writer.origins,
        writer.layouts,
    )


def _write_graph(writer: _Writer) -> Graph:
    """The local graph."""
    source = writer.partitioned.graph
    writer.bind_sources()
    writer.write()
    graph = writer.build.graph
    graph.outputs = [
        writer.local(tensor, spec)
        for tensor, spec in zip(source.outputs, writer.partitioned.output_specs, strict=True)
    ]
    graph.effects = [op for e in source.effects for op in writer.effects.get(e, ())]
    return graph


class _Writer:
    """Emits one partitioned graph into a builder; expansions nest.

    Args:
        stages: the places of the graph's ops, if they have any.

    Attributes:
        places: of the ops that are emitted.
        origins: of each, the op of the graph for which it is.
        layouts: of emitted tensors.
    """

    def __init__(
        self,
        partitioned: PartitionedGraph,
        build: GraphBuilder,
        stages: Mapping[Op, StagePass] | None = None,
    ) -> None:
        self.places: dict[Op, StagePass] = {}
        self.origins: dict[Op, Op] = {}
        self.layouts: dict[Tensor, LocalLayout] = {}
        self._stages = stages or {}
        self.partitioned = partitioned
        self.mesh = partitioned.mesh
        self.build = build
        self.tensors: dict[Tensor, dict[Spec, Tensor]] = {}
        self.effects: dict[Op, list[Op]] = {}

    def bind(self, tensor: Tensor, spec: Spec, local: Tensor) -> None:
        self.tensors.setdefault(tensor, {})[spec] = local
        self.layouts[local] = LocalLayout(tensor.shape, spec)

    def bind_sources(self) -> None:
        """Placeholders for inputs and variable handles, in local shapes."""
        graph = self.partitioned.graph
        handles, readers = graph.variable_of(), graph.consumers()
        fed = set(graph.inputs)
        for op in graph.ops:
            if op.type != "Placeholder":
                continue
            (tensor,) = op.outputs
            spec = self.partitioned.specs[tensor]
            shape = tensor.shape
            if tensor.is_static:
                shape = local_shape(tensor.shape, spec, self.mesh)
            clone = self.build.emit(
                "Placeholder", (), [(shape, tensor.dtype)], op.attrs, name=op.name
            )
            self.bind(tensor, spec, clone.outputs[0])
            if tensor in handles:
                variable = handles[tensor]
                if op in self._stages and not readers.get(tensor):  # nothing else says where it is
                    self.places[clone] = self._stages[op]
                self.build.graph.variables.append(
                    Variable(
                        variable.name,
                        shape,
                        variable.dtype,
                        variable.trainable,
                        clone.outputs[0],
                        offloaded=variable.offloaded,
                    )
                )
        self.build.graph.inputs = [
            self.local(t, self.partitioned.specs[t]) for t in graph.inputs if t in fed
        ]

    def local(self, tensor: Tensor, spec: Spec) -> Tensor:
        """The local tensor of `tensor` in `spec`, resharded (once) if need be."""
        versions = self.tensors[tensor]
        if spec not in versions:
            kept = self.partitioned.specs[tensor]
            first = len(self.build.graph.ops)
            self.bind(tensor, spec, self.reshard(versions[kept], Reshard(tensor, kept, spec)))
            self._note(tensor.op, self.build.graph.ops[first:])
        return versions[spec]

    def _note(self, op: Op, emitted: Sequence[Op]) -> None:
        """`emitted` is for `op`: it runs where that runs, but for what is made anywhere."""
        self.origins.update(dict.fromkeys(emitted, op))
        if op in self._stages and op.type != "Placeholder":
            placed = (e for e in emitted if e.type not in CONSTANTS)
            self.places.update(dict.fromkeys(placed, self._stages[op]))

    def reshard(self, local: Tensor, reshard: Reshard) -> Tensor:
        tensor = reshard.tensor
        if tensor.dtype == "variant":
            return self._remade(tensor, reshard.target)
        self.build.name = f"{tensor.op.name}/reshard"
        steps = reshard.steps(self.mesh)
        own = wire_dtype = local.dtype
        if any(step.is_collective for step in steps):
            wire_dtype = self.partitioned.wire_dtypes.get(tensor, own)
        local = self.build.cast(local, wire_dtype)
        for step in steps:
            local = emit_step(self.build, local, step, tuple(tensor.shape or ()), self.mesh)
            self.layouts[local] = LocalLayout(tensor.shape, step.after)
        return self.build.cast(local, own)

    def _remade(self, tensor: Tensor, spec: Spec) -> Tensor:
        """A list made in another spec, of elements in that spec."""
        op = tensor.op
        if op.type not in NEW_LISTS:
            strategy = remaking(op, self.partitioned.prepared.rules[op], spec, self.mesh)
            inputs = [self.local(t, s) for t, s in zip(op.inputs, strategy.in_specs, strict=True)]
            return self._write_plain(op, Decision(strategy), inputs)[0]
        shape = local_shape(tensor.shape, spec, self.mesh) if tensor.is_static else tensor.shape
        inputs = [self.local(t, self.partitioned.specs[t]) for t in op.inputs]
        if inputs and tensor.is_static and op.attrs["element_dtype"] != "variant":
            inputs[0] = self.build.const(shape[1:], inputs[0].dtype)
        made = self.build.emit(op.type, inputs, [(shape, "variant")], op.attrs, name=op.name)
        return made.outputs[0]

    def write(self) -> None:
        for op in self.partitioned.graph.ops:
            if op.type != "Placeholder":
                self.write_op(op)

    def write_op(self, op: Op) -> None:
        decision = self.partitioned.decisions[op]
        inputs = [
            self.local(t, s) for t, s in zip(op.inputs, decision.strategy.in_specs, strict=True)
        ]
        first = len(self.build.graph.ops)
        if decision.expansion is not None:
            outputs = self._write_expansion(op, decision.expansion, inputs)
        elif op.type in REGIONS:
            functions = self.build.graph.functions
            outputs = write_region(
                op,
                decision,
                inputs,
                self.build,
                self.mesh,
                lambda inner: _write_graph(
                    _Writer(inner, GraphBuilder(Graph(functions=functions), rank=self.build.rank))
                ),
            )
        else:
            outputs = self._write_plain(op, decision, inputs)
        self._keep_order(op, self.build.graph.ops[first:])
        for tensor, local, made in zip(
            op.outputs, outputs, decision.strategy.out_specs, strict=True
        ):
            resolution = self.partitioned.resolutions.get(tensor)
            if resolution is not None:
                self.bind(tensor, resolution.target, self.reshard(local, resolution))
            else:
                self.bind(tensor, made, local)
        self._note(op, self.build.graph.ops[first:])

    def _keep_order(self, op: Op, emitted: Sequence[Op]) -> None:
        """Control edges between global ops become edges between their local effects."""
        ordered = [e for e in emitted if e.stateful] or list(emitted[-1:])
        for local in ordered:
            if local.stateful:
                local.attrs = {**local.attrs, EFFECT_OF: op.name}
        self.effects[op] = ordered
        if op.control:
            before = [e for c in op.control for e in self.effects.get(c, ())]
            for local in ordered:
                if local.type not in CONSTANTS:
                    local.control.extend(before)

    def _write_plain(self, op: Op, decision: Decision, inputs: list[Tensor]) -> Sequence[Tensor]:
        rule = self.partitioned.prepared.rules[op]
        strategy = decision.strategy
        local = LocalOp(
            op,
            rule,
            strategy.splits,
            self.mesh,
            inputs,
            strategy.in_specs,
            strategy.out_specs,
            self.build,
        )
        self.build.name = op.name
        if any(factor >= 0 for factor, _ in strategy.splits):
            if rule.masked:
                local = dataclasses.replace(local, inputs=self._masked(local))
            if rule.lower is not None:
                return rule.lower(local)
        elif rule.pseudo and rule.lower is not None:
            return rule.lower(local)
        elif op in self.partitioned.prepared.once and self.mesh.size > 1:
            return self._write_once(local)
        return local.copy().outputs

    def _write_once(self, local: LocalOp) -> Sequence[Tensor]:
        """An op that one rank runs for all; in a body, where no rank can, all in lockstep."""
        if local.op not in self.partitioned.shared:
            return local.copy(None, **_common_seed(local.op)).outputs
        made = local.copy(None, **{ONCE: True}).outputs
        if not made:
            return ()
        axes = tuple(range(self.mesh.num_axes))
        outputs = [(t.shape, t.dtype) for t in made]
        return self.build.emit("Broadcast", made, outputs, {"axes": axes}).outputs

    def _masked(self, local: LocalOp) -> list[Tensor]:
        """Inputs with the padding of reduced factors set to the reduction's neutral value."""
        inputs = list(local.inputs)
        for factor, reduction in local.rule.reduce.items():
            if reduction == SAME or all(split != factor for split, _ in local.splits):
                continue
            for i, dims in enumerate(local.rule.inputs):
                for d, dim in enumerate(dims):
                    if factor in dim and inputs[i].dtype not in ("resource", "variant"):
                        fill = neutral(reduction, inputs[i].dtype)
                        inputs[i] = local.mask_padding(inputs[i], i, d, fill)
        return inputs

    def _write_expansion(
        self, op: Op, inner: PartitionedGraph, inputs: list[Tensor]
    ) -> Sequence[Tensor]:
        self.build.name = op.name
        writer = _Writer(inner, ScopedBuilder(self.build, op.name))
        for tensor, local in zip(inner.graph.inputs, inputs, strict=True):
            writer.bind(tensor, inner.specs[tensor], local)
        writer.write()
        self.layouts.update(writer.layouts)
        return [
            writer.local(t, s) for t, s in zip(inner.graph.outputs, inner.output_specs, strict=True)
        ]


def _common_seed(op: Op) -> dict[str, int]:
    """Seeds for a random op that has none, so that all ranks draw the same numbers."""
    if op.attrs.get("seed", 1) or op.attrs.get("seed2", 1):
        return {}
    return {"seed": 1, "seed2": zlib.crc32(op.name.encode())}


class ScopedBuilder(GraphBuilder):
    """Emits into another builder's graph with every name under `scope`."""

    def __init__(self, outer: GraphBuilder, scope: str) -> None:
        super().__init__(outer.graph, scope, outer.rank)
        self._outer = outer
        self._scope = scope

    def unique_name(self, base: str) -> str:
        inside = base if base.startswith(self._scope) else f"{self._scope}/{base}"
        return self._outer.unique_name(inside)


# --- Emitting loops, branches and calls: the op itself, naming local bodies ---


def write_region(
    op: Op,
    decision: Decision,
    inputs: Sequence[Tensor],
    build: GraphBuilder,
    mesh: Mesh,
    write_body: Callable[[PartitionedGraph], Graph],
) -> Sequence[Tensor]:
    """Emit `op` on local inputs with its bodies as `write_body` makes them."""
    functions = build.graph.functions
    local_names: dict[str, FunctionRef] = {}
    for name, inner in decision.bodies.items():
        body = write_body(inner)
        local_names[name] = _unused(name, functions)
        functions[local_names[name]] = body
    outputs = [
        (_local(t, spec, mesh), t.dtype)
        for t, spec in zip(op.outputs, decision.strategy.out_specs, strict=True)
    ]
    attrs = {key: renamed_functions(value, local_names) for key, value in op.attrs.items()}
    if attrs.get("output_shapes"):
        attrs["output_shapes"] = [
            ShapeAttr(shape) if _is_plain(shape, dtype) else UnknownShape()
            for shape, dtype in outputs
        ]
    emitted = build.emit(op.type, inputs, outputs, attrs, name=op.name, stateful=op.stateful)
    return emitted.outputs


def _local(tensor: Tensor, spec: Spec, mesh: Mesh) -> Shape:
    return local_shape(tensor.shape, spec, mesh) if tensor.is_static else tensor.shape


def _is_plain(shape: Shape, dtype: str) -> bool:
    return dtype not in ("resource", "variant") and shape is not None and None not in shape


def _unused(name: str, functions: dict[str, Graph]) -> FunctionRef:
    candidate, count = name, 0
    while candidate in functions:
        count += 1
        candidate = f"{name}_{count}"
    return FunctionRef(candidate)
