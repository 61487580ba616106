"""Memory move that recomputes stages: those of the ranks that store too much, as few as it takes.

A stage that is computed again keeps of a microbatch in flight what it was sent alone, but holds all
of the one whose backward pass runs. So of f in flight it stores about f - 1 less, for a forward
pass more in each microbatch. In 1F1B the first stages have the most in flight: often it is enough
to recompute these.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterator, Sequence
from typing import Protocol

from tfpar.cost.pipeline_cost import StageCost
from tfpar.pipeline.recompute import recompute_of, recomputes
from tfpar.planning.memory.fit import MemoryFit, MoveEstimate
from tfpar.planning.pricing.price import pipeline_cost_of
from tfpar.plans import Plan


class StagePricer(Protocol):
    """Prices plans in stages."""

    def price(self, plan: Plan) -> Plan | None:
        """Price a plan in stages; None if the step has no price."""
        ...


@dataclasses.dataclass(frozen=True)
class RecomputeStages:
    """Stages of full ranks, computed again: as many as it takes, those first that take least time
    for a byte. Schedules that halve backward passes stay as they are: each half would compute a
    stage again."""

    step: StagePricer
    name: str = "recompute stages"

    def estimate(self, fit: MemoryFit) -> MoveEstimate:
        """Estimate what the fullest ranks compute again, as far as they do not wait meanwhile for
        the busiest. Where that is not enough, other moves come first."""
        plan = fit.best()
        staged = pipeline_cost_of(plan)
        fullest = staged.stages[staged.fullest]
        picked = _picked(plan, fullest.ranks)
        if not picked:
            return MoveEstimate(math.inf)
        busy = {share.ranks: staged.seconds / (1 + share.bubble) for share in staged.stages}
        added = sum(plan.microbatches * staged.stages[stage].forward_s for stage in picked)
        added -= max(busy.values()) - busy[fullest.ranks]
        return MoveEstimate(max(0.0, added) / sum(_freed(staged.stages[s]) for s in picked))

    def plans(self, fit: MemoryFit) -> Iterator[Plan]:
        """Yield ever more stages computed again, of the plan that lacks least of those in which
        that helps, until all fits."""
        for plan in fit.misses():
            more = _with_more_recomputed(plan)
            while more is not None:
                priced = self.step.price(more)
                if priced is None:
                    return
                yield priced
                more = None if fit.fits(priced) else _with_more_recomputed(priced)
                if more is None:
                    return


def _with_more_recomputed(plan: Plan) -> Plan | None:
    """Return the plan with stages of all ranks that store too much recomputed, not priced yet; None
    if that is not enough for some."""
    stages = plan.stages
    assert stages is not None, "a plan with stages"
    full = {share.ranks for share in pipeline_cost_of(plan).stages if share.excess_bytes > 0}
    picked = [_picked(plan, ranks) for ranks in full]
    if not picked or not all(picked):
        return None
    known = [s for s in range(stages.num_stages) if recomputes(stages.recompute, s)]
    recompute = recompute_of([*known, *(s for one in picked for s in one)], stages.num_stages)
    return dataclasses.replace(
        plan, stages=dataclasses.replace(stages, recompute=recompute, cost=None)
    )


def _picked(plan: Plan, ranks: Sequence[int]) -> list[int]:
    """Choose the stages that these ranks are to compute again: those that take least time for each
    byte, as many as free what the ranks lack; none where all of them would not."""
    stages, costs = plan.stages, pipeline_cost_of(plan).stages
    assert stages is not None, "a plan with stages"
    freeing = [
        stage
        for stage, share in enumerate(costs)
        if share.ranks == ranks
        and _freed(share)
        and not recomputes(stages.recompute, stage)
        and stage not in stages.schedule.halved_stages
    ]
    freeing.sort(key=lambda stage: costs[stage].forward_s / _freed(costs[stage]))
    freed = [*itertools.accumulate(_freed(costs[stage]) for stage in freeing)]
    for number, (stage, bytes_freed) in enumerate(zip(freeing, freed, strict=True), 1):
        if bytes_freed >= costs[stage].excess_bytes:
            return freeing[:number]
    return []


def _freed(share: StageCost) -> float:
    """The bytes, about, that a rank stores less if a stage is computed again."""
    return share.kept_bytes * max(0, share.in_flight - 1)
