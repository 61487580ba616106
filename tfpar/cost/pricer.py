"""Terms of single ops, collectives and variables, and the cost that the terms of a step come to.

A rank computes its ops one after another and waits for the collectives between them: they are
the critical path. The gradients' collectives, which only the update waits for, run beside the
backward pass in packed buckets; those of the update are packed too, as are those between ops that
are needed at the same time (`cost.packing_gain`).
"""

from __future__ import annotations

import functools
import math
from collections.abc import Container, Iterator
from typing import NamedTuple

from tfpar.cluster.description import Cluster
from tfpar.cost.collectives import collective_seconds
from tfpar.cost.cost import Cost
from tfpar.cost.host import waiting_for_host
from tfpar.cost.op_compute import (
    efficiency,
    entries,
    flops,
    functions,
    rate_of,
    sides,
    trips,
    update_seconds,
)
from tfpar.cost.packing_gain import PackingKey, PackingSets
from tfpar.cost.terms import Terms, best_buckets
from tfpar.ir.gathered_weights import is_prefetched
from tfpar.ir.graph import Op, Tensor, Variable, itemsize
from tfpar.ir.kernels import InKernel
from tfpar.ir.roles import BACKWARD, UPDATE, Roles, When
from tfpar.ir.traits import (
    BRANCHES,
    FREE,
    GIVES,
    IN_FLIGHT,
    ON_HOST,
    READ_PART,
    TAKES,
    WHOLE_UPDATES,
    is_free,
)
from tfpar.propagation.partitioned_graph import Decision, PartitionedGraph, Reshard
from tfpar.propagation.reshard import Communication
from tfpar.rules.rule import OpRule
from tfpar.spec import Mesh, Replicate, Shard, Spec, local_length, local_shape


class VariableBytes(NamedTuple):
    """Bytes of a variable on a rank.

    Attributes:
        weight: of a weight.
        state: of its slots, or of other state.
        updated: of the part of the weight that the rank updates.
        copies_s: seconds in which slots that lie in host memory come from there and go back, where
            the graph holds only a stand-in for the update.
        away: of its slots, or of other state, in host memory.
    """

    weight: float = 0.0
    state: float = 0.0
    updated: float = 0.0
    copies_s: float = 0.0
    away: float = 0.0

    def plus(self, other: VariableBytes) -> VariableBytes:
        """Add those of other variables."""
        return VariableBytes(*(one + more for one, more in zip(self, other, strict=True)))

    def minus(self, other: VariableBytes) -> VariableBytes:
        """Subtract those of other variables."""
        return VariableBytes(*(one - less for one, less in zip(self, other, strict=True)))


class Pricer:
    """Pricer of ops and reshards on one mesh and cluster; memoized by rule and decision.

    Args:
        roles: of the graph that is priced.

    Attributes:
        ranks: the mesh whose axes collectives go over.
        linked: the machines of these ranks.
        temporaries: the memo of what decompositions store for a moment (`cost.memory`).
    """

    def __init__(self, mesh: Mesh, cluster: Cluster, roles: Roles) -> None:
        self.mesh = self.ranks = mesh
        self.cluster = self.linked = cluster
        self.roles = roles
        self.trains = BACKWARD in roles.phase.values()
        device = cluster.device
        self._dispatch_s = device.xla_dispatch_s if roles.jit_compile else device.dispatch_s
        self._ops: dict[tuple[OpRule, Decision, bool, InKernel | None], tuple[float, float]] = {}
        self.temporaries: dict[PartitionedGraph, float] = {}
        self._collective_seconds: dict[tuple[str, tuple[int, ...], float], float] = {}

    def zero(self) -> Terms:
        """Make terms that are all 0."""
        return Terms(self.ranks.num_axes)

    def add_op(self, terms: Terms, op: Op, rule: OpRule, decision: Decision) -> None:
        """Add the terms of `op`, which runs as `decision`."""
        times = self.roles.times.get(op, 1)
        if not is_free(op):
            self.add_compute(terms, op, rule, decision, self.roles.phase[op], times)
        for moved in decision.communications(op):
            self.add_communication(terms, moved)
        for tensor, spec in zip(op.outputs, decision.strategy.out_specs, strict=True):
            if tensor in self.roles.activations and not is_free(op):
                terms.activation_bytes += times * self.stored(tensor, spec)

    def add_compute(
        self, terms: Terms, op: Op, rule: OpRule, decision: Decision, phase: int, times: int
    ) -> None:
        """Add the seconds of an op that is not free, and what it takes to host memory.

        Args:
            phase: in which it runs.
            times: how often.
        """
        key = rule, decision, ON_HOST in op.attrs, self.roles.in_kernel(op)
        found = self._ops.get(key)
        if found is None:
            dispatch = self._dispatch_s and self._dispatch_s * self.issued(op, decision)
            found = self._ops[key] = self.op_seconds(op, rule, decision), dispatch
        seconds, dispatch = found
        terms.compute[phase] += times * seconds
        terms.dispatch[phase] += times * dispatch
        terms.host_activation_bytes += times * self.kept_on_host(op, decision)

    def add_ops(
        self, terms: Terms, partitioned: PartitionedGraph, part: Container[Op] | None = None
    ) -> None:
        """Add the terms of ops, and of broadcasts of what one rank runs for all.

        Args:
            part: which of them; by default all.
        """
        rules = partitioned.prepared.rules
        for op, decision in partitioned.decisions.items():
            if part is None or op in part:
                self.add_op(terms, op, rules[op], decision)
                if op in partitioned.shared and op.outputs:
                    self.add_communication(terms, Communication.of_shared(op, self.mesh))

    def add_reshard(self, terms: Terms, reshard: Reshard) -> None:
        """Add the terms of `reshard`."""
        for moved in reshard.communications(self.mesh, self.roles.wire_dtypes):
            self.add_communication(terms, moved)

    def add_communication(self, terms: Terms, moved: Communication) -> None:
        """Add a collective of a step in one piece, and the seconds that it adds where it cuts a
        kernel."""
        phase, times = self.roles.phase[moved.op], self.roles.times.get(moved.op, 1)
        terms.compute[phase] += times * self.cut_seconds(moved)
        self.add_collective(terms, moved, moved.axes, phase, times)

    def add_collective(
        self,
        terms: Terms,
        moved: Communication,
        axes: tuple[int, ...],
        phase: int,
        times: int,
        runs: int = 1,
    ) -> None:
        """Add a collective: its seconds if ops wait for it, else its bytes to buckets.

        All prices of collectives are accumulated here: of a step, of its chunks or microbatches, of
        the tasks of a stage, of layers. `wait` says what they come to.

        Args:
            axes: those of ranks that it goes over.
            phase: whose ops wait for it.
            times: how many of the model's it stands for.
            runs: how often a step runs each, if `terms` are those of a microbatch.
        """
        kind, num_bytes, when = moved.kind, moved.num_bytes, moved.when(self.roles)
        if when is When.BETWEEN:
            packable = PackingKey.of(moved, self.roles, axes, phase, times, runs)
            seconds = self.waited_seconds(kind, axes, num_bytes, packable is not None)
            terms.communication[phase] += times * seconds
            if moved.ahead or is_prefetched(moved.op):
                terms.prefetched[phase] += times * seconds
            terms.dispatch[phase] += times * self._dispatch_s
            terms.count += times * runs
            if packable is not None:
                one = PackingSets.one(packable, num_bytes, seconds)
                terms.together = terms.together.plus(one)
        else:
            terms.pack(when, kind, axes, times * num_bytes)

    def waited_seconds(
        self, kind: str, axes: tuple[int, ...], num_bytes: float, packable: bool
    ) -> float:
        """Price a collective that ops wait for, by itself.

        Args:
            packable: it may start with others, of which `wait` knows.
        """
        return self.collective_seconds(kind, axes, num_bytes)

    def add_variables(self, terms: Terms, stored: VariableBytes, state_ratio: float | None) -> None:
        """Add the bytes of variables, and their update where the graph holds only stand-ins for it.

        Args:
            state_ratio: bytes of slots per byte of weight; None where the graph holds the update.
        """
        terms.weight_bytes += stored.weight
        terms.state_bytes += stored.state
        terms.host_slot_bytes += stored.away
        if state_ratio is not None:
            seconds = self.update_seconds(stored.updated, state_ratio)
            terms.compute[UPDATE] += seconds + stored.copies_s

    def seconds(self, moved: Communication) -> float:
        """Price a collective by itself."""
        return self.collective_seconds(moved.kind, moved.axes, moved.num_bytes)

    def collective_seconds(self, kind: str, axes: tuple[int, ...], num_bytes: float) -> float:
        """Price a collective over axes of ranks, by itself."""
        key = kind, axes, num_bytes
        seconds = self._collective_seconds.get(key)
        if seconds is None:
            seconds = collective_seconds(*key, self.ranks, self.linked)
            self._collective_seconds[key] = seconds
        return seconds

    def cut_seconds(self, moved: Communication) -> float:
        """Price the compute that a collective adds where it cuts a kernel: what would stay within
        is written for it, and a kernel starts that reads what it gives. Else 0."""
        if moved.tensor is None or not self.roles.stays_within(moved.tensor):
            return 0.0
        step = moved.step
        num_bytes = sum(self.local_bytes(moved.tensor, s) for s in (step.before, step.after))
        device = self.cluster.device
        seconds = num_bytes / device.memory_bandwidth
        seconds += min(seconds, device.ramp_s)
        return device.launch_s + seconds / self.alike(step.before, step.after)

    def update_seconds(self, weight_bytes: float, state_ratio: float) -> float:
        """Price an update where the graph holds only stand-ins for it."""
        fused = self.roles.jit_compile
        return update_seconds(weight_bytes, state_ratio, self.cluster, fused=fused)

    def op_seconds(self, op: Op, rule: OpRule, decision: Decision) -> float:
        """Price one op on one rank: the slower of arithmetic and memory, what the device needs to
        work on it with all it has, and its start. Of an op that XLA fuses with others, its own part
        in what their kernel takes.

        A loop takes its body's time for each trip, a branching the longest branch's.
        """
        device = self.cluster.device
        inner = [sum(self._body_seconds(body)) for body in self._inner(decision)]
        if inner:
            return max(inner) if op.type in BRANCHES else trips(op) * sum(inner)
        if ON_HOST in op.attrs:
            return self._copy_seconds(op, decision)
        if op.type in FREE:
            return 0.0
        parts, sizes = 1.0, list(rule.sizes)
        for axis, (factor, pattern) in enumerate(decision.strategy.splits):
            if factor >= 0:
                whole, shard = sizes[factor], Shard(0, *pattern)
                sizes[factor] = local_length(whole, shard, self.mesh, axis)
                parts *= whole / sizes[factor]
        arithmetic = multiplied = flops(op, rule) / parts
        if multiplied:
            rate = device.flops_of(op.outputs[0].dtype)
            lengths = sides(op, rule, sizes)
            if lengths is not None:
                rate *= efficiency(lengths, device.half_size)
            arithmetic /= rate
        strategy = decision.strategy
        made = [*zip(op.outputs, strategy.out_specs, strict=True)]
        read = [*zip(op.inputs, strategy.in_specs, strict=True)][op.type in READ_PART :]
        slow = rate_of(op.type, device.entries_per_s)
        if slow is not None:
            sizes_of = ([self._local_entries(t, s) for t, s in some] for some in (read, made))
            arithmetic += entries(op, *sizes_of) / slow
        elif device.functions_per_s is not None:
            arithmetic += functions(op) / parts / device.functions_per_s
        kernel = self.roles.in_kernel(op)
        starts = kernel is None or kernel.ends
        if kernel is not None:
            read = [read[i] for i in kernel.reads]
        used = [*made, *read] if starts else read
        moved = sum(self.local_bytes(tensor, spec) for tensor, spec in used)
        moved += sum(self._written_bytes(op, tensor, spec) for tensor, spec in used)
        seconds = max(arithmetic, moved / device.memory_bandwidth)
        alike = self.alike(*strategy.in_specs, *strategy.out_specs)
        if not starts:
            return seconds / alike
        if not multiplied:
            seconds += min(seconds, device.ramp_s)
        return device.launch_s + seconds / alike

    def issued(self, op: Op, decision: Decision) -> float:
        """Count the ops that the host issues to run one: none for what stays within a kernel of
        XLA, those of a loop's body for each trip, of a branching those of its longest branch."""
        inner = [
            sum(self.issued(each, own) for each, own in body.decisions.items())
            for body in self._inner(decision)
        ]
        if inner:
            return max(inner) if op.type in BRANCHES else trips(op) * sum(inner)
        kernel = self.roles.in_kernel(op)
        return 0 if op.type in FREE or (kernel is not None and not kernel.ends) else 1

    def _copy_seconds(self, op: Op, decision: Decision) -> float:
        """Seconds in which what an op on the host gives or takes crosses the link. Nothing is
        hidden: the device is taken to wait."""
        strategy = decision.strategy
        crossing = [*zip(op.inputs, strategy.in_specs, strict=True)]
        if op.attrs[ON_HOST] == GIVES:
            crossing = [*zip(op.outputs, strategy.out_specs, strict=True)]
        sizes = [self.local_bytes(t, spec) for t, spec in crossing if t.dtype != "resource"]
        return self.host_seconds(sum(sizes), len(sizes))

    def host_seconds(self, num_bytes: float, copies: float) -> float:
        """Price some copies that cross the link to the host, one way."""
        device = self.cluster.device
        if self.cluster.in_host_memory:
            return 0.0
        return copies * device.host_latency_s + num_bytes / device.host_bandwidth

    def kept_on_host(self, op: Op, decision: Decision) -> float:
        """Find the bytes that `op` takes to host memory for the backward pass; what slots take
        there is counted with their variables."""
        if op.attrs.get(ON_HOST) != TAKES or self.cluster.in_host_memory:
            return 0.0
        if any(t.dtype == "resource" for t in op.inputs):
            return 0.0
        taken = zip(op.inputs, decision.strategy.in_specs, strict=True)
        return sum(self.local_bytes(tensor, spec) for tensor, spec in taken)

    def is_away(self, variable: Variable) -> bool:
        """Whether a slot, or the slots of a weight, lie in memory that is not the device's."""
        return variable.offloaded and not self.cluster.in_host_memory

    def alike(self, *specs: Spec) -> int:
        """Count the ranks that store or compute the same together, as they have one memory."""
        if not self.cluster.one_memory:
            return 1
        return math.prod(
            n
            for axis, n in enumerate(self.mesh.shape)
            if all(isinstance(spec[axis], Replicate) for spec in specs)
        )

    def _written_bytes(self, op: Op, handle: Tensor, spec: Spec) -> int:
        """Bytes that `op` moves of the variable behind `handle`, if it updates it."""
        if handle.dtype != "resource" or op.type not in WHOLE_UPDATES:
            return 0
        times = 1 if op.type == "AssignVariableOp" else 2  # the others read it too
        item = itemsize(str(op.attrs.get("dtype", op.attrs.get("T", ""))))
        return times * shard_bytes(tuple(handle.shape or ()), item, spec, self.mesh)

    def _local_entries(self, tensor: Tensor, spec: Spec) -> float:
        item = itemsize(tensor.dtype)
        return self.local_bytes(tensor, spec) / item if item else 0.0

    def local_bytes(self, tensor: Tensor | Variable, spec: Spec) -> int:
        """Find what a rank stores of `tensor`, padding included, in bytes."""
        return shard_bytes(tuple(tensor.shape or ()), itemsize(tensor.dtype), spec, self.mesh)

    def stored(self, tensor: Tensor | Variable, spec: Spec) -> float:
        """Find a rank's part of what there is in memory of `tensor`, in bytes; of what comes from
        the host, with as much that is on its way."""
        given = isinstance(tensor, Tensor) and tensor.op.attrs.get(ON_HOST) == GIVES
        times = IN_FLIGHT if given else 1
        return times * self.local_bytes(tensor, spec) / self.alike(spec)

    def stored_bytes(
        self,
        variable: Variable,
        spec: Spec,
        state_ratio: float | None,
        slots: Spec | None = None,
    ) -> VariableBytes:
        """Find what a rank stores of a variable; see `Cost`.

        Args:
            slots: how the slots of a weight lie; None: as it does.
        """
        times = self.roles.times.get(variable.handle.op, 1)
        size = times * self.stored(variable, spec)
        if not variable.trainable:
            return VariableBytes(away=size) if self.is_away(variable) else VariableBytes(state=size)
        updated = size if slots is None else times * self.stored(variable, slots)
        ratio = state_ratio or 0.0
        if not self.is_away(variable):
            return VariableBytes(size, updated * ratio, updated)
        copies = 2 * math.ceil(ratio) * times  # each slot comes and goes
        slot_bytes = updated * ratio
        return VariableBytes(
            size, 0.0, updated, self.host_seconds(2 * slot_bytes, copies), slot_bytes
        )

    def _inner(self, decision: Decision) -> Iterator[PartitionedGraph]:
        if decision.expansion is not None:
            yield decision.expansion
        yield from decision.bodies.values()

    def _body_seconds(self, body: PartitionedGraph) -> Iterator[float]:
        for op, decision in body.decisions.items():
            yield self.op_seconds(op, body.prepared.rules[op], decision)

    # --- what terms come to --------------------------------------------------------

    def wait(self, terms: Terms) -> tuple[list[float], float]:
        """Price the collectives that ops wait for, by phase, and count them: those that run at the
        same time start once, and prefetched ones run beside the ops of their phase as far as these
        last."""
        communication, _, count = self._waits(terms)
        return communication, count

    def _waits(self, terms: Terms) -> tuple[list[float], list[float], float]:
        """`wait`, and between its two answers the seconds of each phase that hide what is
        prefetched."""
        communication, count = terms.communication.tolist(), terms.count
        hidden = terms.prefetched.tolist()
        for phase, seconds, fewer, ahead in terms.together.saved(self.collective_seconds):
            communication[phase] -= seconds
            hidden[phase] -= seconds if ahead else 0.0
            count -= fewer
        if any(hidden):
            hideable = (self.cluster.overlap * terms.compute).tolist()
            hidden = [max(0.0, min(pair)) for pair in zip(hidden, hideable, strict=True)]
            communication = [all_ - own for all_, own in zip(communication, hidden, strict=True)]
        return communication, hidden, count

    def cost(self, terms: Terms) -> Cost:
        """Make the cost of a step of its terms."""
        terms = terms.without_rounding()
        forward, backward, update = map(float, terms.compute)
        compute = forward, backward, update
        (forward, backward, update), hidden, count = self._waits(terms)
        hideable = self.cluster.overlap * compute[BACKWARD] - hidden[BACKWARD]
        packed = best_buckets(terms, hideable, self.ranks, self.linked)
        waiting = forward, backward, update + packed.after_s
        running = sum(compute) + sum(waiting) + packed.exposed_s
        host_wait_s = waiting_for_host(float(terms.dispatch.sum()), running)
        return Cost(
            running + host_wait_s + self.cluster.step_s,
            compute,
            waiting,
            packed.seconds,
            packed.exposed_s,
            packed.bucket_bytes,
            terms.weight_bytes,
            terms.state_bytes,
            terms.weight_bytes if self.trains else 0.0,
            terms.activation_bytes,
            host_wait_s=host_wait_s,
            collectives=round(count) + packed.num_buckets,
            host_slot_bytes=terms.host_slot_bytes,
            host_activation_bytes=terms.host_activation_bytes,
        )


@functools.lru_cache(maxsize=65536)
def shard_bytes(shape: tuple[int, ...], item: int, spec: Spec, mesh: Mesh) -> int:
    """Find the bytes of a rank's part of a tensor of `item`-byte entries, padding included."""
    known = tuple(1 if n is None else n for n in shape)
    return math.prod(local_shape(known, spec, mesh)) * item
