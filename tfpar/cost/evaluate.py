"""The one evaluator: what any partitioned graph costs on a cluster (TAP §IV-F).

The terms of single ops and reshards add up, so that a search can price what changed; `Cost` is
what they come to. A rank computes its ops one after another and waits for the collectives
between them: they are the critical path. The gradients' collectives, which only the update
waits for, run beside the backward pass in packed buckets; those of the update are packed too.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from tfpar.cluster.description import Cluster
from tfpar.cost.collectives import collective_seconds
from tfpar.cost.memory import Peak, operands_of_collectives, peak
from tfpar.cost.work import READ_PART, efficiency, flops, functions, sides
from tfpar.ir.graph import Op, Tensor, Variable, itemsize
from tfpar.ir.roles import BACKWARD, PHASES, RELABELS, UPDATE, Roles
from tfpar.propagation.factors import size_after
from tfpar.propagation.partitioned import Decision, PartitionedGraph, Reshard
from tfpar.propagation.reshard import lower_reshard, step_bytes
from tfpar.rules.rule import OpRule
from tfpar.spec import Mesh, Replicate, Spec, local_shape
from tfpar.spec.arguments import finite, integer, listed, optional, refused

BUCKET_SIZES = tuple(2**k * 1024 * 1024 for k in range(9))
"""Sizes of packed gradient buckets to choose from, in bytes (1 to 256 MiB)."""

BRANCHES = frozenset({"If", "StatelessIf", "Case", "StatelessCase"})
"""Op types of whose bodies one runs."""

PACKED_KINDS = ("all_reduce", "reduce_scatter", "all_gather", "all_to_all")
"""The collectives that are packed (`rewrite.packing`)."""

_LARGE = 2.0**40

_WRITES = ("Assign", "ResourceApply")

# Places in a vector of terms; after them the bytes of collectives that travel in buckets, by when,
# by kind and by which mesh axes they cross (a bit each): see `Pricer.packed`.
COMPUTE, COMMUNICATION, COUNT, KEPT, PACKED = 0, 3, 6, 7, 8

BESIDE, AFTER = range(2)
"""When packed collectives run: beside the backward pass, and in the update."""


@dataclasses.dataclass(frozen=True)
class Traffic:
    """The collectives of one kind, phase and group, in one step.

    Attributes:
        num_bytes: payload on one rank, as `reshard.step_bytes` counts it, of all of them.
        seconds: what they take one after another, each by itself.
    """

    kind: str
    axes: tuple[str, ...]
    phase: str
    count: int
    num_bytes: int
    seconds: float


@dataclasses.dataclass(frozen=True)
class Cost:
    """What one step costs on one rank: times in seconds (`_s`), sizes in bytes.

    Attributes:
        seconds: the time of a step: `compute_s`, `communication_s`, `exposed_s` and the cluster's
            `step_s` together, less `hidden_s`.
        compute_s: of the ops of forward, backward and update.
        communication_s: of the collectives that forward, backward and update wait for.
        hidden_s: how long chunks are computed while those of others are in flight
            (`cost.overlap`).
        gradients_s: of the gradients' collectives, all-reduces packed; the update waits for
            `exposed_s` of it, the backward pass hides the rest.
        bucket_bytes: the size of buckets with which that is least.
        weight_bytes, state_bytes: what a rank stores all the time, padding included: weights;
            optimizer slots and other state.
        gradient_bytes, activation_bytes: of the weights' gradients, and of what the backward pass
            reads again.
        live_bytes: the most that is stored at once of gradients, activations and all else that
            a step computes (`cost.memory`); None where only the sums are known.
        collectives: how many a rank takes part in, packed ones counted as one.
    """

    seconds: float
    compute_s: tuple[float, float, float]
    communication_s: tuple[float, float, float]
    gradients_s: float
    exposed_s: float
    bucket_bytes: int
    weight_bytes: float = 0.0
    state_bytes: float = 0.0
    gradient_bytes: float = 0.0
    activation_bytes: float = 0.0
    live_bytes: float | None = None
    hidden_s: float = 0.0
    collectives: int = 0

    @property
    def memory_bytes(self) -> float:
        """The most that a rank stores, in bytes."""
        live = self.gradient_bytes + self.activation_bytes
        return self.weight_bytes + self.state_bytes + (
            live if self.live_bytes is None else self.live_bytes
        )  # fmt: skip

    @classmethod
    def of(cls, fields: Mapping[str, Any]) -> Cost:
        """Inverse of `dataclasses.asdict`, through JSON.

        Raises:
            ArgumentError: a field is no such number, or not as many.
            TypeError: a field is missing or not known.
        """
        known = {f.name: f.type for f in dataclasses.fields(cls)}
        return cls(
            **{
                name: _READERS[str(known[name])](f"cost.{name}", value) if name in known else value
                for name, value in fields.items()
            }
        )


def _per_phase(name: str, value: Any) -> tuple[float, ...]:
    found = listed(name, value, f"{len(PHASES)} numbers")
    if len(found) != len(PHASES):
        raise refused(name, value, f"{len(PHASES)} numbers")
    return tuple(finite(name, one) for one in found)


_READERS: Mapping[str, Callable[[str, Any], Any]] = {
    "float": finite,
    "float | None": functools.partial(optional, finite),
    "int": functools.partial(integer, least=0),
    "tuple[float, float, float]": _per_phase,
}
"""How a field of a `Cost` is read, by its type."""


class Buckets(NamedTuple):
    """Packed collectives.

    Attributes:
        seconds: of those beside the backward pass; of these `exposed_s` are not hidden.
        after_s: of those of the update.
        bucket_bytes: the size of a bucket.
        num_buckets: of all of them.
    """

    seconds: float
    exposed_s: float
    after_s: float
    bucket_bytes: int
    num_buckets: int


class Pricer:
    """Terms of ops and reshards on one mesh and cluster; memoised by rule and decision.

    Args:
        roles: of the graph that is priced.
    """

    def __init__(self, mesh: Mesh, cluster: Cluster, roles: Roles) -> None:
        self.mesh = mesh
        self.cluster = cluster
        self.roles = roles
        self.length = PACKED + 2 * len(PACKED_KINDS) * 2**mesh.num_axes
        self.trains = BACKWARD in roles.phase.values()
        self._op_seconds: dict[tuple[OpRule, Decision], float] = {}

    def zero(self) -> np.ndarray:
        """A vector of terms that are all 0."""
        return np.zeros(self.length)

    def add_op(self, terms: np.ndarray, op: Op, rule: OpRule, decision: Decision) -> None:
        """Add what `op` takes when it runs as `decision`."""
        phase, times = self.roles.phase[op], self.roles.times.get(op, 1)
        if op.type not in RELABELS:
            key = (rule, decision)
            seconds = self._op_seconds.get(key)
            if seconds is None:
                seconds = self._op_seconds[key] = self.op_seconds(op, rule, decision)
            terms[COMPUTE + phase] += times * seconds
        for inner in self._inner(decision):
            for reshard in all_reshards(inner):
                for *_, seconds in self.collectives(reshard):
                    terms[COMMUNICATION + phase] += times * seconds
                    terms[COUNT] += times
        for tensor, spec in zip(op.outputs, decision.choice.out_specs, strict=True):
            if tensor in self.roles.kept and op.type not in RELABELS:
                terms[KEPT] += times * self.stored(tensor, spec)

    def add_reshard(self, terms: np.ndarray, reshard: Reshard) -> None:
        """Add what `reshard` takes."""
        tensor = reshard.tensor
        times = self.roles.times.get(tensor.op, 1)
        phase, late = self.roles.phase[tensor.op], tensor in self.roles.deferrable
        for kind, axes, num_bytes, seconds in self.collectives(reshard):
            if late or phase == UPDATE:
                terms[self.packed(BESIDE if late else AFTER, kind, axes)] += times * num_bytes
            else:
                terms[COMMUNICATION + phase] += times * seconds
                terms[COUNT] += times

    def add_broadcast(self, terms: np.ndarray, op: Op) -> None:
        """Add the broadcast of what one rank computes for all."""
        axes, times = tuple(range(self.mesh.num_axes)), self.roles.times.get(op, 1)
        size = sum(t.num_bytes for t in op.outputs)
        seconds = collective_seconds("broadcast", axes, size, self.mesh, self.cluster)
        terms[COMMUNICATION + self.roles.phase[op]] += times * seconds
        terms[COUNT] += times

    def packed(self, when: int, kind: str, axes: tuple[int, ...]) -> int:
        """The place among terms of the bytes of packed collectives; `when` is BESIDE or AFTER."""
        row = when * len(PACKED_KINDS) + PACKED_KINDS.index(kind)
        return PACKED + (row << self.mesh.num_axes) + sum(1 << a for a in axes)

    def in_buckets(self, terms: np.ndarray, when: int) -> list[tuple[str, tuple[int, ...], float]]:
        """(kind, mesh axes, bytes) of the collectives that are packed; see `packed`."""
        rows = len(PACKED_KINDS) << self.mesh.num_axes
        found = []
        for at in np.flatnonzero(terms[PACKED + when * rows : PACKED + (when + 1) * rows]):
            kind, mask = divmod(int(at), 1 << self.mesh.num_axes)
            axes = tuple(a for a in range(self.mesh.num_axes) if mask >> a & 1)
            num_bytes = float(terms[PACKED + when * rows + at])
            found.append((PACKED_KINDS[kind], axes, num_bytes))
        return found

    def collectives(self, reshard: Reshard) -> Sequence[tuple[str, tuple[int, ...], int, float]]:
        """(kind, mesh axes, payload bytes, seconds) of the collectives of a reshard."""
        tensor = reshard.tensor
        item = itemsize(self.roles.carried.get(tensor, tensor.dtype))
        return _collectives(
            tuple(tensor.shape or ()), item, reshard.source, reshard.target, self.mesh, self.cluster
        )

    def op_seconds(self, op: Op, rule: OpRule, decision: Decision) -> float:
        """Seconds of one op on one rank: the slower of arithmetic and memory, and its start.

        A loop takes its body's time for each trip, a branching the longest branch's.
        """
        device = self.cluster.device
        inner = [sum(self._body_seconds(body)) for body in self._inner(decision)]
        if inner:
            return max(inner) if op.type in BRANCHES else trips(op) * sum(inner)
        if op.type in RELABELS:
            return 0.0
        parts, sizes = 1.0, list(rule.sizes)
        for (factor, pattern), ranks in zip(decision.choice.splits, self.mesh.shape, strict=True):
            if factor >= 0:
                whole, sizes[factor] = sizes[factor], size_after(sizes[factor], pattern, ranks)
                parts *= whole / sizes[factor]
        arithmetic = flops(op, rule) / parts
        if arithmetic:
            rate = device.flops_of(op.outputs[0].dtype)
            lengths = sides(op, rule, sizes)
            if lengths is not None:
                rate *= efficiency(lengths, device.half_size)
            arithmetic /= rate
        if device.functions_per_s is not None:
            arithmetic += functions(op) / parts / device.functions_per_s
        choice = decision.choice
        used = [*zip(op.outputs, choice.out_specs, strict=True)]
        used += [*zip(op.inputs, choice.in_specs, strict=True)][op.type in READ_PART :]
        moved = sum(self.local_bytes(tensor, spec) for tensor, spec in used)
        moved += sum(self._written_bytes(op, tensor, spec) for tensor, spec in used)
        seconds = max(arithmetic, moved / device.memory_bandwidth)
        return device.launch_s + seconds / self._alike(*choice.in_specs, *choice.out_specs)

    def _alike(self, *specs: Spec) -> int:
        """How many ranks store or compute the same together, as they have one memory."""
        if not self.cluster.one_memory:
            return 1
        return math.prod(
            n
            for axis, n in enumerate(self.mesh.shape)
            if all(isinstance(spec[axis], Replicate) for spec in specs)
        )

    def _written_bytes(self, op: Op, handle: Tensor, spec: Spec) -> int:
        """Bytes that `op` moves of the variable behind `handle`, if it updates it."""
        if handle.dtype != "resource" or not op.type.startswith(_WRITES):
            return 0
        times = 1 if op.type == "AssignVariableOp" else 2  # the others read it too
        item = itemsize(str(op.attrs.get("dtype", op.attrs.get("T", ""))))
        return times * _local_bytes(tuple(handle.shape or ()), item, spec, self.mesh)

    def local_bytes(self, tensor: Tensor | Variable, spec: Spec) -> int:
        """What a rank stores of `tensor`, padding included, in bytes."""
        return _local_bytes(tuple(tensor.shape or ()), itemsize(tensor.dtype), spec, self.mesh)

    def stored(self, tensor: Tensor | Variable, spec: Spec) -> float:
        """Its part of what there is in memory of `tensor`, in bytes."""
        return self.local_bytes(tensor, spec) / self._alike(spec)

    def stored_bytes(
        self, variable: Variable, spec: Spec, state_ratio: float | None
    ) -> tuple[float, float]:
        """Bytes of a variable on a rank, and of its slots or as other state; see `Cost`."""
        size = self.roles.times.get(variable.handle.op, 1) * self.stored(variable, spec)
        return (size, size * (state_ratio or 0.0)) if variable.trainable else (0.0, size)

    def _inner(self, decision: Decision) -> Iterator[PartitionedGraph]:
        if decision.expansion is not None:
            yield decision.expansion
        yield from decision.bodies.values()

    def _body_seconds(self, body: PartitionedGraph) -> Iterator[float]:
        for op, decision in body.decisions.items():
            yield self.op_seconds(op, body.prepared.rules[op], decision)

    # --- what terms come to --------------------------------------------------------

    def buckets(self, terms: np.ndarray, hideable: float) -> Buckets:
        """What packed collectives take, in buckets of the size that is best.

        TAP §IV-G: larger buckets start fewer collectives, but the first of them is full
        later and the last ends later: the backward pass hides less. The size is the one of
        `BUCKET_SIZES` with the least that is waited for, in the update too.

        Args:
            hideable: seconds of them that the backward pass can hide.
        """
        beside, after = self.in_buckets(terms, BESIDE), self.in_buckets(terms, AFTER)
        total = sum(n for *_, n in beside)
        largest = max([total, *(n for *_, n in after)])
        if not largest:
            return Buckets(0.0, 0.0, 0.0, BUCKET_SIZES[-1], 0)
        best, least = None, math.inf
        for size in BUCKET_SIZES:
            taken = [self._in_buckets_of(size, *one) for one in beside]
            busy, last = sum(t[0] for t in taken), max([t[1] for t in taken], default=0.0)
            part = 1.0 - min(size / total, 1.0) if total else 0.0
            exposed = busy - min(hideable * part, busy - last)
            waiting = sum(self._in_buckets_of(size, *one)[0] for one in after)
            if best is None or (exposed + waiting, busy) < (least, best.seconds):
                count = sum(math.ceil(n / size) for *_, n in (*beside, *after))
                best, least = Buckets(busy, exposed, waiting, size, count), exposed + waiting
            if size >= largest:
                break
        assert best is not None
        return best

    def _in_buckets_of(
        self, bucket: float, kind: str, axes: tuple[int, ...], num_bytes: float
    ) -> tuple[float, float]:  # fmt: skip
        """(seconds, seconds of the largest) of collectives packed in buckets of `bucket` bytes."""
        full, rest = divmod(num_bytes, bucket)
        one = collective_seconds(kind, axes, bucket, self.mesh, self.cluster)
        other = collective_seconds(kind, axes, rest, self.mesh, self.cluster) if rest else 0.0
        return full * one + other, one if full else other

    def seconds_per_byte(self, kind: str, axes: tuple[int, ...]) -> float:
        """What a byte takes, of so many that starting a collective is nothing."""
        return collective_seconds(kind, axes, _LARGE, self.mesh, self.cluster) / _LARGE

    def cost(self, terms: np.ndarray, weight_bytes: float = 0.0, state_bytes: float = 0.0) -> Cost:
        """The cost that summed `terms` come to.

        Args:
            weight_bytes, state_bytes: what a rank stores, in bytes; see `Cost`.
        """
        terms = _without_rounding(terms)
        forward, backward, update = map(float, terms[COMPUTE : COMPUTE + 3])
        compute = forward, backward, update
        forward, backward, update = map(float, terms[COMMUNICATION : COMMUNICATION + 3])
        hideable = self.cluster.overlap * compute[BACKWARD]
        packed = self.buckets(terms, hideable)
        waiting = forward, backward, update + packed.after_s
        seconds = sum(compute) + sum(waiting) + packed.exposed_s + self.cluster.step_s
        return Cost(
            seconds, compute, waiting, packed.seconds, packed.exposed_s, packed.bucket_bytes,
            weight_bytes, state_bytes, weight_bytes if self.trains else 0.0, float(terms[KEPT]),
            collectives=round(float(terms[COUNT])) + packed.num_buckets,
        )  # fmt: skip


def evaluate(
    partitioned: PartitionedGraph, cluster: Cluster, roles: Roles,
    state_ratio: float | None = None,
) -> Cost:  # fmt: skip
    """Price a partitioned step, whoever made its plan.

    Args:
        state_ratio: bytes of optimizer slots per byte of weight, where the graph holds only
            stand-ins for the update: its time is then that of reading and writing them.
    """
    pricer = Pricer(partitioned.mesh, cluster, roles)
    terms = pricer.zero()
    rules = partitioned.prepared.rules
    for op, decision in partitioned.decisions.items():
        pricer.add_op(terms, op, rules[op], decision)
        if op in partitioned.shared and op.outputs:
            pricer.add_broadcast(terms, op)
    for reshard in partitioned.reshards:
        pricer.add_reshard(terms, reshard)
    weights = state = 0.0
    for variable, spec in partitioned.variable_specs.items():
        weight_bytes, state_bytes = pricer.stored_bytes(variable, spec, state_ratio)
        weights += weight_bytes
        state += state_bytes
    if state_ratio is not None:
        terms[COMPUTE + UPDATE] += update_seconds(weights, state_ratio, cluster)
    cost = pricer.cost(terms, weights, state)
    live = live_peak(partitioned, pricer, cost.bucket_bytes, state_ratio)
    return dataclasses.replace(cost, live_bytes=live.num_bytes)


def live_peak(
    partitioned: PartitionedGraph, pricer: Pricer, bucket_bytes: float,
    state_ratio: float | None = None, show: int = 5,
) -> Peak:  # fmt: skip
    """The most that a rank stores at once of what a step computes; see `cost.memory`.

    Besides, communication libraries keep a buffer into which they pack what they carry; where all
    ranks have one memory, none is at work.

    Args:
        bucket_bytes: of packed all-reduces.
        state_ratio, show: as of `evaluate` and `peak`.
    """
    roles = pricer.roles
    passing = operands_of_collectives(partitioned, pricer.stored, roles, bucket_bytes)
    packed = 0.0 if pricer.cluster.one_memory else max(passing.values(), default=0.0)
    handles = {v.handle: v for v in partitioned.graph.variables}
    for op in partitioned.decisions:
        if roles.phase[op] == UPDATE and op.type.startswith(_WRITES) and op.inputs[0] in handles:
            variable = handles[op.inputs[0]]
            size = pricer.stored(variable, partitioned.variable_specs[variable])
            passing[op] = size * _temporaries(variable.trainable, state_ratio)
    most = peak(partitioned, pricer.stored, roles.times, passing, show)
    return dataclasses.replace(most, num_bytes=most.num_bytes + packed)


def _temporaries(trainable: bool, state_ratio: float | None) -> int:
    """How many tensors of a variable's size its update has beside those that the graph shows.

    A weight's slots are computed side by side: while one is written, what another gets is there.
    Stand-ins show nothing: `lr * g` without slots, else what two slots get.
    """
    if state_ratio is None:
        return 0 if trainable else 1
    return 2 if state_ratio else 1


# What an optimizer moves per byte of weight: Keras's go op by op, and each op reads and writes
# whole arrays. Counted in their graphs: SGD 5, Adagrad 17, Lion 19, RMSprop 21, Adam 30, AdamW 37.
_PASSES, _PASSES_PER_SLOT = 5.0, 12.5


def update_seconds(weight_bytes: float, state_ratio: float, cluster: Cluster) -> float:
    """Seconds to read and write gradients, weights and slots in an update."""
    passes = _PASSES + _PASSES_PER_SLOT * state_ratio
    return weight_bytes * passes / cluster.device.memory_bandwidth


def traffic(partitioned: PartitionedGraph, cluster: Cluster, roles: Roles) -> list[Traffic]:
    """The collectives of one step by kind, group and phase: exactly those that are emitted.

    Before all-reduces are packed; of a folded graph, those of what is left.
    """
    pricer = Pricer(partitioned.mesh, cluster, roles)
    found: dict[tuple[str, tuple[int, ...], int], list] = {}

    def note(kind: str, axes: tuple[int, ...], phase: int, size: int, seconds: float) -> None:
        entry = found.setdefault((kind, axes, phase), [0, 0, 0.0])
        entry[0] += 1
        entry[1] += size
        entry[2] += seconds

    for reshard in partitioned.reshards:
        for kind, axes, size, seconds in pricer.collectives(reshard):
            note(kind, axes, roles.phase[reshard.tensor.op], size, seconds)
    for op, decision in partitioned.decisions.items():
        if decision.expansion is not None:
            for reshard in all_reshards(decision.expansion):
                for kind, axes, size, seconds in pricer.collectives(reshard):
                    note(kind, axes, roles.phase[op], size, seconds)
        if op in partitioned.shared and op.outputs:
            axes = tuple(range(partitioned.mesh.num_axes))
            size = sum(t.num_bytes for t in op.outputs)
            seconds = collective_seconds("broadcast", axes, size, partitioned.mesh, cluster)
            note("broadcast", axes, roles.phase[op], size, seconds)
    names = partitioned.mesh.axis_names
    return [
        Traffic(kind, tuple(names[a] for a in axes), PHASES[phase], *values)
        for (kind, axes, phase), values in sorted(found.items())
    ]


def trips(op: Op) -> int:
    """How often the body of a loop runs, read off the lists that it walks; 1 for other ops."""
    if "While" not in op.type:
        return 1
    lengths = [t.shape[0] for t in (*op.inputs, *op.outputs) if _is_list(t)]
    return max((n for n in lengths if n), default=1)


def all_reshards(partitioned: PartitionedGraph) -> Iterator[Reshard]:
    """Its reshards, and those of the ops that stand for its ops."""
    yield from partitioned.reshards
    for decision in partitioned.decisions.values():
        if decision.expansion is not None:
            yield from all_reshards(decision.expansion)


def _without_rounding(terms: np.ndarray) -> np.ndarray:
    """`terms` with 0 for what adding and subtracting others left, which may be below 0."""
    seconds = terms[COMPUTE:COUNT]
    terms = np.maximum(terms, 0.0)
    terms[COMPUTE:COUNT][seconds < 1e-12 * seconds.sum()] = 0.0
    terms[PACKED:][terms[PACKED:] < 0.5] = 0.0  # less than a byte
    return terms


def _is_list(tensor: Tensor) -> bool:
    return tensor.dtype == "variant" and bool(tensor.shape)


@functools.lru_cache(maxsize=65536)
def _local_bytes(shape: tuple[int, ...], item: int, spec: Spec, mesh: Mesh) -> int:
    known = tuple(1 if n is None else n for n in shape)
    return math.prod(local_shape(known, spec, mesh)) * item


@functools.lru_cache(maxsize=65536)
def _collectives(
    shape: tuple[int, ...], item: int, source: Spec, target: Spec, mesh: Mesh, cluster: Cluster
) -> tuple[tuple[str, tuple[int, ...], int, float], ...]:
    found = []
    for step in lower_reshard(shape, source, target, mesh):
        if step.is_collective:
            size = step_bytes(step, shape, item, mesh)
            seconds = collective_seconds(step.kind, step.axes, size, mesh, cluster)
            found.append((step.kind, step.axes, size, seconds))
    return tuple(found)
