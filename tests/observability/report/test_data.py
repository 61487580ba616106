"""The data of a plan's views: layers add up to the plan; it is written and read again."""

from __future__ import annotations

import dataclasses
import functools
import json
from collections import Counter

import pytest

from tests.graphs import saved
from tests.plan.graphs import partition, placeholder, read, variable
from tfpar.cluster import find_cluster
from tfpar.ir import DType, GraphBuilder, ModelLayer
from tfpar.observability.report.data.build import build_report
from tfpar.observability.report.data.schema import Report, read_report
from tfpar.observability.report.summary import summary
from tfpar.pipeline import Pipeline
from tfpar.planning import PlanRequest, StepSearch, attach_partitioned
from tfpar.planning.intra_op import find_planner
from tfpar.plans import Plan, plan_from_constraints
from tfpar.spec import Mesh, PlanError, Shard, format_spec, replicated_spec


@functools.cache
def search_of(name: str) -> StepSearch:
    """TAP's planner for a saved step: one for all that is asked of it."""
    step = saved(name)
    batch = step.graph.inputs[0].shape[0]
    return StepSearch(step, batch, find_planner("tap", None), state_ratio=2.0)


def planned(name: str, mesh: list[int], cluster: str, pipeline: Pipeline | None = None) -> Plan:
    whole = Mesh.of(mesh)
    stages = 1 if pipeline is None else pipeline.order.num_actors
    request = PlanRequest(
        whole.sized(whole.size // stages),
        find_cluster(cluster, whole),
        pipeline=pipeline,
    )
    return attach_partitioned(*search_of(name)(request), request.cluster)


PLANS = {
    "gpt": lambda: planned("gpt_50257_words", [1, 2], "rhino-m8"),
    "a step in microbatches": lambda: planned(
        "gpt", [1, 2], "v100-ethernet", Pipeline(microbatches=2)
    ),
    "stages": lambda: planned("gpt", [2, 2], "v100-ethernet", Pipeline(stages=2, microbatches=4)),
    "two stages a rank": lambda: planned(
        "gpt",
        [2, 2],
        "v100-ethernet",
        Pipeline(stages=4, microbatches=4, schedule="interleaved"),
    ),
    "convolutions": lambda: planned("convolutions", [2], "v100-ethernet"),
    "a large model": lambda: planned("gpt_medium", [1, 4], "rhino-m8"),
    "many stages": lambda: planned(
        "gpt_5_layers",
        [2, 2],
        "v100-ethernet",
        Pipeline(stages=4, microbatches=4, schedule="interleaved"),
    ),
    "residual blocks": lambda: planned("resnet", [4], "v100-ethernet"),
    "a wide head": lambda: planned("gpt_wide", [1, 4], "rhino-m8"),
}
AT_NIGHT = ("a large model", "many stages", "residual blocks", "a wide head")


@functools.cache
def plan_of(name: str) -> Plan:
    """Each plan is searched once."""
    return PLANS[name]()


SLOW = ("a step in microbatches", "stages")


def marks(name: str) -> list[pytest.MarkDecorator]:
    return [pytest.mark.nightly] * (name in AT_NIGHT) + [pytest.mark.slow] * (name in SLOW)


@pytest.fixture(params=[pytest.param(name, marks=marks(name)) for name in PLANS])
def plan(request) -> Plan:
    return plan_of(request.param)


def report(plan: Plan) -> Report:
    return build_report(plan, plan.partitioned)


@pytest.mark.slow
def test_the_parts_of_a_step_add_up_to_it(plan):
    cost = report(plan).cost
    assert sum(part.seconds for part in cost.parts) == pytest.approx(plan.cost.seconds)
    assert cost.memory.total == pytest.approx(plan.cost.memory_bytes)


def test_waiting_for_the_host_is_a_part_of_a_step():
    plan = plan_of("gpt")
    waited = dataclasses.replace(plan.cost, seconds=plan.cost.seconds + 1, host_wait_s=1.0)
    slow = plan.with_findings(cost=waited)
    parts = {part.name: part.seconds for part in report(slow).cost.parts}
    assert parts["host"] == 1.0 and sum(parts.values()) == pytest.approx(waited.seconds)
    assert "for 1.00 s devices wait for their host to issue ops" in slow.summary()
    assert "host" not in {part.name for part in report(plan).cost.parts}


def test_layers_add_up_to_the_time_and_bytes_of_the_plan(plan):
    found = report(plan)
    layers = found.layers
    fullest = layers
    if plan.stages is not None:
        actors = plan.stages.schedule.actors
        busy = Counter()
        for layer in layers:
            busy[actors[layer.stage]] += layer.total_s
        most = max(busy, key=busy.__getitem__)
        layers = [layer for layer in layers if actors[layer.stage] == most]
        holding = actors[plan.stages.cost.fullest]
        fullest = [layer for layer in found.layers if actors[layer.stage] == holding]
    waits = {"bubble", "transfers", "start", "hidden"}
    parts = sum(part.seconds for part in found.cost.parts if part.name not in waits)
    assert sum(layer.total_s for layer in layers) == pytest.approx(parts, rel=1e-6)
    stored = sum(layer.memory.total for layer in fullest)
    assert stored == pytest.approx(plan.cost.memory_bytes, rel=1e-3)


def test_collectives_are_those_of_the_program(plan):
    found: Counter = Counter()
    size: Counter = Counter()
    for one in report(plan).collectives:
        found[one.kind, one.axes] += one.count
        size[one.kind, one.axes] += one.num_bytes
    expected: Counter = Counter()
    bytes_: Counter = Counter()
    for kind, axes, num_bytes in plan.partitioned.collectives():
        expected[kind, axes] += 1
        bytes_[kind, axes] += num_bytes
    assert found == expected and size == bytes_


@pytest.mark.slow
def test_what_is_written_is_read_again(plan, tmp_path):
    found = report(plan)
    assert read_report(json.loads(json.dumps(plan.report_data())), "x") == found
    plan.save(tmp_path / "p.json")
    again = Plan.load(tmp_path / "p.json")
    assert again == plan and again.partitioned is None
    assert build_report(again) == found
    for sort in (None, "time", "memory"):
        assert again.summary(sort=sort) == plan.summary(sort=sort)
    assert again.summary(full=True) == plan.summary(full=True)
    layer = found.layers[2].path
    assert again.explain(layer) == plan.explain(layer)


def test_paths_are_kerass_own_and_unique():
    layers = report(plan_of("gpt")).layers
    paths = [layer.path for layer in layers]
    assert len(set(paths)) == len(paths)
    weighted = [layer for layer in layers if layer.weights]
    for layer in weighted:
        assert "functional" not in layer.path, layer.path
    variables = report(plan_of("gpt")).variables
    for found in variables:
        if found.kind == "weight":
            assert found.path.startswith(found.layer), found


def test_blocks_that_repeat_are_told_apart():
    layers = report(plan_of("gpt")).layers
    blocks = {layer.repeat.block for layer in layers if layer.repeat}
    assert blocks
    for block in blocks:
        members = [layer for layer in layers if layer.repeat and layer.repeat.block == block]
        assert {layer.repeat.instance for layer in members} == set(range(members[0].repeat.of))
        assert "*" in members[0].repeat.name


def test_a_layer_has_the_class_and_the_line_that_the_model_tells():
    plan = plan_of("gpt")
    path = next(layer.path for layer in report(plan).layers if layer.weights)
    known = plan.of_model([ModelLayer("gpt", "Functional"), ModelLayer(path, "Own", "a.py:3")])
    found = report(known)
    assert (found.facts.model, found.facts.model_class) == ("gpt", "Functional")
    layer = next(layer for layer in found.layers if layer.path == path)
    assert (layer.class_name, layer.source) == ("Own", "a.py:3")
    assert "made in a.py:3" in known.explain(path) and f"{path} (Own)" in known.summary(full=True)


@pytest.mark.slow
def test_tasks_of_a_pipeline_run_in_the_time_of_the_step():
    for name in ("stages", "two stages a rank"):
        plan = plan_of(name)
        pipeline = report(plan).pipeline
        kinds = Counter(task.kind for task in pipeline.tasks)
        assert kinds["F"] == plan.stages.num_stages * plan.microbatches
        assert kinds["U"] == plan.stages.num_stages
        ends = max(task.end for task in pipeline.tasks)
        assert ends == pytest.approx(plan.cost.seconds - plan.cluster.step_s)
        for task in pipeline.tasks:
            assert task.start <= task.end and task.actor == pipeline.actor_of_stage[task.stage]


def test_baselines_are_candidates():
    found = {c.name: c for c in report(plan_of("gpt")).candidates if c.kind == "baseline"}
    assert set(found) == {"one device", "data parallel", "lower bound"}
    own = next(c for c in report(plan_of("gpt")).candidates if c.kind == "plan")
    assert own.seconds < found["one device"].seconds and own.fits
    assert found["data parallel"].memory_bytes > 0
    bound = found["lower bound"].seconds
    assert bound == plan_of("gpt").bound.seconds <= own.seconds
    assert f"{own.seconds / bound:.3g} times as long as the best" in plan_of("gpt").summary()


def test_a_summary_has_forty_lines_at_most(plan):
    lines = plan.summary().splitlines()
    assert len(lines) <= 40
    assert max(len(line) for line in lines if line.startswith(("|", "+"))) <= 120


def test_the_largest_layers_come_first_where_that_is_asked_for():
    found = report(plan_of("gpt"))
    for sort, key in (
        ("time", lambda layer: layer.total_s),
        ("memory", lambda layer: layer.memory.total),
    ):
        dearest = max((layer for layer in found.layers if layer.weights), key=key)
        table = summary(found, full=True, sort=sort).split("Layers (")[1].splitlines()
        assert table[4].startswith(f"| {dearest.path} "), sort


@pytest.mark.parametrize(
    ("changed", "match"),
    [
        ({"version": 99}, "has the version 99; this tfpar reads 1. Make the plan again"),
        ({"format": "other"}, "holds no report"),
        ({"layers": [{"path": 3}]}, r"malformed: .*layers\[0\]"),
        ({"cost": "much"}, r"malformed: .*cost"),
    ],
)
def test_a_report_that_cannot_be_read_says_why(changed, match):
    data = {**plan_of("gpt").report_data(), **changed}
    with pytest.raises(PlanError, match=match):
        read_report(data, "p.json")


def test_a_layer_that_is_called_twice_is_one():
    build = GraphBuilder()
    x = placeholder(build, (8, 6), "float32", "x")
    build.graph.inputs.append(x)
    kernel = variable(build, "twice/kernel", (6, 6))
    attrs = {"T": DType("float32"), "transpose_a": False, "transpose_b": False}
    for call in ("net/twice_1", "net/twice_2"):
        build.name = call
        x = build.one("MatMul", (x, read(build, kernel)), (8, 6), "float32", attrs)
    build.name = "loss"
    build.graph.outputs.append(build.reduce("Sum", x, [0, 1]))
    plan = plan_from_constraints(build.graph, Mesh.of([2]))
    found = build_report(plan, partition(build.graph, plan))
    (layer,) = (layer for layer in found.layers if layer.weights)
    assert (layer.path, layer.weights, layer.kind) == ("twice", 36, "MatMul")
    assert all(flow.source != flow.target for flow in found.flows)


def test_a_plan_that_was_changed_is_not_shown_by_the_report_of_what_it_was(tmp_path):
    plan = plan_of("gpt")
    plan.save(tmp_path / "p.json")
    saved = Plan.load(tmp_path / "p.json")
    assert build_report(saved).layers
    name, variable = next((n, v) for n, v in saved.variables.items() if v.spec is not None)
    whole = dataclasses.replace(variable, spec=replicated_spec(saved.mesh.num_axes))
    split = dataclasses.replace(variable, spec=(Shard(0), *whole.spec[1:]))
    other = split if variable.spec == whole.spec else whole
    changed = dataclasses.replace(saved, variables={**saved.variables, name: other})
    for one in (changed, dataclasses.replace(saved, microbatches=2)):
        assert not build_report(one).layers
    (told,) = (v for v in build_report(changed).variables if v.path == name)
    assert told.spec == format_spec(other.spec)
