"""Least seconds of a step on a mesh, whatever is decided: the relaxation of an integer program.

The program is that of the first mesh axis (`ilp`), in which everything that is not decided there is
as good as it can be:

- along the other axes all work, and all that is sent, is divided among the ranks, and nothing moves
  (what starts a kernel is divided by nothing);
- collectives that may be packed start at no cost, since those of a pack start once;
- the backward pass hides all the gradients that it has time for.

So a plan that runs every op in one of its ways, on this mesh, takes no less. It is the bound that
a branch and bound over meshes needs (Land and Doig 1960): one that is not below the best plan found
need not be searched.
"""

from __future__ import annotations

import math

import numpy as np

from tfpar.cluster.description import Cluster
from tfpar.cost.collectives import least_seconds_per_byte
from tfpar.cost.host import waiting_for_host
from tfpar.cost.packing_gain import PackingKey
from tfpar.cost.pricer import Pricer
from tfpar.cost.terms import BUCKET_SIZES, Terms
from tfpar.ir.graph import Op
from tfpar.ir.roles import Roles, When
from tfpar.planning.deadline import Deadline
from tfpar.planning.intra_op.rhino.axis_space import AxisStrategySpace
from tfpar.planning.intra_op.rhino.axis_strategy import AxisStrategy
from tfpar.planning.intra_op.rhino.cones import eliminate_chains
from tfpar.planning.intra_op.rhino.costs import Costs, Gradients
from tfpar.planning.intra_op.rhino.ilp import relaxed_seconds
from tfpar.propagation.partitioned_graph import Decision
from tfpar.propagation.reshard import Communication
from tfpar.rules.rule import OpRule
from tfpar.spec import Mesh


def least_seconds(space: AxisStrategySpace, deadline: Deadline) -> float:
    """Bound a step from below, whatever is decided along the axis of `space` and those behind.

    Args:
        space: of the first mesh axis that has several ranks.

    Returns:
        The seconds; 0 if they were not found in time.
    """
    costs = _RelaxedCosts(space)
    weights = [v for v in space.graph.variables if v.trainable]
    times = space.model.roles.times
    num_bytes = sum(v.num_bytes * times.get(v.handle.op, 1) for v in weights)
    few = num_bytes <= BUCKET_SIZES[0]
    network = costs.network(Gradients.EXPOSED if few else Gradients.HIDDEN)
    running = relaxed_seconds(eliminate_chains(network).network, deadline)
    if not running:
        return 0.0
    issuing = waiting_for_host(costs.least_dispatch_s(), running)
    return running + issuing + space.problem.cluster.step_s


class _RelaxedPricer(Pricer):
    """A pricer to whom all that is not decided is as good as it can be.

    Args:
        parts: ranks that share all work along the other axes.
    """

    def __init__(self, mesh: Mesh, cluster: Cluster, roles: Roles, parts: int) -> None:
        super().__init__(mesh, cluster, roles)
        self.parts = parts

    def op_seconds(self, op: Op, rule: OpRule, decision: Decision) -> float:
        seconds = super().op_seconds(op, rule, decision)
        if any(self._inner(decision)):  # the ops of its body were relaxed one by one
            return seconds
        starting = min(seconds, self.cluster.device.launch_s * self.issued(op, decision))
        return starting + (seconds - starting) / self.parts

    def cut_seconds(self, moved: Communication) -> float:
        return super().cut_seconds(moved) / self.parts

    def update_seconds(self, weight_bytes: float, state_ratio: float) -> float:
        return super().update_seconds(weight_bytes, state_ratio) / self.parts

    def add_collective(
        self,
        terms: Terms,
        moved: Communication,
        axes: tuple[int, ...],
        phase: int,
        times: int,
        runs: int = 1,
    ) -> None:
        kind, num_bytes, when = moved.kind, moved.num_bytes / self.parts, moved.when(self.roles)
        if when is not When.BETWEEN:
            terms.pack(when, kind, axes, times * num_bytes)
        elif PackingKey.of(moved, self.roles, axes, phase, times, runs) is None:
            terms.communication[phase] += times * self.collective_seconds(kind, axes, num_bytes)
        else:  # it may start with others
            per_byte = least_seconds_per_byte(kind, axes, self.ranks, self.linked)
            terms.communication[phase] += times * num_bytes * per_byte


class _RelaxedCosts(Costs):
    """See the module."""

    def least_dispatch_s(self) -> float:
        """Seconds in which hosts issue the ops, however they run."""
        zero, found = self.pricer.zero(), 0.0
        zero.dispatch[:] = 1.0
        for terms, seconds in self._nodes:
            issued = (terms @ zero.vector)[np.isfinite(seconds)]
            found += float(issued.min(initial=math.inf)) if len(issued) else 0.0
        return found

    def _make_pricer(self) -> Pricer:
        space = self.space
        parts = space.mesh.size // space.parts
        return _RelaxedPricer(space.mesh, space.problem.cluster, space.model.roles, parts)

    def _feeding_seconds(self, op: Op, strategy: AxisStrategy) -> float:
        return 0.0  # no step takes longer by it

    def _add_left_alone(self, terms: Terms, op: Op, strategy: AxisStrategy) -> None:
        """Add what its part takes where the batch is split."""
        self.pricer.add_op(terms, op, self.space.prepared.rules[op], self.space.data_parallel[op])
