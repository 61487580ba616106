"""Why a plan does not fit into the memory of a device, and what would help."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from tfpar.cost.memory import live_peak
from tfpar.cost.pricer import Pricer
from tfpar.ir.graph import Variable
from tfpar.ir.roles import Roles
from tfpar.plans import Plan
from tfpar.propagation.partitioned import PartitionedGraph
from tfpar.spec import MemoryLimitError, Spec
from tfpar.spec.quantities import format_bytes

SHOWN = 3
"""How many variables and tensors are named."""

LEAST_HELP = 0.05
"""What part of what is lacking something has to save to be worth a word."""


def memory_error(
    plan: Plan,
    partitioned: PartitionedGraph,
    limit: float,
    state_ratio: float | None,
    is_constrained: bool,
    sets_of_ranks: int = 1,
) -> MemoryLimitError:
    """The error that says by how much the best plan does not fit.

    Args:
        plan: as a planner found it, with its cluster and cost.
        partitioned: the step's graph as the plan lays it.
        limit: what a device may store, in bytes.
        state_ratio: bytes of optimizer slots per byte of weight; None if the graph has the slots.
        is_constrained: whether something was given that a planner had to keep to.
        sets_of_ranks: of a pipeline, among which the step is shared out as stages: the plan is of
            the whole step on one of them, and the limit what a rank of each may store, together.
    """
    assert plan.cost is not None and plan.cluster is not None
    cost = plan.cost
    needed = cost.memory_bytes
    live = needed - cost.weight_bytes - cost.state_bytes
    roles = Roles.of(partitioned.graph)
    pricer = Pricer(plan.mesh, plan.cluster, roles)

    def stored(variable: Variable, spec: Spec) -> float:
        slots = partitioned.slots_spec(variable)
        found = pricer.stored_bytes(variable, spec, state_ratio, slots)
        return found.weight + found.state

    largest = sorted(
        ((found.name, stored(found, spec)) for found, spec in partitioned.variable_specs.items()),
        key=lambda item: -item[1],
    )
    most = live_peak(partitioned, pricer, cost.bucket_bytes, state_ratio, SHOWN)
    helps = ["a longer search (this one was cut short)"] if plan.cut_short else []
    helps.append("more devices")
    if cost.activation_bytes > 2 * LEAST_HELP * (needed - limit):
        helps.append(f"half the batch (saves about {_text(cost.activation_bytes / 2)})")
    if is_constrained:
        helps.append("constraints that leave more weights to be split")
    device, stages = "a device", ""
    if sets_of_ranks > 1:
        device = f"one device of each of {sets_of_ranks} stages together"
        stages = f", {_text(limit / sets_of_ranks)} of each of them on average"
    return MemoryLimitError(
        f"No plan fits into the memory of {device} of {plan.cluster.name!r}: the best that the "
        f"{plan.planner} planner found, on {plan.mesh}, needs {_text(needed)} where "
        f"{_text(limit)} may be used{stages}, {_text(needed - limit)} too much: weights "
        f"{_text(cost.weight_bytes)}, slots and other state {_text(cost.state_bytes)}, activations "
        f"and gradients {_text(live)} at once. Of the weights with their slots weigh most: "
        f"{_items(largest[:SHOWN])}; of the tensors stored while {most.op!r} runs: "
        f"{_items(most.largest)}. What would help: {', '.join(helps)}. If the device has more, "
        f"say so with memory_limit=.",
        needed / sets_of_ranks,
    )


def check_room(
    variables: Iterable[Variable], state_ratio: float | None, limits: Sequence[float], cluster: str
) -> None:
    """Check that devices have room for the variables of a step at all, however these are split.

    Args:
        variables: that a planner lays.
        state_ratio: as of `memory_error`.
        limits: bytes that each device may store.
        cluster: its name.

    Raises:
        MemoryLimitError: they have not; says by how much.
    """
    sizes: dict[str, tuple[float, float]] = {}
    for variable in variables:
        weight = variable.num_bytes if variable.trainable else 0
        state = weight * (state_ratio or 0.0) if variable.trainable else variable.num_bytes
        sizes[variable.name] = weight, state
    weights, state = map(sum, zip(*sizes.values(), strict=True)) if sizes else (0, 0)
    needed, there = weights + state, sum(limits)
    if needed <= there:
        return
    count, limit = len(limits), there / len(limits)
    stored = sorted(((n, sum(size)) for n, size in sizes.items()), key=lambda item: -item[1])
    device = "a device" if len({*limits}) == 1 else "the devices (on average)"
    raise MemoryLimitError(
        f"No plan fits into the memory of {device} of {cluster!r}: even if {count} ranks share all "
        f"weights and slots evenly, each needs {_text(needed / count)} where {_text(limit)} may be "
        f"used, {_text((needed - there) / count)} too much: weights {_text(weights / count)}, "
        f"slots and other state {_text(state / count)}, besides activations and gradients. Of the "
        f"weights with their slots weigh most: {_items(stored[:SHOWN])}. What would help: more "
        f"devices (above {math.floor(needed / limit)} of these), an optimizer with fewer slots. If "
        f"the device has more, say so with memory_limit=.",
        needed / count,
    )


def _text(num_bytes: float) -> str:
    return format_bytes(num_bytes)


def _items(items: Iterable[tuple[str, float]]) -> str:
    return ", ".join(f"{name!r} ({_text(size)})" for name, size in items) or "none"
