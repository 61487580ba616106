"""Batch statistics of one microbatch: what batch normalisation takes over the batch is taken over
each microbatch of all ranks ("ghost batches").

By default the numbers are those of the whole batch: a mean over it is a sum over the axis of the
microbatches, which all of them wait for. Here that sum stays within each microbatch:

    mean = AllReduce(sum(x) / 8, micro)      mean = 2 * sum(x) / 8        of 4 of 8 samples
    y = x - mean                             y = x - mean
    moving = 0.9 moving + 0.1 mean           moving = average of 0.9 moving + 0.1 mean, by samples

What is made of such a statistic once a step is averaged over microbatches, each weighted by its
samples: the new value of a running average, the gradient of a weight. Sums of gradients that lead
back to a statistic are scaled in the same way. With n of N samples in a microbatch, what is read of
a sum s is (N / n) s, and its average with weight n / N is s again: what is linear in the sums is as
it was, and the gradients are those of the loss with these statistics.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator

from tfpar.compile.local.local_graph import LocalProgram, build_local_program
from tfpar.compile.local.microbatch_rounds import differing_ops, is_made_in_rounds, meets
from tfpar.compile.local.rank_local_axis import Repetition
from tfpar.compile.local.reshard import ONCE
from tfpar.ir.graph import Op, Tensor, is_floating
from tfpar.ir.roles import BACKWARD, FORWARD, UPDATE, Roles
from tfpar.ir.traits import ADDITIONS, ASSIGNMENTS, HANDED_ON, VARIABLE_READS
from tfpar.pipeline.statistics import EXACT, BatchStatistics
from tfpar.propagation.partitioned_graph import PartitionedGraph

_TAPE = "gradient_tape/"


def batch_statistics(program: LocalProgram, roles: Roles) -> BatchStatistics:
    """Find what normalisations take over the batch.

    In the forward pass that is a sum over the batch that the forward pass of each microbatch reads,
    and that a running average (a variable that the forward pass moves) takes in. Other sums, such
    as those of sample weights, of a loss or of a metric, stay those of the whole batch.

    Args:
        program: its last mesh axis are microbatches.
        roles: of the ops that the program was written for.
    """
    return StatisticsSearch(program, roles).found()


def statistics_of(laid: PartitionedGraph, roles: Roles) -> BatchStatistics:
    """Find the batch statistics by the ops of a step on a mesh whose last axis are microbatches:
    those that make the sums, and those of which something runs for each microbatch."""
    program = build_local_program(laid)
    found, origins = batch_statistics(program, roles), program.origins
    return BatchStatistics(
        frozenset(origins[op] for op in found.sums), frozenset(origins[op] for op in found.each)
    )


class StatisticsSearch:
    """Looks for the statistics of a program."""

    def __init__(self, program: LocalProgram, roles: Roles) -> None:
        self.program = program
        self.axis = program.mesh.num_axes - 1
        self.repetition = Repetition(program, {})
        self.readers = program.graph.consumers()
        self.exact = differing_ops(program, self.repetition)
        self._roles = roles

    def found(self) -> BatchStatistics:
        """Return the statistics, and what leads back to them."""
        joins = [op for op in self.program.graph.ops if self._is_sum(op) and self._joins(op)]
        scopes: set[str] = set()
        sums: set[Op] = set()
        for op in joins:
            written = [w for w in self._after(op) if self._moves(w)]
            if self.phase(op) == FORWARD and written and self._reaches(op, FORWARD):
                sums.add(op)
                scopes.update(_common(self._scope(op), self._scope(w)) for w in written)
        if not sums:
            return EXACT
        # Where the forward pass joins otherwise too, and trains what it joins, names have to say
        # which gradients are whose.
        trained = self._trained()
        others = any(self.phase(op) == FORWARD and op not in sums and op in trained for op in joins)
        while True:
            each = self._each(sums)
            more = {
                op
                for op in self.program.graph.ops
                if op not in sums
                and self._is_sum(op)
                and self.phase(op) == BACKWARD
                and (not others or any(_is_within(self._scope(op), scope) for scope in scopes))
                and self._is_read_by(op, each)
            }
            if not more:
                return BatchStatistics(frozenset(sums), frozenset(each - self.exact))
            sums |= more

    def phase(self, op: Op) -> int:
        """Return the phase of what an op was written for; FORWARD of what was written for none."""
        origin = self.program.origins.get(op)
        return FORWARD if origin is None else self._roles.phase.get(origin, FORWARD)

    def ends(self, op: Op) -> bool:
        """Whether an op runs once a step, whatever it reads."""
        return (
            self.phase(op) == UPDATE
            or ONCE in op.attrs
            or self.repetition.writes(op)
            or meets(op, self.axis)
        )

    def _is_sum(self, op: Op) -> bool:
        return (
            op.type == "AllReduce"
            and meets(op, self.axis)
            and op.attrs["reduction"] == "sum"
            and is_floating(op.outputs[0].dtype)
        )

    def is_each(self, op: Op) -> bool:
        """Whether an op runs for each microbatch, statistics being exact."""
        return is_made_in_rounds(op, self.axis, self.exact)

    def _after(self, op: Op) -> Iterator[Op]:
        """Yield the readers of `op`, direct or through ops that run once a step; not further than
        an op that runs for each microbatch, or ends it."""
        seen: set[Op] = set()
        waiting = [op]
        while waiting:
            for tensor in waiting.pop().outputs:
                for reader in self.readers.get(tensor, ()):
                    if reader not in seen:
                        seen.add(reader)
                        yield reader
                        if not self.is_each(reader) and not self.ends(reader):
                            waiting.append(reader)

    def _joins(self, op: Op) -> bool:
        return any(map(self.is_each, self._after(op)))

    def _reaches(self, op: Op, phase: int) -> bool:
        return any(self.is_each(r) and self.phase(r) == phase for r in self._after(op))

    def _moves(self, op: Op) -> bool:
        """Whether `op` moves a running average: it does not merely add to its variable."""
        if self.phase(op) != FORWARD or op.type not in ASSIGNMENTS:
            return False
        handle, value = op.inputs
        added = [value]
        if op.type == "AssignVariableOp":
            maker = _behind(value).op
            if maker.type not in ADDITIONS or not any(_is_read(t, handle) for t in maker.inputs):
                return True
            added = [t for t in maker.inputs if not _is_read(t, handle)]
        return any(self._reads(t, handle) for t in added)

    def _reads(self, tensor: Tensor, handle: Tensor) -> bool:
        """Whether a value is made of what a variable held."""
        seen, waiting = {tensor}, [tensor]
        while waiting:
            for before in waiting.pop().op.inputs:
                if before is handle:
                    return True
                if before not in seen and not self.is_each(before.op):
                    seen.add(before)
                    waiting.append(before)
        return False

    def _trained(self) -> set[Op]:
        """Return the ops that depend on a variable."""
        handles = self.program.graph.variable_of()
        found: set[Op] = set()
        for op in self.program.graph.ops:
            if any(t in handles or t.op in found for t in op.inputs):
                found.add(op)
        return found

    def _each(self, sums: set[Op]) -> set[Op]:
        """Return the ops that run for each microbatch if these sums stay within it."""
        found: set[Op] = set()
        for op in self.program.graph.ops:
            if self.is_each(op) or (
                op not in self.exact
                and not self.ends(op)
                and any(t.op in found or t.op in sums for t in op.inputs)
            ):
                found.add(op)
        return found

    def _is_read_by(self, op: Op, each: set[Op]) -> bool:
        return any(self.is_each(r) or r in each for r in self._after(op))

    def _scope(self, op: Op) -> str:
        """The scope of the layer's ops that an op was written for, or is the gradient of."""
        return self.program.origins[op].scope.removeprefix(_TAPE)


def _behind(tensor: Tensor) -> Tensor:
    while tensor.op.type in HANDED_ON and tensor.op.type not in VARIABLE_READS:
        tensor = tensor.op.inputs[0]
    return tensor


def _is_read(tensor: Tensor, handle: Tensor) -> bool:
    maker = _behind(tensor).op
    return maker.type in VARIABLE_READS and maker.inputs[0] is handle


def _common(scope: str, other: str) -> str:
    pairs = zip(scope.split("/"), other.split("/"), strict=False)
    return "/".join(a for a, _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))


def _is_within(scope: str, outer: str) -> bool:
    return not outer or scope == outer or scope.startswith(f"{outer}/")
