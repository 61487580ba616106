"""Floating-point operations of a step, whatever runs it."""

from __future__ import annotations

from collections.abc import Mapping

from tfpar.cost.op_compute import flops
from tfpar.cost.pricer import trips
from tfpar.ir.passes.recompute import is_recomputed
from tfpar.ir.traits import BRANCHES
from tfpar.propagation.partitioned_graph import PartitionedGraph


def model_flops(partitioned: PartitionedGraph) -> Mapping[str, float]:
    """Count the floating-point operations of the matrix products and convolutions of a step on the
    whole batch, by dtype.

    What a plan computes again counts once, and what several ranks compute alike, too; a loop
    counts for each of its trips, where it is known how many there are, a branching as its longest
    branch.
    """
    found: dict[str, float] = {}
    for op, decision in partitioned.decisions.items():
        bodies = [model_flops(body) for body in decision.bodies.values()]
        if op.type in BRANCHES and bodies:
            bodies = [max(bodies, key=lambda work: sum(work.values()))]
        for work in bodies:
            for dtype, count in work.items():
                found[dtype] = found.get(dtype, 0.0) + trips(op) * count
        count = flops(op, partitioned.prepared.rules[op])
        if count and not is_recomputed(op):
            dtype = op.outputs[0].dtype
            found[dtype] = found.get(dtype, 0.0) + count
    return found
