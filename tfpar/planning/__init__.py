"""Planning: from a captured step to its plan.

request, problems     what is asked, and what a planner then solves, as values
drive, candidates     the loop over candidates: propose, lay out, fit, price, keep the best
step_search           makes candidates of proposals, for one step
pipeline_search       picks the outer search: the pipeline that is given, or all
solve                 one problem: cache, planner, Ctrl-C
intra_op, inter_op    planners of layouts; searches of pipelines
memory                the loop over named moves that make a plan fit
pricing               the one price of a plan
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from tfpar.lazy import lazy_exports

if TYPE_CHECKING:
    from tfpar.planning.completion import attach_partitioned
    from tfpar.planning.objective import UNCERTAINTY, Budget
    from tfpar.planning.problem import step_anchors
    from tfpar.planning.request import PlanRequest
    from tfpar.planning.solve import find_plan
    from tfpar.planning.step_search import StepSearch

__all__ = [
    "UNCERTAINTY",
    "Budget",
    "PlanRequest",
    "StepSearch",
    "attach_partitioned",
    "find_plan",
    "step_anchors",
]

__getattr__ = lazy_exports(
    __name__,
    {
        "tfpar.planning.completion": ["attach_partitioned"],
        "tfpar.planning.objective": ["Budget", "UNCERTAINTY"],
        "tfpar.planning.problem": ["step_anchors"],
        "tfpar.planning.request": ["PlanRequest"],
        "tfpar.planning.solve": ["find_plan"],
        "tfpar.planning.step_search": ["StepSearch"],
    },
)
