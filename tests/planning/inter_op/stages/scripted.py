"""Plans with given costs, and an evaluator that is told what becomes of proposals."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping

from tfpar.cost import Cost
from tfpar.pipeline import Pipeline
from tfpar.planning.candidates import (
    BestSchedule,
    NewLayout,
    OtherMicrobatches,
    OtherStages,
    SolvedCandidate,
)
from tfpar.planning.drive import search_plan
from tfpar.planning.inter_op.enumerate_pipelines import EnumeratePipelines, numbers_of_stages
from tfpar.planning.inter_op.relaxed_estimate import RelaxedEstimate
from tfpar.plans import Findings, PipelinePlan, Plan
from tfpar.spec import MemoryLimitError, Mesh

MESH = Mesh.of([8])
BATCH = 16


@dataclasses.dataclass(frozen=True)
class ScriptedEvaluator:
    """An evaluator whose answers are given as functions of plans."""

    planned: Callable[[Pipeline | None], Plan]
    repriced: Callable[[Plan, Pipeline], Plan | None]
    scheduled: Callable[[Plan], Plan]
    enough: Callable[[Plan], bool]
    why_enough: str = ""
    promised: Callable[[Pipeline | None], RelaxedEstimate | None] = lambda _: None
    restaged: Callable[[Plan, Pipeline], Plan | None] = lambda *_: None
    computing: Mapping[int, float] = dataclasses.field(default_factory=dict)

    def evaluate(self, proposal) -> SolvedCandidate | None:
        match proposal:
            case NewLayout(pipeline):
                plan = self.planned(pipeline)
            case OtherMicrobatches(base, pipeline):
                plan = self.repriced(base.plan, pipeline)
            case BestSchedule(base):
                plan = self.scheduled(base.plan)
            case OtherStages(base, pipeline):
                plan = self.restaged(base.plan, pipeline)
            case _:
                plan = proposal.base.plan
        return None if plan is None else SolvedCandidate.of(plan, None)

    def estimate(self, pipeline: Pipeline | None) -> RelaxedEstimate | None:
        return self.promised(pipeline)

    def bound(self, pipeline: Pipeline | None) -> Cost:
        return estimated(self.computing.get(pipeline.num_stages, 0.5), 1.0).cost

    def is_good_enough(self, candidate: SolvedCandidate) -> bool:
        return self.enough(candidate.plan)

    def machine_types(self, pipeline, ranks):
        return [None]

    def unlike_groups(self, given):
        return []

    def rank_orders(self, pipeline, given):
        return []


def estimated(seconds: float, memory_fraction: float, bubble_s: float = 0.0) -> RelaxedEstimate:
    """An estimate of a step that waits so long for other stages, and else computes."""
    nothing = (0.0, 0.0, 0.0)
    computed = (seconds - bubble_s, 0.0, 0.0)
    cost = Cost(seconds, computed, nothing, 0.0, 0.0, 1, memory_fraction, bubble_s=bubble_s)
    return RelaxedEstimate(cost, memory_fraction, seconds - bubble_s)


def choose_pipeline(
    stages, batch_size, evaluator: ScriptedEvaluator, memory_limit: float, ranks: int
) -> Plan:
    search = EnumeratePipelines(
        evaluator, stages, batch_size, memory_limit, ranks, evaluator.why_enough
    )
    return search_plan(search, evaluator).best.plan


class Costs:
    """Plans whose steps take and store what functions of (stages, microbatches, recompute) say."""

    def __init__(self, seconds, memory=lambda *_: 1.0, limit=math.inf, enough=0.0) -> None:
        self.seconds, self.memory, self.limit, self.enough = seconds, memory, limit, enough
        self.searched: list[int] = []

    def choose(self, stages=None, batch=BATCH) -> Plan:
        evaluator = ScriptedEvaluator(
            self.planned,
            self.repriced,
            lambda plan: plan,
            lambda plan: plan.cost.seconds <= self.enough,
            "it is fast enough",
        )
        return choose_pipeline(
            stages or numbers_of_stages(MESH), batch, evaluator, self.limit, MESH.size
        )

    def planned(self, pipeline: Pipeline | None) -> Plan:
        self.searched.append(1 if pipeline is None else pipeline.order.num_stages)
        plan = self.made(pipeline)
        if plan.cost.memory_bytes > self.limit:
            raise MemoryLimitError("Too large.", plan.cost.memory_bytes)
        return plan

    def repriced(self, plan: Plan, pipeline: Pipeline) -> Plan:
        assert plan.num_ranks == MESH.size
        return self.made(pipeline)

    def made(self, pipeline: Pipeline | None) -> Plan:
        pipeline = pipeline or Pipeline(microbatches=1)
        stages, micro = pipeline.order.num_stages, pipeline.order.num_microbatches
        asked = stages, micro, pipeline.recompute
        planned = None
        if stages > 1:
            scopes = {f"layer_{stage}": stage for stage in range(stages)}
            planned = PipelinePlan(pipeline.order, scopes, pipeline.recompute)
        nothing = (0.0, 0.0, 0.0)
        cost = Cost(self.seconds(*asked), nothing, nothing, 0.0, 0.0, 1, self.memory(*asked))
        empty = Plan(MESH.sized(MESH.size // stages), (), {}, {}, (), "", findings=Findings(cost))
        return dataclasses.replace(empty, stages=planned, microbatches=micro)


def bubble(stages: int, micro: int, again: bool, sent: float = 0.4) -> float:
    """Work of 8 seconds on 8 ranks, a bubble, a price for each microbatch, and gradients."""
    work = 1 + (stages - 1) / micro
    return work * (4 / 3 if again else 1) + 0.02 * micro * (stages > 1) + sent * 8 / stages
