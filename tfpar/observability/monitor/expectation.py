"""Predicted time of a step's collectives by kind, and of the step if they take longer."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from tfpar.cluster.description import Cluster
from tfpar.cost.collectives import collective_seconds
from tfpar.cost.cost import Cost
from tfpar.ir.roles import BACKWARD, Roles, When
from tfpar.plans import Plan
from tfpar.tf.runtime.executable import Executable

Kind = tuple[str, tuple[int, ...]]
"""A kind of collective, and the mesh axes that it runs over."""


def machines_of(plan: Plan) -> Cluster:
    """Return the cluster of a priced plan, in the order in which stages have its machines."""
    assert plan.cluster is not None, "a plan that was priced"
    return plan.cluster if plan.stages is None else plan.stages.placed(plan.cluster)


@dataclasses.dataclass(frozen=True)
class ExpectedCollectives:
    """Predicted seconds of the collectives of a step, by kind.

    Attributes:
        waited_s: of those that ops wait for.
        beside_s: of those that run beside the backward pass, which hides most of them.
        exposed_s: how long the update is predicted to wait for these.
        hideable_s: how much of them the backward pass can hide.
    """

    waited_s: Mapping[Kind, float]
    beside_s: Mapping[Kind, float]
    exposed_s: float
    hideable_s: float

    @classmethod
    def of(cls, plan: Plan, executable: Executable) -> ExpectedCollectives:
        """Predict the collectives of a step that runs by `plan`.

        The times of single collectives are scaled to what the plan expects of all, as some are
        packed or overlap.
        """
        cost, machines = plan.cost, machines_of(plan)
        assert cost is not None, "a plan that was priced"
        partitioned = executable.partitioned
        roles = Roles.of(partitioned.graph, executable.captured.gradient_tensors)
        alone: dict[bool, dict[Kind, float]] = {False: {}, True: {}}
        for moved in partitioned.communications():
            beside = moved.when(roles) is When.BESIDE
            kind = moved.kind, moved.axes
            seconds = collective_seconds(*kind, moved.num_bytes, plan.mesh, machines)
            alone[beside][kind] = alone[beside].get(kind, 0.0) + seconds
        return cls(
            _scaled(alone[False], max(sum(cost.communication_s) - cost.hidden_s, 0.0)),
            _scaled(alone[True], cost.gradients_s),
            cost.exposed_s,
            machines.overlap * cost.compute_s[BACKWARD],
        )

    def seconds(self, ratios: Mapping[Kind, float]) -> dict[Kind, float]:
        """Return how long a step waits for each kind if collectives take longer than predicted.

        Args:
            ratios: measured over predicted time of each kind; 1 for kinds that are not named.
        """
        waited = {kind: s * ratios.get(kind, 1.0) for kind, s in self.waited_s.items()}
        beside = {kind: s * ratios.get(kind, 1.0) for kind, s in self.beside_s.items()}
        together_s, predicted_s = sum(beside.values()), sum(self.beside_s.values())
        # What is longer hides first behind what is left of the backward pass.
        longer_s = max(together_s, self.hideable_s) - max(predicted_s, self.hideable_s)
        exposed = _scaled(beside, max(self.exposed_s + longer_s, 0.0))
        return {
            kind: waited.get(kind, 0.0) + exposed.get(kind, 0.0)
            for kind in dict.fromkeys([*waited, *exposed])
        }


def work_s(cost: Cost) -> float:
    """Return the predicted time of a step without the waits for collectives."""
    return cost.seconds - sum(cost.communication_s) + cost.hidden_s - cost.exposed_s


def _scaled(seconds: Mapping[Kind, float], together_s: float) -> dict[Kind, float]:
    """Scale times to another sum, in the same proportions."""
    now_s = sum(seconds.values())
    return {kind: s * together_s / now_s for kind, s in seconds.items()} if now_s else {}
