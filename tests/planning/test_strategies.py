"""Pipelines that searches of strategies find for captured steps."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace

import pytest

from tests.clusters import device, two_levels
from tests.planning.problems import Captured
from tfpar.cluster import Cluster, Link
from tfpar.constraints import stage
from tfpar.cost import Cost
from tfpar.options import Options
from tfpar.pipeline import AUTO, Pipeline, generate
from tfpar.planning.incumbent import SearchInterrupted
from tfpar.planning.inter_op.strategy_search import (
    StrategyPipeline,
    in_other_microbatches,
    plans_of_layouts,
    sizes_of_stages,
    strategy_pipeline,
)
from tfpar.planning.inter_op.three_d.searches import Ranked
from tfpar.planning.inter_op.three_d.strategy import MemoryOptions, Strategy3D
from tfpar.planning.intra_op.planners import find_planner
from tfpar.planning.meshes import logical_meshes
from tfpar.planning.objective import UNCERTAINTY
from tfpar.planning.pipeline_search import ALL, search_step, select_scope
from tfpar.planning.request import PlanRequest
from tfpar.planning.step_search import StepSearch
from tfpar.plans import PipelinePlan, Plan, execution_key
from tfpar.settings import Settings
from tfpar.spec import Mesh, PlanError

PAIR = Mesh.of([2])


def machines(bandwidth: float, count: int, each: int = 1) -> Cluster:
    slow = device(1e9, 1e9, 1e9, 1e11, 1e-6)
    return two_levels("machines", count, each, slow, Link(1e9, 1e-6), Link(bandwidth, 1e-6))


def step_search(name: str = "hourglass") -> StepSearch:
    captured = Captured.saved(name)
    return StepSearch(captured.step, captured.batch, find_planner("tap"), state_ratio=2.0)


def found(search: StepSearch, request: PlanRequest, how: str = "anneal", **options: int) -> Plan:
    asked = Pipeline(AUTO, search=how, **options)
    return search_step(search, request, dataclasses.replace(ALL, strategies=asked))[0]


def planned(search: StepSearch, request: PlanRequest, one: StrategyPipeline) -> Plan:
    """The plan of one strategy."""
    asked = request.with_pipeline(one.pipeline, one.meshes)
    return search(dataclasses.replace(asked, ranks=one.ranks))[0]


def fastest_s(plan: Plan) -> float:
    """Of all that were priced: a plan without stages is taken where others are hardly faster."""
    planned = [r.cost.seconds for r in plan.findings.rivals if r.cost and not r.reason]
    return min([plan.cost.seconds, *planned])


def test_the_same_seed_finds_the_same_plan():
    plans = [found(step_search(), PlanRequest(PAIR, machines(3e6, 2)), seed=3) for _ in range(2)]
    assert plans[0].stages is not None and plans[0].stages.num_actors == 2
    assert execution_key(plans[0]) == execution_key(plans[1]) and plans[0].cost == plans[1].cost
    assert plans[0].findings.rivals[0].plan.stages is None  # it was compared with no stages


@pytest.mark.slow
@pytest.mark.parametrize(("name", "ranks"), [("wide", 4), ("gpt", 2)])
def test_annealing_is_never_worse_than_enumeration_by_what_predictions_can_tell(name, ranks):
    request = PlanRequest(Mesh.of([ranks]), machines(3e6, ranks))
    enumerated, _ = search_step(step_search(name), request, ALL)
    annealed = found(step_search(name), request)
    assert annealed.stages is not None
    assert fastest_s(annealed) <= fastest_s(enumerated) * (1 + UNCERTAINTY)


@pytest.mark.slow
def test_every_search_finds_what_fits_and_names_what_it_was_preferred_to():
    search, request = step_search(), PlanRequest(PAIR, machines(3e6, 2))
    for how in ("exhaustive", "random", "alpa", "megatron"):
        plan = found(search, request, how)
        assert plan.cost.memory_bytes <= 1e9
        assert plan.findings.rivals and all(
            rival.cost or rival.reason for rival in plan.findings.rivals
        )


def test_stages_take_ranks_in_any_order_that_a_strategy_says():
    """Copies in different machines, and the pipeline within each."""
    search, request = step_search(), PlanRequest(Mesh.of([2, 2]), machines(1e8, 2, 2))
    plan = planned(search, request, StrategyPipeline(Pipeline(2, 2), (0, 2, 1, 3)))
    assert plan.stages.ranks == (0, 2, 1, 3)


def test_a_pipeline_recomputes_the_stages_that_a_strategy_does():
    again = MemoryOptions(recompute=True)
    strategy = Strategy3D(1, 1, 1, (2,) * 4, virtual=2, memory=(again, MemoryOptions()) * 2)
    laid = {(1, 1, 1): SimpleNamespace(problem=SimpleNamespace(meshes=()))}
    found = strategy_pipeline(Ranked(strategy, 1.0), laid, 8)  # type: ignore[arg-type]
    assert found.pipeline.recompute == (0, 2) and found.pipeline.num_stages == 4
    scopes = {str(stage): stage for stage in range(4)}
    stages = PipelinePlan(generate("interleaved", 2, 4), scopes, recompute=(0, 1))
    other = in_other_microbatches(stages, 8)
    assert other.recompute == (0, 1) and other.num_stages == 4 and other.num_microbatches == 8


def test_what_is_far_by_the_table_is_not_planned(monkeypatch):
    search, request = step_search(), PlanRequest(PAIR, machines(3e6, 2))
    slow = Cost(1e6, (1e6, 0.0, 0.0), (0.0, 0.0, 0.0), 0.0, 0.0, 1)
    far = StrategyPipeline(Pipeline(2, 8), seconds=1e6, cost=slow)

    def proposals(*_):
        yield from (StrategyPipeline(None), far)

    monkeypatch.setattr("tfpar.planning.inter_op.strategy_search.propose", proposals)
    plan = found(search, request)
    assert plan.stages is None
    assert [rival.name for rival in plan.findings.rivals] == ["2 stages, 8 microbatches"]
    (rival,) = plan.findings.rivals
    assert "not planned" in rival.reason and rival.cost == slow, "with what its layers cost"


def test_constraints_on_stages_leave_no_fewer():
    search = step_search()
    hint = stage("wide_2048.*", 1)
    request = PlanRequest(PAIR, machines(3e6, 2), (hint,))
    plans = plans_of_layouts(search, request, sizes_of_stages(request))
    assert {degrees.size for degrees in plans} == {1}


def test_a_batch_of_unknown_size_is_refused():
    search, request = step_search(), PlanRequest(PAIR, machines(3e6, 2))
    search = dataclasses.replace(search, batch_size=None)
    with pytest.raises(PlanError, match=r"search='anneal' cuts a batch whose size is known"):
        found(search, request)


def test_what_leaves_no_strategy_is_said(monkeypatch):
    def proposals(*_):
        yield StrategyPipeline(None)
        raise PlanError("Nothing comes out even. Give another batch.")

    monkeypatch.setattr("tfpar.planning.inter_op.strategy_search.propose", proposals)
    plan = found(step_search(), PlanRequest(PAIR, machines(3e6, 2)))
    assert [(r.name, r.reason) for r in plan.findings.rivals] == [
        ("strategies with stages", "Nothing comes out even")
    ]


def test_an_interrupted_search_leaves_the_best_so_far(monkeypatch):
    def proposals(*_):
        yield StrategyPipeline(None)
        raise KeyboardInterrupt

    monkeypatch.setattr("tfpar.planning.inter_op.strategy_search.propose", proposals)
    with pytest.raises(SearchInterrupted) as stopped:
        found(step_search(), PlanRequest(PAIR, machines(3e6, 2)))
    assert stopped.value.plan.findings.cut_short and stopped.value.plan.stages is None


def test_auto_means_enumeration_unless_another_search_is_asked_for():
    def settings(pipeline) -> Settings:
        return Settings.of(None, (), Options(pipeline=pipeline))

    assert settings(Pipeline(AUTO)).pipeline == AUTO
    assert settings(Pipeline(AUTO)).pipeline_search is None
    asked = settings(Pipeline(AUTO, search="anneal", seed=1))
    assert asked.pipeline == AUTO and asked.pipeline_search.search == "anneal"
    scope = select_scope(asked.pipeline, asked.pipeline_search, is_constrained=False)
    assert scope.strategies is asked.pipeline_search


@pytest.mark.slow
def test_stages_that_share_machines_share_what_leaves_these():
    """Copies in two machines each: gradients of two stages cross the same links at a time."""
    search, apart = step_search("gpt"), machines(1e9, 4)
    meshes = tuple(mesh for mesh in logical_meshes(PAIR) if mesh.batch_parts == 2)

    def summing_s(cluster: Cluster, ranks: tuple[int, ...]) -> float:
        request = PlanRequest(Mesh.of([2, 2]), cluster)
        plan = planned(search, request, StrategyPipeline(Pipeline(2, 2), ranks, meshes))
        return max(share.reduction_s for share in plan.stages.cost.stages)

    standing = summing_s(machines(1e9, 2, 2), (0, 2, 1, 3))
    assert standing == pytest.approx(2 * summing_s(apart, ()), rel=0.1) and standing > 0
