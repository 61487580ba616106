"""Memory moves that offload slots or activations to the memory of hosts (TAP §IV-H).

Each byte of a slot, or of an activation, crosses the link to the host twice a step. So the slots of
no more weights are offloaded than it takes, the largest first: these save most for each copy that
has to start. No plan is searched again: the one found is priced with them there.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Collection, Iterator, Sequence

from tfpar.cost.pricer import shard_bytes
from tfpar.ir.graph import itemsize
from tfpar.ir.traits import IN_FLIGHT
from tfpar.planning.memory.fit import MemoryFit, MoveEstimate
from tfpar.planning.memory.move_estimates import estimate_change
from tfpar.planning.memory.offload import offloaded_problem, weights_with_slots
from tfpar.planning.memory.shard_slots import with_sharded_slots
from tfpar.planning.pricing.price import price_whole
from tfpar.planning.problem import Problem
from tfpar.plans import OffloadPlan, Plan
from tfpar.spec import replicated_spec


@dataclasses.dataclass(frozen=True)
class OffloadActivations:
    """Move that offloads the saved activations of as few blocks as it takes to fit, and slots
    besides if it is not enough.

    Attributes:
        layout: a priced plan that has nothing offloaded.
        choices: of blocks by name, ever more.
    """

    problem: Problem
    layout: Plan
    choices: Sequence[tuple[str, ...]]
    name: str = "offload activations"

    def estimate(self, fit: MemoryFit) -> MoveEstimate:
        """Estimate the copies to the host and back of what the first of the choices keep."""
        if not self.choices:
            return MoveEstimate()
        away = OffloadPlan(activations=self.choices[0])
        return estimate_change(self.problem, offloaded_problem(self.problem, away))

    def plans(self, fit: MemoryFit) -> Iterator[Plan]:
        found = None
        for blocks in self.choices:
            found = with_offloaded_activations(self.layout, self.problem, blocks)
            if found is not None and fit.fits(found):
                break
        if found is not None:
            yield found
            more = None if fit.fits(found) else offload_slots_to_fit(found, self.problem)
            if more is not None:
                yield more


def offload_slots_to_fit(plan: Plan, problem: Problem) -> Plan | None:
    """Return `plan` with as many of its slots in host memory as it takes to fit, sharded before:
    each rank then moves a part of them; None if the user has decided, or there are none."""
    if not problem.decides_offload:
        return None  # nothing is priced in vain
    return with_offloaded_slots(with_sharded_slots(plan, problem) or plan, problem)


def with_offloaded_slots(plan: Plan, problem: Problem) -> Plan | None:
    """Return `plan`, which has a cost, with as many of its slots in host memory as it takes to fit,
    or as there are, and as the whole of it costs then; None if there are none, or the user has
    decided.
    """
    if plan.cost is None:
        return None
    found = None
    for names in _choices(plan, problem, problem.excess_in_parts(plan.cost)):
        found = _priced(_away(plan, names), problem)
        if not problem.excess_in_parts(found.cost):
            break
    return found


def with_offloaded_activations(
    plan: Plan, problem: Problem, blocks: tuple[str, ...]
) -> Plan | None:
    """Return `plan`, which has a cost, with what these blocks keep in host memory, as the whole of
    it costs then; None if the user has decided."""
    if plan.cost is None or not problem.decides_offload:
        return None
    offloaded = dataclasses.replace(plan.offloaded, activations=blocks)
    return _priced(dataclasses.replace(plan, offloaded=offloaded), problem)


def _priced(plan: Plan, problem: Problem) -> Plan:
    cost, laid = price_whole(plan, problem)
    return plan.with_findings(cost=cost).with_partitioned(laid)


def offload_slots(plan: Plan, problem: Problem, weights: Collection[str]) -> Plan | None:
    """Offload the slots of some weights of a plan, too, not priced yet; None if they have none."""
    names = [name for name in _slot_bytes(plan, problem) if name in weights]
    names = list(dict.fromkeys([*plan.offloaded.slots, *names]))
    return _away(plan, tuple(names)) if len(names) > len(plan.offloaded.slots) else None


def _away(plan: Plan, weights: tuple[str, ...]) -> Plan:
    offloaded = dataclasses.replace(plan.offloaded, slots=weights)
    return dataclasses.replace(plan, offloaded=offloaded)


def _choices(plan: Plan, problem: Problem, excess: float) -> Iterator[tuple[str, ...]]:
    """The weights whose slots to offload: about as many as are `excess` bytes, then all."""
    sizes = _slot_bytes(plan, problem)
    excess += IN_FLIGHT * max(sizes.values(), default=0.0)  # those are there in passing
    names = sorted(sizes, key=lambda name: -sizes[name])
    saved = [*itertools.accumulate(sizes[name] for name in names)]
    enough = next((i for i, size in enumerate(saved, 1) if size >= excess), len(names))
    if 0 < enough < len(names):
        yield tuple(names[:enough])
    if names:
        yield tuple(names)


def _slot_bytes(plan: Plan, problem: Problem) -> dict[str, float]:
    """By weight, the bytes of its slots that a rank stores and that the planner may have in host
    memory; of matrices and larger weights: those of vectors are less than it takes to start a copy.
    """
    if not problem.decides_offload:
        return {}
    ratio = problem.step.state_ratio
    having = {*weights_with_slots(problem.step.graph, ratio)} - problem.step.bound
    found = {}
    for name, variable in plan.variables.items():
        spec = variable.slots or variable.spec or replicated_spec(plan.mesh.num_axes)
        if variable.trainable and name in having and len(variable.shape) > 1:
            size = shard_bytes(variable.shape, itemsize(variable.dtype), spec, plan.mesh)
            found[name] = size * (1.0 if ratio is None else ratio)
    return {name: size for name, size in found.items() if size}
