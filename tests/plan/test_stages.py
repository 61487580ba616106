"""What a plan says of stages: a short table that gives every op its stage back, and a file."""

import dataclasses
import itertools
import json
import random

import pytest

from tests.cases import some_first
from tests.graphs import saved
from tests.plan.graphs import mlp
from tests.planning.inter_op.stages.test_unit_builder import seconds
from tfpar.ir import Op, Roles, planning_graph
from tfpar.pipeline import (
    FAMILIES,
    RecomputeOf,
    Schedule,
    assignable,
    generate,
    name_of,
    stages_of_step,
)
from tfpar.planning.inter_op import assign_step
from tfpar.plans import PipelinePlan, Plan, plan_from_constraints
from tfpar.spec import ArgumentError, Mesh, OtherModelError, PlanError

MESH = Mesh.of([1, 2])
SCHEDULE = generate("1f1b", 2, 4)


def op(name: str) -> Op:
    return Op(name, "Relu")


# --- the table --------------------------------------------------------------------------------


MODELS = ("gpt_5_layers", "t5_4_layers", "unet", "resnet", "clip_4_layers", "gshard_moe")


@pytest.mark.parametrize(
    ("name", "num_stages"),
    some_first([("gpt_5_layers", 2), ("unet", 4)], itertools.product(MODELS, (2, 4))),
)
def test_a_model_gets_its_stages_back_from_a_short_table(name, num_stages):
    step = saved(name)
    graph = planning_graph(step.graph, step.gradients).graph
    roles = Roles.of(graph, step.gradient_tensors)
    units, found = assign_step(graph, roles, seconds, num_stages)
    forward = units.forward_stages(found.stages)
    planned = PipelinePlan.of(generate("1f1b", num_stages, 4), forward)
    assert planned.forward_stages(assignable(graph, roles)) == forward
    assert stages_of_step(graph, roles, planned.forward_stages(forward)) == stages_of_step(
        graph, roles, forward
    )
    assert len(planned.scopes) < len(forward) / 2
    in_order = [*planned.scopes.values()] == sorted(planned.scopes.values())
    assert in_order or (name, num_stages) != ("gpt_5_layers", 2)


@pytest.mark.parametrize("name", ["gpt", "unet"])
def test_any_cut_of_a_model_comes_back(name):
    """Be it amid a layer."""
    step = saved(name)
    graph = planning_graph(step.graph, step.gradients).graph
    ops = assignable(graph, Roles.of(graph, step.gradient_tensors))
    for seed in range(5):
        rng = random.Random(seed)
        cuts = sorted(rng.sample(range(1, len(ops)), 2))
        forward = {op: sum(cut <= i for cut in cuts) for i, op in enumerate(ops)}
        planned = PipelinePlan.of(generate("gpipe", 3, 2), forward)
        assert planned.forward_stages(ops) == forward


def tables(stages: dict[str, int]):
    """All tables that are allowed: of scopes whose ops are in one stage, and of ops."""
    under: dict[str, set[int]] = {}
    for name, stage in stages.items():
        parts = name.split("/")
        for i in range(1, len(parts) + 1):
            under.setdefault("/".join(parts[:i]), set()).add(stage)
    allowed = {n: min(found) for n, found in under.items() if len(found) == 1} | stages
    for count in range(len(allowed) + 1):
        for names in itertools.combinations(allowed, count):
            yield {name: allowed[name] for name in names}


def test_no_table_is_smaller():
    """Of names that are parts of each other, too."""
    rng = random.Random(7)
    sizes = set()
    for _ in range(150):
        names = {
            "/".join(rng.choice("ab") for _ in range(rng.randint(1, 3)))
            for _ in range(rng.randint(2, 6))
        }
        stages = {name: rng.randint(0, 1) for name in sorted(names)}
        if len({*stages.values()}) < 2:
            continue
        forward = {op(name): stage for name, stage in stages.items()}
        planned = PipelinePlan.of(SCHEDULE, forward)
        assert planned.forward_stages(forward) == forward
        smallest = next(
            table
            for table in tables(stages)
            if {*table.values()} == {0, 1}
            and PipelinePlan(SCHEDULE, table).forward_stages(forward) == forward
        )
        assert len(planned.scopes) == len(smallest)
        sizes.add(len(smallest))
    assert {2, 3, 4} <= sizes


def test_the_longest_scope_decides_on_whole_parts_of_a_name():
    scopes = {"m/block_1": 0, "m/block_1/fc/MatMul": 1, "m/block_12": 1}
    planned = PipelinePlan(SCHEDULE, scopes)
    named = [op(name) for name in ("m/block_1/x", "m/block_1/fc/MatMul", "m/block_12/x")]
    others = [op(name) for name in ("m/block_13/x", "m/block", "m", "block_1/x")]
    assert [*planned.forward_stages([*named, *others]).items()] == [
        *zip(named, (0, 1, 1), strict=True)
    ]


def reading(name: str, *makers: Op) -> Op:
    found = op(name)
    found.add_output((2,), "float32")
    found.inputs = [maker.outputs[0] for maker in makers]
    return found


def test_what_lies_in_no_scope_goes_with_what_it_reads_or_what_reads_it():
    """Labels are masked before the loss reads them; a metric comes of the outputs."""
    labels = reading("Placeholder")
    hidden = reading("m/hidden")
    mask = reading("Less", labels)
    both = reading("LogicalAnd", mask)
    outputs = reading("m/outputs", hidden)
    loss = reading("compile_loss/loss", outputs, both)
    metric = reading("Equal", hidden)
    ops = [hidden, mask, both, outputs, loss, metric]
    planned = PipelinePlan(SCHEDULE, {"m/hidden": 0, "m/outputs": 1, "compile_loss": 1})
    expected = {hidden: 0, mask: 1, both: 1, outputs: 1, loss: 1, metric: 0}
    assert planned.forward_stages(ops) == expected
    assert PipelinePlan.of(SCHEDULE, expected).scopes == planned.scopes
    elsewhere = PipelinePlan.of(SCHEDULE, {**expected, metric: 1})
    assert elsewhere.scopes == {**planned.scopes, "Equal": 1}
    assert elsewhere.forward_stages(ops)[metric] == 1


def test_what_reads_weights_alone_goes_with_them():
    handle = Op("handle", "Placeholder")
    handle.add_output((2,), "resource")
    value, again = Op("m/fc/read", "ReadVariableOp"), Op("read", "ReadVariableOp")
    for read in (value, again):
        read.inputs = [handle.outputs[0]]
        read.add_output((2,), "float32")
    layer, penalty = reading("m/fc/MatMul", value), reading("L2Loss", again)
    loss = reading("compile_loss/Sum", layer)
    total = reading("AddN", loss, penalty)
    planned = PipelinePlan(SCHEDULE, {"m": 0, "compile_loss": 1})
    ops = [layer, penalty, loss, total]
    assert [*planned.forward_stages(ops).values()] == [0, 0, 1, 1]


def test_no_op_is_in_an_earlier_stage_than_what_it_reads():
    """Whatever a name says that was counted up for another op."""
    first = reading("m/first")
    second = reading("m/second", first)
    third = reading("Add_1", second)
    planned = PipelinePlan(SCHEDULE, {"m/first": 0, "m/second": 1, "Add_1": 0})
    assert [*planned.forward_stages([first, second, third]).values()] == [0, 1, 1]


@pytest.mark.parametrize(
    ("scopes", "names", "expected"),
    [
        (["net_1/a", "net_1/b"], ["net_1/a/x", "net_1/b/x"], ["net_1/a", "net_1/b"]),
        (["net_1/a", "net_1/b"], ["net_5_1/a/x", "net_5_1/b/x"], ["net_5_1/a", "net_5_1/b"]),
        (["net_1/a", "loss"], ["other/a/x", "loss/x"], ["other/a", "loss"]),
        (["f_1/a", "f_3/b"], ["f_3/a/x", "f_5/b/x"], ["f_3/a", "f_5/b"]),
        (["f_1", "Add"], ["f_2/a", "Add"], ["f_2", "Add"]),
        (["one/a", "two/b"], ["first/a/x", "last/b/x"], None),
        (["net/a", "net/b"], ["net/a/x", "head/x"], None),
    ],
)
def test_stages_fit_models_of_other_names(scopes, names, expected):
    planned = PipelinePlan(SCHEDULE, dict(zip(scopes, (0, 1), strict=True)))
    ops = [op(name) for name in names]
    if expected is None:
        with pytest.raises(OtherModelError, match="its stages say nothing of '.*Build the model"):
            planned.fitted(ops)
    else:
        assert [*planned.fitted(ops).scopes] == expected


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"scopes": {"a": 0, "b": 2}}, "scope 'b' into stage 2; its schedule has 2 stages"),
        ({"scopes": {"a": 0}}, "no ops into stage 1; its schedule has 2 stages"),
        ({"scopes": {"a": 0, "b": -1}}, "stage of scope 'b' is -1"),
        ({"scopes": {"": 0, "b": 1}}, "name of a scope is ''"),
        ({"owners": {"kernel": 2}}, "variable 'kernel' into stage 2"),
        ({"owners": {"kernel": 0.5}}, "stage of variable 'kernel' is 0.5"),
        ({"recompute": 1}, "recompute is 1; it must be True or False"),
        ({"recompute": (0, 2)}, r"recompute is \(0, 2\); .* stages from 0 to 1"),
    ],
)
def test_stages_that_cannot_be_are_refused(fields, message):
    with pytest.raises((PlanError, ArgumentError), match=message):
        PipelinePlan(SCHEDULE, **{"scopes": {"a": 0, "b": 1}, **fields})


# --- in a plan --------------------------------------------------------------------------------


def forward_ops(graph):
    return [op for op in graph.ops if op.name.startswith("mlp/")]


def staged(schedule: Schedule = SCHEDULE, recompute: RecomputeOf = False, **changes) -> Plan:
    """Block 0 in stage 0, the head in the last."""
    graph = mlp(momentum=True)
    last = schedule.num_stages - 1
    ops = [op for op in forward_ops(graph) if "head" not in op.name]
    forward = {op: i * last // len(ops) for i, op in enumerate(ops)}
    forward.update((op, last) for op in forward_ops(graph) if op not in forward)
    owners = {v.name: last if "head" in v.name else 0 for v in graph.variables}
    stages = PipelinePlan.of(schedule, forward, recompute, owners)
    fields = {"microbatches": schedule.num_microbatches, "stages": stages, **changes}
    return dataclasses.replace(plan_from_constraints(graph, MESH), **fields)


def test_the_mesh_of_a_plan_is_that_of_one_stage():
    plan = staged()
    assert plan.mesh.size == 2 and plan.num_ranks == 4 and plan.in_microbatches
    assert plan.whole_mesh == Mesh.of([2, 2]) and plan.whole_mesh.sized(2) == plan.mesh
    plan.check_ranks(Mesh.of([4]))
    with pytest.raises(
        PlanError, match=r"for 4 ranks \(.* for each of 2 sets of ranks\), not .* 2 "
    ):
        plan.check_ranks(MESH)
    virtual = staged(generate("interleaved", 2, 4))
    assert virtual.stages.num_stages == 4 and virtual.num_ranks == 4
    alone = plan_from_constraints(mlp(), MESH)
    assert alone.num_ranks == 2 and alone.whole_mesh == MESH and not alone.in_microbatches


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("recompute", [False, True, (1,)])
def test_a_file_keeps_the_stages(name, recompute, tmp_path):
    plan = staged(generate(name, 2, 3), recompute)
    plan.save(tmp_path / "plan.json")
    loaded = Plan.load(tmp_path / "plan.json")
    assert loaded == plan and loaded.to_json() == plan.to_json() and not loaded.diff(plan)
    assert [*loaded.stages.scopes] == [*plan.stages.scopes]
    lines = (tmp_path / "plan.json").read_text().splitlines()
    assert f'      "{plan.stages.schedule}"'.split("\n")[0] in "\n".join(lines)
    assert sum('"mlp/head": ' in line for line in lines) == 1


def test_a_file_without_stages_has_none():
    plan = plan_from_constraints(mlp(), MESH)
    fields = json.loads(plan.to_json())
    assert fields["stages"] is None
    del fields["stages"]
    assert Plan.from_json(json.dumps(fields)) == plan


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda p: p.update(stages=[]), r"malformed: stages is \[\]; it must be an object"),
        (lambda p: p.update(microbatches=3), "has 3 microbatches, but its schedule 4"),
        (lambda p: p.update(chunks=2), "chunks or stages, not both"),
        (lambda p: p["stages"].pop("schedule"), "stages.schedule is missing"),
        (lambda p: p["stages"].update(schedule="0F0"), "stages.schedule is '0F0'"),
        (
            lambda p: p["stages"].update(schedule=["0F0", 1]),
            r"stages.schedule\[1\] is 1; it must be a string",
        ),
        (lambda p: p["stages"].update(schedule=["0F0,0X0"]), "line 1, cell 2: cannot read '0X0'"),
        (lambda p: p["stages"].update(schedule=["0F0"]), "lacks 0B0"),
        (lambda p: p["stages"]["scopes"].update({"mlp/head": 7}), "'mlp/head' into stage 7"),
        (lambda p: p["stages"]["scopes"].update({"mlp/head": "1"}), "is '1'"),
        (lambda p: p["stages"]["owners"].update({"tail": 0}), "does not have: 'tail'"),
        (lambda p: p["stages"].update(cost=1), "stages.cost is 1"),
        (
            lambda p: p["stages"].update(cost={"seconds": 1.0, "bubble": 0.0, "stages": []}),
            "prices of 0 stages, but 2 stages",
        ),
        (lambda p: p["stages"].update(recompute=0), "stages.recompute is 0"),
        (lambda p: p["stages"].update(recompute=[2]), r"recompute is \(2,\)"),
    ],
)
def test_what_is_wrong_with_stages_in_a_file_is_named(change, message):
    fields = json.loads(staged().to_json())
    change(fields)
    with pytest.raises(PlanError, match=message):
        Plan.from_json(json.dumps(fields))


def test_a_plan_keeps_its_stages_for_other_names_and_for_a_part_of_the_step():
    plan = staged()
    fitted = plan.fitted(mlp(momentum=True, prefix="net/"))
    assert fitted.stages.scopes == plan.stages.scopes
    assert fitted.stages.owners["net/head/kernel"] == 1
    assert fitted.stages.owners["net/block_0/fc1/kernel"] == 0
    assert {*fitted.stages.owners} == {*fitted.variables}
    part = plan.fitted(mlp(prefix="net/"), part=True)
    assert part.stages.scopes == plan.stages.scopes and part.num_ranks == 4
    assert part.stages.owners["net/head/kernel"] == 1


def test_what_differs_in_stages_is_said():
    plan = staged()
    alone = dataclasses.replace(plan, stages=None, microbatches=1)
    assert alone.diff(plan) == ["microbatches: 1 -> 4", "stages: one -> 2"]
    assert plan.diff(staged(generate("gpipe", 2, 4))) == ["schedule: 1f1b -> gpipe"]
    assert plan.diff(staged(recompute=True)) == ["stages recompute: False -> True"]
    assert plan.diff(staged(recompute=(1,))) == ["stages recompute: False -> (1,)"]
    moved = {**plan.stages.scopes, "mlp/block_0/fc2": 1}
    owners = {**plan.stages.owners, "block_0/fc2/kernel": 1}
    other = dataclasses.replace(plan.stages, scopes=moved, owners=owners)
    assert plan.diff(dataclasses.replace(plan, stages=other)) == [
        "block_0/fc2/kernel: stage 0 -> stage 1",
        "mlp/block_0/fc2: no stage of its own -> stage 1",
    ]


@pytest.mark.parametrize("name", FAMILIES)
def test_schedules_are_known_by_their_orders(name):
    assert name_of(generate(name, 3, 4)) == name
    assert name_of(Schedule(generate(name, 3, 4).orders[::-1])) == "given"
