"""How much of what a step computes is in a rank's memory at once: liveness over the local graph.

Here are three ops on tensors of 1 KB each:

    x = Placeholder                            stored: x            1 KB
    h = MatMul(x, x)   last to read x                  x, h         2 KB   <- the peak
    r = Relu(h)        last to read h                  r            1 KB   written over h
    y = MatMul(r, r)   last to read r                  r, y         2 KB

Ops run in the order of the graph. A tensor is stored from the op that makes it to the last op that
reads it, once for each spec that it is read in: it is resharded as soon as it is there. Views share
the memory of what they view, an elementwise op writes over an input that nobody reads after it, and
a collective has its operand and its result at the same time. Variables are counted elsewhere
(`Pricer.stored_bytes`), but what is gathered of them is counted here. What an op on the host takes
is no longer stored; what it gives is, from then on.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence

from tfpar.cost.cost import Cost
from tfpar.cost.pricer import Pricer
from tfpar.cost.update import temporaries
from tfpar.ir.graph import Op, Tensor
from tfpar.ir.roles import BACKWARD, FORWARD, UPDATE, Roles
from tfpar.ir.traits import (
    CONSTANTS,
    GIVES,
    ON_HOST,
    SIZES,
    VARIABLE_READS,
    VIEWS,
    WHOLE_UPDATES,
    given,
    given_at,
)
from tfpar.propagation.partitioned import PartitionedGraph
from tfpar.spec import Spec

Buffer = tuple[Tensor, Spec]
"""A tensor, which views may share, in one of the specs that it is stored in."""


@dataclasses.dataclass(frozen=True)
class Peak:
    """When a rank stores the most tensors.

    Attributes:
        num_bytes: of them together.
        op: the name of the op that runs then.
        largest: (name, bytes) of some of them, the largest first.
        copied_bytes: of what the step keeps for its backward pass, what are copies: tensors of the
            forward pass that are read in another spec than their own.
        gathered_bytes: the same of variables: as much for any batch.
    """

    num_bytes: float
    op: str = ""
    largest: tuple[tuple[str, float], ...] = ()
    copied_bytes: float = 0.0
    gathered_bytes: float = 0.0

    def in_cost(self, cost: Cost) -> Cost:
        """`cost` of the same step with what is stored then."""
        return dataclasses.replace(
            cost,
            live_bytes=self.num_bytes,
            copied_bytes=self.copied_bytes,
            gathered_bytes=self.gathered_bytes,
        )


def peak(
    partitioned: PartitionedGraph,
    local_bytes: Callable[[Tensor, Spec], float],
    times: Mapping[Op, int] | None = None,
    passing: Mapping[Op, float] | None = None,
    show: int = 5,
    phase: Mapping[Op, int] | None = None,
) -> Peak:
    """The most that one rank stores of tensors at once.

    Args:
        local_bytes: what a rank stores of a tensor in a spec.
        times: how many ops of the model each op of a folded graph stands for: a run of ops that
            stand for n is taken as one of n iterations, all alike, that follow on each other. That
            comes within some percent of the whole graph's.
        passing: bytes that are stored beside the result of an op for a moment; see
            `operands_of_collectives`.
        show: how many of the largest tensors to name.
        phase: of ops (`Roles`), by which to tell what is kept for the backward pass.
    """
    times, passing = times or {}, passing or {}
    lives = Lives(partitioned, times)
    stored: dict[Buffer, float] = {}
    base, best = 0.0, Peak(0.0)
    for count, ops in itertools.groupby(partitioned.graph.ops, lambda op: times.get(op, 1) or 1):
        run = _Run()
        for op in ops:
            over = lives.overwritten(op, lives.dying.get(op, ()))
            for buffer in over:
                run.free(stored.pop(buffer), lives.copies[buffer], buffer in run.made)
            for buffer in lives.made.get(op, ()):
                stored[buffer] = local_bytes(*buffer)
                run.store(stored[buffer], buffer)
            now = run.now + passing.get(op, 0.0)
            if now > run.most:
                run.most, run.at, run.then = now, op.name, list(stored)
            for buffer in lives.dying.get(op, ()):
                if buffer not in over:
                    run.free(stored.pop(buffer), lives.copies[buffer], buffer in run.made)
        outliving = [(b, size) for b, size in stored.items() if b in run.made]
        each = run.freed_each + sum(size for b, size in outliving if lives.copies[b] > 1)
        once = run.freed_once + sum(size for b, size in outliving if lives.copies[b] == 1)
        total = base + run.most + max(0.0, (count - 1) * each)
        if total > best.num_bytes:
            sizes = sorted(
                ((b[0].name, stored.get(b) or local_bytes(*b)) for b in run.then),
                key=lambda item: -item[1],
            )
            best = Peak(total, run.at, tuple(sizes[:show]))
        base += count * each + once
    if phase is not None:
        of_variables = _of_variables(partitioned.graph.ops)
        sizes_of: dict[bool, list[float]] = {False: [], True: []}
        for kept in lives.kept_copies(phase):
            sizes_of[kept[0].op in of_variables].append(lives.copies[kept] * local_bytes(*kept))
        copied, gathered = map(math.fsum, (sizes_of[False], sizes_of[True]))
        best = dataclasses.replace(best, copied_bytes=copied, gathered_bytes=gathered)
    return best


def operands_of_collectives(
    partitioned: PartitionedGraph,
    local_bytes: Callable[[Tensor, Spec], float],
    roles: Roles,
    bucket_bytes: float,
) -> dict[Op, float]:
    """By op, the bytes of what is reduced or moved as soon as it is made.

    Collectives that only the update waits for are packed in buckets: their operands are stored
    until a bucket is full.
    """
    found: dict[Op, float] = {}
    bucket = 0.0
    last: Op | None = None

    def flush() -> None:
        if last is not None:
            found[last] = max(found[last], bucket)

    for tensor, reshard in partitioned.resolutions.items():
        size = local_bytes(tensor, reshard.source)
        found[tensor.op] = max(found.get(tensor.op, 0.0), size)
        if tensor in roles.deferrable:
            # What an op of a folded graph stands for fills buckets by itself.
            full = max(bucket_bytes, size)
            size = min(size * roles.times.get(tensor.op, 1), full)
            if bucket + size > bucket_bytes:
                flush()
                bucket = 0.0
            bucket, last = bucket + size, tensor.op
    flush()
    return found


def live_peak(
    partitioned: PartitionedGraph,
    pricer: Pricer,
    bucket_bytes: float,
    state_ratio: float | None = None,
    show: int = 5,
) -> Peak:
    """The most that a rank stores at once of what a step computes, communication included.

    Communication libraries keep a buffer into which they pack tensors: its size is added, unless
    all ranks have one memory and there is no such library.

    Args:
        bucket_bytes: of packed all-reduces.
        state_ratio, show: as of `evaluate` and `peak`.
    """
    roles = pricer.roles
    passing = operands_of_collectives(partitioned, pricer.stored, roles, bucket_bytes)
    packed = 0.0 if pricer.cluster.one_memory else max(passing.values(), default=0.0)
    handles = {v.handle: v for v in partitioned.graph.variables}
    for op in partitioned.decisions:
        if roles.phase[op] == UPDATE and op.type in WHOLE_UPDATES and op.inputs[0] in handles:
            variable = handles[op.inputs[0]]
            laid = partitioned.slots_spec(variable) or partitioned.variable_specs[variable]
            size = pricer.stored(variable, laid)
            away = pricer.is_away(variable)
            passing[op] = size * temporaries(variable.trainable, state_ratio, away)
    most = peak(partitioned, pricer.stored, roles.times, passing, show, roles.phase)
    return dataclasses.replace(most, num_bytes=most.num_bytes + packed)


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
    at: str = ""
    then: list[Buffer] = dataclasses.field(default_factory=list)
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


class Lives:
    """Where buffers begin and end.

    Attributes:
        made, dying: the buffers that an op makes, and those it is the last to read.
        copies: how many of a buffer a folded graph's step has: one for each iteration where it is
            both made and read last in such.
    """

    def __init__(self, partitioned: PartitionedGraph, times: Mapping[Op, int]) -> None:
        self.partitioned = partitioned
        self.made: dict[Op, list[Buffer]] = {}
        self.dying: dict[Op, list[Buffer]] = {}
        self._of: dict[Buffer, Buffer | None] = {}
        last: dict[Buffer, Op] = {}
        for op in partitioned.graph.ops:
            for buffer in self.used(op):
                if buffer not in last:
                    self.made.setdefault(buffer[0].op, []).append(buffer)
                last[buffer] = op
        ends = set(partitioned.graph.outputs)
        for buffer, op in last.items():
            if buffer[0] not in ends:
                self.dying.setdefault(op, []).append(buffer)
        self.copies = {
            b: _copies(times.get(b[0].op, 1), times.get(op, 1)) for b, op in last.items()
        }

    def kept_copies(self, phase: Mapping[Op, int]) -> Iterator[Buffer]:
        """The buffers of forward ops, in other specs than their own, that backward ops are the last
        to read."""
        for op, buffers in self.dying.items():
            if phase[op] == BACKWARD:
                for tensor, spec in buffers:
                    if phase[tensor.op] == FORWARD and spec != self.partitioned.specs.get(tensor):
                        yield tensor, spec

    def overwritten(self, op: Op, dying: Collection[Buffer]) -> list[Buffer]:
        """The input that an elementwise op writes its result over, of those that nobody reads
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
        """The buffers that an op reads or makes."""
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
        """What holds `tensor` in `spec`; None for what takes no memory of its own."""
        key = tensor, spec
        if key not in self._of:
            self._of[key] = self._find(tensor, spec)
        return self._of[key]

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
        return self._buffer(given(tensor), decision.strategy.in_specs[given_at(tensor)])


def _of_variables(ops: Sequence[Op]) -> set[Op]:
    """The ops that compute something of variables and constants alone."""
    found: set[Op] = set()
    for op in ops:
        if op.type in VARIABLE_READS:
            found.add(op)
        elif op.inputs and all(t.op in found or t.op.type in CONSTANTS for t in op.inputs):
            found.add(op)
    return found


def _copies(made: int, read: int) -> int:
    """How many of a buffer the whole model has, if its maker stands for `made` ops, and the last to
    read it for `read`: as many as the fewer of them.

    A stand-in for an update stands for 0 ops; then there are as many as are made.
    """
    return min(made, read) if read else made
