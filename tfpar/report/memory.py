"""Why a plan does not fit into the memory of a device, and what would help."""

from __future__ import annotations

from collections.abc import Iterable

from tfpar.cost.memory import live_peak
from tfpar.cost.pricer import Pricer
from tfpar.ir.roles import Roles
from tfpar.plans import Plan
from tfpar.propagation.partitioned import PartitionedGraph
from tfpar.spec import MemoryLimitError
from tfpar.spec.quantities import format_bytes

SHOWN = 3
"""How many variables and tensors are named."""


def memory_error(
    plan: Plan,
    partitioned: PartitionedGraph,
    limit: float,
    state_ratio: float | None,
    is_constrained: bool,
) -> MemoryLimitError:
    """The error that says by how much the best plan does not fit.

    Args:
        plan: as a planner found it, with its cluster and cost.
        partitioned: the step's graph as the plan lays it.
        limit: what a device may store, in bytes.
        state_ratio: bytes of optimizer slots per byte of weight; None if the graph has the slots.
        is_constrained: whether something was given that a planner had to keep to.
    """
    assert plan.cost is not None and plan.cluster is not None
    cost = plan.cost
    needed = cost.memory_bytes
    live = needed - cost.weight_bytes - cost.state_bytes
    roles = Roles.of(partitioned.graph)
    pricer = Pricer(plan.mesh, plan.cluster, roles)
    stored = sorted(
        (
            (v.name, sum(pricer.stored_bytes(v, spec, state_ratio)))
            for v, spec in partitioned.variable_specs.items()
        ),
        key=lambda item: -item[1],
    )
    most = live_peak(partitioned, pricer, cost.bucket_bytes, state_ratio, SHOWN)
    helps = ["a longer search (this one was cut short)"] if plan.cut_short else []
    helps += ["more devices", f"half the batch (saves about {_text(cost.activation_bytes / 2)})"]
    if is_constrained:
        helps.append("constraints that leave more weights to be split")
    return MemoryLimitError(
        f"No plan fits into the memory of a device of {plan.cluster.name!r}: the best that the "
        f"{plan.planner} planner found, on {plan.mesh}, needs {_text(needed)} where "
        f"{_text(limit)} may be used, {_text(needed - limit)} too much: weights "
        f"{_text(cost.weight_bytes)}, slots and other state {_text(cost.state_bytes)}, activations "
        f"and gradients {_text(live)} at once. Of the weights with their slots weigh most: "
        f"{_items(stored[:SHOWN])}; of the tensors stored while {most.op!r} runs: "
        f"{_items(most.largest)}. What would help: {', '.join(helps)}. If the device has more, "
        f"say so with memory_limit=.",
        needed,
    )


def _text(num_bytes: float) -> str:
    return format_bytes(num_bytes)


def _items(items: Iterable[tuple[str, float]]) -> str:
    return ", ".join(f"{name!r} ({_text(size)})" for name, size in items) or "none"
