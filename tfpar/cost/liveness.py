"""Liveness of buffers over ops that run one after another: a whole step, or one task of a stage.

Here are three ops on tensors of 1 KB each:

    x = Placeholder                            stored: x            1 KB
    h = MatMul(x, x)   last to read x                  x, h         2 KB   <- the peak
    r = Relu(h)        last to read h                  r            1 KB   written over h
    y = MatMul(r, r)   last to read r                  r, y         2 KB

A buffer is stored from the op that makes its tensor to the last op that reads it, one for each spec
that the tensor is read in: it is resharded as soon as it is there. Views share the memory of what
they view, and an elementwise op writes over an input that nobody reads after it. What ops read and
none of them makes is there from the beginning; what outlives them is there at the end.

    liveness = BufferLiveness(Buffers(partitioned), partitioned.graph.ops, lambda buffer: False)
    num_bytes, op = liveness.find_peak(pricer.stored)
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import NamedTuple

from tfpar.ir.graph import Op, Tensor
from tfpar.ir.traits import (
    CONSTANTS,
    GIVES,
    ON_HOST,
    SIZES,
    VARIABLE_READS,
    VIEWS,
    forwarded_input,
    forwarded_input_index,
)
from tfpar.propagation.partitioned_graph import PartitionedGraph
from tfpar.spec import Spec

Buffer = tuple[Tensor, Spec]
"""A tensor, which views may share, in one of the specs that it is stored in."""


class Buffers:
    """Buffers that the ops of a partitioned graph read and make."""

    def __init__(self, partitioned: PartitionedGraph) -> None:
        self.partitioned = partitioned
        self._of: dict[Buffer, Buffer | None] = {}

    def overwritten(self, op: Op, dying: Collection[Buffer]) -> list[Buffer]:
        """Find the input that an elementwise op writes its result over, which nobody reads
        later."""
        rule = self.partitioned.prepared.rules[op]
        if len(op.outputs) != 1 or not dying or not op.inputs:
            return []
        specs = self.partitioned.decisions[op].strategy.in_specs
        found = []
        for tensor, spec, dims in zip(op.inputs, specs, rule.inputs, strict=True):
            buffer = self._buffer(tensor, spec)
            if dims == rule.outputs[0] and buffer is not None and buffer in dying:
                found.append(buffer)
        return found[:1]

    def used(self, op: Op) -> Iterator[Buffer]:
        """List the buffers that an op reads or makes."""
        decision = self.partitioned.decisions.get(op)
        if decision is not None:
            for tensor, spec in zip(op.inputs, decision.strategy.in_specs, strict=True):
                buffer = self._buffer(tensor, spec)
                if buffer is not None:
                    yield buffer
        for tensor in op.outputs:
            buffer = self._buffer(tensor, self.partitioned.specs[tensor])
            if buffer is not None:
                yield buffer

    def _buffer(self, tensor: Tensor, spec: Spec) -> Buffer | None:
        """Find what holds `tensor` in `spec`; None for what takes no memory of its own."""
        key = tensor, spec
        found = self._of.get(key, key)
        if found is key:  # not known yet
            found = self._of[key] = self._find(tensor, spec)
        return found

    def _find(self, tensor: Tensor, spec: Spec) -> Buffer | None:
        op = tensor.op
        kept = self.partitioned.specs.get(tensor)
        if tensor.dtype == "resource" or op.type in SIZES or op.type in CONSTANTS:
            return None
        if ON_HOST in op.attrs:
            return (tensor, spec) if op.attrs[ON_HOST] == GIVES else None
        if op.type in VARIABLE_READS and spec == kept:
            return None
        decision = self.partitioned.decisions.get(op)
        if decision is None or op.type not in VIEWS or spec != kept:
            return tensor, spec
        if tensor in self.partitioned.resolutions:
            return tensor, spec
        return self._buffer(
            forwarded_input(tensor), decision.strategy.in_specs[forwarded_input_index(tensor)]
        )


class HighWaterMark(NamedTuple):
    """Peak of the bytes stored at once, and the op that runs then; None: before all ops."""

    num_bytes: float
    op: Op | None


class BufferLiveness:
    """Lifetimes of buffers over ops that run one after another.

    Attributes:
        given: buffers that the ops read and none of them makes, in the order of reading.
        made, dying: buffers that an op makes, and those it is the last to read.
        copies: how many of a buffer a folded graph's step has: one for each iteration where it is
            both made and read last in such.

    Args:
        ops: in the order in which they run.
        outlives: whether a buffer is still there when they have ended.
        times: how many ops of the model each op of a folded graph stands for; by default 1.
    """

    def __init__(
        self,
        buffers: Buffers,
        ops: Sequence[Op],
        outlives: Callable[[Buffer], bool],
        times: Mapping[Op, int] | None = None,
    ) -> None:
        self.buffers, self.ops, self.times = buffers, ops, times or {}
        self.given: list[Buffer] = []
        self.made: dict[Op, list[Buffer]] = {}
        self.dying: dict[Op, list[Buffer]] = {}
        own = set(ops)
        last: dict[Buffer, Op] = {}
        for op in ops:
            for buffer in buffers.used(op):
                if buffer not in last:
                    maker = buffer[0].op
                    new = self.made.setdefault(maker, []) if maker in own else self.given
                    new.append(buffer)
                last[buffer] = op
        for buffer, op in last.items():
            if not outlives(buffer):
                self.dying.setdefault(op, []).append(buffer)
        count = self.times.get
        self.copies = {b: _copies(count(b[0].op, 1), count(op, 1)) for b, op in last.items()}

    def find_peak(
        self, size: Callable[[Tensor, Spec], float], passing: Mapping[Op, float] | None = None
    ) -> HighWaterMark:
        """Find the peak of the bytes that are stored at once.

        A run of ops that stand for n each is taken as one of n iterations, all alike, that follow
        on each other. That comes within some percent of the whole graph's.

        Args:
            size: bytes of a buffer; 0 for what is counted elsewhere.
            passing: bytes that are stored beside the result of an op for a moment.
        """
        passing = passing or {}
        stored: dict[Buffer, float] = {}
        base, best = 0.0, HighWaterMark(0.0, None)
        run = _Run()
        for buffer in self.given:
            stored[buffer] = size(*buffer)
            run.store(stored[buffer], buffer)
        run.most = run.now
        for count, ops in itertools.groupby(self.ops, lambda op: self.times.get(op, 1) or 1):
            for op in ops:
                dying = self.dying.get(op, ())
                overwritten = self.buffers.overwritten(op, dying) if dying else ()
                for buffer in overwritten:
                    run.free(stored.pop(buffer), self.copies[buffer], buffer in run.made)
                for buffer in self.made.get(op, ()):
                    stored[buffer] = size(*buffer)
                    run.store(stored[buffer], buffer)
                now = run.now + passing.get(op, 0.0)
                if now > run.most:
                    run.most, run.at = now, op
                for buffer in dying:
                    if buffer not in overwritten:
                        run.free(stored.pop(buffer), self.copies[buffer], buffer in run.made)
            outliving = [(b, num_bytes) for b, num_bytes in stored.items() if b in run.made]
            each = run.freed_each + sum(n for b, n in outliving if self.copies[b] > 1)
            once = run.freed_once + sum(n for b, n in outliving if self.copies[b] == 1)
            total = base + run.most + max(0.0, (count - 1) * each)
            if total > best.num_bytes:
                best = HighWaterMark(total, run.at)
            base += count * each + once
            run = _Run()
        return best

    def stored_at(self, at: Op) -> list[Buffer]:
        """List the buffers that are stored while an op runs, in the order of making."""
        stored = dict.fromkeys(self.given)
        for op in self.ops:
            dying = self.dying.get(op, ())
            overwritten = self.buffers.overwritten(op, dying) if dying else ()
            for buffer in overwritten:
                del stored[buffer]
            stored.update(dict.fromkeys(self.made.get(op, ())))
            if op is at:
                break
            for buffer in dying:
                if buffer not in overwritten:
                    del stored[buffer]
        return list(stored)


@dataclasses.dataclass(eq=False)
class _Run:
    """One iteration of a run of ops.

    Attributes:
        now, most: bytes above what was stored when it began.
        freed_each, freed_once: what each iteration, or the last one, frees of what was made
            before the run; not above 0.
    """

    now: float = 0.0
    most: float = 0.0
    at: Op | None = None
    made: set[Buffer] = dataclasses.field(default_factory=set)
    freed_each: float = 0.0
    freed_once: float = 0.0

    def store(self, size: float, buffer: Buffer) -> None:
        self.now += size
        self.made.add(buffer)

    def free(self, size: float, copies: int, made_here: bool) -> None:
        if made_here or copies > 1:
            self.now -= size
        if not made_here and copies > 1:
            self.freed_each -= size
        elif not made_here:
            self.freed_once -= size


def _copies(made: int, read: int) -> int:
    """Count a buffer in the whole model, if its maker stands for `made` ops and its last reader for
    `read`: there are as many as the fewer of them.

    A stand-in for an update stands for 0 ops; then there are as many as are made.
    """
    return min(made, read) if read else made
