"""Frames between a search and its planner: a traceback shows the driver's loop and little else."""

from __future__ import annotations

import traceback

import pytest

from tests.graphs import BATCH, saved
from tests.planning.test_saved_graphs import SLOW
from tfpar.pipeline import Pipeline
from tfpar.planning.intra_op.tap.planner import TapPlanner
from tfpar.planning.pipeline_search import search_step
from tfpar.planning.request import PlanRequest
from tfpar.planning.step_search import StepSearch
from tfpar.spec import Mesh


class Looking(TapPlanner):
    """Writes down the functions between the search and itself."""

    def __init__(self) -> None:
        super().__init__()
        self.frames: list[list[str]] = []

    def solve(self, problem):
        names = [frame.name for frame in traceback.extract_stack()]
        self.frames.append(names[names.index("search_step") :])
        return super().solve(problem)


@pytest.mark.parametrize("pipeline", [None, Pipeline(2, 2)])
def test_a_planner_is_called_ten_frames_below_a_search_at_most(pipeline):
    planner = Looking()
    mesh = Mesh.of([2 if pipeline is None else 1])
    search = StepSearch(saved("wide"), BATCH, planner, state_ratio=2.0)
    search_step(search, PlanRequest(mesh, SLOW, pipeline=pipeline))
    assert planner.frames and max(map(len, planner.frames)) <= 10, planner.frames
    assert "search_plan" in planner.frames[0]
