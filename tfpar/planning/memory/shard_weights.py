"""Sharding of weights over the ranks that split the batch (ZeRO-3, FSDP), as a memory move.

A rank that stores a part of each weight stores as small a part of its gradient and its optimizer
slots. Weights are gathered before a block of layers runs, in both passes. So on `n` ranks each byte
of a weight is gathered twice, and `(1 - 1/n)(2 + s)` bytes are stored less, with `s` bytes of slots
per byte of weight.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence

from tfpar.constraints import split_weight
from tfpar.cost.collectives import collective_seconds
from tfpar.cost.pricer import shard_bytes
from tfpar.ir.graph import itemsize
from tfpar.ir.roles import Roles
from tfpar.planning.memory.fit import MemoryFit, MoveEstimate
from tfpar.planning.memory.offload import offloaded_problem
from tfpar.planning.memory.offload_moves import offload_slots_to_fit
from tfpar.planning.memory.relayout import fastest_plan
from tfpar.planning.pricing.price import price_whole
from tfpar.planning.problem import Planner, Problem
from tfpar.plans import OffloadPlan, Plan, PlannedVariable
from tfpar.spec import Replicate


@dataclasses.dataclass(frozen=True)
class ShardWeights:
    """The fastest layout with its weights sharded over the ranks that split the batch; if that does
    not fit, with slots offloaded, and with ever more blocks recomputed.

    Attributes:
        problem: of the step as it is, with nothing recomputed or offloaded.
        offloaded: what lies in host memory.
        choices: blocks to recompute, by name, ever more; none first.
    """

    problem: Problem
    planner: Planner
    offloaded: OffloadPlan
    choices: Sequence[tuple[str, ...]]
    name: str = "shard weights"

    def estimate(self, fit: MemoryFit) -> MoveEstimate:
        """Estimate the gathers of both passes over what is stored less."""
        mesh, cluster = fit.tried[0].mesh, self.problem.cluster
        saved = moved_s = 0.0
        slots = self.problem.step.state_ratio or 0.0
        for weight in _sharded(fit.tried[0], self.problem).values():
            assert weight.spec is not None and weight.gathered is not None
            shape, item = weight.shape, itemsize(weight.dtype)
            whole, part = (
                shard_bytes(shape, item, spec, mesh) for spec in (weight.gathered, weight.spec)
            )
            axes = tuple(a for a, p in enumerate(weight.spec) if p != weight.gathered[a])
            saved += (whole - part) * (2 + slots)
            moved_s += 2 * collective_seconds("all_gather", axes, whole, mesh, cluster)
        return MoveEstimate(moved_s / saved if saved else 0.0)

    def plans(self, fit: MemoryFit) -> Iterator[Plan]:
        fastest = fastest_plan(offloaded_problem(self.problem, self.offloaded), self.planner)
        fastest = dataclasses.replace(fastest, offloaded=self.offloaded)
        for names in self.choices:
            plan = with_sharded_weights(dataclasses.replace(fastest, recompute=names), self.problem)
            if plan is None:
                return
            yield plan
            if fit.fits(plan):
                return
            more = offload_slots_to_fit(plan, self.problem)
            if more is not None:
                yield more


def with_sharded_weights(plan: Plan, problem: Problem) -> Plan | None:
    """Return `plan`, which has a cost, with its weights sharded over the ranks that split the
    batch, as the whole of it costs then; None if none can be."""
    sharded = _sharded(plan, problem)
    if plan.cost is None or not sharded:
        return None
    # A plan that says of gradients that they stay partial sums says so of whole weights.
    gradients = {t.op.name for t in Roles.of(problem.step.graph).deferrable}
    ops = {name: op for name, op in plan.ops.items() if name not in gradients}
    found = dataclasses.replace(plan, variables={**plan.variables, **sharded}, ops=ops)
    cost, laid = price_whole(found, problem)
    return found.with_findings(cost=cost).with_partitioned(laid)


def _sharded(plan: Plan, problem: Problem) -> dict[str, PlannedVariable]:
    """Return the weights that are whole along an axis which splits the batch, sharded along it; but
    for those of which the user has said something."""
    if problem.cluster.one_memory:
        return {}
    found = {}
    for name, variable in plan.variables.items():
        spec = variable.spec
        if not variable.trainable or spec is None or name in problem.given.variables:
            continue
        for axis in map(plan.mesh.axis, plan.batch_axes):
            if isinstance(spec[axis], Replicate):
                spec = split_weight(variable.shape, spec, axis, plan.mesh)
        if spec != variable.spec:
            found[name] = dataclasses.replace(
                variable,
                spec=spec,
                slots=None,
                gathered=variable.spec,
                scatters_gradient=True,
                why="sharded to fit into memory",
            )
    return found
