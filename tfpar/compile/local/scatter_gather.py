"""Scatter/gather transfers: a tensor that is replicated in its stage goes to the next in slices.

    stage 0, ranks 0 and 1                  stage 1, ranks 2 and 3
    h, the same on both
    part = Slice(h): a half each       ->   h = AllGather(part)

Each rank sends one slice to its like, and these gather what they got (Narayanan et al., 2021,
§4.1). Whether that is faster is for prices to say (`cost.stage_transfers`). Between stages in
unlike layouts it is arrivals that come in slices (`compile.local.arrivals`).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Protocol

import numpy as np

from tfpar.compile.local.local_graph import LocalProgram, StagePass
from tfpar.ir.builder import GraphBuilder
from tfpar.ir.graph import Graph, Op, Tensor, itemsize
from tfpar.ir.traits import CONSTANTS
from tfpar.pipeline.step_stages import can_be_sent
from tfpar.spec import Spec, local_shape


class Slicing(Protocol):
    """Says what is sent in slices; see `cost.stage_transfers.ScatterGatherCost`."""

    def axes(
        self, spec: Spec, part_bytes: int, lengths: Sequence[int], source: int, target: int
    ) -> tuple[int, ...]:
        """Return the mesh axes of the target whose ranks each get a slice of a tensor; none where
        it goes whole.

        Args:
            spec: of the tensor on the target's mesh; it is replicated along the axes that are
                returned. What lies behind the axes of ranks are microbatches.
            part_bytes: of the largest part of it that a rank has.
            lengths: of what may be cut: the number of slices divides one of them.
            source, target: actors.
        """
        ...


def scatter_gather_transfers(
    program: LocalProgram, actors: Sequence[int], slicing: Slicing
) -> None:
    """Slice where it is made, and gather where it is read, what goes from actor to actor; in place.

    What the program gives goes whole, to all ranks.

    Args:
        program: of the whole step; its ops have places.
        actors: that run each stage.
    """
    writer = _Writer(program)
    readers, given = program.graph.consumers(), {*program.graph.outputs}
    for op in program.graph.ops:
        writer.ops.append(op)
        for tensor in op.outputs if op in program.places else ():
            layout = program.layouts.get(tensor)
            if layout is None or tensor in given or not can_be_sent(tensor):
                continue
            shape, spec = layout
            counts = [
                math.prod(local_shape(shape or (), spec, view)) for view in program.mesh.views
            ]
            part_bytes, lengths = itemsize(tensor.dtype) * max(counts), [math.gcd(*counts)]
            source = actors[program.places[op].stage]
            for target, reading in _by_actor(program, readers.get(tensor, ()), actors).items():
                if target != source:
                    axes = slicing.axes(spec, part_bytes, lengths, source, target)
                    if axes:
                        writer.send(tensor, axes, reading)
    program.graph.ops = writer.ops


def _by_actor(
    program: LocalProgram, ops: Iterable[Op], actors: Sequence[int]
) -> dict[int, list[Op]]:
    found: dict[int, list[Op]] = {}
    for op in ops:
        if op in program.places:
            found.setdefault(actors[program.places[op].stage], []).append(op)
    return found


class _Writer:
    """Adds ops to those of a program.

    Attributes:
        ops: the new program's so far.
    """

    def __init__(self, program: LocalProgram) -> None:
        self._build = GraphBuilder(Graph(functions=program.graph.functions))
        self._mesh, self._places = program.mesh, program.places
        self._slices: dict[tuple[Tensor, tuple[int, ...]], Tensor] = {}
        self.ops = self._build.graph.ops

    def send(self, tensor: Tensor, axes: tuple[int, ...], reading: Sequence[Op]) -> None:
        """Have some ops of an actor read what is gathered of slices."""
        self._build.name = f"{tensor.op.name}/slices{tensor.index}"
        first = len(self.ops)
        if (tensor, axes) not in self._slices:
            self._slices[tensor, axes] = self._slice(tensor, axes)
            self._put(first, self._places[tensor.op])
        first = len(self.ops)
        whole = self._gathered(self._slices[tensor, axes], axes, tensor.shape)
        self._put(first, earliest(self._places[op] for op in reading))
        for op in reading:
            op.inputs = [whole if t is tensor else t for t in op.inputs]

    def _put(self, first: int, place: StagePass) -> None:
        """The ops from the one at `first` on run at `place`."""
        emitted = (op for op in self.ops[first:] if op.type not in CONSTANTS)
        self._places.update(dict.fromkeys(emitted, place))

    def _slice(self, tensor: Tensor, axes: tuple[int, ...]) -> Tensor:
        """Emit the slice of each rank of a tensor that is replicated along `axes`, flat."""
        size = tensor.num_elements // self._mesh.group_size(axes)
        begins = [np.zeros(1, np.int32)] * self._mesh.size
        for group in self._mesh.groups(axes):
            for at, rank in enumerate(group):
                begins[rank] = np.array([at * size], np.int32)
        flat = self._build.reshape(tensor, (tensor.num_elements,))
        return self._build.slice(flat, self._build.per_rank(begins), (size,))

    def _gathered(self, part: Tensor, axes: tuple[int, ...], shape: Sequence[int]) -> Tensor:
        """The tensor of this shape whose slices ranks along `axes` have."""
        attrs = {"axes": axes, "dims": (0,)}
        whole = self._build.one("AllGather", (part,), (math.prod(shape),), part.dtype, attrs)
        return self._build.reshape(whole, shape)


# --- sinking --------------------------------------------------------------------------------
# Ops sink into the stages that read them, so that stages send less.
#
# parts of inputs    each stage is fed inputs itself, and takes of them what it reads
# all-gathers        parts are sent, and gathered there


def earliest(places: Iterable[StagePass]) -> StagePass:
    """Return the one of several places of the same ranks that a microbatch comes to first."""
    found = [*places]
    return min((place for place in found if not place.backward), default=max(found))


def sink_input_slices(program: LocalProgram) -> None:
    """Give what is computed of inputs alone to the stages that read it, in place: a copy to each.

    What the program gives stays without a place: all stages give it.

    Args:
        program: of the whole step; all its other ops have places.
    """
    graph, places = program.graph, program.places
    readers = graph.consumers()
    given = {*graph.outputs}
    ops: list[Op] = []
    for op in reversed(graph.ops):
        ops.append(op)
        reading = dict.fromkeys(r for t in op.outputs for r in readers.get(t, ()))
        is_free = op not in places and op.inputs and given.isdisjoint(op.outputs)
        if not is_free or any(reader not in places for reader in reading):
            continue
        by_stage: dict[int, list[Op]] = {}
        for reader in reading:
            by_stage.setdefault(places[reader].stage, []).append(reader)
        for i, (stage, members) in enumerate(by_stage.items()):
            own = op if i == 0 else _copied(op, f"{op.name}/stage{stage}")
            places[own] = earliest(places[reader] for reader in members)
            if own is not op:
                ops.append(own)
                program.origins[own] = program.origins[op]
                for tensor in own.inputs:
                    readers[tensor].append(own)
                new = dict(zip(op.outputs, own.outputs, strict=True))
                for reader in members:
                    reader.inputs = [new.get(t, t) for t in reader.inputs]
    graph.ops = ops[::-1]


def _copied(op: Op, name: str) -> Op:
    copy = Op(name, op.type, op.inputs, op.attrs, op.control, op.stateful)
    for tensor in op.outputs:
        copy.add_output(tensor.shape, tensor.dtype)
    return copy


def sink_all_gathers(program: LocalProgram) -> None:
    """Gather in the stage that alone reads the whole, in place: its parts are sent.

    Args:
        program: of the whole step; its ops have places, which change.
    """
    graph, places = program.graph, program.places
    readers, kept = graph.consumers(), {*graph.outputs}
    for op in reversed(graph.ops):
        if op.type != "AllGather" or op not in places or any(t in kept for t in op.outputs):
            continue
        reading = [places.get(r) for t in op.outputs for r in readers.get(t, ())]
        stages = {place.stage for place in reading if place is not None}
        if None not in reading and len(stages) == 1:
            (stage,) = stages
            places[op] = places[op]._replace(stage=stage)
