"""Ops that run as a plan says: what can be said, that it is done, and that it is kept in files."""

from __future__ import annotations

import dataclasses
import itertools

import numpy as np
import pytest
import tensorflow as tf

import tfpar as tap
from benchmarks.models import SMALL
from tests.partitioned import Traced
from tests.plan.graphs import mlp
from tests.planning.problems import Captured, partition
from tfpar.plans import Plan, plan_from_constraints
from tfpar.propagation import Anchors, OpPlan, PartitionedGraph, prepare, propagate
from tfpar.propagation.decide import strategy_of
from tfpar.propagation.factors import CARRY
from tfpar.spec import Mesh, PlanError, parse_spec, replicated_spec

GRID = {"data": 2, "model": 2}
PAIR = Mesh.of([2])
MEGATRON = (
    tap.batch("data"),
    tap.shard("(query|key|value)/kernel", 1, "model"),
    tap.shard("attention_output/kernel", 0, "model"),
    tap.shard(".*fc1/kernel", 1, "model"),
    tap.shard(".*fc2/kernel", 0, "model"),
    tap.shard("head/kernel", 1, "model"),
)
LAID = {
    "gpt by heads": ("gpt", MEGATRON),
    "gpt data parallel": ("gpt", (tap.batch("data", "model"),)),
    "experts": ("gshard_moe", (tap.batch("data", "model"), tap.shard("moe/w[io]", 0, "model"))),
}


@pytest.fixture(scope="module")
def laid() -> dict[str, PartitionedGraph]:
    captured = {name: Captured.of(SMALL[name], 8) for name in ("gpt", "gshard_moe")}
    found = {}
    for case, (name, constraints) in LAID.items():
        step = captured[name].step
        plan = plan_from_constraints(
            step.graph, Mesh.of(GRID), constraints, gradients=step.gradients
        )
        found[case] = partition(captured[name].problem(GRID, "cpu", constraints), plan)
    return found


def specs(*texts):
    return tuple(map(parse_spec, texts))


def ordinary(partitioned):
    """(op, rule, strategy) of all that hold no other graph."""
    for op, decision in partitioned.decisions.items():
        if not decision.bodies:
            yield op, partitioned.prepared.rules[op], decision.strategy


# --- what can be said -------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("case", LAID)
def test_a_choice_follows_from_its_specs(laid, case):
    kinds = set()
    for op, rule, strategy in ordinary(laid[case]):
        found = strategy_of(rule, strategy.in_specs, strategy.out_specs, laid[case].mesh)
        assert found == strategy, op.name
        kinds |= {split for split, _ in strategy.splits}
    assert max(kinds) >= 2 and (CARRY in kinds or case == "gpt data parallel")


@pytest.mark.parametrize("case", LAID)
def test_all_ops_named_as_they_run_run_as_before(laid, case):
    before = laid[case]
    ops = {
        op.name: OpPlan(
            strategy.in_specs, strategy.out_specs, tuple(before.specs[t] for t in op.outputs)
        )
        for op, _, strategy in ordinary(before)
    }
    anchors = Anchors(
        variables={v.name: spec for v, spec in before.variable_specs.items()},
        inputs=[before.specs[t] for t in before.graph.inputs],
        outputs=before.output_specs,
        ops=ops,
    )
    after = propagate(prepare(before.graph), before.mesh, anchors)
    assert after.specs == before.specs
    moved = [{(r.tensor, r.source, r.target) for r in p.reshards} for p in (before, after)]
    assert moved[0] == moved[1]
    for op, _, strategy in ordinary(before):
        assert after.decisions[op].strategy == strategy, op.name


def the_rule(function, *shapes):
    """The rule of the op that `function` makes of its arguments last."""
    traced = Traced.of(function, [np.ones(shape, "float32") for shape in shapes])
    op = next(op for op in reversed(traced.prepared.graph.ops) if len(op.inputs) >= len(shapes))
    while op.type == "Identity":
        op = op.inputs[0].op
    return traced.prepared.rules[op]


def test_specs_that_no_candidate_has():
    matmul = the_rule(tf.matmul, (4, 6), (6, 8))
    can = [
        (("S(0)", "R"), "S(0)"),
        (("R", "S(1)"), "S(1)"),
        (("S(1)", "S(0)"), "P(sum)"),
        (("P(sum)", "R"), "P(sum)"),
        (("R", "P(sum)"), "P(sum)"),
        (("R", "R"), "R"),
    ]
    read = ["R", "S(0)", "S(1)", "P(sum)", "P(max)"]
    for first, second, made in itertools.product(read, read, ["R", "S(0)", "S(1)", "P(sum)"]):
        found = strategy_of(matmul, specs(first, second), specs(made), PAIR)
        assert (found is not None) == (((first, second), made) in can), (first, second, made)


def test_a_dim_that_must_stay_whole_is_not_split():
    diagonal = the_rule(tf.linalg.diag_part, (3, 4, 4))
    assert strategy_of(diagonal, specs("S(0)", "R", "R"), specs("S(0)"), PAIR)
    assert strategy_of(diagonal, specs("S(1)", "R", "R"), specs("S(1)"), PAIR) is None
    assert strategy_of(diagonal, specs("S(5)", "R", "R"), specs("R"), PAIR) is None


def test_partials_pass_only_where_an_op_is_linear():
    relu, add, scaled, moved = (
        the_rule(f, (4, 6)) for f in (tf.nn.relu, lambda x: x + x, tf.square, tf.transpose)
    )
    assert strategy_of(relu, specs("P(sum)"), specs("P(sum)"), PAIR) is None
    assert strategy_of(scaled, specs("P(sum)"), specs("P(sum)"), PAIR) is None
    assert strategy_of(add, specs("P(sum)", "P(sum)"), specs("P(sum)"), PAIR)
    assert strategy_of(add, specs("P(sum)", "R"), specs("P(sum)"), PAIR) is None
    whole = ["R"] * (len(moved.inputs) - 1)
    assert strategy_of(moved, specs("P(max)", *whole), specs("P(max)"), PAIR)
    assert strategy_of(moved, specs("P(max)", *whole), specs("P(sum)"), PAIR) is None


def test_strides_are_those_that_the_axes_before_leave():
    matmul, mesh = the_rule(tf.matmul, (4, 6), (6, 8)), Mesh.of([2, 2])
    assert strategy_of(matmul, specs("S(0),S(0)", "R,R"), specs("S(0),S(0)"), mesh)
    assert strategy_of(matmul, specs("S(0),S(1)", "R,S(0)"), specs("S(0),P(sum)"), mesh)
    # Four entries in strides of 2 can be cut once; what is left has no such stride.
    assert strategy_of(matmul, specs("S(0/2),S(0)", "R,R"), specs("S(0/2),S(0)"), mesh)
    assert strategy_of(matmul, specs("S(0/3),R", "R,R"), specs("S(0/3),R"), mesh) is None
    one = the_rule(tf.matmul, (1, 6), (6, 8))
    assert strategy_of(one, specs("S(0)", "R"), specs("S(0)"), PAIR) is None


# --- that it is done ----------------------------------------------------------------------


def product(x, kernel):
    h = tf.matmul(x, kernel, name="product")
    return tf.nn.relu(h, name="relu"), tf.tanh(h, name="tanh")


ROWS = np.linspace(-1, 1, 24).reshape(4, 6), np.cos(np.arange(48)).reshape(6, 8)
SPLIT_SUM = OpPlan(specs("S(1)", "S(0)"), specs("P(sum)"), specs("S(1)"))


def traced(rows=4):
    return Traced.of(product, [a.astype("float32") for a in (ROWS[0][:rows], ROWS[1])])


def is_right(run):
    for got, want in zip(run.outputs, run.expected, strict=True):
        np.testing.assert_allclose(got, want, rtol=2e-5, atol=2e-5)
    return True


def test_an_op_runs_and_its_output_is_kept_as_said():
    whole = [replicated_spec(1)] * 2
    without = traced().run(whole, PAIR)
    assert is_right(without) and not without.partitioned.collectives()
    run = traced().run(whole, PAIR, {"product": SPLIT_SUM})
    assert is_right(run)
    (decision,) = run.decisions("MatMul")
    assert decision.strategy.in_specs == SPLIT_SUM.in_specs
    assert decision.strategy.out_specs == SPLIT_SUM.made
    (tensor,) = (op.outputs[0] for op in run.partitioned.decisions if op.type == "MatMul")
    assert run.partitioned.specs[tensor] == SPLIT_SUM.kept[0]
    kinds = sorted(kind for kind, _, _ in run.partitioned.collectives())
    # Scattered once for both readers; what they give is gathered at the end.
    assert kinds == ["all_gather", "all_gather", "reduce_scatter"]


@pytest.mark.parametrize(
    "planned",
    [
        OpPlan(specs("S(1)", "S(0)"), specs("P(sum)"), specs("P(sum)")),
        OpPlan(specs("S(1)", "S(0)"), specs("P(sum)"), specs("R")),
        OpPlan(specs("S(0)", "R"), specs("S(0)"), specs("S(0)")),
        OpPlan(specs("R", "S(1)"), specs("S(1)"), specs("S(0)")),
        OpPlan(specs("R", "S(1/4)"), specs("S(1/4)"), specs("S(1/4)")),
        OpPlan(specs("P(sum)", "R"), specs("P(sum)"), specs("S(0)")),
    ],
    ids=str,
)
@pytest.mark.parametrize("arriving", ["R", "S(0)", "S(1)", "P(sum)"])
def test_whatever_is_planned_gives_the_same_values(planned, arriving):
    run = traced().run(specs(arriving, "R"), PAIR, {"product": planned})
    assert is_right(run)
    (decision,) = run.decisions("MatMul")
    assert decision.strategy.in_specs == planned.in_specs


@pytest.mark.parametrize(
    "planned",
    [
        OpPlan(specs("S(0)", "S(0)"), specs("P(sum)"), specs("R")),
        OpPlan(specs("S(0)", "R"), specs("S(1)"), specs("S(1)")),
        OpPlan(specs("S(0)"), specs("S(0)"), specs("S(0)")),
        OpPlan(specs("S(0)", "R"), (), ()),
        OpPlan(specs("S(0/3)", "R"), specs("S(0/3)"), specs("S(0/3)")),
    ],
    ids=str,
)
def test_an_op_that_cannot_run_so_is_decided_as_usual(planned):
    run = traced().run([replicated_spec(1)] * 2, PAIR, {"product": planned})
    assert is_right(run)
    (decision,) = run.decisions("MatMul")
    assert decision.strategy.in_specs == specs("R", "R")


def test_a_plan_for_a_batch_serves_another_as_far_as_it_can():
    rows = OpPlan(specs("S(0)", "R"), specs("S(0)"), specs("S(0)"))
    for batch, expected in ((4, "S(0)"), (3, "S(0)"), (1, "R")):
        run = traced(batch).run([replicated_spec(1)] * 2, PAIR, {"product": rows})
        assert is_right(run)
        (decision,) = run.decisions("MatMul")
        assert decision.strategy.in_specs == specs(expected, "R"), batch


@pytest.mark.parametrize("kept", ["S(0)", "S(0/2)", "S(1)"])
def test_what_is_kept_otherwise_for_a_batch_serves_another_as_far_as_it_can(kept):
    summed = OpPlan(specs("S(1)", "S(0)"), specs("P(sum)"), specs(kept))
    for batch in (4, 3, 1):
        assert is_right(traced(batch).run([replicated_spec(1)] * 2, PAIR, {"product": summed})), (
            batch
        )


def test_a_variable_stays_as_it_lies():
    graph = mlp()
    read = next(op for op in graph.ops if op.type == "ReadVariableOp")
    (variable,) = (v for v in graph.variables if v.handle is read.inputs[0])
    split = OpPlan(specs("S(1)"), specs("S(1)"), specs("S(1)"))
    for given, expected in ((None, "S(1)"), ("R", "R"), ("S(0)", "S(0)"), ("S(1)", "S(1)")):
        fixed = {} if given is None else {variable.name: parse_spec(given)}
        anchors = Anchors(
            variables=fixed, inputs=[replicated_spec(1)] * len(graph.inputs), ops={read.name: split}
        )
        found = propagate(prepare(graph), PAIR, anchors)
        assert found.variable_specs[variable] == parse_spec(expected), given


# --- files ----------------------------------------------------------------------------------


@pytest.fixture
def plan() -> Plan:
    made = plan_from_constraints(mlp(), Mesh.of([2, 4]), (tap.batch("data"),))
    ops = {
        "mlp/head/MatMul": OpPlan(
            specs("S(0),S(1)", "R,S(0)"), specs("S(0),P(sum)"), specs("S(0),S(1)")
        ),
        "mlp/head/Relu": OpPlan(specs("S(0),S(1/2)"), specs("S(0),S(1/2)"), specs("S(0),S(1/2)")),
        "mlp/nothing": OpPlan((), specs("R,R"), specs("R,R")),
    }
    return dataclasses.replace(made, ops=ops)


def test_files_keep_how_ops_run(plan, tmp_path):
    path = tmp_path / "plan.json"
    plan.save(path)
    loaded = Plan.load(path)
    assert loaded == plan and loaded.ops == plan.ops and loaded.to_json() == plan.to_json()
    assert loaded.anchors().ops == plan.ops
    lines = path.read_text().splitlines()
    assert sum('"mlp/head/MatMul": {' in line for line in lines) == 1
    assert sum('"kept"' in line for line in lines) == 1  # only where it differs


def test_older_files_say_nothing_of_ops(plan):
    lines = dataclasses.replace(plan, ops={}).to_json().splitlines()
    older = "\n".join(line for line in lines if '"ops"' not in line).replace("{},\n}", "{}\n}")
    assert '"ops"' not in older
    assert Plan.from_json(older).ops == {}


def test_ops_that_run_otherwise_are_listed(plan):
    other = dict(plan.ops)
    del other["mlp/nothing"]
    relu = other["mlp/head/Relu"]
    other["mlp/head/Relu"] = dataclasses.replace(relu, kept=specs("S(0),R"))
    (line,) = plan.diff(dataclasses.replace(plan, ops=other))
    assert "'mlp/head/Relu'" in line and "'mlp/nothing'" in line and "MatMul" not in line
    assert not plan.diff(dataclasses.replace(plan))


def test_ops_of_another_mesh_are_refused(plan):
    short = OpPlan(specs("R"), specs("R,R"), specs("R,R"))
    with pytest.raises(PlanError, match="'mlp/head/Relu'.*needs 2 placements"):
        dataclasses.replace(plan, ops={"mlp/head/Relu": short})
