"""Pipelines that recompute all stages, and then only those that have to be."""

from __future__ import annotations

import dataclasses

import pytest

from tests.planning.tiny import Step
from tfpar.cluster import Cluster, Device, Level, Node
from tfpar.ir import Gradient, StepGraph
from tfpar.pipeline import Pipeline
from tfpar.planning.candidates import FewerRecomputed, NewLayout, SolvedCandidate
from tfpar.planning.intra_op.planners import find_planner
from tfpar.planning.request import PlanRequest
from tfpar.planning.step_search import StepEvaluator, StepSearch
from tfpar.spec import Mesh

SAMPLES = 4096
LARGE = Device({"float32": 1e12}, 2**40, 1e11, 1e-6, host_bandwidth=1e9)
RECOMPUTED = NewLayout(Pipeline(2, 8, recompute=True))


def evaluator(memory_bytes: float) -> StepEvaluator:
    """Of blocks that keep 16 times what they give, on a machine whose devices have this memory, and
    one whose devices have more."""
    step = Step(SAMPLES, 32)
    x = step.x
    for i in range(8):
        x = step.dense(f"block_{i}/up", x, 512, "Relu")
        x = step.dense(f"block_{i}/down", x, 32, "Relu")
    graph = step.train(x)
    names = {variable.handle: variable.name for variable in graph.variables}
    gradients = [Gradient(names[op.inputs[0]], op.inputs[1]) for op in graph.effects]
    small = dataclasses.replace(LARGE, memory_bytes=memory_bytes)
    pair = (Level(2, 1e10, 0.0),)
    nodes = Node(small, pair), Node(LARGE, pair)
    cluster = Cluster("two memories", nodes, (Level(2, 4e9, 1e-6),))
    search = StepSearch(
        StepGraph(graph, 1, gradients=gradients), SAMPLES, find_planner("tap"), state_ratio=2.0
    )
    return StepEvaluator(search, PlanRequest(Mesh.of([4]), cluster), lambda *_: False)


@pytest.fixture(scope="module")
def recomputed() -> SolvedCandidate:
    return evaluator(2**40).evaluate(RECOMPUTED)


def fewer(recomputed: SolvedCandidate, room: float) -> tuple[SolvedCandidate, SolvedCandidate]:
    """The candidates with all and with fewer stages recomputed, where the small devices have so
    many times the memory that the first takes."""
    small = evaluator(room * recomputed.plan.stages.cost.stages[0].peak_bytes)
    base = small.evaluate(RECOMPUTED)
    found = small.evaluate(FewerRecomputed(base))
    assert found.seconds < base.seconds and found.plan.stages.cost.fits
    return base, found


def test_only_the_stage_on_small_devices_is_recomputed_and_gets_less(recomputed):
    base, found = fewer(recomputed, 1.02)
    assert base.plan.stages.recompute is True and found.plan.stages.recompute == (0,)
    all_first, first = (
        sum(stage == 0 for stage in one.plan.stages.scopes.values()) for one in (base, found)
    )
    assert first < all_first


def test_where_all_stages_fit_as_they_are_none_is_recomputed(recomputed):
    _, found = fewer(recomputed, 4.0)
    assert found.plan.stages.recompute is False
