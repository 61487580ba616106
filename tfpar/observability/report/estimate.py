"""Estimate of a plan in a few lines: whether it fits into memory, and how fast a step is."""

from __future__ import annotations

from tfpar.cost.op_compute import flops
from tfpar.observability.report.pipeline import memory_limit, mesh_text
from tfpar.plans import Plan
from tfpar.spec.quantities import format_bytes, format_seconds


def estimate(plan: Plan) -> str:
    """The predictions for a searched plan that holds its partitioned graph, as text."""
    cost, cluster, partitioned = plan.cost, plan.cluster, plan.partitioned
    assert cost is not None and cluster is not None and partitioned is not None
    graph, rules = partitioned.graph, partitioned.prepared.rules
    batch = next((t.shape[0] for t in graph.inputs if t.shape), 1)
    work = sum(flops(op, rules[op]) for op in graph.ops)
    limit = memory_limit(plan)
    axes = " and ".join(plan.batch_axes) or "no axis"
    waiting = sum(cost.communication_s) + cost.exposed_s - cost.hidden_s
    rate = work / cost.seconds / plan.num_ranks
    return "\n".join(
        [
            f"Fits: {format_bytes(cost.memory_bytes)} of {format_bytes(limit)} a "
            f"device ({cost.memory_bytes / limit:.0%}), on {cluster.shape_text()} of "
            f"{cluster.name!r}",
            f"Plan: {mesh_text(plan)}, batch of {batch} over {axes}",
            f"Step: {format_seconds(cost.seconds)}, {waiting / cost.seconds:.0%} of it waiting for "
            f"other devices",
            f"Speed: {batch / cost.seconds:.4g} samples/s, {rate / 1e12:.3g} TFLOP/s a device",
        ]
    )
