"""A planner that says of every op how it runs, and nothing of the batch."""

from __future__ import annotations

import dataclasses

from tfpar.planning.pricing.plan_propagation import propagate_plan
from tfpar.planning.problem import Problem
from tfpar.plans import Plan, PlannedVariable
from tfpar.propagation import OpPlan
from tfpar.spec import Mesh, replicated_spec


@dataclasses.dataclass(frozen=True)
class ByOps:
    """Data parallelism, op by op: each op that reads the batch is said to take its own rows.

    Args:
        whole: op types that are to take all rows.
    """

    whole: frozenset[str] = frozenset()
    name: str = "by ops"

    def solve(self, problem: Problem) -> Plan:
        ranks = max(logical.mesh.size for logical in problem.meshes)
        plan = problem.plan(
            mesh=Mesh.of([ranks]),
            batch_axes=("data",),
            variables={
                v.name: PlannedVariable(tuple(v.shape), v.dtype, v.trainable)
                for v in problem.step.variables
            },
            planner=self.name,
        )
        laid = propagate_plan(plan, problem)
        nothing = replicated_spec(1)
        ops = {}
        for op, decision in laid.decisions.items():
            made = decision.strategy.out_specs
            kept = tuple(laid.specs[t] for t in op.outputs)
            planned = OpPlan(decision.strategy.in_specs, made, kept)
            if op.type in self.whole:
                planned = OpPlan(*((nothing,) * len(specs) for specs in (op.inputs, made, kept)))
            if op.inputs and not decision.bodies:
                ops[op.name] = planned
        return dataclasses.replace(plan, batch_axes=(), ops=ops)
