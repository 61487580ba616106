"""Inter-operator parallelism: the pipeline of a step and its machines (auto3d §4, Rhino §5)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tfpar.lazy import lazy_exports

if TYPE_CHECKING:
    from tfpar.planning.inter_op.stage_planner import assign_stages
    from tfpar.planning.inter_op.stages.unit_builder import assign_step
    from tfpar.planning.inter_op.three_d.cost_table import LayerLayout
    from tfpar.planning.inter_op.turning_points import break_even_batch

__all__ = [
    "LayerLayout",
    "assign_stages",
    "assign_step",
    "break_even_batch",
]

__getattr__ = lazy_exports(
    __name__,
    {
        "tfpar.planning.inter_op.stage_planner": ["assign_stages"],
        "tfpar.planning.inter_op.stages.unit_builder": ["assign_step"],
        "tfpar.planning.inter_op.three_d.cost_table": ["LayerLayout"],
        "tfpar.planning.inter_op.turning_points": ["break_even_batch"],
    },
)
