"""Plans of pipelines: ops and variables in stages, the schedule checked against what is read."""

from __future__ import annotations

import dataclasses
import functools
import itertools

import pytest

import tfpar as tap
from tests.cases import some_first
from tests.graphs import saved
from tests.pipeline.test_step_stages import Step, sent
from tests.planning.inter_op.stages.steps import Staged, machines
from tfpar.cluster import read_preset
from tfpar.cost import Cost
from tfpar.ir import FORWARD, Roles, StepGraph, planning_graph
from tfpar.pipeline import Pipeline, Schedule, assignable, generate, stages_of_step
from tfpar.planning.candidates import NewLayout
from tfpar.planning.deadline import Deadline
from tfpar.planning.inter_op.stage_planner import assign_stages
from tfpar.planning.inter_op.stages.limits import NO_LIMITS, StageLimits
from tfpar.planning.inter_op.stages.pipeline_pricing import price_best_schedule
from tfpar.planning.intra_op.planners import find_planner
from tfpar.planning.memo import Memo
from tfpar.planning.memory.stages import StagedFit
from tfpar.planning.pricing.price import price_plan
from tfpar.planning.problem import Problem
from tfpar.planning.problems import state_problem
from tfpar.planning.request import PlanRequest
from tfpar.planning.step_search import StepEvaluator, StepSearch
from tfpar.plans import Plan, plan_from_constraints
from tfpar.spec import (
    MemoryLimitError,
    Mesh,
    OtherModelError,
    PlanError,
    ScheduleError,
    SpecError,
)

CLUSTER = read_preset("dgx-a100")
MESH = Mesh.of([1, 2])


def made(step: StepGraph, pipeline: Pipeline, *constraints, **options) -> Plan:
    plan = plan_from_constraints(step.graph, MESH, gradients=step.gradients)
    return assign_stages(plan, step, pipeline, CLUSTER, constraints, **options)


def layers_in(plan: Plan, step: StepGraph) -> list[set[str]]:
    """By stage, the parts of a functional model that have weights there."""
    found: list[set[str]] = [set() for _ in range(plan.stages.num_stages)]
    for variable in step.graph.variables:
        if variable.trainable:
            found[plan.stages.owners[variable.name]].add(variable.name.partition("/")[0])
    return found


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "num_stages"),
    some_first(
        [("t5_4_layers", 4), ("unet", 2)],
        itertools.product(("gpt_5_layers", "t5_4_layers", "unet", "clip_4_layers"), (2, 4)),
    ),
)
def test_every_op_and_variable_has_a_stage(name, num_stages):
    step = saved(name)
    plan = made(step, Pipeline(num_stages, 4))
    roles = Roles.of(step.graph, step.gradient_tensors)
    ops = assignable(step.graph, roles)
    stage = stages_of_step(step.graph, roles, plan.stages.forward_stages(ops))
    assert {*stage.values()} == {*range(num_stages)}
    assert {*plan.stages.owners} == {v.name for v in step.graph.variables} == {*plan.variables}
    assert all(plan.stages.owners[v.name] == stage[v.handle.op] for v in step.graph.variables)
    assert plan.num_ranks == 2 * num_stages and plan.microbatches == 4
    assert Plan.from_json(plan.to_json()) == plan
    again = saved(name)
    fitted = plan.fitted(again.graph, gradients=again.gradients)
    assert fitted.stages == plan.stages


def test_blocks_of_a_deep_model_are_shared_out():
    step = saved("gpt_5_layers")
    plan = made(step, Pipeline(2, 4))
    first, last = layers_in(plan, step)
    assert "tokens" in first and "head" in last and first.isdisjoint(last)
    blocks = [{n.split("_")[1] for n in names if n.startswith("block")} for names in (first, last)]
    assert len(blocks[0] & blocks[1]) <= 1 and blocks[0] | blocks[1] == {*"01234"}
    assert max(blocks[0]) <= min(blocks[1])


def test_slots_lie_with_their_weights_and_a_tied_table_with_its_first_reader():
    step = saved("t5_4_layers")
    assert made(step, Pipeline(2, 4)).stages.owners["tokens/embeddings"] == 0


@pytest.mark.slow
def test_virtual_stages_are_stages():
    step = saved("gpt_5_layers")
    for name in ("interleaved", "zb-v"):
        plan = made(step, Pipeline(2, 4, name))
        assert plan.stages.num_stages == 4 and plan.num_ranks == 4
        assert {*plan.stages.owners.values()} == {0, 1, 2, 3}


def test_stages_keep_to_the_tolerance_that_is_given(caplog):
    """Rhino §5.2: those that may differ more send no more, whatever else is known of the step."""
    step, memo, moved = saved("unet"), Memo(), []
    graph = planning_graph(step.graph, step.gradients).graph
    roles = Roles.of(graph, step.gradient_tensors)
    ops = assignable(graph, roles)
    for tolerance in (None, 0.0, 0.9):
        plan = made(step, Pipeline(2, 4), limits=StageLimits(tolerance), memo=memo)
        stage = stages_of_step(graph, roles, plan.stages.forward_stages(ops))
        moved.append(sent(graph, stage, FORWARD, roles))
    usual, even, uneven = moved
    assert uneven < usual <= even
    assert not caplog.messages, "of 0, stages are as balanced as they can be"
    made(saved("recurrent"), Pipeline(4, 4), limits=StageLimits(0.1))
    (said,) = caplog.messages
    assert "times the average, more than tolerance=0.1 allows: no cut is better" in said
    assert "whose loop '" in said and "/while' cannot be cut. Loops in several layers" in said


@pytest.mark.slow
def test_each_stage_keeps_to_its_own_limit_of_memory():
    plan = searched("wide", Pipeline(2, 4))
    held = [share.peak_bytes for share in plan.stages.cost.stages]
    for stage in (0, 1):
        limits = [1e12, 1e12]
        limits[stage] = 0.7 * held[stage]
        less = searched("wide", Pipeline(2, 4), limits=StageLimits(memory_bytes=tuple(limits)))
        shares = less.stages.cost.stages
        assert [share.limit_bytes for share in shares] == [
            min(limit, CLUSTER.device.memory_bytes) for limit in limits
        ]
        assert shares[stage].peak_bytes <= limits[stage] and less.stages.cost.fits
        assert shares[1 - stage].peak_bytes > 0.7 * held[1 - stage], "the other has room"
        assert Plan.from_json(less.to_json()) == less
    with pytest.raises(MemoryLimitError):
        searched("wide", Pipeline(2, 4), limits=StageLimits(memory_bytes=(1e12, 1e3)))


def test_a_pipeline_of_one_stage_leaves_the_plan_as_it_is():
    step = saved("gpt")
    plan = plan_from_constraints(step.graph, MESH, gradients=step.gradients)
    assert assign_stages(plan, step, Pipeline(microbatches=4), CLUSTER) is plan


@pytest.mark.slow
def test_what_the_user_puts_into_a_stage_is_there():
    step = saved("gpt_5_layers")
    constraints = (tap.stage("block_[01]_.*", 0), tap.stage("block_2.*|head", 1), tap.batch("data"))
    plan = made(step, Pipeline(2, 4, recompute=True), *constraints)
    first, last = layers_in(plan, step)
    assert {n[:7] for n in first if n.startswith("block")} == {"block_0", "block_1"}
    assert {n[:7] for n in last if n.startswith("block")} == {"block_2", "block_3", "block_4"}
    assert plan.constraints == tuple(map(str, constraints[:2])) and plan.stages.recompute
    graph = planning_graph(step.graph, step.gradients).graph
    scopes = plan.stages.scopes
    assert len(scopes) < len(assignable(graph, Roles.of(graph, step.gradient_tensors))) / 3


def test_what_cannot_be_is_refused_with_its_reason():
    step = saved("gpt")
    with pytest.raises(PlanError, match="'functional_1/tokens_1.* reads what comes of"):
        made(step, Pipeline(2, 4), tap.stage("tokens", 1), tap.stage("block_0_fc1", 0))
    with pytest.raises(SpecError, match=r"stage\('blok', 1\) matches no layer or op"):
        made(step, Pipeline(2, 4), tap.stage("blok", 1))
    assert made(step, Pipeline(2, 4), tap.stage("blok", 1), part=True).stages is not None
    with pytest.raises(SpecError, match="there are 2 stages"):
        made(step, Pipeline(2, 4), tap.stage("head", 2))


def by_hand(step: Step) -> StepGraph:
    graph = step.build.graph
    return StepGraph(graph, len(graph.inputs))


def one_layer(trained: bool) -> StepGraph:
    """relu(x @ w), and if it is trained what the gradient of w takes off it."""
    step = Step()
    x, w = step.fed("x"), step.variable("w")
    h = step.op("MatMul", "m/a", x, step.read(w, "m/read"))
    y = step.op("Relu", "m/b", h)
    step.build.graph.outputs.append(y)
    if trained:
        step.assign("update", w, step.back("MatMul", "dw", x, step.back("ReluGrad", "dh", y, y)))
    return by_hand(step)


def test_a_training_step_of_fewer_parts_than_stages_says_the_most_there_can_be():
    message = (
        r"3 stages are too many.* 2 is the most there can be \('m/a', 'm/b'\).*trains needs one"
    )
    with pytest.raises(PlanError, match=message):
        made(one_layer(trained=True), Pipeline(3, 2))


def test_what_trains_nothing_runs_where_its_weights_lie():
    """Stages that have nothing to do in it stay empty; the plan names no ops."""
    lying = made(one_layer(trained=False), Pipeline(4, 2), owners={"w": 2})
    few = made(one_layer(trained=False), Pipeline(3, 2))
    for plan, owner in ((lying, 2), (few, 0)):
        assert not plan.stages.scopes and plan.stages.owners == {"w": owner}
        assert Plan.from_json(plan.to_json()) == plan
        again = one_layer(trained=False)
        assert plan.fitted(again.graph).stages == plan.stages
        stage = plan.stages.cut(again)
        assert {s for op, s in stage.items() if op.name.startswith("m/")} == {owner}
    shared_out = made(one_layer(trained=False), Pipeline(2, 2))
    assert {*shared_out.stages.scopes.values()} == {0, 1}


def test_variables_that_cannot_all_stay_where_they_lie_move():
    """Such as those of a model that was compiled again and reads them in another order."""
    step = saved("gpt")
    backwards = {"tokens/embeddings": 1, "block_0_fc1/kernel": 0}
    assert made(step, Pipeline(2, 4), owners=backwards) == made(step, Pipeline(2, 4))


def test_a_plan_without_ops_is_none_for_a_step_that_trains():
    plan = made(one_layer(trained=True), Pipeline(2, 2))
    emptied = dataclasses.replace(plan, stages=dataclasses.replace(plan.stages, scopes={}))
    with pytest.raises(OtherModelError, match="its stages say nothing of 'm/a' and 1 more"):
        emptied.fitted(one_layer(trained=True).graph)


def test_a_schedule_that_can_never_end_with_these_stages_is_refused():
    """It runs where two towers do not read of each other, and not in a chain."""
    orders = Schedule.parse("1F0,0F0,0B0,1B0\n2F0,2B0")
    chain = Step()
    x = chain.fed("x")
    for name in "abc":
        x = chain.op("Relu", f"m/{name}", x)
    chain.build.graph.outputs.append(x)
    with pytest.raises(ScheduleError, match="wait for each other: .*1F0"):
        made(by_hand(chain), Pipeline(schedule=orders))
    towers = Step()
    a = towers.op("Relu", "m/a", towers.fed("x"))
    b = towers.op("Relu", "m/b", towers.fed("y"))
    towers.build.graph.outputs.append(towers.op("AddV2", "m/c", a, b))
    fixed = tap.stage("m/a", 0), tap.stage("m/b", 1)
    plan = made(by_hand(towers), Pipeline(schedule=orders), *fixed)
    assert [*plan.stages.scopes.items()] == [("m/a", 0), ("m/b", 1), ("m/c", 2)]


# --- searched plans ---------------------------------------------------------------------------


@functools.cache
def search_of(name: str, planner: str) -> StepSearch:
    """One for all that is asked of a step: what is known of it holds for each pipeline."""
    return StepSearch(saved(name), 8, find_planner(planner), state_ratio=2.0)


def searched(
    name: str,
    pipeline: Pipeline | None,
    planner: str = "tap",
    *constraints,
    cluster=CLUSTER,
    limits=NO_LIMITS,
) -> Plan:
    request = PlanRequest(Mesh.of([1, 4]), cluster, constraints, pipeline=pipeline, limits=limits)
    plan, problem = search_of(name, planner)(request)
    assert problem.cluster.size == (4 if pipeline and pipeline.order.num_actors > 1 else 16)
    return plan


@pytest.mark.parametrize("planner", ["tap", pytest.param("rhino", marks=pytest.mark.slow)])
def test_a_searched_plan_is_that_of_a_stage_of_ranks(planner):
    plan = searched("wide", Pipeline(2, 4), planner, tap.stage("head", 1))
    assert plan.mesh.size == 4 and plan.num_ranks == 8 and plan.planner.startswith(planner)
    assert plan.stages.owners["head/kernel"] == 1 and plan.cluster == CLUSTER
    assert plan.constraints == ("stage('head', 1)",)
    plan.check_ranks(Mesh.of([2, 4]), CLUSTER)
    assert plan.cost.seconds == plan.stages.cost.seconds and len(plan.stages.cost.stages) == 2
    assert Plan.from_json(plan.to_json()) == plan
    shown = plan.summary(full=True)
    assert "are spent waiting for other stages" in shown and "In flight" in shown


@pytest.mark.slow
def test_the_fastest_schedule_is_picked_and_the_others_are_shown():
    plan = searched("wide", Pipeline(2, 8, "auto"))
    prices = {price.name: price for price in plan.stages.cost.schedules}
    assert {*prices} == {"gpipe", "1f1b", "interleaved", "zb-h1", "list"}
    first, *others = plan.stages.cost.schedules
    assert all(first.seconds <= other.seconds for other in others)
    assert first.seconds == plan.cost.seconds == plan.stages.cost.seconds
    assert first.memory_bytes == max(share.peak_bytes for share in plan.stages.cost.stages)
    if first.name != "list":
        assert plan.stages.schedule == generate(first.name, 2, 8, 1)
    for name, price in prices.items():
        if name != "list":
            alone = searched("wide", Pipeline(2, 8, name, virtual_stages=1))
            assert price.seconds == alone.cost.seconds
    assert Plan.from_json(plan.to_json()) == plan
    shown = plan.summary(full=True)
    assert f"schedule {first.name}, picked by simulation" in shown
    assert all(f"| {name} " in shown for name in prices)


def test_a_picked_schedule_keeps_to_memory_virtual_stages_and_recompute():
    staged = Staged.of("unet", 2)
    stages = dataclasses.replace(staged.plan.stages, schedule=generate("1f1b", 2, 8))
    plan = dataclasses.replace(staged.plan, stages=stages, microbatches=8)
    free = price_best_schedule(plan, staged.problem, machines())
    needed = {price.name: price.memory_bytes for price in free.stages.cost.schedules}
    limit = (needed["1f1b"] + needed["gpipe"]) / 2
    kept = price_best_schedule(plan, staged.problem, machines().with_memory(limit))
    assert kept.cost.memory_bytes <= limit < kept.stages.cost.schedules[-1].memory_bytes
    small = dataclasses.replace(kept, cluster=machines().with_memory(limit))
    assert "gpipe (does not fit)" in small.summary(full=True)
    nothing = price_best_schedule(plan, staged.problem, machines().with_memory(1.0))
    assert not nothing.stages.cost.schedules, "none fits, so that none is compared"
    assert nothing.stages.schedule == stages.schedule and not nothing.stages.cost.fits

    twice = searched("wide", Pipeline(2, 4, "auto", virtual_stages=2))
    assert twice.stages.schedule.actors in {(0, 1, 0, 1)}
    names = {price.name for price in twice.stages.cost.schedules}
    assert names == {"gpipe", "interleaved", "list"}

    again = searched("wide", Pipeline(2, 4, "auto", recompute=True))
    names = {price.name for price in again.stages.cost.schedules}
    assert names == {"gpipe", "1f1b", "interleaved", "list"} and again.stages.recompute
    tasks = [task.kind for order in again.stages.schedule.orders for task in order]
    assert {*tasks} == {"F", "B"}


def test_a_picked_schedule_of_one_stage_accumulates():
    plan = searched("wide", Pipeline(microbatches=4, schedule="auto"))
    assert plan.stages is None and plan.microbatches == 4


def test_constraints_of_stages_alone_leave_the_search_free():
    plain = searched("wide", None)
    staged = searched("wide", Pipeline(2, 1), "tap", tap.stage("head", 1))
    assert staged.mesh == plain.mesh and staged.batch_axes == plain.batch_axes
    specs = [{n: v.spec for n, v in p.variables.items()} for p in (plain, staged)]
    assert specs[0] == specs[1]


class Searched:
    """Stands for a planner that knows two plans: one with whole weights, and one that splits them
    and stores less."""

    may_recompute = False

    def __init__(self, step: str = "wide", pipeline: Pipeline = Pipeline(2, 4)) -> None:  # noqa: B008
        self.step, self.pipeline = saved(step), pipeline
        request = PlanRequest(Mesh.of([1, 4]), CLUSTER, pipeline=pipeline)
        self.problem = state_problem(self.step, request, 8, state_ratio=2.0)
        none = (0.0, 0.0, 0.0)
        whole = plan_from_constraints(self.step.graph, Mesh.of([1, 4]), [tap.replicate(".*kernel")])
        split = [tap.shard(".*kernel", 1, "model"), tap.batch("data")]
        split = plan_from_constraints(self.step.graph, Mesh.of([1, 4]), split)
        self.plans = [
            plan.with_findings(cost=Cost(1.0, none, none, 0.0, 0.0, 1, weight_bytes=stored))
            for plan, stored in ((whole, 100.0), (split, 25.0))
        ]
        self.limits: list[float] = []

    def find(self, problem: Problem) -> Plan:
        self.limits.append(problem.memory_limit)
        for plan in self.plans:
            if plan.cost.memory_bytes <= problem.memory_limit:
                return plan
        raise MemoryLimitError("none", 25.0)

    def assign(
        self, layout: Plan, before: Plan | None = None, deadline: Deadline | None = None
    ) -> Plan:
        return assign_stages(
            layout, self.step, self.pipeline, CLUSTER, before=before, deadline=deadline
        )

    def price(self, plan: Plan) -> Plan | None:
        return price_plan(plan, self.problem, self.cluster)

    def plan(self, memory: float) -> Plan:
        self.limits.clear()
        self.cluster = CLUSTER.with_memory(memory)
        return StagedFit(self).run(self.find(self.problem))


def test_a_plan_fits_where_each_stage_does():
    """What a stage stores is known once there are stages: if it is too much, the search is asked
    again with less memory, until it finds nothing."""
    search = Searched()
    search.problem = search.problem.with_step(state_ratio=0.0)  # no slots to split
    most = search.plan(1e12)
    assert len(search.limits) == 1 and most.variables["head/kernel"].why.startswith("replicate")
    needed = most.cost.memory_bytes
    assert needed == max(share.peak_bytes for share in most.stages.cost.stages)
    less = search.plan(needed * 0.6)
    assert less.variables["head/kernel"].why.startswith("shard")
    assert less.cost.memory_bytes <= needed * 0.6
    assert search.limits == [search.problem.memory_limit, pytest.approx(60.0)]
    message = r"in 2 stages: a rank of stage 0 stores .* that it may, .* 2 microbatches in flight"
    with pytest.raises(MemoryLimitError, match=message) as caught:
        search.plan(needed * 0.05)
    assert caught.value.needed_bytes == needed and len(search.limits) == 2


def test_the_stage_that_stores_too_much_is_recomputed_alone():
    search = Searched("gpt", Pipeline(3, 6))
    search.problem = search.problem.with_step(state_ratio=0.0)  # no slots to split
    shares = search.plan(1e12).stages.cost.stages
    peaks = [share.peak_bytes for share in shares]
    assert max(peaks[0], peaks[2]) < 0.7 * peaks[1] and shares[1].in_flight == 2
    search.may_recompute = True
    again = search.plan(0.99 * peaks[1])
    assert again.stages.recompute == (1,) and again.stages.cost.fits
    assert again.findings.attempts[0].name == "recompute stages"


@pytest.mark.slow
def test_where_nobody_decides_one_stage_that_is_recomputed_is_better_than_all_or_none():
    search = StepSearch(saved("gpt"), 8, find_planner("tap"), state_ratio=0.0)

    def found(memory: float, again: bool | None = None, whole: bool = False, given: bool = False):
        pipeline = Pipeline(3, 6, recompute=whole)
        cluster = CLUSTER.part(range(3)).with_memory(memory)
        asked = PlanRequest(Mesh.of([1 if given else 3]), cluster, recompute=again)
        asked = dataclasses.replace(asked, pipeline=pipeline if given else None)
        candidate = StepEvaluator(search, asked).evaluate(NewLayout(pipeline))
        assert candidate is not None
        return candidate.plan

    memory = 0.99 * found(1e12).cost.memory_bytes
    one = found(memory)
    assert one.stages.recompute == (1,)
    others = [found(memory, again=False), found(memory, whole=True), found(memory, given=True)]
    assert [other.stages.recompute for other in others] == [False, True, False]
    assert all(one.cost.seconds < other.cost.seconds for other in others)


def test_a_stage_that_stores_nothing_limits_nothing():
    class LastStoresNothing(Searched):
        def price(self, plan: Plan) -> Plan | None:
            found = super().price(plan)
            cost = found.stages.cost
            shares = (*cost.stages[:-1], dataclasses.replace(cost.stages[-1], peak_bytes=0.0))
            cost = dataclasses.replace(cost, stages=shares)
            staged = dataclasses.replace(found.stages, cost=cost)
            return dataclasses.replace(found, stages=staged)

    search = LastStoresNothing()
    search.problem = search.problem.with_step(state_ratio=0.0)  # no slots to split
    needed = search.plan(1e12).stages.cost.stages[0].peak_bytes
    assert search.plan(needed * 0.6).stages.cost.fits
    assert search.limits[1:] == [pytest.approx(60.0)]


def test_microbatches_alone_are_as_before():
    plan = searched("wide", Pipeline(microbatches=4))
    assert plan.stages is None and plan.microbatches == 4 and plan.cost is not None
