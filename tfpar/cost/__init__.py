"""Cost: what a partitioned step takes on a cluster, in seconds and bytes."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tfpar.lazy import lazy_exports

if TYPE_CHECKING:
    from tfpar.cost.closed_form import pipeline_seconds
    from tfpar.cost.collectives import collective_seconds, lines, transfer_seconds
    from tfpar.cost.cost import Cost
    from tfpar.cost.evaluation import evaluate
    from tfpar.cost.op_compute import efficiency, flops
    from tfpar.cost.patterns import splits
    from tfpar.cost.pipeline_cost import PipelineCost, StageCost
    from tfpar.cost.pipeline_cost_model import PipelineCostModel, bottleneck_cost, staged_cost
    from tfpar.cost.pricer import Pricer
    from tfpar.cost.schedule_search import compare_schedules
    from tfpar.cost.stage_breakdown import stage_prices
    from tfpar.cost.stage_transfers import ScatterGatherCost, StageTransfers
    from tfpar.cost.sub_batch_cost import hidden_by_chunks, microbatched_cost
    from tfpar.cost.task_partition import TaskPartition
    from tfpar.cost.terms import Terms

__all__ = [
    "Cost",
    "PipelineCost",
    "PipelineCostModel",
    "Pricer",
    "ScatterGatherCost",
    "StageCost",
    "StageTransfers",
    "TaskPartition",
    "Terms",
    "bottleneck_cost",
    "collective_seconds",
    "compare_schedules",
    "efficiency",
    "evaluate",
    "flops",
    "hidden_by_chunks",
    "lines",
    "microbatched_cost",
    "pipeline_seconds",
    "splits",
    "stage_prices",
    "staged_cost",
    "transfer_seconds",
]

__getattr__ = lazy_exports(
    __name__,
    {
        "tfpar.cost.closed_form": ["pipeline_seconds"],
        "tfpar.cost.collectives": ["collective_seconds", "lines", "transfer_seconds"],
        "tfpar.cost.cost": ["Cost"],
        "tfpar.cost.evaluation": ["evaluate"],
        "tfpar.cost.sub_batch_cost": ["hidden_by_chunks", "microbatched_cost"],
        "tfpar.cost.op_compute": ["efficiency", "flops"],
        "tfpar.cost.patterns": ["splits"],
        "tfpar.cost.pipeline_cost": ["PipelineCost", "StageCost"],
        "tfpar.cost.pipeline_cost_model": ["PipelineCostModel", "bottleneck_cost", "staged_cost"],
        "tfpar.cost.pricer": ["Pricer"],
        "tfpar.cost.schedule_search": ["compare_schedules"],
        "tfpar.cost.stage_transfers": ["ScatterGatherCost", "StageTransfers"],
        "tfpar.cost.stage_breakdown": ["stage_prices"],
        "tfpar.cost.task_partition": ["TaskPartition"],
        "tfpar.cost.terms": ["Terms"],
    },
)
