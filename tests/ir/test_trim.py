"""Trim keeps the step and its order of effects, and nothing else."""

from tfpar.ir import FunctionRef, Graph, Op, Variable
from tfpar.ir.passes import trim as trim_lib
from tfpar.ir.passes.trim import trim


class Sketch:
    """A graph written by hand, one line an op."""

    def __init__(self, functions=None):
        self.graph = Graph(functions=functions if functions is not None else {})

    def op(self, name, op_type, *inputs, control=(), outputs=1, dtype="float32", attrs=None):
        stateful = op_type in (
            "AssignVariableOp",
            "ReadVariableOp",
            "Assert",
            "PrintV2",
            "WriteScalarSummary",
            "If",
            "AssignAddVariableOp",
            "VarHandleOp",
            "SaveV2",
            "RestoreV2",
            "VarIsInitializedOp",
        )
        op = Op(name, op_type, [i.outputs[0] for i in inputs], attrs or {}, control, stateful)
        for _ in range(outputs):
            op.add_output((), dtype)
        self.graph.ops.append(op)
        return op

    def effect(self, *args, **kwargs):
        return self.op(*args, outputs=0, **kwargs)

    def variable(self, name):
        op = self.op(name, "Placeholder", dtype="resource")
        self.graph.variables.append(Variable(name, (), "float32", True, op.outputs[0]))
        return op

    def returns(self, *ops, effects=()):
        self.graph.outputs = [o.outputs[0] for o in ops]
        self.graph.effects = list(effects)
        return trim(self.graph)


def names(ops):
    return {op.name for op in ops}


def find(trimmed, name):
    return next(op for op in trimmed.graph.ops if op.name == name)


def test_dead_code_goes_and_inputs_and_variables_stay():
    s = Sketch()
    x = s.op("x", "Placeholder")
    unused = s.op("unused", "Placeholder")
    v = s.variable("v")
    y = s.op("y", "Square", x)
    s.op("z", "Square", y)
    s.graph.inputs = [x.outputs[0], unused.outputs[0]]
    result = s.returns(y)
    assert [op.name for op in result.graph.ops] == ["x", "unused", "v", "y"]
    assert names(result.removed[trim_lib.DEAD]) == {"z"}
    assert result.graph.variables[0].handle is find(result, "v").outputs[0]
    assert result.graph.variables[0].handle is not v.outputs[0]
    assert len(s.graph.ops) == 5, "the source graph is left as it is"


def test_order_is_forwarded_through_removed_ops():
    s = Sketch()
    v, one = s.variable("v"), s.op("one", "Const")
    read = s.op("read", "ReadVariableOp", v)
    small = s.op("small", "Less", read, one)
    guard = s.effect("guard", "Assert", small)
    shown = s.effect("shown", "PrintV2", read, control=[guard])
    written = s.effect("written", "WriteScalarSummary", read, control=[shown])
    assign = s.effect("assign", "AssignVariableOp", v, one, control=[written])
    loss = s.op("loss", "Identity", read)
    result = s.returns(loss, effects=[guard, shown, written, assign])
    assert find(result, "assign").control == [find(result, "read")]
    assert result.graph.effects == [find(result, "assign")]
    assert names(result.removed[trim_lib.ASSERTION]) == {"guard", "small"}
    assert names(result.removed[trim_lib.DEBUGGING]) == {"shown"}
    assert names(result.removed[trim_lib.SUMMARY]) == {"written"}
    assert result.summary() == "1 summary, 2 assertion, 1 debugging"


def test_groups_dissolve_and_their_effects_run():
    s = Sketch()
    v, w, one = s.variable("v"), s.variable("w"), s.op("one", "Const")
    first = s.effect("first", "AssignAddVariableOp", v, one)
    second = s.effect("second", "AssignAddVariableOp", w, one)
    update = s.effect("update", "NoOp", control=[first, second])
    step = s.effect("step", "AssignAddVariableOp", v, one, control=[update])
    group = s.effect("group", "NoOp", control=[update, step])
    result = s.returns(effects=[group])
    assert [op.name for op in result.graph.effects] == ["first", "second", "step"]
    assert names(find(result, "step").control) == {"first", "second"}
    assert names(result.removed[trim_lib.GROUPING]) == {"update", "group"}


def test_effect_needed_only_by_a_removed_op_still_runs():
    s = Sketch()
    v, one = s.variable("v"), s.op("one", "Const")
    bump = s.effect("bump", "AssignAddVariableOp", v, one)
    read = s.op("read", "ReadVariableOp", v, control=[bump])
    group = s.effect("shown", "PrintV2", read)
    result = s.returns(effects=[group])
    assert [op.name for op in result.graph.effects] == ["bump"]


def test_ops_that_hand_their_input_on_are_bypassed():
    s = Sketch()
    v, one = s.variable("v"), s.op("one", "Const")
    bump = s.effect("bump", "AssignAddVariableOp", v, one)
    x = s.op("x", "Placeholder")
    s.graph.inputs = [x.outputs[0]]
    checked = s.op("checked", "CheckNumerics", x, control=[bump])
    y = s.op("y", "Square", checked)
    last = s.op("last", "CheckNumerics", y)
    result = s.returns(last)
    assert find(result, "y").inputs == find(result, "x").outputs
    assert find(result, "y").control == [find(result, "bump")]
    assert result.graph.outputs == find(result, "y").outputs


def test_fetched_summary_stays():
    s = Sketch()
    x = s.op("x", "Const")
    text = s.op("text", "ScalarSummary", x, dtype="string")
    result = s.returns(text)
    assert not any(result.removed.values())


def test_initialisers_and_checkpoints_are_listed():
    s = Sketch()
    v, seed, path = s.variable("v"), s.op("seed", "Const"), s.op("path", "Const")
    random = s.op("random", "RandomUniform", seed)
    s.effect("v/Assign", "AssignVariableOp", v, random)
    s.op("v/is_initialized", "VarIsInitializedOp", v)
    read = s.op("read", "ReadVariableOp", v)
    s.effect("save", "SaveV2", path, read)
    restored = s.op("restored", "RestoreV2", path)
    s.effect("restore", "AssignVariableOp", v, s.op("cast", "Identity", restored))
    one = s.op("one", "Const")
    update = s.effect("update", "AssignAddVariableOp", v, one)
    result = s.returns(effects=[update])
    assert names(result.graph.ops) == {"v", "one", "update"}
    assert names(result.removed[trim_lib.INITIALIZATION]) == {
        "seed",
        "random",
        "v/Assign",
        "v/is_initialized",
    }
    assert names(result.removed[trim_lib.CHECKPOINT]) == {
        "path",
        "read",
        "save",
        "restored",
        "cast",
        "restore",
    }
    assert names(result.removed[trim_lib.DEAD]) == set()
    assert result.initial_values == {"v": random.outputs[0]}


def guarded(else_type):
    """An `If` whose else branch runs `else_type`, nested once more in a call."""
    functions = {}
    for name, op_type in (("then", "NoOp"), ("else", else_type)):
        body = Sketch(functions)
        ok = body.op(f"{name}/ok", "Placeholder")
        body.graph.inputs = [ok.outputs[0]]
        done = body.effect(f"{name}/act", op_type, ok)
        body.graph.outputs = [ok.outputs[0]]
        body.graph.effects = [done]
        functions[name] = body.graph
    s = Sketch(functions)
    x = s.op("x", "Placeholder")
    s.graph.inputs = [x.outputs[0]]
    attrs = {"then_branch": FunctionRef("then"), "else_branch": FunctionRef("else")}
    guard = s.op("guard", "If", x, attrs=attrs)
    y = s.op("y", "Square", x, control=[guard])
    return s.returns(y, effects=[guard])


def test_a_guard_around_an_assertion_goes_with_it():
    result = guarded("Assert")
    assert [op.name for op in result.graph.ops] == ["x", "y"]
    assert not result.graph.effects


def test_a_branch_with_an_effect_stays():
    result = guarded("AssignVariableOp")
    assert [op.name for op in result.graph.effects] == ["guard"]
    assert [op.name for op in result.graph.functions["else"].effects] == ["else/act"]
    assert [op.type for op in result.graph.functions["then"].ops] == ["Placeholder"]


def test_order_is_forwarded_through_constants():
    s = Sketch()
    v, one = s.variable("v"), s.op("one", "Const")
    first = s.effect("first", "AssignVariableOp", v, one)
    late = s.op("late", "Const", control=[first])
    group = s.effect("group", "NoOp", control=[late])
    last = s.effect("last", "AssignAddVariableOp", v, late, control=[group])
    result = s.returns(effects=[last])
    assert find(result, "last").control == [find(result, "first")]
    assert find(result, "late").control == [find(result, "first")]
