"""Split of a step into stages: the program of each actor, and the tensors that actors send each
other.

    stage 0    h = MatMul(x, a)         ->    rank 0, 1    h = MatMul(x, a); Send(h)
    stage 1    y = MatMul(h, b)               rank 2, 3    h = Recv();  y = MatMul(h, b)

The whole step is written first, for one actor as if it ran all stages; every op has its place.
Here each actor gets the ops of its stages. A tensor is sent once to each actor that reads it, rank
to rank. Where actors have layouts of their own, the step is written once for each layout, an actor
gets the ops that are written in its own, and tensors are resharded as they are sent
(`compile.local.arrivals`, `compile.local.cross_mesh`).

What costs nothing is made where it is read: constants, and the parts of what is fed. So is what
cannot be sent: strings, and what has no known shape. Of a scalar that is no weight, such as a step
counter, every actor has a copy (`compile.local.replicated_scalars`).

A rank asks for a tensor as it turns to the task that comes `RECEIVE_AHEAD` before the one that
reads it (`pipeline.graph`).
"""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Mapping, Sequence

from tfpar.compile.local.arrivals import ARRIVAL, Arrival, find_arrivals
from tfpar.compile.local.cross_mesh import End, transfer
from tfpar.compile.local.local_graph import TASK, LocalProgram, StagePass, build_local_program
from tfpar.compile.local.programs import Group, ProgramSet
from tfpar.compile.local.replicated_scalars import (
    can_be_computed,
    find_replicated_scalars,
    remove_dead_reads,
)
from tfpar.compile.local.scatter_gather import (
    Slicing,
    scatter_gather_transfers,
    sink_all_gathers,
    sink_input_slices,
)
from tfpar.compile.local.transfers import recv, send
from tfpar.ir.builder import GraphBuilder
from tfpar.ir.effects import OUTSIDE, Accesses
from tfpar.ir.graph import DType, Graph, Op, Shape, Tensor
from tfpar.ir.traits import REFERENCES
from tfpar.pipeline import Schedule
from tfpar.pipeline.graph import RECEIVE_AHEAD
from tfpar.pipeline.pipeline import groups_of
from tfpar.pipeline.recompute import RecomputeOf
from tfpar.pipeline.step_stages import can_be_sent
from tfpar.propagation.partitioned_graph import PartitionedGraph
from tfpar.spec import (
    CompilerError,
    Placement,
    Replicate,
    Shard,
    SpecError,
    TfparError,
    UnevenMesh,
    replicated_spec,
)
from tfpar.spec.pieces import ShardedTensor, pieces_between


@dataclasses.dataclass(frozen=True, eq=False)
class PipelineLowering:
    """Lowering of a step to a pipeline: the stage of each op, and the schedule.

    Attributes:
        places: of all ops of the step.
        schedule: the order in which each actor runs the tasks of its stages.
        recompute: the stages whose backward pass runs their forward pass again.
        slicing: what is sent in slices; None: nothing.
        ranks: of the job, actor by actor; by default in their order.
        layouts: the number of the layout of each actor, of those that the step is written in; by
            default all have one.
    """

    places: Mapping[Op, StagePass]
    schedule: Schedule
    recompute: RecomputeOf = False
    slicing: Slicing | None = None
    ranks: Sequence[int] = ()
    layouts: Sequence[int] = ()

    @property
    def has_one_layout(self) -> bool:
        """Whether all actors have one layout."""
        return len({*self.layouts}) < 2


@dataclasses.dataclass(frozen=True, eq=False)
class WrittenStep:
    """A step written in the layout of one actor, as if that ran all stages.

    Attributes:
        program: its ops have places.
        laid: that it was written from, on the mesh with equal shares of the batch; the axes behind
            those of the program's mesh are within ranks. None: it need not be known, as all actors
            have one layout.
    """

    program: LocalProgram
    laid: PartitionedGraph | None = None

    @functools.cached_property
    def _marked(self) -> dict[str, Op]:
        ops = () if self.laid is None else self.laid.graph.ops
        return {op.attrs[ARRIVAL]: op for op in ops if ARRIVAL in op.attrs}

    def layout_of(self, arrival: Arrival, tensor: Tensor) -> ShardedTensor:
        """Return the layout of what arrives."""
        marked = self._marked.get(arrival.name)
        if marked is None or self.laid is None:  # all have it whole
            assert tensor.shape is not None, "it can be sent"
            own = self.program.mesh
            return ShardedTensor(tensor.shape, own, replicated_spec(own.num_axes))
        own, mesh = self.program.mesh, self.laid.mesh
        if isinstance(own, UnevenMesh):
            mesh = own.within(mesh)
        (spec,) = self.laid.decisions[marked].strategy.in_specs
        shape = tuple(marked.inputs[0].shape or ())
        if mesh.num_axes == own.num_axes:
            return ShardedTensor(shape, mesh, spec)
        return ShardedTensor(shape, mesh, spec, (arrival.micro or 0,))


def find_torn_arrivals(
    written: Sequence[WrittenStep], step: PipelineLowering | None
) -> dict[str, Placement]:
    """Find the arrivals of which a stage needs in a microbatch what the stage that makes it has in
    another, as their layouts cut it in other microbatches.

    Args:
        written: the step in each layout.

    Returns:
        by the arrival's name, how a rank that has all of the tensor cuts it in microbatches: along
        the dim along which the maker does.
    """
    found: dict[str, Placement] = {}
    if step is None or step.has_one_layout:
        return found
    layouts = [step.layouts[actor] for actor in step.schedule.actors]
    for op in (op for op in step.places if ARRIVAL in op.attrs):
        (tensor,), arrival = op.inputs, Arrival(op.attrs[ARRIVAL], 0)
        ends = (written[layouts[step.places[o].stage]] for o in (tensor.op, op))
        made, read = (end.layout_of(arrival, tensor) for end in ends)
        try:
            pieces_between(made, read)
        except SpecError:
            cut = made.spec[-1] if made.within else Replicate()
            found[op.name] = Shard(cut.dim) if isinstance(cut, Shard) else cut
    return found


def split_stages(
    written: Sequence[WrittenStep], schedule: Schedule, ranks: Sequence[int] = ()
) -> ProgramSet:
    """Return the program of each actor, which has as many ranks of the job as its mesh.

    All of them get the same inputs, and give what the step gives.

    Args:
        written: the whole step in the layout of each actor; one object for actors of one layout.
        ranks: of the job, actor by actor; by default in their order.

    Raises:
        TfparError: what one actor makes and another reads cannot be sent, or a variable would lie
            with two; names it.
    """
    groups = groups_of([step.program.mesh.size for step in written], ranks)
    actors = [_Actor(step, group) for step, group in zip(written, groups, strict=True)]
    _Split(schedule, actors).write()
    return ProgramSet(
        {actor.group: actor.finish() for actor in actors},
        {group: schedule.stages_of(actor) for actor, group in enumerate(groups)},
    )


def write_in_stages(partitioned: PartitionedGraph, step: PipelineLowering) -> LocalProgram:
    """Return the program of a whole step whose ops have places, as if one actor ran all of it."""
    program = build_local_program(partitioned, step.places)
    sink_input_slices(program)
    if step.has_one_layout:  # else what is sent is what arrives, in whatever layout
        sink_all_gathers(program)
    return program


def send_in_slices(program: LocalProgram, step: PipelineLowering) -> None:
    """Slice what the step says is sent in slices, in place; see `compile.local.scatter_gather`."""
    if step.slicing is not None and step.has_one_layout:
        scatter_gather_transfers(program, step.schedule.actors, step.slicing)


class _Actor:
    """Program of one actor, as it is written.

    Attributes:
        kept: the handles of the scalars that all actors have, each with the ops that touch it.
    """

    def __init__(self, written: WrittenStep, group: Group) -> None:
        self.written = written
        self.program = program = written.program
        self.group = group
        self.kept = find_replicated_scalars(program)
        self.everywhere = {op for touching in self.kept.values() for op in touching}
        self.build = GraphBuilder(Graph(functions=program.graph.functions))
        self.tensors: dict[Tensor, Tensor] = {}
        self.shapes: dict[Tensor, Sequence[Shape]] = {}
        self.ops: dict[Op, Op] = {}
        self.calls: list[Op] = []

    def end(self, layout: ShardedTensor) -> End:
        """Return this actor as an end of a transfer of a tensor that it has in such a layout."""
        return End(self.build, self.group, layout, self.shapes)

    def copy(self, op: Op, control: Sequence[Op] = ()) -> None:
        """Add an op whose inputs are there.

        Args:
            control: of this actor, what it waits for beside what it waits for in the whole step.
        """
        clone = self.build.emit(
            op.type,
            [self.tensors[t] for t in op.inputs],
            [(t.shape, t.dtype) for t in op.outputs],
            op.attrs,
            op.name,
            [*(self.ops[c] for c in op.control if c in self.ops), *control],
            op.stateful,
        )
        self.ops[op] = clone
        for tensor, own in zip(op.outputs, clone.outputs, strict=True):
            self.have(tensor, own)
        if clone.type == TASK:
            self.calls.append(clone)

    def have(self, tensor: Tensor, own: Tensor) -> None:
        """From now on a tensor of the whole step is there, as `own`."""
        self.tensors[tensor] = own
        if tensor in self.program.shapes:
            self.shapes[own] = self.program.shapes[tensor]

    def awaited(self) -> list[Op]:
        """Return the calls that must have ended before the next op's tensors are received."""
        return self.calls[-1 - RECEIVE_AHEAD : -RECEIVE_AHEAD]

    def finish(self) -> LocalProgram:
        """The program."""
        whole, graph = self.program, self.build.graph
        graph.inputs = [self.tensors[t] for t in whole.graph.inputs]
        graph.outputs = [self.tensors[t] for t in whole.graph.outputs]
        graph.variables = [
            dataclasses.replace(v, handle=self.tensors[v.handle])
            for v in whole.graph.variables
            if v.handle in self.tensors
        ]
        graph.effects = [self.ops[e] for e in whole.graph.effects if e in self.ops] + [
            op for op in graph.effects if op.type == "Send"
        ]
        handles = {self.tensors[handle] for handle in self.kept}
        graph.ops = remove_dead_reads(graph.ops, handles, graph.outputs)
        # What is in the bodies of tasks, all actors have alike.
        shapes = {**whole.shapes, **self.shapes}
        return dataclasses.replace(whole, graph=graph, places={}, shapes=shapes)


class _Split:
    """Shares out the ops of a step among actors."""

    def __init__(self, schedule: Schedule, actors: list[_Actor]) -> None:
        self.actors = actors
        self._actor_of = schedule.actors
        self._written = [_Written(step) for step in dict.fromkeys(a.written for a in actors)]
        self._of = {each.step: each for each in self._written}
        self._signals: dict[tuple[Op, _Actor], Op] = {}

    def write(self) -> None:
        for actor in self.actors:
            for tensor in (*actor.program.graph.inputs, *actor.kept):
                actor.copy(tensor.op)
        for written in self._written:
            self._write_until(written, None)
        self._write_variables()
        for actor in self.actors:
            for tensor in actor.program.graph.outputs:
                self._bring(tensor, actor, result=tensor)

    def _write_until(self, written: _Written, last: Op | None) -> None:
        """Share out the ops of a written step among its actors, as far as `last`, or all.

        Of several written steps each goes as far as others need what it makes: they have the same
        order, so that none waits for itself.
        """
        places = written.step.program.places
        for op in written.ops:
            place = places.get(op)
            if place is not None:
                own = self.actors[self._actor_of[place.stage]]
                for actor in self.actors:
                    if actor.written is not written.step or op in actor.ops:
                        continue
                    if actor is own or op in actor.everywhere:
                        for tensor in op.inputs:
                            self._bring(tensor, actor)
                        actor.copy(op, [self._signal(c, actor) for c in self._awaited(op, actor)])
            if op is last:
                return

    def _write_variables(self) -> None:
        """Check that each variable lies with one actor, and have the first take what none has."""
        holding: dict[str, list[_Actor]] = {}
        for actor in self.actors:
            for variable in actor.program.graph.variables:
                holders = holding.setdefault(variable.name, [])
                if variable.handle in actor.tensors:
                    holders.append(actor)
        first = self.actors[0]
        for variable in first.program.graph.variables:
            holders = holding[variable.name]
            if variable.handle in first.kept:
                continue
            if len(holders) > 1:
                listed = " and ".join(str(list(actor.group)) for actor in holders)
                raise TfparError(
                    f"Variable {variable.name!r} is used by its handle by the ranks {listed}; it "
                    f"can lie with one of them only. Keep what uses it in one stage: "
                    f"tap.stage(...)."
                )
            if not holders:
                self._bring(variable.handle, first)

    def _awaited(self, op: Op, actor: _Actor) -> list[Op]:
        """The ops of other actors that `op` waits for: of those that have an effect outside, as it
        has. Of others it waits for data only: each variable lies with one actor, or with all."""
        accesses = self._of[actor.written].accesses
        outside = OUTSIDE in accesses.of(op)
        apart = [c for c in op.control if outside and c not in actor.ops]
        return [c for c in apart if OUTSIDE in accesses.of(c)]

    def _signal(self, op: Op, actor: _Actor) -> Op:
        """Send `actor` word that `op`, of another actor, has run; what receives it."""
        if (op, actor) not in self._signals:
            source = self.actors[self._actor_of[actor.program.places[op].stage]]
            ran = self._own(op, source, actor)
            source.build.name = actor.build.name = f"{op.name}/done/to{actor.group[0]}"
            word = source.build.const(0, "int32")
            attrs = {"T": DType("int32")}
            done = source.build.emit(
                "Identity", [word], [((), "int32")], attrs, control=[source.ops[ran]]
            )
            key = _key(f"{op.name}/done")
            received = transfer(
                done.outputs[0],
                source.end(_whole_scalar(source)),
                actor.end(_whole_scalar(actor)),
                key,
                actor.awaited(),
            )
            self._signals[op, actor] = received.op
        return self._signals[op, actor]

    def _own(self, op: Op, source: _Actor, target: _Actor) -> Op:
        """Return the op that is for `source`, in its layout, what `op` is in that of `target`; it
        has been written."""
        if source.written is target.written:
            return op
        written = self._of[source.written]
        own = written.by_name[op.name]
        if own not in source.ops:
            self._write_until(written, own)
        return own

    def _bring(self, tensor: Tensor, actor: _Actor, result: Tensor | None = None) -> None:
        """Have `actor` make a tensor that it reads, or receive it.

        Args:
            result: of the step that the tensor is needed for; None: an op of `actor` reads it.
        """
        if tensor in actor.tensors:
            return
        place = actor.program.places.get(tensor.op)
        again = _is_made_again(tensor) or can_be_computed(tensor, actor.tensors)
        if place is not None and not again:
            self._send(tensor, self.actors[self._actor_of[place.stage]], actor, result)
            return
        for read in tensor.op.inputs:
            self._bring(read, actor, result)
        actor.copy(tensor.op)

    def _send(self, tensor: Tensor, source: _Actor, target: _Actor, result: Tensor | None) -> None:
        if not can_be_sent(tensor):
            what = f"{tensor.name!r} ({tensor.dtype}, shape {tensor.shape}) is made by the ranks "
            what += f"{list(source.group)} and read by {list(target.group)}, but cannot be sent: "
            what += "only tensors of numbers, of known shape. "
            if result is None:
                what += "Keep what makes and what reads it in one stage: tap.stage(...)."
            else:
                what += f"All ranks give {result.name!r}, a result of the step, which is made of "
                what += "it: return something of known shape instead."
            raise TfparError(what)
        key = _key(f"{tensor.op.name}/{tensor.index}")
        source.build.name = target.build.name = f"{tensor.op.name}/to{target.group[0]}"
        if source.written is target.written:
            send(source.build, source.tensors[tensor], key, target.group)
            received = recv(
                target.build, tensor.shape, tensor.dtype, key, source.group, target.awaited()
            )
        else:
            received = self._reshard(tensor, source, target, key)
        target.have(tensor, received)

    def _reshard(self, tensor: Tensor, source: _Actor, target: _Actor, key: str) -> Tensor:
        """Send a tensor from one layout to another; `tensor` is that of the target's program."""
        ours, theirs = self._of[target.written], self._of[source.written]
        arrival = ours.arrival_of.get(tensor)
        sent = None if arrival is None else theirs.sent(arrival)
        if arrival is None or sent is None:
            raise CompilerError(
                f"The ranks {list(target.group)} read {tensor.name!r} of the ranks "
                f"{list(source.group)}, which lie in another layout and have none such."
            )
        if sent.op in theirs.step.program.places and sent.op not in source.ops:
            self._write_until(theirs, sent.op)
        self._bring(sent, source)
        there = source.end(source.written.layout_of(arrival, sent))
        here = target.end(target.written.layout_of(arrival, tensor))
        try:
            return transfer(source.tensors[sent], there, here, key, target.awaited())
        except SpecError as error:
            raise CompilerError(
                f"{tensor.name!r} cannot go from the ranks {list(source.group)} to "
                f"{list(target.group)}: {error}"
            ) from error


def _whole_scalar(actor: _Actor) -> ShardedTensor:
    mesh = actor.program.mesh
    return ShardedTensor((), mesh, replicated_spec(mesh.num_axes))


class _Written:
    """A written step while its ops are shared out.

    Attributes:
        ops: those that are left.
        arrival_of: of tensors between tasks, what they arrive as.
        by_name: its ops.
    """

    def __init__(self, step: WrittenStep) -> None:
        graph = step.program.graph
        self.step = step
        self.ops = iter(graph.ops)
        self.accesses = Accesses(graph.functions)
        self.by_name = {op.name: op for op in graph.ops}
        self.arrival_of: dict[Tensor, Arrival] = {}
        self._sent: dict[Arrival, Tensor] = {}
        shared = [op for t in find_replicated_scalars(step.program).values() for op in t]
        for arrival, tensor in find_arrivals(step.program, shared):
            self.arrival_of.setdefault(tensor, arrival)
            self._sent.setdefault(arrival, tensor)

    def sent(self, arrival: Arrival) -> Tensor | None:
        """Return the tensor of this step that arrives so."""
        once = arrival._replace(micro=None)
        return self._sent.get(arrival, self._sent.get(once))


def _key(text: str) -> str:
    """The key of a transfer, spelled as names of ops are."""
    return re.sub(r"[^A-Za-z0-9_.\-/]", ".", text)


def _is_made_again(tensor: Tensor) -> bool:
    """Whether a tensor that cannot be sent, such as a string, can be computed where it is read."""
    op = tensor.op
    pure = bool(op.inputs) and not op.stateful and op.type != TASK
    return pure and tensor.dtype not in REFERENCES and not can_be_sent(tensor)
