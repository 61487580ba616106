"""Steps in stages: each set of ranks has its own program, and all together compute the step."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from tests.cut_steps import (
    ONE,
    TWO,
    Staged,
    attending,
    cut,
    normalized,
    numbers,
    three_layers,
    tied,
    traced,
)
from tests.partitioned import Traced, devices
from tfpar.compile.local.local_graph import TASK, LocalProgram, StagePass, build_local_program
from tfpar.compile.local.scatter_gather import sink_all_gathers, sink_input_slices
from tfpar.compile.local.stage_split import WrittenStep, split_stages
from tfpar.ir import DType, GraphBuilder, Op, Tensor, Variable
from tfpar.pipeline import RECEIVE_AHEAD, RecomputeOf, Schedule, generate
from tfpar.propagation import Anchors, prepare, propagate
from tfpar.spec import Mesh, Replicate, Shard, TfparError, replicated_spec
from tfpar.tf.runtime import InProcessProgram


def _written(program):
    return [WrittenStep(program)] * 2


def staged(step: Traced, schedule: Schedule, mesh: Mesh = ONE, **asked: Any) -> Staged:
    """The step in stages, checked by running it."""
    found = cut(step, schedule, mesh, **asked)
    everyone = Mesh.of([mesh.size * schedule.num_actors])
    fed = [tf.constant(a) for a in step.args] * schedule.num_actors
    results = InProcessProgram(found.programs, devices(everyone))(fed, [])
    for i, want in enumerate(step.expected * schedule.num_actors):
        np.testing.assert_allclose(results[i].numpy(), want, 1e-4, 1e-5)
    return found


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gpipe", "1f1b", "zb-h1", "interleaved", "zb-v"])
@pytest.mark.parametrize("function", [three_layers, tied, attending])
def test_every_schedule_computes_the_step(function, name):
    schedule = generate(name, 2, 4)
    found = staged(traced(function), schedule)
    for actor, order in enumerate(schedule.orders):
        ran = found.calls(actor)
        assert ran == [str(task) for task in order if str(task) in ran]


@pytest.mark.parametrize("microbatches", [1, 2, 3])
def test_data_parallel_stages_with_ragged_batches(microbatches):
    staged(traced(rows=7), generate("1f1b", 2, microbatches), TWO)


def test_layers_split_within_stages():
    mesh = Mesh.of({"data": 1, "model": 2})
    across = [(Replicate(), Shard(1)), (Replicate(), Shard(0)), (Replicate(), Replicate())]
    found = staged(traced(), generate("1f1b", 2, 2), mesh, weights=tuple(across))
    assert any(op.type == "AllReduce" for body in found.whole.graphs()[1:] for op in body.ops)


def test_three_stages_hand_on_from_one_to_the_next():
    found = staged(traced(), generate("gpipe", 3, 2))
    assert found.types(0).count("Send") and found.types(2).count("Recv")
    for actor in range(3):
        assert {call[0] for call in found.calls(actor)} == {str(actor)}


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gpipe", "1f1b"])
def test_joins_hold_up_all_stages(name):
    found = staged(traced(normalized), generate(name, 2, 3))
    rounds = {op.name.split("/")[0] for op in found.whole.graph.ops if op.type == TASK}
    assert len(rounds) > 4, "mean and deviation of two layers, and the sums of their gradients"


def returned(program: LocalProgram, task: str) -> int:
    """How many tensors a task gives, sums aside."""
    call = next(op for op in program.graph.ops if op.type == TASK and f"/{task}/" in op.name)
    return len(call.outputs) - len(call.attrs["carried"])


def test_recomputed_stages_keep_only_what_they_read():
    schedule = generate("1f1b", 2, 4)
    kept, again = (staged(traced(), schedule, recompute=r).whole for r in (False, True))
    assert returned(again, "F0") < returned(kept, "F0")

    def tanhs(program: LocalProgram) -> int:
        return [op.type for body in program.graphs()[1:] for op in body.ops].count("Tanh")

    assert tanhs(again) > tanhs(kept)


def test_the_stages_that_recompute_are_those_that_compute_twice():
    schedule = generate("1f1b", 3, 2)

    def ops(recompute: RecomputeOf) -> dict[str, Counter[str]]:
        functions = cut(traced(), schedule, ONE, recompute=recompute).whole.graph.functions
        return {name: Counter(op.type for op in body.ops) for name, body in functions.items()}

    kept, again, one = ops(False), ops(True), ops((1,))
    assert one == {name: (again if name.endswith("1") else kept)[name] for name in kept}
    assert one["round1_B1"]["Tanh"] == 2 and not kept["round1_B1"]["Tanh"]


def test_the_halves_of_the_backward_pass_are_what_is_waited_for_and_sums():
    found = staged(traced(), generate("zb-h1", 2, 4))
    halves = [op for op in calls(found.whole) if "/W1/" in op.name]
    assert halves and all(len(op.outputs) == len(op.attrs["carried"]) for op in halves)


def calls(program: LocalProgram) -> list[Op]:
    return [op for op in program.graph.ops if op.type == TASK]


def test_programs_grow_with_microbatches_by_calls_and_what_these_read():
    sizes = [
        len(staged(traced(rows=16), generate("1f1b", 2, m)).whole.graph.ops) for m in (2, 4, 8)
    ]
    assert sizes[2] - sizes[1] == 2 * (sizes[1] - sizes[0])
    assert len(staged(traced(), generate("1f1b", 2, 2)).whole.graphs()) == 1 + 4


def test_each_tensor_is_sent_once_to_each_reader():
    found = staged(traced(), generate("1f1b", 2, 4))
    keys = [
        (op.attrs["key"], op.attrs["targets"])
        for program in found.programs.programs.values()
        for op in program.graph.ops
        if op.type == "Send"
    ]
    assert keys and len(keys) == len(set(keys))


@pytest.mark.parametrize("name", ["gpipe", "1f1b", "zb-h1", "interleaved", "zb-v"])
def test_a_tensor_is_asked_for_two_tasks_before_the_one_that_reads_it(name):
    found = cut(traced(normalized if name == "gpipe" else attending), generate(name, 2, 8))
    for program in found.programs.programs.values():
        ran = [op for op in program.graph.ops if op.type == TASK]
        place = {op: i for i, op in enumerate(ran)}
        readers = program.graph.consumers()
        late = 0
        for op in program.graph.ops:
            if op.type != "Recv":
                continue
            tasks = [place[r] for r in readers.get(op.outputs[0], ()) if r in place]
            if not tasks:
                continue
            begun = min(tasks) - RECEIVE_AHEAD  # has begun once the one before it has ended
            assert op.control == ran[max(0, begun - 1) : max(0, begun)]
            late += bool(op.control)
        assert late, "some wait"


def test_gradients_of_what_a_stage_reads_often_are_sent_as_one():
    """Those of activations for each microbatch, that of the weight once a step."""
    microbatches = 3
    found = staged(traced(attending), generate("1f1b", 2, microbatches))
    sent = [op for op in found.programs.programs[1,].graph.ops if op.type == "Send"]
    gradients = [op.inputs[0].shape for op in sent if op.inputs[0].op.type == TASK]
    assert gradients.count((3, 5)) == 2 * microbatches, "of two tensors, of three rows each"
    assert gradients.count((5, 5)) == 1
    assert len(gradients) == 2 * microbatches + 1


def test_what_cannot_be_sent_is_named():
    def worded(x: tf.Tensor, w: tf.Tensor) -> tf.Tensor:
        words = tf.strings.as_string(x)
        return tf.reduce_sum(tf.strings.to_number(words) @ w)

    step = Traced.of(worded, [numbers(4, 3), numbers(3, 2)])
    graph, whole = step.prepared.graph, replicated_spec(1)
    anchors = Anchors(inputs=[whole] * 2, outputs=[whole])
    places = {op: StagePass(int(op.type == "StringToNumber")) for op in graph.ops}
    for op in graph.ops:
        op.stateful = op.stateful or op.type == "AsString"  # else stage 1 would make it again
        if any(places[t.op].stage for t in op.inputs):
            places[op] = StagePass(1)
    program = build_local_program(propagate(step.prepared, ONE, anchors), places)
    with pytest.raises(TfparError, match=r"AsString.*string.*cannot be sent.*tap\.stage"):
        split_stages(_written(program), generate("1f1b", 2, 1))


def test_a_result_that_cannot_be_sent_is_named():
    def drawn(x: tf.Tensor) -> tf.Tensor:
        return tf.random.uniform(tf.shape(tf.boolean_mask(x, x > 0)))

    step = Traced.of(drawn, [numbers(4, 3)])
    graph = step.prepared.graph
    anchors = Anchors(inputs=[replicated_spec(1)], outputs=[replicated_spec(1)])
    places = {op: StagePass(1) for op in graph.ops}
    program = build_local_program(propagate(step.prepared, ONE, anchors), places)
    with pytest.raises(TfparError, match=r"RandomUniform.* made by the ranks \[1\].* a result of"):
        split_stages(_written(program), generate("1f1b", 2, 1))


def test_a_variable_that_nothing_touches_stays_in_its_stage():
    build = GraphBuilder()
    attrs = {"dtype": DType("float32")}
    handle = build.emit("Placeholder", (), [((3,), "resource")], attrs, "handle").outputs[0]
    build.graph.variables.append(Variable("table", (3,), "float32", True, handle))
    places = {handle.op: StagePass(1)}
    anchors = Anchors(variables={"table": replicated_spec(1)}, inputs=[], outputs=[])
    program = build_local_program(propagate(prepare(build.graph), ONE, anchors), places)
    first, second = split_stages(_written(program), generate("1f1b", 2, 1)).programs.values()
    assert not first.graph.variables and [v.name for v in second.graph.variables] == ["table"]


def test_scalars_that_are_no_weights_are_kept_by_all_and_sent_only_what_is_computed_elsewhere():
    build = GraphBuilder()
    of = {kind: {"dtype": DType(kind)} for kind in ("float32", "int64")}
    fed = build.emit("Placeholder", (), [((3,), "float32")], of["float32"], "x").outputs[0]
    build.graph.inputs.append(fed)
    handles = {}
    for name, dtype in (("counter", "int64"), ("total", "float32"), ("scale", "float32")):
        made = build.emit("Placeholder", (), [((), "resource")], of[dtype], name)
        handles[name] = made.outputs[0]
        weight = name == "scale"
        build.graph.variables.append(Variable(name, (), dtype, weight, made.outputs[0]))

    def read(name: str, dtype: str, after: tuple[Op, ...] = ()) -> Tensor:
        found = ((), dtype)
        op = build.emit("ReadVariableOp", (handles[name],), [found], of[dtype], name, after, True)
        return op.outputs[0]

    def assign(name: str, value: Tensor, after: Tensor) -> Op:
        given, attrs = (handles[name], value), of[value.dtype]
        op = build.emit("AssignVariableOp", given, (), attrs, f"set_{name}", [after.op], True)
        build.graph.effects.append(op)
        return op

    scale = read("scale", "float32")
    count = read("counter", "int64")
    counted = build.one("AddV2", (count, build.const(1, "int64")), (), "int64", {})
    first = [scale, count, counted, assign("counter", counted, count)]
    largest = build.one("Max", (fed, build.const([0], "int32")), (), "float32", {})
    before = read("total", "float32")
    total = build.one("AddV2", (before, largest), (), "float32", {})
    set_total = assign("total", total, before)
    result = build.one("Neg", (read("total", "float32", (set_total,)),), (), "float32", {})
    steps = build.one("Square", (read("counter", "int64", (first[-1],)),), (), "int64", {})
    build.graph.outputs += [result, steps]
    stage = dict.fromkeys((op if isinstance(op, Op) else op.op for op in first), StagePass(0))
    places = {op: stage.get(op, StagePass(1)) for op in build.graph.ops if op.type != "Placeholder"}
    program = LocalProgram(build.graph, ONE, [(3,)], [(Replicate(),)], [()] * 2, {}, places)

    one, other = (
        p.graph for p in split_stages(_written(program), generate("1f1b", 2, 1)).programs.values()
    )
    assert [v.name for v in one.variables] == ["counter", "total", "scale"]
    assert [v.name for v in other.variables] == ["counter", "total"]
    assert [op.name for op in one.effects] == [op.name for op in other.effects[:2]]
    sent = [[op.inputs[0].op for op in g.ops if op.type == "Send"] for g in (one, other)]
    assert not sent[0] and [op.type for op in sent[1]] == ["AddV2"]
    for graph in (one, other):  # what waits for a read that nobody asked for is still in order
        ops = {op.name: op for op in graph.ops}
        last = graph.outputs[0].op.inputs[0].op
        assert last.type == "ReadVariableOp" and last.control == [ops["set_total"]]
    unasked = [
        op for op in one.ops if op.type == "ReadVariableOp" and op.inputs[0].op.name == "total"
    ]
    assert len(unasked) == 1


def test_parts_are_sent_and_gathered_where_they_are_read():
    build = GraphBuilder()
    attrs = {"dtype": DType("float32")}
    fed = build.emit("Placeholder", (), [((4, 3), "float32")], attrs, "x").outputs[0]
    build.graph.inputs.append(fed)
    half = build.one("Tanh", (fed,), (4, 3), "float32", {"T": DType("float32")})
    whole = build.one("AllGather", (half,), (8, 3), "float32", {"axes": (0,), "dims": (0,)})
    read = build.one("Exp", (whole,), (8, 3), "float32", {"T": DType("float32")})
    build.graph.outputs.append(read)
    places = {half.op: StagePass(0), whole.op: StagePass(0), read.op: StagePass(1)}
    program = LocalProgram(build.graph, TWO, [(8, 3)], [(Shard(0),)], [(Replicate(),)], {}, places)
    sink_all_gathers(program)
    first, second = split_stages(_written(program), generate("1f1b", 2, 1)).programs.values()
    assert [op.inputs[0].shape for op in first.graph.ops if op.type == "Send"] == [(4, 3)]
    assert "AllGather" not in {op.type for op in first.graph.ops}
    assert "AllGather" in {op.type for op in second.graph.ops}


def test_stages_take_their_parts_of_inputs_themselves():
    """What is computed of inputs alone is not sent; that of two stages is there for each."""
    build = GraphBuilder()
    attrs = {"dtype": DType("float32")}
    fed = build.emit("Placeholder", (), [((4, 3), "float32")], attrs, "x").outputs[0]
    build.graph.inputs.append(fed)
    half = build.slice(fed, build.per_rank([np.zeros(2, np.int32), np.int32([2, 0])]), (2, 3))
    twice = build.binary("AddV2", half, half)
    first = build.unary("Exp", twice)
    second = build.binary("Mul", build.binary("AddV2", first, twice), half)
    build.graph.outputs.append(second)
    places = {first.op: StagePass(0), second.op: StagePass(1), second.op.inputs[0].op: StagePass(1)}
    program = LocalProgram(build.graph, TWO, [(4, 3)], [(Replicate(),)], [(Shard(0),)], {}, places)
    program.origins.update({op: op for op in build.graph.ops})
    sink_input_slices(program)
    assert all(
        op in places or op.type in ("Const", "RankConst", "Placeholder") for op in build.graph.ops
    )
    found = split_stages(_written(program), generate("1f1b", 2, 1)).programs
    for own in found.values():
        assert [op.type for op in own.graph.ops].count("Slice") == 1
    sends = [
        [op.inputs[0].op.type for op in own.graph.ops if op.type == "Send"]
        for own in found.values()
    ]
    assert sends == [["Exp"], ["Mul"]], "the second is what the step gives"


def test_a_variable_that_two_stages_would_hold_is_named():
    build = GraphBuilder()
    attrs = {"dtype": DType("float32")}
    handle = build.emit("Placeholder", (), [((3,), "resource")], attrs, "handle").outputs[0]
    build.graph.variables.append(Variable("table", (3,), "float32", True, handle))
    read = [build.one("ReadVariableOp", (handle,), (3,), "float32", attrs) for _ in range(2)]
    build.graph.outputs += read
    places = {tensor.op: StagePass(stage) for stage, tensor in enumerate(read)}
    program = LocalProgram(build.graph, ONE, [], [], [(Replicate(),)] * 2, {}, places)
    with pytest.raises(TfparError, match=r"'table' is used by its handle.*\[0\] and \[1\]"):
        split_stages(_written(program), generate("1f1b", 2, 1))
