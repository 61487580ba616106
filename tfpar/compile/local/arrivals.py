"""Arrivals: where a tensor comes from the stages of another actor, if actors have unlike layouts.

Stages that lie on other meshes, or in other layouts, are each written as part of a program of the
whole step in their own layout (`compile.local.stage_split`). What one of them reads of another is
in both programs: an `Identity` that bears a name marks it, in the stage that reads.

    of stage 0, on 1 rank       h = MatMul(x, a)         Identity(h)  # h arrives
    of stage 1, on 2 ranks      h = MatMul(x, a)         Identity(h)
                                x, h: S(0)               y = MatMul(h, b)

Stage 1 runs the second `Identity`, on the parts of the first program's `h` that its ranks need.

What all ranks of stage 1 need whole may arrive in slices (`compile.local.scatter_gather`): the
`Identity` then reads and makes `h` split over them, which its reader gathers.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from tfpar.compile.local.local_graph import EFFECT_OF, TASK, LocalProgram, StagePass
from tfpar.compile.local.scatter_gather import Slicing, earliest
from tfpar.ir.graph import DType, Graph, Op, Tensor, itemsize
from tfpar.ir.traits import CONSTANTS, REFERENCES
from tfpar.pipeline.step_stages import can_be_sent
from tfpar.pipeline.tasks import Task
from tfpar.propagation.partitioned_graph import OpPlan, PartitionedGraph
from tfpar.spec import local_shape, sliced_spec, unsplit_dims

ARRIVAL = "_tfpar_arrival"
"""The attribute of an `Identity` that marks an arrival: its name."""


class Arrival(NamedTuple):
    """Arrival of a tensor.

    Attributes:
        name: the same in the programs of all layouts.
        micro: the microbatch that the tensor is of; None: it is there once a step.
    """

    name: str
    micro: int | None = None


def mark_arrivals(
    graph: Graph, places: Mapping[Op, StagePass], actors: Sequence[int]
) -> dict[Op, StagePass]:
    """Mark, in place, what stages read of those of other actors.

    Args:
        places: of all ops.
        actors: that run each stage.

    Returns:
        the places of all ops that there are now.
    """
    readers, found = graph.consumers(), dict(places)
    ops: list[Op] = []
    for op in graph.ops:
        ops.append(op)
        is_everywhere = op.type == "Placeholder" or op.type in CONSTANTS
        for tensor in () if is_everywhere else op.outputs:
            if tensor.dtype in REFERENCES or not can_be_sent(tensor):
                continue
            by_stage: dict[int, list[Op]] = {}
            for reader in dict.fromkeys(readers.get(tensor, ())):
                stage = places[reader].stage
                if actors[stage] != actors[places[op].stage]:
                    by_stage.setdefault(stage, []).append(reader)
            for stage, members in by_stage.items():
                name = f"{op.name}/arrival{tensor.index}/stage_{stage}"
                attrs = {"T": DType(tensor.dtype), ARRIVAL: name}
                arrival = Op(name, "Identity", (tensor,), attrs)
                made = arrival.add_output(tensor.shape, tensor.dtype)
                found[arrival] = earliest(places[reader] for reader in members)
                ops.append(arrival)
                for reader in members:
                    reader.inputs = [made if t is tensor else t for t in reader.inputs]
    graph.ops = ops
    return found


def find_sliced_arrivals(
    laid: PartitionedGraph,
    num_axes: int,
    stages: Mapping[Op, int],
    actors: Sequence[int],
    receiving: Collection[int],
    slicing: Slicing,
) -> dict[str, OpPlan]:
    """Find what arrives in slices, which the ranks that get them gather: how it runs, by name.

    What the step gives arrives whole, since all ranks get that.

    Args:
        laid: the step in one layout, in equal shares of the batch.
        num_axes: of its mesh that are of ranks, the first ones.
        stages: of ops.
        actors: that run each stage.
        receiving: those that have this layout.
    """
    given, found = {*laid.graph.outputs}, {}
    for op in laid.graph.ops:
        if ARRIVAL not in op.attrs or op.inputs[0] in given:
            continue
        (tensor,), (made,) = op.inputs, op.outputs
        source, target = actors[stages[tensor.op]], actors[stages[op]]
        if target in receiving:
            (spec,), shape = laid.decisions[op].strategy.in_specs, tuple(tensor.shape or ())
            part_bytes = itemsize(tensor.dtype) * math.prod(local_shape(shape, spec, laid.mesh))
            lengths = [*unsplit_dims(shape, spec).values()]
            axes = slicing.axes(spec, part_bytes, lengths, source, target)
            if axes:
                part = sliced_spec(shape, spec, laid.mesh, axes)[:num_axes]
                found[op.name] = OpPlan((part,), (part,), (laid.specs[made][:num_axes],))
    return found


def find_arrivals(program: LocalProgram, shared: Iterable[Op]) -> Iterator[tuple[Arrival, Tensor]]:
    """Yield the arrivals of a program of the whole step, each with the tensor, between tasks, that
    arrives: those that are marked, what the step gives, and what all actors assign.

    Args:
        shared: ops that all actors run.
    """
    for i, tensor in enumerate(program.graph.outputs):
        yield Arrival(f"output {i}"), tensor
    for op in shared:
        for i, tensor in enumerate(op.inputs):
            yield Arrival(f"input {i} of {op.attrs.get(EFFECT_OF)}"), tensor
    for op in program.graph.ops:
        if ARRIVAL in op.attrs:
            yield Arrival(op.attrs[ARRIVAL]), op.inputs[0]
        elif op.type == TASK:
            body = program.graph.functions[op.attrs["body"]]
            given = {tensor: i for i, tensor in enumerate(body.inputs)}
            micro = Task.parse(op.attrs["task"]).micro
            for inner in body.ops:
                if ARRIVAL in inner.attrs and inner.inputs[0] in given:
                    tensor = op.inputs[given[inner.inputs[0]]]
                    yield Arrival(inner.attrs[ARRIVAL], micro), tensor
