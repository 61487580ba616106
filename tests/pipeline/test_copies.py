"""Each stage has constants of its own, and gets the value of a variable once."""

from __future__ import annotations

import numpy as np

from tests.pipeline.arithmetic import Arithmetic, N, run
from tests.pipeline.sent import sent
from tests.pipeline.test_step_stages import Step
from tfpar.ir import format_graph
from tfpar.pipeline.copies import own_constants, read_once


def with_constants() -> Arithmetic:
    """A constant that is read in stages 0, 1 and 2; in the last one, what comes of it alone."""
    made = Arithmetic()
    ones = made.at(1, made.build.const(np.ones(N, "float32")))
    twice = made.at(1, made.build.binary("AddV2", ones, ones))
    x = made.at(0, made.build.binary("Mul", made.source(0), ones))
    y = made.at(1, made.build.binary("Mul", x, ones))
    z = made.at(2, made.build.binary("Mul", y, twice))
    made.graph.outputs = [z]
    return made


def test_each_stage_has_the_constants_that_it_reads():
    made = with_constants()
    before = run(made.graph, made.fed)
    found = own_constants(made.graph, made.stages())
    assert [*found] == made.graph.ops
    after = run(made.graph, made.fed)
    np.testing.assert_array_equal(*before.values(), *after.values())
    crossing = {(t.op.type, source, target) for t, source, target in sent(made.graph, found)}
    assert crossing == {("Mul", 0, 1), ("Mul", 1, 2)}
    assert sorted(found[op] for op in found if op.type == "Const") == [0, 1, 2]
    assert [found[op] for op in found if op.type == "AddV2"] == [2]


def test_constants_that_are_returned_stay():
    made = with_constants()
    twice = next(op for op in made.graph.ops if op.type == "AddV2")
    made.graph.outputs.append(twice.outputs[0])
    found = own_constants(made.graph, made.stages())
    assert found[twice] == 1
    assert sorted(found[op] for op in found if op.type == "AddV2") == [1, 2]


def test_constants_of_one_stage_stay_as_they_are():
    made = with_constants()
    text = format_graph(made.graph)
    assert own_constants(made.graph, dict.fromkeys(made.graph.ops, 0)) == dict.fromkeys(
        made.graph.ops, 0
    )
    assert format_graph(made.graph) == text


# --- reads ----------------------------------------------------------------------------------------


def counting(stages: int) -> tuple[Step, dict]:
    """An optimizer that reads the rate and the counter for each of two weights in each stage."""
    step = Step()
    rate = step.variable("rate", (), trainable=False)
    count = step.variable("count", (), trainable=False)
    stage = {}
    for s in range(stages):
        for name in (f"{s}/a", f"{s}/b"):
            read = [step.read(v, f"{name}/{v.op.name}") for v in (rate, count)]
            stage[step.op("Mul", f"{name}/by", *read, shape=()).op] = s
    step.assign("tick", count, step.build.const(1.0))
    tick = step.named["tick"]
    tick.control = [op for op in step.build.graph.ops if op.type == "ReadVariableOp"]
    graph = step.build.graph
    return step, {op: stage.get(op, 0) for op in graph.ops}


def test_other_stages_share_a_read():
    step, stage = counting(3)
    graph = step.build.graph
    assert len(sent(graph, stage)) == 8
    found = read_once(graph, stage)
    assert [*found] == graph.ops
    names = [(t.name, target) for t, _, target in sent(graph, found)]
    assert names == [("1/a/rate:0", 1), ("1/a/rate:0", 2), ("1/a/count:0", 1), ("1/a/count:0", 2)]
    reads = [op.name for op in graph.ops if op.type == "ReadVariableOp"]
    assert reads == ["0/a/rate", "0/a/count", "0/b/rate", "0/b/count", "1/a/rate", "1/a/count"]
    assert [op.name for op in step.named["tick"].control] == reads, "it waits for those that stay"


def test_a_read_after_an_update_is_another_value():
    step, stage = counting(2)
    graph, tick = step.build.graph, step.named["tick"]
    count = step.named["count"].outputs[0]
    for name in "cd":
        late = step.read(count, f"late_{name}")
        late.op.control.append(tick)
        stage[late.op] = 0
        stage[step.op("Neg", f"after_{name}", late, shape=()).op] = 1
    found = read_once(graph, stage)
    names = [t.name for t, _, _ in sent(graph, found)]
    assert names == ["1/a/rate:0", "1/a/count:0", "late_c:0"]


def test_reads_of_one_stage_stay_as_they_are():
    step, stage = counting(1)
    text = format_graph(step.build.graph)
    assert read_once(step.build.graph, stage) == stage
    assert format_graph(step.build.graph) == text
