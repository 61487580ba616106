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

from typing import Any

import numpy as np

from tfpar.cluster.description import Cluster
from tfpar.cost.collectives import least_seconds_per_byte
from tfpar.cost.host import waiting_for_host
from tfpar.cost.pricer import Pricer
from tfpar.cost.terms import Terms
from tfpar.ir.graph import Op
from tfpar.ir.roles import Roles
from tfpar.planning.deadline import Deadline
from tfpar.planning.intra_op.rhino.axis_space import AxisStrategySpace
from tfpar.planning.intra_op.rhino.axis_strategy import AxisStrategy
from tfpar.planning.intra_op.rhino.cones import eliminate_chains
from tfpar.planning.intra_op.rhino.costs import Costs, gradient_models
from tfpar.planning.intra_op.rhino.ilp import relaxed_seconds
from tfpar.propagation.partitioned_graph import Decision
from tfpar.propagation.reshard import Communication
from tfpar.rules.rule import OpRule
from tfpar.spec import Mesh, Spec


def least_seconds(space: AxisStrategySpace, deadline: Deadline) -> float:
    """Bound a step from below, whatever is decided along the axis of `space` and those behind.

    Args:
        space: of the first mesh axis that has several ranks.

    Returns:
        The seconds; 0 if they were not found in time.
    """
    costs = _RelaxedCosts(space)
    network = costs.network(gradient_models(space)[0])
    running = relaxed_seconds(eliminate_chains(network).network, deadline)
    if not running:
        return 0.0
    issuing = waiting_for_host(costs.least_dispatch_s(), running)
    return running + issuing + space.problem.cluster.step_s


class _RelaxedPricer(Pricer):
    """A pricer to whom all that is not decided is as good as it can be.

    Args:
        decided: ranks along the axis that is decided.
        parts: ranks that share all work along the others.
    """

    def __init__(
        self, mesh: Mesh, cluster: Cluster, roles: Roles, decided: int, parts: int
    ) -> None:
        super().__init__(mesh, cluster, roles)
        self.decided, self.parts = decided, parts

    def op_seconds(self, op: Op, rule: OpRule, decision: Decision) -> float:
        seconds = super().op_seconds(op, rule, decision)
        if any(self._inner(decision)):  # the ops of its body were relaxed one by one
            return seconds
        starting = min(seconds, self.cluster.device.launch_s * self.issued(op, decision))
        return starting + (seconds - starting) / self.parts

    def alike(self, *specs: Spec) -> int:
        """Leave out the axes that are not decided: what is divided among their ranks is not alike
        there."""
        return max(1, super().alike(*specs) // (self.mesh.size // self.decided))

    def cut_seconds(self, moved: Communication) -> float:
        return super().cut_seconds(moved) / self.parts

    def update_seconds(self, weight_bytes: float, state_ratio: float) -> float:
        return super().update_seconds(weight_bytes, state_ratio) / self.parts

    def add_collective(self, terms: Terms, moved: Communication, *args: Any, **more: Any) -> None:
        part = moved._replace(num_bytes=moved.num_bytes // self.parts)
        super().add_collective(terms, part, *args, **more)

    def waited_seconds(
        self, kind: str, axes: tuple[int, ...], num_bytes: float, packable: bool
    ) -> float:
        if not packable:
            return self.collective_seconds(kind, axes, num_bytes)
        return num_bytes * least_seconds_per_byte(kind, axes, self.ranks, self.linked)


class _RelaxedCosts(Costs):
    """See the module."""

    def least_dispatch_s(self) -> float:
        """Seconds in which hosts issue the ops, however they run."""
        issuing = self.pricer.zero()
        issuing.dispatch[:] = 1.0
        each = (
            (terms @ issuing.vector)[np.isfinite(seconds)].tolist()
            for terms, seconds in self._nodes
        )
        return sum(min(of_node, default=0.0) for of_node in each)

    def _make_pricer(self, mesh: Mesh) -> Pricer:
        space = self.space
        parts = space.mesh.size // space.parts
        cluster, roles = space.problem.cluster, space.model.roles
        return _RelaxedPricer(mesh, cluster, roles, space.parts, parts)

    def _feeding_seconds(self, op: Op, strategy: AxisStrategy) -> float:
        return 0.0  # no step takes longer by it

    def _parts_alone(self) -> float:
        return 1.0  # it takes no less whole than split
