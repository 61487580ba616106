"""Relaxed estimate of a pipeline: its step without memory limits and transfers, by part.

The fastest plan for the ranks of one stage is cheap to find. With the work shared among stages by
speed, it gives an optimistic step, by which numbers of stages are ranked before any is planned, and
which is what is said of those that are not. The plan is priced in microbatches, since every
microbatch launches all ops anew, on each machine type, and on the folded graph, which is fast.
Stages are as even as the ops of the step, in their order, can be shared among them.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from tfpar.cluster.description import Cluster, Device
from tfpar.cost.cost import Cost
from tfpar.ir.collection import collection_paused
from tfpar.ir.graph import Graph
from tfpar.ir.roles import BACKWARD, FORWARD, UPDATE
from tfpar.pipeline import Pipeline
from tfpar.planning.folding.folded_model import folded_model
from tfpar.planning.inter_op.stages.op_times import SingleDeviceProfile
from tfpar.planning.memory.peak_model import PeakMemoryModel
from tfpar.planning.memory.relayout import fastest_plan, fastest_with_sharded_slots
from tfpar.planning.pricing.price import SingleStagePricer
from tfpar.planning.problem import Planner, Problem
from tfpar.plans import Plan

NEAR = 0.01
"""Relative precision with which the fullest stage is estimated."""

Times = tuple[float, float, float]
"""Seconds of forward pass, backward pass and update."""


@dataclasses.dataclass(frozen=True)
class RelaxedEstimate:
    """Cost and memory of a step in so many stages if memory were no limit.

    Attributes:
        cost: of a step, if all stages take equally long and send each other nothing.
        memory_fraction: what that plan stores over what there is; feasible if at most 1.
        least_seconds: of a step in one microbatch whose stages do not wait for each other: no
            microbatches and no schedule make it faster.
    """

    cost: Cost
    memory_fraction: float
    least_seconds: float

    @property
    def seconds(self) -> float:
        """Of a step."""
        return self.cost.seconds

    @property
    def fits(self) -> bool:
        """Whether that plan does, by estimate."""
        return self.memory_fraction <= 1


def estimate_relaxed(
    problem: Problem, planner: Planner, pipeline: Pipeline | None, kinds: Mapping[Cluster, int]
) -> RelaxedEstimate | None:
    """Return the relaxed estimate of a pipeline; None if the planner does not price its plans.

    Optimizer slots are split, and forward passes run twice, if it does not fit else.

    Args:
        problem: of the ranks of a stage.
        kinds: how many actors have such machines.

    Raises:
        PlanError: no plan satisfies the constraints.
    """
    plan = fastest_plan(problem, planner)
    cost = plan.cost
    if cost is None:
        return None
    stored = problem.stored_bytes(cost, PeakMemoryModel.of(cost))
    more = 0.0
    if stored > problem.memory_limit:
        split = fastest_with_sharded_slots(problem, planner)
        if split is not None and split.cost is not None:
            stored = problem.stored_bytes(split.cost, PeakMemoryModel.of(split.cost))
            more = split.cost.seconds - cost.seconds
    fraction = stored / problem.memory_limit
    trains = cost.compute_s[BACKWARD] > 0
    recompute = trains and (fraction > 1 or (pipeline is not None and bool(pipeline.recompute)))
    passes = PassTimes(cost.compute_s, cost.communication_s)
    if pipeline is None:
        actors, bubble, hidden = 1, 0.0, cost.hidden_s
        passes = passes.recomputed() if recompute else passes
        seconds = cost.seconds + more + recompute * passes.forward_s
        least = seconds
    else:
        actors, hidden = pipeline.num_actors, 0.0
        whole = _shared_passes(plan, problem, kinds, actors, 1)
        parts = pipeline.num_microbatches
        shared = _shared_passes(plan, problem, kinds, actors, parts)
        passes = (shared.recomputed() if recompute else shared).updating(passes, actors)
        least = min(whole.seconds, shared.seconds) + passes.update_s
        bubble = passes.seconds * (pipeline.num_stages - 1) / parts
        seconds = passes.seconds + bubble + passes.update_s + (cost.exposed_s + more) / actors
    always = min(cost.weight_bytes + cost.state_bytes, stored)
    found = dataclasses.replace(
        cost,
        seconds=seconds,
        compute_s=passes.compute_s,
        communication_s=passes.communication_s,
        gradients_s=(cost.gradients_s + more) / actors,
        exposed_s=(cost.exposed_s + more) / actors,
        hidden_s=hidden,
        bubble_s=bubble,
        host_wait_s=cost.host_wait_s if pipeline is None else 0.0,
        weight_bytes=cost.weight_bytes / actors,
        state_bytes=(always - cost.weight_bytes) / actors,
        gradient_bytes=cost.gradient_bytes / actors,
        activation_bytes=cost.activation_bytes / actors,
        live_bytes=(stored - always) / actors,
    )
    return RelaxedEstimate(found, fraction, least)


@dataclasses.dataclass(frozen=True)
class PassTimes:
    """Seconds of a step by phase: what is computed, and what collectives are waited for."""

    compute_s: Times
    communication_s: Times

    @property
    def forward_s(self) -> float:
        """Of the forward pass."""
        return self.compute_s[FORWARD] + self.communication_s[FORWARD]

    @property
    def seconds(self) -> float:
        """Of both passes."""
        return self.forward_s + self.compute_s[BACKWARD] + self.communication_s[BACKWARD]

    @property
    def update_s(self) -> float:
        """Of the update."""
        return self.compute_s[UPDATE] + self.communication_s[UPDATE]

    def recomputed(self) -> PassTimes:
        """Return them with the forward pass once more in the backward pass."""
        both = self.compute_s, self.communication_s
        return PassTimes(*((f, b + f, update) for f, b, update in both))

    def scaled(self, factor: float) -> PassTimes:
        """Return them for so many times the work."""
        both = self.compute_s, self.communication_s
        return PassTimes(*((factor * f, factor * b, factor * update) for f, b, update in both))

    def updating(self, other: PassTimes, actors: int) -> PassTimes:
        """Return them with an actor's share of the update of `other`."""
        both = (
            (self.compute_s, other.compute_s),
            (self.communication_s, other.communication_s),
        )
        return PassTimes(*((f, b, update / actors) for (f, b, _), (_, _, update) in both))


def _shared_passes(
    plan: Plan,
    problem: Problem,
    kinds: Mapping[Cluster, int],
    actors: int,
    parts: int,
) -> PassTimes:
    """Return the passes of the busiest actor in so many microbatches, if actors share the step's by
    their speeds, as evenly as its ops can be."""
    plan = dataclasses.replace(plan, microbatches=parts)
    found: dict[Cluster, PassTimes] = {}
    with collection_paused():
        step = SingleStagePricer.folded(plan, problem)
        for machines in kinds:
            cost = step.on(machines).price(plan).cost
            assert cost is not None, "what a pricer says"
            found[machines] = PassTimes(cost.compute_s, cost.communication_s)
    alone = {machines: passes.seconds for machines, passes in found.items()}
    fastest = min(alone, key=alone.__getitem__)
    if not alone[fastest]:
        return found[fastest]
    shared = 1 / sum(count / alone[machines] for machines, count in kinds.items())
    fullest = alone[fastest] * _fullest_part(problem, actors)
    return found[fastest].scaled(max(shared, fullest) / alone[fastest])


class OpEnds(dict[tuple[Graph, Device], NDArray[np.float64]]):
    """When each op of the forward pass ends if they run one after the other, by graph and device;
    as parts of the whole."""


def _fullest_part(problem: Problem, stages: int) -> float:
    """Return the part of the forward pass that the fullest stage has on equal devices, if ops are
    shared among so many in their order as evenly as they can be."""
    ends = _op_ends(problem)
    least, most = 1 / stages, 1.0
    while most - least > NEAR * least:
        middle = (least + most) / 2
        if _stages_of(ends, middle) <= stages:
            most = middle
        else:
            least = middle
    return least


def largest_op_part(problem: Problem) -> float:
    """Return the part of the forward pass that its largest op takes on one device."""
    return float(np.max(np.diff(_op_ends(problem), prepend=0.0)))


def _stages_of(ends: NDArray[np.float64], most: float) -> float:
    """Return how many stages ops make that hold no more each; infinite if one op does."""
    count, taken = 0, 0.0
    while taken < ends[-1]:
        until = int(np.searchsorted(ends, taken + most, side="right")) - 1
        if until < 0 or ends[until] <= taken:
            return math.inf
        count, taken = count + 1, float(ends[until])
    return count


def _op_ends(problem: Problem) -> NDArray[np.float64]:
    known = problem.step.graph_memo.of(OpEnds)
    key = problem.step.graph, problem.cluster.device
    if key not in known:
        model = folded_model(problem, 2)
        seconds = SingleDeviceProfile(model.prepared, model.roles).seconds(problem.cluster)
        own = [(op, s) for op, s in seconds.items() if s and model.roles.phase[op] == FORWARD]
        chain: list[float] = []
        for times, run in itertools.groupby(own, lambda one: model.roles.times.get(one[0], 1)):
            chain += times * [s for _, s in run]  # a block, once for each of its instances
        ends = np.cumsum(np.asarray(chain or [1.0]))
        known[key] = ends / ends[-1]
    return known[key]
