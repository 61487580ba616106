"""What `tap.plan` gives for a captured step by a level of Rhino's, with stages and without.

Plans without stages are searched once for each level, and those with stages are held against the
very same: a search that its time limit ends may find something else when it runs again.
"""

from __future__ import annotations

import dataclasses
import math
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tfpar.capture.step import CapturedStep
    from tfpar.planning import Request
    from tfpar.plans import Plan
    from tfpar.search.problem import Problem
    from tfpar.spec import MemoryLimitError

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

    def whole(self, asked: Request, level: int) -> Plan:
        """The plan without stages or microbatches.

        Raises:
            PlanError: there is none; a MemoryLimitError if none fits.
        """
        return self._whole(asked, level)[0]

    def in_stages(self, asked: Request, level: int) -> Plan:
        """The best plan of all pipelines of a level, and of those without that any level finds.

        Raises:
            PlanError: there is none; a MemoryLimitError if none fits.
        """
        from tfpar.planning import StepSearch
        from tfpar.planning_pipelines import fast_as_the_work, search_pipeline
        from tfpar.search.rhino import RhinoPlanner
        from tfpar.search.stages.choice import Promise

        class Search(StepSearch):
            """Takes plans without stages from what is known of all levels."""

            def __call__(self, request: Request) -> tuple[Plan, Problem]:
                return super().__call__(request) if request.pipeline else whole(request)

            def promise(self, request: Request) -> Promise | None:
                return super().promise(request) if request.pipeline else None

        whole, planner = self._fastest_whole, RhinoPlanner(level=level)
        search = Search(self.captured, self.batch, planner, state_ratio=self.state_ratio)
        plan, _ = search_pipeline(
            search, asked, self.batch, enough=fast_as_the_work, why_enough=ENOUGH
        )
        return plan

    def _fastest_whole(self, asked: Request) -> tuple[Plan, Problem]:
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

    def _whole(self, asked: Request, level: int) -> tuple[Plan, Problem]:
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

    def _search(self, asked: Request, level: int) -> tuple[Plan, Problem]:
        from tfpar.planning import StepSearch
        from tfpar.search.rhino import RhinoPlanner

        planner = RhinoPlanner(level=level)
        search = StepSearch(self.captured, self.batch, planner, state_ratio=self.state_ratio)
        return search(asked)
