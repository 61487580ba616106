"""Steps that run where the variables lie that they read."""

from __future__ import annotations

from tests.pipeline.test_step_stages import Step
from tfpar.ir import Roles
from tfpar.pipeline.colocation import infer_variable_stages
from tfpar.pipeline.step_stages import assignable, stages_of_step


def placed(step: Step, owners: dict[str, int], **fixed: int) -> dict[str, int]:
    """By name, the stage of every op."""
    graph = step.build.graph
    roles = Roles.of(graph)
    ops = assignable(graph, roles)
    given = {step.named[name]: stage for name, stage in fixed.items()}
    forward = infer_variable_stages(graph, ops, owners, given)
    assert [*forward] == ops
    return {op.name: s for op, s in stages_of_step(graph, roles, forward, owners).items()}


def layer(step: Step, name: str, x):
    return step.op("MatMul", name, x, step.read(step.variable(f"w_{name}"), f"read_{name}"))


def test_ops_go_with_the_latest_of_what_they_read():
    step = Step()
    h = layer(step, "a", step.fed("x"))
    step.op("Relu", "r", layer(step, "b", h))
    stage = placed(step, {"w_a": 1, "w_b": 3})
    assert [stage[n] for n in ("a", "b", "r")] == [1, 3, 3]
    assert [stage[n] for n in ("w_a", "w_b", "read_a", "read_b")] == [1, 3, 1, 3]


def test_a_weight_stays_where_it_lies_though_it_is_read_later():
    step = Step()
    layer(step, "first", layer(step, "last", step.fed("x")))
    stage = placed(step, {"w_first": 0, "w_last": 2})
    assert [stage[n] for n in ("last", "first", "w_first", "read_first")] == [2, 2, 0, 0]


def test_a_weight_of_which_nothing_is_known_goes_to_its_reader():
    step = Step()
    layer(step, "b", layer(step, "a", step.fed("x")))
    stage = placed(step, {"w_a": 1})
    assert stage["b"] == stage["w_b"] == 1


def test_what_writes_a_variable_twice_comes_together():
    """Where the later of the two has to be; and with them what reads what they make."""
    step = Step()
    count, x = step.variable("count", trainable=False), step.fed("x")
    early, late = layer(step, "a", x), layer(step, "b", x)
    step.assign("first", count, early)
    step.assign("second", count, late)
    stage = placed(step, {"w_a": 0, "w_b": 2, "count": 1})
    assert [stage[n] for n in ("a", "b", "first", "second", "count")] == [0, 2, 2, 2, 2]


def test_what_has_no_known_shape_comes_to_its_reader():
    step = Step()
    x = step.fed("x")
    kept = step.op("BooleanMask", "kept", layer(step, "a", x), shape=(None, 4))
    step.op("MatMul", "both", kept, layer(step, "b", x), shape=(None, 4))
    stage = placed(step, {"w_a": 0, "w_b": 1})
    assert [stage[n] for n in ("a", "kept", "b", "both")] == [0, 1, 1, 1]


def test_a_stage_that_is_asked_for_is_the_earliest():
    step = Step()
    h = layer(step, "a", step.fed("x"))
    step.op("Relu", "r", h)
    assert [placed(step, {"w_a": 0}, r=1)[n] for n in ("a", "r")] == [0, 1]
    assert [placed(step, {"w_a": 2}, r=1)[n] for n in ("a", "r")] == [2, 2]


def test_updates_of_weights_run_where_these_lie():
    """Of a function that decays them, which reads nothing that it is fed."""
    step = Step()
    for name in "ab":
        handle = step.variable(f"w_{name}")
        step.assign(f"decay_{name}", handle, step.read(handle, f"read_{name}"))
    stage = placed(step, {"w_a": 0, "w_b": 3})
    assert [stage[f"decay_{name}"] for name in "ab"] == [0, 3]
