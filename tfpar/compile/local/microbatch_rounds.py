"""Rounds of a program over its microbatches, which are its last mesh axis: the order of its ops.

Propagation has decided the spec of every tensor along that axis, and the rewriter has written what
follows. Here it is read off the program:

    x = Placeholder            cut along the axis      is fed in blocks, one for each microbatch
    w = ReadVariableOp         the same for all        runs once, before the first microbatch
    y = MatMul(x, w)           reads a block           runs once for each microbatch: round 1
    g = AllReduce(y, micro)    meets along the axis    is added up while round 1 goes on
    u = AssignSub(w, g)        reads what has met      runs once, after round 1
    z = Mul(y, g)              reads both              runs once for each microbatch: round 2

A round is one pass over all microbatches. A second one is there only where microbatches *join*:
where something that runs for each of them reads what all of them made, such as the mean that batch
normalisation takes over the batch, or the sum of a batch's sample weights. What a round needs not
is left to the last round that can do it, so that the forward pass of a batch with sample weights
runs beside its backward pass, and nothing of it is kept meanwhile. But where a round computes the
forward pass anyway, such as for losses that a plan gathers from all ranks, the backward pass that
needs no join runs in it: left to the next round, it would read activations of all microbatches.

Where the step is in stages, a microbatch goes through them in two *sweeps* a round: up through all
stages, which is the forward pass, and back down. What would be read of a later stage on the way up,
or of an earlier one on the way down, waits for the next sweep.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterable, Mapping, Sequence

import numpy as np

from tfpar.compile.local.local_graph import NOWHERE, LocalProgram
from tfpar.compile.local.rank_local_axis import (
    NotRepeatableError,
    Repetition,
    constant_of_sub_batch,
)
from tfpar.compile.local.reshard import COLLECTIVE_TYPES, ONCE
from tfpar.ir.gathered_weights import runs_for_each_microbatch
from tfpar.ir.graph import Op, Tensor
from tfpar.ir.traits import SOURCES
from tfpar.spec import Shard


@dataclasses.dataclass(frozen=True, eq=False)
class MicrobatchRounds:
    """When the ops of a program run.

    Attributes:
        sweep_of: of ops that run once for each microbatch: in which sweep, from 0. Two make a
            round: the first goes up through the stages, the second back down.
        once: of all others: after how many rounds they can run.
    """

    sweep_of: dict[Op, int]
    once: dict[Op, int]

    @property
    def count(self) -> int:
        """The number of rounds."""
        return max(map(_round, self.sweep_of.values()), default=0)

    def of(self, number: int) -> list[Op]:
        """Return the ops that run for each microbatch in a round, from 1."""
        return [op for op, sweep in self.sweep_of.items() if _round(sweep) == number]


def goes_down(sweep: int) -> bool:
    """Whether a sweep goes from the last stage to the first."""
    return sweep % 2 == 1


def _round(sweep: int) -> int:
    """The round of a sweep, from 1."""
    return sweep // 2 + 1


def schedule_rounds(program: LocalProgram, repetition: Repetition) -> MicrobatchRounds:
    """Return the rounds of `program`.

    Args:
        repetition: what is known of its ops when they run more than once.

    Raises:
        NotRepeatableError: names an op with an effect that would come once for each microbatch.
    """
    differing = differing_ops(program, repetition)
    placed = _placed(program, differing, {})
    latest = _least_kept(program, placed, _latest(program, placed))
    return _placed(program, differing, latest)


def differing_ops(program: LocalProgram, repetition: Repetition) -> set[Op]:
    """Return the ops that make another tensor for each microbatch."""
    graph, axis = program.graph, program.mesh.num_axes - 1
    cut = {
        tensor
        for tensor, spec in zip(graph.inputs, program.input_specs, strict=True)
        if isinstance(spec[-1], Shard)
    }
    parts = program.mesh.shape[-1]
    found: set[Op] = set()
    for op in graph.ops:
        if op.type == "Placeholder":
            differs = op.outputs[0] in cut
        elif op.type == "RankConst":
            first = constant_of_sub_batch(op, 0, parts)
            differs = any(
                not np.array_equal(one, other)
                for part in range(1, parts)
                for one, other in zip(constant_of_sub_batch(op, part, parts), first, strict=True)
            )
        elif meets(op, axis):
            differs = op.type in ("ReduceScatter", "AllToAll")
        elif runs_for_each_microbatch(op):
            differs = True  # in time: what it gives is the same, but not kept from one to the next
        elif ONCE in op.attrs or repetition.writes(op):
            differs = False  # microbatches hold the same, even where each has computed it
        else:
            differs = any(t.op in found for t in op.inputs) or repetition.bodies.differ(op)
            if differs and repetition.has_effects(op):
                raise NotRepeatableError(op)
        if differs:
            found.add(op)
    return found


def meets(op: Op, axis: int) -> bool:
    """Whether `op` is a collective along mesh axis `axis`."""
    return op.type in COLLECTIVE_TYPES and axis in op.attrs["axes"]


def is_made_in_rounds(op: Op, axis: int, differing: Collection[Op]) -> bool:
    """Whether `op` runs once for each microbatch, and is not merely cut into blocks."""
    return op in differing and not (op.type in SOURCES or meets(op, axis))


def _placed(
    program: LocalProgram, differing: set[Op], latest: Mapping[Op, int]
) -> MicrobatchRounds:
    """All as early as can be, but in no round before `latest`."""
    axis, places = program.mesh.num_axes - 1, program.places
    found = MicrobatchRounds({}, {})
    for op in program.graph.ops:
        place = places.get(op, NOWHERE)
        rounds = [0]
        sweeps = [2 * (latest.get(op, 1) - 1)]
        for before in op.predecessors:
            if before in found.once:
                rounds.append(found.once[before])
                sweeps.append(2 * found.once[before])  # all microbatches have gone by
            else:
                sweep = found.sweep_of[before]
                rounds.append(_round(sweep))
                sweeps.append(_next(sweep, places.get(before, NOWHERE).stage, place.stage))
        if is_made_in_rounds(op, axis, differing):
            sweep = max(sweeps)
            found.sweep_of[op] = sweep + (place.backward and not goes_down(sweep))
        else:
            found.once[op] = max(rounds)
    return found


def _next(sweep: int, maker: int, reader: int) -> int:
    """The first sweep, from that of a tensor on, that comes to its reader's stage afterwards."""
    comes = reader <= maker if goes_down(sweep) else reader >= maker
    return sweep if comes else sweep + 1


def _latest(program: LocalProgram, placed: MicrobatchRounds) -> dict[Op, int]:
    """The last round in which each op can run and be in time for all that reads it."""
    readers: dict[Op, list[Op]] = {}
    for op in program.graph.ops:
        for before in dict.fromkeys(op.predecessors):
            readers.setdefault(before, []).append(op)
    each = placed.sweep_of
    latest: dict[Op, int] = {}
    for op in reversed(program.graph.ops):
        wait = 0 if op in each else 1  # what runs once has to be there before a round begins
        latest[op] = min(
            (latest[r] - (wait if r in each else 0) for r in readers.get(op, ())),
            default=placed.count,
        )
    return latest


def _least_kept(
    program: LocalProgram, placed: MicrobatchRounds, latest: Mapping[Op, int]
) -> dict[Op, int]:
    """`latest`, but earlier rounds for what would otherwise read more of them than it leaves.

    Args:
        placed: all as early as can be.
    """
    readers = program.graph.consumers()
    rounds = {op: latest[op] for op in placed.sweep_of}
    for number in range(1, placed.count):
        moved = {
            op: number
            for op, sweep in placed.sweep_of.items()
            if _round(sweep) <= number < rounds[op]
        }
        if moved:
            near = dict.fromkeys(t for op in moved for t in (*op.inputs, *op.outputs))
            earlier = {**rounds, **moved}
            if _kept_bytes(near, readers, earlier) < _kept_bytes(near, readers, rounds):
                rounds = earlier
    return rounds


def _kept_bytes(
    tensors: Iterable[Tensor], readers: Mapping[Tensor, Sequence[Op]], rounds: Mapping[Op, int]
) -> int:
    """Bytes that microbatches make in one round and read in a later one."""
    return sum(
        tensor.num_bytes
        for tensor in tensors
        if tensor.op in rounds
        and tensor.is_static
        and any(rounds.get(r, 0) > rounds[tensor.op] for r in readers.get(tensor, ()))
    )
