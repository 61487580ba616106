"""Evaluator of partitioned graphs, the only one: the cost of a step on a cluster (TAP §IV-F).

The terms of ops, reshards and variables add up (`cost.terms`), so that a search can price what
changed, and parts of a step by themselves; `Cost` is what those of a whole step come to.
"""

from __future__ import annotations

from collections.abc import Container

from tfpar.cluster.description import Cluster
from tfpar.cost.cost import Cost
from tfpar.cost.memory import live_peak
from tfpar.cost.pricer import Pricer, VariableBytes
from tfpar.cost.terms import Terms
from tfpar.ir.graph import Op
from tfpar.ir.roles import Roles
from tfpar.propagation.partitioned_graph import PartitionedGraph


def evaluate(
    partitioned: PartitionedGraph,
    cluster: Cluster,
    roles: Roles,
    state_ratio: float | None = None,
) -> Cost:
    """Price a partitioned step, whoever made its plan.

    Args:
        state_ratio: bytes of optimizer slots per byte of weight, where the graph holds only
            stand-ins for the update: its time is then that of reading and writing them.
    """
    pricer = Pricer(partitioned.mesh, cluster, roles)
    cost = pricer.cost(terms_of(partitioned, pricer, state_ratio))
    return live_peak(partitioned, pricer, cost.bucket_bytes, state_ratio).in_cost(cost)


def terms_of(
    partitioned: PartitionedGraph,
    pricer: Pricer,
    state_ratio: float | None = None,
    part: Container[Op] | None = None,
) -> Terms:
    """Add up the terms of a step, or of a part of it.

    A reshard belongs to the op that makes its tensor, a variable to the op of its handle. So the
    terms of parts that together hold each op once add up to those of the step.

    Args:
        state_ratio: see `evaluate`.
        part: the ops of the part; by default all.
    """
    terms = pricer.zero()
    pricer.add_ops(terms, partitioned, part)
    for reshard in partitioned.reshards:
        if part is None or reshard.tensor.op in part:
            pricer.add_reshard(terms, reshard)
    total = VariableBytes()
    for variable, spec in partitioned.variable_specs.items():
        if part is None or variable.handle.op in part:
            slots = partitioned.slots_spec(variable)
            total = total.plus(pricer.stored_bytes(variable, spec, state_ratio, slots))
    pricer.add_variables(terms, total, state_ratio)
    return terms
