"""Input and result of propagation: anchors, and a partitioned graph."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator, Mapping, Sequence

from tfpar.ir.graph import Graph, Op, Tensor, Variable, itemsize
from tfpar.ir.text import format_graph
from tfpar.propagation.decide import OpStrategy
from tfpar.propagation.prepared_graph import PreparedGraph
from tfpar.propagation.reshard import Communication, ReshardStep, lower_reshard, payloads
from tfpar.spec import Mesh, Partial, Shard, Spec, format_spec


@dataclasses.dataclass(frozen=True)
class OpPlan:
    """Specs in which a plan has one op run.

    Attributes:
        in_specs: the spec in which it reads each input.
        made: the specs in which it makes its outputs.
        kept: those in which they are kept: as made, or reduced or scattered right away.

    The specs may be shorter than the mesh has axes: along the others, propagation decides. Where
    they are longer, what they say of further axes holds once the mesh has these.
    """

    in_specs: tuple[Spec, ...]
    made: tuple[Spec, ...]
    kept: tuple[Spec, ...]

    @property
    def num_axes(self) -> int:
        """Number of mesh axes that it decides, the first ones."""
        return min(map(len, (*self.in_specs, *self.made)), default=0)

    def along(self, mesh: Mesh) -> OpPlan:
        """Return what it says of the axes of `mesh`."""
        if self.num_axes <= mesh.num_axes:
            return self
        specs = (self.in_specs, self.made, self.kept)
        return OpPlan(*(tuple(spec[: mesh.num_axes] for spec in own) for own in specs))


@dataclasses.dataclass(frozen=True)
class Anchors:
    """Anchors: the specs that a plan fixes, from which propagation infers the others.

    Attributes:
        variables: specs by variable name. Trainable variables not named are open
            (they take what their first reader wants), others follow their
            weight or are replicated.
        inputs: the spec of each graph input.
        tensors: specs of border tensors by tensor name (`scope/op:0`). They may be shorter than
            the mesh has axes: along the others, propagation decides.
        outputs: specs that graph outputs must have, by position; None leaves one as it comes.
        ops: how ops run, by name. An op that cannot run so (its sizes are others than those that
            were planned, or what it reads cannot be moved) is left to propagation.
        slots: specs, by the name of the weight, that its optimizer slots follow in place of its
            own.
    """

    variables: Mapping[str, Spec] = dataclasses.field(default_factory=dict)
    inputs: Sequence[Spec] = ()
    tensors: Mapping[str, Spec] = dataclasses.field(default_factory=dict)
    outputs: Sequence[Spec | None] = ()
    ops: Mapping[str, OpPlan] = dataclasses.field(default_factory=dict)
    slots: Mapping[str, Spec] = dataclasses.field(default_factory=dict)

    @functools.cached_property
    def data_axes(self) -> frozenset[int]:
        """The mesh axes along which the plan splits what it fixes of the data."""
        given = [*self.inputs, *self.tensors.values()]
        return frozenset(a for spec in given for a, p in enumerate(spec) if isinstance(p, Shard))


@dataclasses.dataclass(frozen=True, eq=False)
class Decision:
    """Decision of how one op runs.

    Attributes:
        strategy: splits and specs; see `decide.OpStrategy`.
        expansion: the partitioned decomposition that runs in the op's place.
        bodies: partitioned function bodies of a control-flow op or call, by name.
    """

    strategy: OpStrategy
    expansion: PartitionedGraph | None = None
    bodies: Mapping[str, PartitionedGraph] = dataclasses.field(default_factory=dict)

    @functools.cached_property
    def makes_partials(self) -> bool:
        """Whether something comes out as a Partial."""
        return any(isinstance(p, Partial) for made in self.strategy.out_specs for p in made)

    def communications(self, op: Op) -> Iterator[Communication]:
        """Yield the collectives that are part of the work of `op`, which runs so."""
        if self.expansion is not None:
            for moved in self.expansion.communications():
                yield moved._replace(op=op, tensor=None)


@dataclasses.dataclass(frozen=True)
class Reshard:
    """A tensor's change of spec; emitted once, whoever reads it."""

    tensor: Tensor
    source: Spec
    target: Spec

    def steps(self, mesh: Mesh) -> tuple[ReshardStep, ...]:
        return lower_reshard(tuple(self.tensor.shape or ()), self.source, self.target, mesh)

    def communications(self, mesh: Mesh, wire_dtypes: Mapping[Tensor, str]) -> list[Communication]:
        """Its collectives.

        Args:
            wire_dtypes: the dtype in which they carry a tensor, if it is not its own.
        """
        tensor = self.tensor
        shape, item = tuple(tensor.shape or ()), itemsize(wire_dtypes.get(tensor, tensor.dtype))
        return [
            Communication(step, num_bytes, tensor.op, tensor)
            for step, num_bytes in payloads(shape, item, self.source, self.target, mesh)
        ]


@dataclasses.dataclass(eq=False)
class PartitionedGraph:
    """The result: every tensor's spec and every reshard.

    Attributes:
        specs: the spec in which each tensor is kept (after `resolutions`).
        resolutions: tensors reduced or anchored as soon as they are made.
        reshards: all changes of spec, resolutions included, in graph order.
        variable_specs: by variable, in capture order.
        shared: ops that the first rank runs for all, who get the results by broadcast.
        replicated_regions: (loop, branch or call, mesh axis) that runs replicated along the axis:
            its body would have needed a collective.
        wire_dtypes: the dtype in which collectives carry a tensor, if it is not its own.
        jit_compile: XLA compiles the step.
    """

    prepared: PreparedGraph
    mesh: Mesh
    specs: dict[Tensor, Spec] = dataclasses.field(default_factory=dict)
    decisions: dict[Op, Decision] = dataclasses.field(default_factory=dict)
    reshards: list[Reshard] = dataclasses.field(default_factory=list)
    resolutions: dict[Tensor, Reshard] = dataclasses.field(default_factory=dict)
    variable_specs: dict[Variable, Spec] = dataclasses.field(default_factory=dict)
    output_specs: list[Spec] = dataclasses.field(default_factory=list)
    shared: set[Op] = dataclasses.field(default_factory=set)
    replicated_regions: list[tuple[Op, int]] = dataclasses.field(default_factory=list)
    wire_dtypes: Mapping[Tensor, str] = dataclasses.field(default_factory=dict)
    jit_compile: bool = False

    @property
    def graph(self) -> Graph:
        return self.prepared.graph

    def __str__(self) -> str:
        """The graph as text, and how each op runs; see `format_partitioned`."""
        return format_partitioned(self)

    def slots_spec(self, weight: Variable) -> Spec | None:
        """Return the spec of a weight's slots where a stand-in for the optimizer decides it; else
        None."""
        made = self.prepared.slots_apart.get(weight.name)
        return None if made is None else self.specs[made]

    def is_free(self, position: int) -> bool:
        """Whether the output at `position` is a new list, which can be had in any spec."""
        tensor = self.graph.outputs[position]
        return tensor.dtype == "variant" and tensor in self.prepared.zeros

    def collectives(self) -> list[tuple[str, tuple[str, ...], int]]:
        """(kind, mesh axis names, payload bytes) of each collective of one step."""
        names = self.mesh.axis_names
        return [
            (moved.kind, tuple(names[a] for a in moved.axes), moved.num_bytes)
            for moved in self.communications()
        ]

    def communications(
        self, wire_dtypes: Mapping[Tensor, str] | None = None
    ) -> Iterator[Communication]:
        """Yield the collectives of one step: all that is emitted, before some are packed.

        Loop bodies hold none.

        Args:
            wire_dtypes: the dtypes in which tensors travel, if not the graph's own `wire_dtypes`.
        """
        wire_dtypes = self.wire_dtypes if wire_dtypes is None else wire_dtypes
        for reshard in self.reshards:
            yield from reshard.communications(self.mesh, wire_dtypes)
        for op, decision in self.decisions.items():
            yield from decision.communications(op)
            permuted = self.prepared.rules[op].permutes
            if permuted is not None:
                splits = enumerate(decision.strategy.splits)
                axes = tuple(axis for axis, (factor, _) in splits if factor == permuted)
                (spec,) = decision.strategy.in_specs
                if self.mesh.group_size(axes) > 1:
                    ahead = bool(op.attrs["ahead"])
                    yield Communication.of_permutation(op, spec, axes, ahead, self.mesh)
            if op in self.shared and op.outputs:
                yield Communication.of_shared(op, self.mesh)


# --- text -----------------------------------------------------------------------------------


def format_partitioned(partitioned: PartitionedGraph) -> str:
    """Format the graph as text, which reads back as such (`tfpar.ir.text`).

    Behind an op stand the specs in which it reads its inputs and makes its outputs, and what these
    are kept as where that is something else: `// S(0),R; R,S(1) -> S(0),S(1)`.
    """
    notes = {op: _note(partitioned, op) for op in partitioned.graph.ops}
    return f"// on the mesh {partitioned.mesh}\n{format_graph(partitioned.graph, notes)}"


def _note(partitioned: PartitionedGraph, op: Op) -> str:
    kept = [partitioned.specs[t] for t in op.outputs if t in partitioned.specs]
    decision = partitioned.decisions.get(op)
    if decision is None:  # an input or a variable
        return _listed(kept)
    strategy = decision.strategy
    made = list(strategy.out_specs)
    text = f"{_listed(strategy.in_specs)} -> {_listed(made)}" if op.inputs else _listed(made)
    return text if kept == made else f"{text}, kept as {_listed(kept)}"


def _listed(specs: list[Spec] | tuple[Spec, ...]) -> str:
    return "; ".join(map(format_spec, specs)) or "nothing"
