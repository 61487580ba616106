"""Errors that no plan fits into memory: what is stored where, how much is lacking, and what would
help.

`check_room` knows it before anything is searched, by a lower bound; `memory_error` says it of the
best plan that was found.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Iterator, Sequence

from tfpar.cost.memory import live_peak
from tfpar.cost.pricer import Pricer
from tfpar.ir.graph import Op, Tensor, Variable
from tfpar.ir.roles import Roles
from tfpar.ir.traits import CONSTANTS, ON_HOST, VARIABLE_READS, VIEWS, forwarded_input
from tfpar.planning.problem import Problem
from tfpar.plans import Plan
from tfpar.propagation.partitioned_graph import PartitionedGraph
from tfpar.spec import MemoryLimitError, Spec
from tfpar.spec.quantities import format_bytes

SHOWN = 3
"""Number of variables and tensors that are named."""

LEAST_HELP = 0.05
"""Part of the lacking bytes that something has to save to be worth advising."""


@dataclasses.dataclass(frozen=True)
class LeastMemory:
    """Bytes that all ranks of a problem store together at least, whatever the plan.

    It is a lower bound: of what is split over all ranks each stores its even part, and of what is
    not, more. Weights and other state are there during the whole step. When the first update
    begins, all gradients are there if updates come last, as in planning graphs, else one of them at
    a time (in microbatches and stages, their sums are stored all the time). Activations are left
    out: they may be computed again, or lie in host memory.

    Attributes:
        weight_bytes, gradient_bytes: of all trainable weights.
        state_bytes: slots that no host has room for, or may have, and other state.
        host_slot_bytes: slots that lie in host memory.
        largest: the variables that store most, with their slots on the device, by name.
    """

    weight_bytes: float
    gradient_bytes: float
    state_bytes: float
    host_slot_bytes: float
    largest: tuple[tuple[str, float], ...]

    @property
    def total(self) -> float:
        """On all devices."""
        return self.weight_bytes + self.gradient_bytes + self.state_bytes

    @classmethod
    def of(cls, problem: Problem) -> LeastMemory:
        """Return the least that the ranks of a problem store."""
        ratio = problem.step.state_ratio or 0.0
        weights = [v for v in problem.step.graph.variables if v.trainable]
        others = [v for v in problem.step.graph.variables if not v.trainable]
        slots = {v.name: ratio * v.num_bytes for v in weights}
        movable = 0.0
        if problem.may_offload_slots:
            movable = sum(size for name, size in slots.items() if name not in problem.step.bound)
            if (
                problem.step.state_ratio is None
            ):  # the graph holds them, perhaps all that is no weight
                movable += sum(v.num_bytes for v in others)
        on_host = min(movable, problem.host_limit * problem.meshes[0].mesh.size)
        on_device = not on_host
        sizes = {v.name: v.num_bytes + on_device * slots[v.name] for v in weights}
        sizes |= {v.name: float(v.num_bytes) for v in others}
        return cls(
            weight_bytes=sum(v.num_bytes for v in weights),
            gradient_bytes=_gradient_bytes(problem.step.graph.ops, problem.step.zero_cost_ops),
            state_bytes=sum(v.num_bytes for v in others) + sum(slots.values()) - on_host,
            host_slot_bytes=on_host,
            largest=tuple(sorted(sizes.items(), key=lambda item: -item[1])[:SHOWN]),
        )


def _gradient_bytes(ops: Sequence[Op], stand_ins: Iterable[Op]) -> float:
    """Bytes of the gradients that some stand-in for an update finds, each once."""
    updates = set(stand_ins)
    found: dict[Tensor, float] = {}
    for op in updates:
        held = tensor = op.inputs[1]
        size = tensor.num_bytes if tensor.is_static else 0
        while held.op.type in VIEWS:
            held = forwarded_input(held)
            size = min(size, held.num_bytes if held.is_static else 0)
        kept = held.op.type not in CONSTANTS | VARIABLE_READS and ON_HOST not in held.op.attrs
        found[held] = size if kept else 0.0
    are_last = set(ops[len(ops) - len(updates) :]) == updates
    return sum(found.values()) if are_last else max(found.values())


def check_room(problem: Problem, limits: Sequence[float]) -> None:
    """Check that devices have room for a step at all, however it is split.

    Args:
        limits: bytes that each device may store.

    Raises:
        MemoryLimitError: they have not; says by how much.
    """
    least, there = LeastMemory.of(problem), sum(limits)
    if least.total <= there:
        return
    count, limit = len(limits), there / len(limits)
    needed, lacking = least.total / count, (least.total - there) / count
    device = "a device" if len({*limits}) == 1 else "the devices (on average)"
    parts = [f"weights {_text(least.weight_bytes / count)}"]
    if least.gradient_bytes:
        parts.append(f"gradients {_text(least.gradient_bytes / count)}")
    has_slots = (
        bool(problem.step.state_ratio) and least.state_bytes > LEAST_HELP * least.weight_bytes
    )
    if has_slots:
        parts.append(f"slots and other state {_text(least.state_bytes / count)}")
    stored = "weights, gradients and slots" if has_slots else "weights and gradients"
    if not least.gradient_bytes:
        stored = stored.replace(", gradients", "").replace(" and gradients", "")
    besides = "activations" if least.gradient_bytes else "activations and gradients"
    with_slots = " with their slots" if has_slots and not least.host_slot_bytes else ""
    helps = [f"more devices (above {math.floor(least.total / limit)} of these)"]
    if has_slots and least.state_bytes / count > LEAST_HELP * lacking:
        helps += _about_slots(problem, is_full=bool(least.host_slot_bytes))
    raise MemoryLimitError(
        f"No plan fits into the memory of {device} of {problem.cluster.name!r}: even if {count} "
        f"ranks share all {stored} evenly, each needs {_text(needed)} where {_text(limit)} may be "
        f"used, {_text(lacking)} too much: {', '.join(parts)}, besides {besides}"
        f"{_on_host(least.host_slot_bytes / count, 0.0)}. Of the weights{with_slots} weigh most: "
        f"{_items(least.largest)}. What would help: {', '.join(helps)}. If the device has more, "
        f"say so with memory_limit=.",
        needed,
    )


def memory_error(plan: Plan, partitioned: PartitionedGraph, problem: Problem) -> MemoryLimitError:
    """Return the error that says by how much the best plan does not fit.

    Of a pipeline, the plan is of the whole step on the ranks of one actor, and the limit what a
    rank of each may store, together.

    Args:
        plan: as a planner found it, with its cost.
        partitioned: the step's graph, partitioned by the plan.
    """
    assert plan.cost is not None, "a plan that was priced"
    cost, limit, sets = plan.cost, problem.memory_limit, problem.batch.num_actors
    needed = cost.memory_bytes
    lacking, host_lacking = needed - limit, cost.host_bytes - problem.host_limit
    live = needed - cost.weight_bytes - cost.state_bytes
    pricer = Pricer(plan.mesh, problem.cluster, Roles.of(partitioned.graph))

    def stored(variable: Variable, spec: Spec) -> float:
        slots = partitioned.slots_spec(variable)
        found = pricer.stored_bytes(variable, spec, problem.step.state_ratio, slots)
        return found.weight + found.state

    largest = sorted(
        ((found.name, stored(found, spec)) for found, spec in partitioned.variable_specs.items()),
        key=lambda item: -item[1],
    )
    most = live_peak(partitioned, pricer, cost.bucket_bytes, problem.step.state_ratio, SHOWN)
    device, stages = "a device", ""
    if sets > 1:
        device = f"one device of each of {sets} stages together"
        stages = f", {_text(limit / sets)} of each of them on average"
    if lacking > 0:
        says = f"{_text(limit)} may be used{stages}, {_text(lacking)} too much"
    else:
        device, says = f"the host of {device}", f"{_text(limit)} may be used{stages}"
    on_host = _on_host(cost.host_slot_bytes, cost.host_activation_bytes)
    if host_lacking > 0:
        on_host += (
            f", where a rank may have {_text(problem.host_limit)}, {_text(host_lacking)} too much"
        )
    return MemoryLimitError(
        f"No plan fits into the memory of {device} of {problem.cluster.name!r}: the best that the "
        f"{plan.planner} planner found, on {plan.mesh}, needs {_text(needed)} where {says}: "
        f"weights {_text(cost.weight_bytes)}, {_state(problem)} {_text(cost.state_bytes)}, "
        f"activations and gradients {_text(live)} at once{on_host}. Of the weights"
        f"{' with their slots' if _slots_on_device(plan, problem) else ''} weigh most: "
        f"{_items(largest[:SHOWN])}; of the tensors stored while {most.op!r} runs: "
        f"{_items(most.largest)}. What would help: {', '.join(_helps(plan, problem))}. "
        + ("If the device has more, say so with memory_limit=." if lacking > 0 else _HOST_HINT),
        needed / sets,
    )


_HOST_HINT = "If the host has more, say so with host_memory in the cluster file."


def _helps(plan: Plan, problem: Problem) -> Iterator[str]:
    """Name changes by which a plan would store less of what is lacking."""
    cost = plan.cost
    assert cost is not None, "a plan that was priced"
    lacking = max(0.0, cost.memory_bytes - problem.memory_limit)
    host_lacking = max(0.0, cost.host_bytes - problem.host_limit)
    activations = cost.activation_bytes if lacking else cost.host_activation_bytes
    if plan.findings.cut_short:
        yield "a longer search (this one was cut short)"
    yield "more devices" if lacking else "more machines, or hosts with more memory"
    if activations > 2 * LEAST_HELP * (lacking or host_lacking):
        yield f"half the batch (saves about {_text(activations / 2)})"
    slots = cost.state_bytes if lacking else cost.host_slot_bytes
    if problem.step.state_ratio and slots > LEAST_HELP * (lacking or host_lacking):
        yield from _about_slots(problem, is_full=host_lacking > 0)
    if problem.given.variables or problem.given.constraints:
        yield "constraints that leave more weights to be split"


def _about_slots(problem: Problem, is_full: bool) -> Iterator[str]:
    """Name changes that help where slots take what is lacking.

    Args:
        is_full: the memory of hosts is.
    """
    yield "an optimizer with fewer slots"
    if is_full:
        yield "hosts with more memory, for slots"
    elif not problem.may_offload_slots and not problem.cluster.in_host_memory:
        yield "slots in host memory (offload=tap.Offload(optimizer=True))"


def _slots_on_device(plan: Plan, problem: Problem) -> bool:
    return problem.step.state_ratio != 0.0 and not plan.offloaded.slots


def _state(problem: Problem) -> str:
    return "other state" if problem.step.state_ratio == 0.0 else "slots and other state"


def _on_host(slots: float, activations: float) -> str:
    """Say what a rank has in host memory, as a part of a sentence; empty if nothing."""
    parts = {"slots": slots, "activations": activations}
    found = [f"{name} {_text(size)}" for name, size in parts.items() if size]
    return f"; in host memory {', '.join(found)}" if found else ""


def _text(num_bytes: float) -> str:
    return format_bytes(num_bytes)


def _items(items: Iterable[tuple[str, float]]) -> str:
    return ", ".join(f"{name!r} ({_text(size)})" for name, size in items) or "none"
