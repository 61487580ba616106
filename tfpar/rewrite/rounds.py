"""When each op of a program runs whose last mesh axis are microbatches, one behind the other.

Propagation has said of every tensor how it lies along that axis, and the rewriter has written what
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
runs beside its backward pass, and nothing of it is kept meanwhile.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Mapping

import numpy as np

from tfpar.ir.graph import Op
from tfpar.ir.traits import CONSTANTS, SOURCES
from tfpar.rewrite.local_graph import LocalProgram
from tfpar.rewrite.part_bodies import of_part
from tfpar.rewrite.reshard import COLLECTIVE_TYPES, ONCE
from tfpar.rewrite.within_rank import CannotRepeat, Repetition
from tfpar.spec import Shard


@dataclasses.dataclass(frozen=True, eq=False)
class Rounds:
    """When the ops of a program run.

    Attributes:
        count: the number of rounds.
        each: of ops that run once for each microbatch: in which round, from 1.
        once: of all others: after how many rounds they can run.
    """

    count: int
    each: dict[Op, int]
    once: dict[Op, int]


def rounds_of(program: LocalProgram, repetition: Repetition) -> Rounds:
    """The rounds of `program`.

    Args:
        repetition: what is known of its ops when they run more than once.

    Raises:
        CannotRepeat: names an op with an effect that would come once for each microbatch.
    """
    differing = _differing(program, repetition)
    each, _ = _placed(program, differing, lambda op, earliest: earliest)
    latest = _latest(program, each)
    each, once = _placed(program, differing, lambda op, earliest: max(earliest, latest[op]))
    return Rounds(max(each.values(), default=0), each, once)


def _differing(program: LocalProgram, repetition: Repetition) -> set[Op]:
    """The ops that make another tensor for each microbatch."""
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
            of_parts = [np.stack(of_part(op, part, parts)) for part in range(parts)]
            differs = any(not np.array_equal(values, of_parts[0]) for values in of_parts)
        elif meets(op, axis):
            differs = op.type in ("ReduceScatter", "AllToAll")
        elif ONCE in op.attrs or repetition.writes(op):
            differs = False  # microbatches hold the same, even where each has computed it
        else:
            differs = any(t.op in found for t in op.inputs) or repetition.bodies.differ(op)
            if differs and repetition.has_effects(op):
                raise CannotRepeat(op)
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
    program: LocalProgram, differing: set[Op], round_of: Callable[[Op, int], int]
) -> tuple[dict[Op, int], dict[Op, int]]:
    """`Rounds.each` and `Rounds.once`: all as early as can be, but in rounds as `round_of` says."""
    axis = program.mesh.num_axes - 1
    each: dict[Op, int] = {}
    once: dict[Op, int] = {}
    for op in program.graph.ops:
        before = _before(op)
        rounds = [each[b] for b in before if b in each]
        done = [once[b] for b in before if b in once]
        if is_made_in_rounds(op, axis, differing):
            each[op] = round_of(op, max([1, *rounds, *(n + 1 for n in done)]))
        else:
            once[op] = max([0, *rounds, *done])
    return each, once


def _before(op: Op) -> list[Op]:
    """What `op` comes after. A constant comes after nothing, whatever it was told to wait for."""
    return [] if op.type in CONSTANTS else [*(t.op for t in op.inputs), *op.control]


def _latest(program: LocalProgram, each: Mapping[Op, int]) -> dict[Op, int]:
    """The last round in which each op can run and be in time for all that reads it."""
    count = max(each.values(), default=0)
    readers: dict[Op, list[Op]] = {}
    for op in program.graph.ops:
        for before in dict.fromkeys(_before(op)):
            readers.setdefault(before, []).append(op)
    latest: dict[Op, int] = {}
    for op in reversed(program.graph.ops):
        wait = 0 if op in each else 1  # what runs once has to be there before a round begins
        latest[op] = min(
            (latest[r] - (wait if r in each else 0) for r in readers.get(op, ())),
            default=count,
        )
    return latest
