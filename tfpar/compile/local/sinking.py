"""Sinking of ops into the stages that read them, so that stages send less.

parts of inputs    each stage is fed inputs itself, and takes of them what it reads
all-gathers        parts are sent, and gathered there
"""

from __future__ import annotations

from collections.abc import Iterable

from tfpar.compile.local.local_graph import LocalProgram, StagePass
from tfpar.ir.graph import Op


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
