"""Costs of a step along one mesh axis where all that is decided along others is as good as can be.

- Along the other axes all work, and all that is sent, is divided among the ranks, and nothing moves
  (what starts a kernel is divided by nothing).
- Collectives that may be packed are, and start once, whatever is sent (`ilp.FixedCharge`).
- The backward pass hides all the gradients that it has time for.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Hashable
from typing import Any

import numpy as np

from tfpar.cluster.description import Cluster
from tfpar.cost.collectives import least_seconds_per_byte, least_startup_seconds
from tfpar.cost.pricer import Pricer
from tfpar.cost.terms import Terms
from tfpar.ir.graph import Op
from tfpar.ir.roles import Roles, When
from tfpar.planning.intra_op.rhino.axis_strategy import AxisStrategy
from tfpar.planning.intra_op.rhino.costs import Costs
from tfpar.planning.intra_op.rhino.ilp import FixedCharge
from tfpar.propagation.partitioned_graph import Decision
from tfpar.propagation.reshard import Communication
from tfpar.rules.rule import OpRule
from tfpar.spec import Mesh, Spec


class RelaxedPricer(Pricer):
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

    def host_seconds(self, num_bytes: float, copies: float) -> float:
        return super().host_seconds(num_bytes / self.parts, copies)

    def waited_seconds(
        self, kind: str, axes: tuple[int, ...], num_bytes: float, packable: bool
    ) -> float:
        if not packable:
            return self.collective_seconds(kind, axes, num_bytes)
        return num_bytes * least_seconds_per_byte(kind, axes, self.ranks, self.linked)

    def startup_seconds(self, kind: str, axes: tuple[int, ...]) -> float:
        """Bound the start of collectives that are packed, whatever they send."""
        return least_startup_seconds(kind, axes, self.ranks, self.linked)


class RelaxedCosts(Costs):
    """See the module."""

    pricer: RelaxedPricer

    def least_dispatch_s(self) -> float:
        """Seconds in which hosts issue the ops, however they run."""
        issuing = self.pricer.zero()
        issuing.dispatch[:] = 1.0
        each = (
            [
                t.vector @ issuing.vector
                for t, allowed in zip(terms, np.isfinite(more), strict=True)
                if allowed
            ]
            for terms, more in self._nodes
        )
        return float(sum(min(of_node, default=0.0) for of_node in each))

    def starts(self) -> dict[Hashable, FixedCharge]:
        """Starts of collectives that are packed: of those that ops wait for one for each set, of
        gradients' one, for the bucket that nothing hides, of the update's one for each kind."""
        found: dict[Hashable, FixedCharge] = {}
        for node, (terms, _) in enumerate(self._nodes):
            for choice, of_choice in enumerate(terms):
                for start in self._starts_of(of_choice, found):
                    start.by_nodes.setdefault(node, np.zeros(len(terms), bool))[choice] = True
        of_moves = [self._starts_of(terms, found) for terms in self._distinct]
        for moves, (_, tables) in enumerate(self._moves):
            for table in tables:
                for number in np.unique(table):
                    for start in of_moves[number]:
                        spends = start.by_moves.setdefault(moves, np.zeros(table.shape, bool))
                        spends |= table == number
        return found

    def _starts_of(self, terms: Terms, found: dict[Hashable, FixedCharge]) -> list[FixedCharge]:
        """Those of `found` that are spent where these terms are; others are added."""
        spent: dict[Hashable, float] = {
            key: key.times * self.pricer.startup_seconds(key.kind, key.axes)
            for key in terms.together
        }
        if terms.packed(When.BESIDE):
            spent[When.BESIDE] = self._last_start
        for kind, axes, _ in terms.packed(When.AFTER):
            spent[When.AFTER, kind, axes] = self.pricer.startup_seconds(kind, axes)
        return [found.setdefault(key, FixedCharge(seconds)) for key, seconds in spent.items()]

    @functools.cached_property
    def _last_start(self) -> float:
        """Of the bucket that is full last, of whatever kind."""
        present = self.pricer.zero()
        for terms in (*itertools.chain.from_iterable(of for of, _ in self._nodes), *self._distinct):
            present.vector += terms.vector
        return min(
            self.pricer.startup_seconds(kind, axes) for kind, axes, _ in present.packed(When.BESIDE)
        )

    def _make_pricer(self, mesh: Mesh) -> RelaxedPricer:
        space = self.space
        parts = space.mesh.size // space.parts
        cluster, roles = space.problem.cluster, space.model.roles
        return RelaxedPricer(mesh, cluster, roles, space.parts, parts)

    def _feeding_seconds(self, op: Op, strategy: AxisStrategy) -> float:
        return 0.0  # no step takes longer by it

    def _parts_alone(self) -> float:
        return 1.0  # it takes no less whole than split
