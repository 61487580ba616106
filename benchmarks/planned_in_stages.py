"""What `tap.plan` gives for a captured step by a level of Rhino's, with stages and without.

Plans without stages are searched once for each level, and those with stages are held against the
very same: a search that its time limit ends may find something else when it runs again.
"""

from __future__ import annotations

import dataclasses
import math
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tfpar.planning.problem import Problem
    from tfpar.planning.request import PlanRequest
    from tfpar.plans import Plan
    from tfpar.spec import MemoryLimitError
    from tfpar.tf.capture.step import CapturedStep

LEVELS = (2, 3)
ENOUGH = "what was found is nearly as fast as the work alone"


@dataclasses.dataclass
class Searches:
    """Searches for one captured step.

    Attributes:
        batch: its samples.
        state_ratio: bytes of slots by byte of weight.
    """

    captured: CapturedStep
    batch: int
    state_ratio: float

    def __post_init__(self) -> None:
        self._known: dict[tuple, tuple[Plan, Problem] | MemoryLimitError] = {}

    def whole(self, asked: PlanRequest, level: int) -> Plan:
        """The plan without stages or microbatches.

        Raises:
            PlanError: there is none; a MemoryLimitError if none fits.
        """
        return self._whole(asked, level)[0]

    def in_stages(self, asked: PlanRequest, level: int) -> Plan:
        """The best plan of all pipelines of a level, and of those without that any level finds.

        Raises:
            PlanError: there is none; a MemoryLimitError if none fits.
        """
        from tfpar.planning.inter_op.relaxed_estimate import RelaxedEstimate
        from tfpar.planning.inter_op.stopping import reaches_compute_bound
        from tfpar.planning.intra_op.rhino import RhinoPlanner
        from tfpar.planning.pipeline_search import PipelineScope, search_step
        from tfpar.planning.step_search import Layouts, StepSearch

        class Search(StepSearch):
            """Takes plans without stages from what is known of all levels."""

            def find_layout(self, problem: Problem, request: PlanRequest, known: Layouts) -> Plan:
                if request.pipeline is None:
                    return whole(request)
                return super().find_layout(problem, request, known)

            def estimate(self, request: PlanRequest) -> RelaxedEstimate | None:
                return super().estimate(request) if request.pipeline else None

        def whole(request: PlanRequest) -> Plan:
            return self._fastest_whole(request)[0]

        planner = RhinoPlanner(level=level)
        search = Search(self.captured, self.batch, planner, state_ratio=self.state_ratio)
        plan, _ = search_step(search, asked, PipelineScope(reaches_compute_bound, ENOUGH))
        return plan

    def _fastest_whole(self, asked: PlanRequest) -> tuple[Plan, Problem]:
        from tfpar.spec import MemoryLimitError

        found, errors = [], []
        for level in LEVELS:
            try:
                found.append(self._whole(asked, level))
            except MemoryLimitError as error:
                errors.append(error)
        if not found:
            raise min(errors, key=lambda error: error.needed_bytes)
        return min(found, key=lambda one: one[0].cost.seconds if one[0].cost else math.inf)

    def _whole(self, asked: PlanRequest, level: int) -> tuple[Plan, Problem]:
        from tfpar.spec import MemoryLimitError

        key = asked.cluster.name, asked.mesh, level
        if key not in self._known:
            try:
                self._known[key] = self._search(asked, level)
            except MemoryLimitError as error:
                self._known[key] = error
        known = self._known[key]
        if isinstance(known, MemoryLimitError):
            raise known
        return known

    def _search(self, asked: PlanRequest, level: int) -> tuple[Plan, Problem]:
        from tfpar.planning.intra_op.rhino import RhinoPlanner
        from tfpar.planning.step_search import StepSearch

        planner = RhinoPlanner(level=level)
        search = StepSearch(self.captured, self.batch, planner, state_ratio=self.state_ratio)
        return search(asked)
