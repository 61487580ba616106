"""Intra-operator parallelism: planners for the layout of the ranks of one stage."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tfpar.lazy import lazy_exports

if TYPE_CHECKING:
    from tfpar.planning.intra_op.planners import PLANNERS, find_planner, make_budget
    from tfpar.planning.intra_op.rhino import RhinoPlanner
    from tfpar.planning.intra_op.tap.planner import TapPlanner

__all__ = [
    "PLANNERS",
    "RhinoPlanner",
    "TapPlanner",
    "find_planner",
    "make_budget",
]

__getattr__ = lazy_exports(
    __name__,
    {
        "tfpar.planning.intra_op.planners": ["PLANNERS", "find_planner", "make_budget"],
        "tfpar.planning.intra_op.rhino": ["RhinoPlanner"],
        "tfpar.planning.intra_op.tap.planner": ["TapPlanner"],
    },
)
