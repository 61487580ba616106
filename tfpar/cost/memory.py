"""Peak memory of a rank that runs a step: tensors, and what collectives need for a moment.

Tensors are stored as `cost.liveness` says, in the order of the graph. A collective has its operand
and its result at the same time. Variables are counted elsewhere (`Pricer.stored_bytes`), but what
is gathered of them is counted here. What an op on the host takes is no longer stored; what it gives
is, from then on.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

from tfpar.cost.cost import Cost
from tfpar.cost.liveness import Buffer, BufferLiveness, Buffers
from tfpar.cost.op_compute import temporaries
from tfpar.cost.pricer import Pricer
from tfpar.ir.graph import Op, Tensor
from tfpar.ir.roles import BACKWARD, FORWARD, UPDATE, Roles
from tfpar.ir.traits import CONSTANTS, VARIABLE_READS, WHOLE_UPDATES
from tfpar.propagation.partitioned_graph import PartitionedGraph
from tfpar.spec import Spec


@dataclasses.dataclass(frozen=True)
class LivePeak:
    """Moment at which a rank stores the most tensors.

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
        """Put the peak into the `cost` of the same step."""
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
) -> LivePeak:
    """Find the most that one rank stores of tensors at once.

    Args:
        local_bytes: what a rank stores of a tensor in a spec.
        times: how many ops of the model each op of a folded graph stands for.
        passing: bytes that are stored beside the result of an op for a moment; see
            `operands_of_collectives`.
        show: how many of the largest tensors to name.
        phase: of ops (`Roles`), by which to tell what is kept for the backward pass.
    """
    graph = partitioned.graph
    ends = set(graph.outputs)
    buffers = Buffers(partitioned)
    liveness = BufferLiveness(buffers, graph.ops, lambda buffer: buffer[0] in ends, times)
    most, op = liveness.find_peak(local_bytes, passing)
    found = LivePeak(most)
    if op is not None:
        largest = _largest(liveness.stored_at(op), local_bytes, show) if show else ()
        found = LivePeak(most, op.name, largest)
    if phase is not None:
        of_variables = _of_variables(graph.ops)
        sizes_of: dict[bool, list[float]] = {False: [], True: []}
        for kept in _kept_copies(liveness, phase):
            sizes_of[kept[0].op in of_variables].append(liveness.copies[kept] * local_bytes(*kept))
        copied, gathered = map(math.fsum, (sizes_of[False], sizes_of[True]))
        found = dataclasses.replace(found, copied_bytes=copied, gathered_bytes=gathered)
    return found


def _largest(
    buffers: Iterable[Buffer], local_bytes: Callable[[Tensor, Spec], float], show: int
) -> tuple[tuple[str, float], ...]:
    """(name, bytes) of the largest buffers, so many, the largest first."""
    sizes = ((tensor.name, local_bytes(tensor, spec)) for tensor, spec in buffers)
    return tuple(sorted(sizes, key=lambda item: -item[1])[:show])


def _kept_copies(liveness: BufferLiveness, phase: Mapping[Op, int]) -> Iterator[Buffer]:
    """The buffers of forward ops, in other specs than their own, that backward ops are the last to
    read."""
    specs = liveness.buffers.partitioned.specs
    for op, buffers in liveness.dying.items():
        if phase[op] == BACKWARD:
            for tensor, spec in buffers:
                if phase[tensor.op] == FORWARD and spec != specs.get(tensor):
                    yield tensor, spec


def operands_of_collectives(
    partitioned: PartitionedGraph,
    local_bytes: Callable[[Tensor, Spec], float],
    roles: Roles,
    bucket_bytes: float,
) -> dict[Op, float]:
    """Find, by op, the bytes of what is reduced or moved as soon as it is made.

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


def temporaries_of_expansions(partitioned: PartitionedGraph, pricer: Pricer) -> dict[Op, float]:
    """Find what ops that always run decomposed (attention on blocks) store beside their inputs and
    results, by op. Decompositions of others store little beside what the op itself would."""
    found: dict[Op, float] = {}
    for op, decision in partitioned.decisions.items():
        inner = decision.expansion
        if inner is not None and partitioned.prepared.rules[op].stands_for is not None:
            if inner not in pricer.temporaries:
                pricer.temporaries[inner] = _temporaries(inner, pricer.stored)
            found[op] = pricer.temporaries[inner]
    return found


def _temporaries(inner: PartitionedGraph, local_bytes: Callable[[Tensor, Spec], float]) -> float:
    ends = {*inner.graph.inputs, *inner.graph.outputs}

    def size(tensor: Tensor, spec: Spec) -> float:
        return 0.0 if tensor in ends else local_bytes(tensor, spec)

    liveness = BufferLiveness(Buffers(inner), inner.graph.ops, lambda buffer: False)
    return liveness.find_peak(size).num_bytes


def live_peak(
    partitioned: PartitionedGraph,
    pricer: Pricer,
    bucket_bytes: float,
    state_ratio: float | None = None,
    show: int = 5,
) -> LivePeak:
    """Find the most that a rank stores at once of what a step computes, communication included.

    Communication libraries keep a buffer into which they pack tensors: its size is added, unless
    all ranks have one memory and there is no such library.

    Args:
        bucket_bytes: of packed all-reduces.
        state_ratio, show: as of `evaluate` and `peak`.
    """
    roles = pricer.roles
    passing = operands_of_collectives(partitioned, pricer.stored, roles, bucket_bytes)
    packed = 0.0 if pricer.cluster.one_memory else max(passing.values(), default=0.0)
    for op, size in temporaries_of_expansions(partitioned, pricer).items():
        passing[op] = passing.get(op, 0.0) + size
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


def _of_variables(ops: Sequence[Op]) -> set[Op]:
    """The ops that compute something of variables and constants alone."""
    found: set[Op] = set()
    for op in ops:
        if op.type in VARIABLE_READS:
            found.add(op)
        elif op.inputs and all(t.op in found or t.op.type in CONSTANTS for t in op.inputs):
            found.add(op)
    return found
