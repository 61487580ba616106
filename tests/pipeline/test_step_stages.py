"""Every op of a training step has a stage: backward pass and update follow the forward pass."""

from __future__ import annotations

import pytest

from tests.graphs import saved
from tfpar.ir import (
    BACKWARD,
    FORWARD,
    UPDATE,
    DType,
    Graph,
    GraphBuilder,
    Op,
    Roles,
    Tensor,
    Variable,
    planning_graph,
    traits,
)
from tfpar.pipeline.step_stages import assignable, stages_of_step
from tfpar.spec import PlanError

N = 4


class Step:
    """A step by hand: each op under the name that it is asked about by."""

    def __init__(self) -> None:
        self.build = GraphBuilder()
        self.named: dict[str, Tensor | Op] = {}
        self.forward: dict[Op, int] = {}
        self.gradients: list[Tensor] = []

    def fed(self, name: str, shape=(N, N)) -> Tensor:
        found = self.source(name, shape, "float32")
        self.build.graph.inputs.append(found)
        return found

    def source(self, name: str, shape, dtype: str) -> Tensor:
        attrs = {"dtype": DType(dtype)}
        op = self.build.emit("Placeholder", (), [(shape, dtype)], attrs, name)
        self.named[name] = op
        return op.outputs[0]

    def variable(self, name: str, shape=(N, N), trainable: bool = True) -> Tensor:
        handle = self.source(name, shape, "resource")
        self.build.graph.variables.append(Variable(name, shape, "float32", trainable, handle))
        return handle

    def read(self, handle: Tensor, name: str) -> Tensor:
        return self.op("ReadVariableOp", name, handle, shape=handle.shape)

    def op(self, op_type: str, name: str, *inputs: Tensor, shape=(N, N), stage=None) -> Tensor:
        op = self.build.emit(op_type, inputs, [(shape, "float32")], name=name)
        self.named[name] = op
        if stage is not None:
            self.forward[op] = stage
        return op.outputs[0]

    def back(self, op_type: str, name: str, *inputs: Tensor, shape=(N, N)) -> Tensor:
        found = self.op(op_type, f"gradient_tape/{name}", *inputs, shape=shape)
        self.named[name] = found.op
        return found

    def assign(self, name: str, handle: Tensor, value: Tensor, stage=None) -> None:
        op = self.build.emit("AssignSubVariableOp", (handle, value), [], name=name, stateful=True)
        self.named[name] = op
        self.build.graph.effects.append(op)
        if stage is not None:
            self.forward[op] = stage

    def stages(self, *names: str) -> tuple[int, ...]:
        graph = self.build.graph
        found = stages_of_step(graph, Roles.of(graph, self.gradients), self.forward)
        assert {*found} == {*graph.ops}
        return tuple(found[self.named[name]] for name in names)


def two_layers(update: bool = True) -> Step:
    """y = relu(x @ a) @ b, a in stage 0 and b in stage 1, and the gradients of both."""
    step = Step()
    x, a, b = step.fed("x"), step.variable("a"), step.variable("b")
    read_a, read_b = step.read(a, "read_a"), step.read(b, "read_b")
    h = step.op("MatMul", "h", x, read_a, stage=0)
    r = step.op("Relu", "r", h, stage=0)
    y = step.op("MatMul", "y", r, read_b, stage=1)
    dy = step.back("Mul", "dy", y, step.build.const(2.0))
    db = step.back("MatMul", "db", r, dy)
    dr = step.back("MatMul", "dr", dy, read_b)
    dh = step.back("ReluGrad", "dh", dr, r)
    da = step.back("MatMul", "da", x, dh)
    step.gradients = [da, db]
    if update:
        step.assign("update_a", a, da)
        step.assign("update_b", b, db)
    return step


# --- by hand ----------------------------------------------------------------------------------


@pytest.mark.parametrize("update", [True, False])
def test_gradients_are_computed_where_the_forward_pass_was(update):
    step = two_layers(update)
    assert step.stages("dy", "db", "dr", "dh", "da") == (1, 1, 1, 0, 0)
    assert step.stages("x", "a", "b", "read_a", "read_b") == (0, 0, 1, 0, 1)
    if update:
        assert step.stages("update_a", "update_b") == (0, 1)


def test_a_bias_gradient_is_summed_before_it_is_sent():
    """And what it makes smaller stays: a cast or a spread goes on."""
    step = Step()
    x, a, bias = step.fed("x"), step.variable("a"), step.variable("bias", (N,))
    h = step.op("MatMul", "h", x, step.read(a, "read_a"), stage=0)
    s = step.op("AddV2", "s", h, step.read(bias, "read_bias"), stage=1)
    mean = step.op("Mean", "mean", s, shape=(), stage=1)
    dmean = step.back("Mul", "dmean", mean, mean, shape=())
    ds = step.back("BroadcastTo", "ds", dmean)
    dbias = step.back("Sum", "dbias", ds, shape=(N,))
    dh = step.back("Neg", "dh", ds)
    da = step.back("MatMul", "da", x, dh)
    step.gradients = [da, dbias]
    step.assign("update_bias", bias, dbias)
    step.assign("update_a", a, da)
    assert step.stages("ds", "dbias", "update_bias", "dh", "da") == (1, 1, 1, 0, 0)


def test_the_gradient_of_a_weight_is_computed_with_it_though_it_is_a_product_and_a_sum():
    """A layer that is cut before its bias: what its product gives is read behind the cut."""
    step = Step()
    x, a, skip = step.fed("x", (2, N, N)), step.variable("a"), (2, N, N)
    e = step.op("Neg", "e", x, shape=skip, stage=0)
    read = step.read(a, "read_a")
    h = step.op("BatchMatMulV2", "h", e, read, shape=skip, stage=0)
    y = step.op("AddV2", "y", h, e, shape=skip, stage=1)
    dy = step.back("Square", "dy", y, shape=skip)
    both = step.back("BatchMatMulV2", "both", e, dy, shape=skip)
    da = step.back("Sum", "da", both)
    de = step.back("BatchMatMulV2", "de", dy, read, shape=skip)
    step.back("L2Loss", "square_e", de, shape=())
    step.gradients = [da, step.named["square_e"].outputs[0]]
    step.assign("update_a", a, da)
    assert step.stages("dy", "de", "both", "da") == (1, 0, 0, 0)


def test_gradients_of_a_tied_weight_are_added_up_with_its_owner():
    step = Step()
    x, table, b = step.fed("x"), step.variable("table"), step.variable("b")
    read, again = step.read(table, "read"), step.read(table, "again")
    e = step.op("MatMul", "e", x, read, stage=0)
    h = step.op("MatMul", "h", e, step.read(b, "read_b"), stage=1)
    y = step.op("MatMul", "y", h, again, stage=2)
    dy = step.back("Square", "dy", y)
    late = step.back("MatMul", "late", h, dy)
    dh = step.back("MatMul", "dh", dy, again)
    db = step.back("MatMul", "db", e, dh)
    de = step.back("MatMul", "de", dh, step.named["read_b"].outputs[0])
    early = step.back("MatMul", "early", x, de)
    total = step.op("AddN", "AddN", late, early)
    step.gradients = [total, db]
    step.assign("update", table, total)
    assert step.stages("table", "read", "again") == (0, 0, 0)
    assert step.stages("dy", "late", "dh", "db", "de", "early") == (2, 2, 2, 1, 1, 0)
    assert step.stages("AddN", "update") == (0, 0)


def test_gradients_of_a_skip_are_sent_as_one():
    """It is read in stages 1 and 2: what comes of both is added up in 1, and sent once."""
    step = Step()
    x = step.fed("x")
    a, b = step.variable("a"), step.variable("b")
    s = step.op("MatMul", "s", x, step.read(a, "read_a"), stage=0)
    m = step.op("MatMul", "m", s, step.read(b, "read_b"), stage=1)
    y = step.op("Mul", "y", s, m, stage=2)
    dy = step.back("Square", "dy", y)
    ds = step.back("Mul", "ds", dy, m)
    dm = step.back("Mul", "dm", dy, s)
    db = step.back("MatMul", "db", s, dm)
    through = step.back("MatMul", "through", dm, step.named["read_b"].outputs[0])
    total = step.op("AddN", "AddN", ds, through)
    da = step.back("MatMul", "da", x, total)
    step.gradients = [da, db]
    step.assign("update_a", a, da)
    step.assign("update_b", b, db)
    assert step.stages("dy", "ds", "AddN", "da") == (2, 1, 1, 0)
    assert step.stages("dm", "db", "through") == (1, 1, 1)


def test_what_the_backward_pass_alone_reads_binds_it_to_no_stage():
    """A label that is compared with a gradient."""
    step = Step()
    x, a = step.fed("x"), step.variable("a")
    h = step.op("MatMul", "h", x, step.read(a, "read_a"), stage=0)
    y = step.op("Tanh", "y", h, stage=1)
    dy = step.back("TanhGrad", "dy", y, y)
    loss = step.back("Sub", "loss", dy, step.fed("label"))
    dh = step.back("Square", "dh", loss)
    da = step.back("MatMul", "da", x, dh)
    step.gradients = [da]
    step.assign("update_a", a, da)
    assert step.stages("dy", "loss", "label", "da") == (1, 0, 0, 0)


def test_a_weight_that_the_backward_pass_moves_is_moved_where_it_lies():
    """Its second gradient is taken at another value, which is read in a later stage."""
    step = Step()
    x, bias = step.fed("x"), step.variable("bias")
    h = step.op("AddV2", "h", x, step.read(bias, "read"), stage=1)
    dh = step.back("Square", "dh", h)
    step.assign("gradient_tape/climb", bias, dh)
    again = step.op("AddV2", "again", x, step.read(bias, "read_again"), stage=0)
    step.op("Tanh", "y", again, stage=1)
    d_again = step.back("Square", "d_again", again)
    step.gradients = [d_again]
    step.assign("update", bias, d_again)
    found = step.stages("bias", "read", "gradient_tape/climb", "read_again", "update")
    assert found == (0,) * 5


def with_adam(step: Step, name: str, gradient: Tensor, rate: Tensor) -> None:
    """Momentum and second moment, by hand."""
    handle = step.named[name].outputs[0]
    m = step.variable(f"{name}/m", trainable=False)
    v = step.variable(f"{name}/v", trainable=False)
    step.assign(f"{name}/decay", m, step.op("Mul", f"{name}/dm", gradient, rate))
    step.assign(f"{name}/square", v, step.op("Square", f"{name}/dv", gradient))
    moved = step.op("Mul", f"{name}/moved", step.read(m, f"{name}/new_m"), rate)
    scale = step.op("Rsqrt", f"{name}/scale", step.read(v, f"{name}/new_v"))
    step.assign(f"{name}/step", handle, step.op("Mul", f"{name}/by", moved, scale))


def test_slots_follow_their_weight():
    step = two_layers(update=False)
    count = step.variable("iterations", (), trainable=False)
    rate = step.op("Pow", "rate", step.read(count, "read_count"), shape=())
    for name, gradient in zip("ab", step.gradients, strict=True):
        with_adam(step, name, gradient, rate)
    step.assign("tick", count, step.build.const(1.0))
    for name, stage in (("a", 0), ("b", 1)):
        ops = ("m", "v", "decay", "square", "dm", "dv", "moved", "new_m", "scale", "step", "by")
        assert {*step.stages(*(f"{name}/{op}" for op in ops))} == {stage}
    assert len({*step.stages("iterations", "tick", "read_count")}) == 1


def test_a_global_norm_is_summed_where_it_is_read_first():
    step = two_layers(update=False)
    da, db = step.gradients
    for name, gradient in (("a", da), ("b", db)):
        square = step.op("Square", f"square_{name}", gradient)
        step.op("Sum", f"sum_{name}", square, shape=())
    sums = [step.named[f"sum_{n}"].outputs[0] for n in "ab"]
    norm = step.op("AddN", "norm", *sums, shape=())
    for name, gradient in (("a", da), ("b", db)):
        step.op("Mul", f"clipped_{name}", gradient, norm)
        handle = step.named[name].outputs[0]
        step.assign(f"update_{name}", handle, step.named[f"clipped_{name}"].outputs[0])
    assert step.stages("square_a", "square_b") == (0, 1)
    assert step.stages("clipped_a", "clipped_b", "update_a", "update_b") == (0, 1, 0, 1)
    assert step.stages("norm") == (0,)


def test_gradients_that_are_clipped_before_the_optimizer_stay_where_they_are():
    """Their norm is part of the backward pass then, and read in both stages."""
    step = two_layers(update=False)
    squares = [
        step.back("L2Loss", f"square_{i}", gradient, shape=())
        for i, gradient in enumerate(step.gradients)
    ]
    scale = step.op("AddN", "norm", *squares, shape=())
    for i, name in enumerate("ab"):
        clipped = step.back("Mul", f"clipped_{name}", step.gradients[i], scale)
        step.gradients[i] = clipped
        step.assign(f"update_{name}", step.named[name].outputs[0], clipped)
    assert step.stages("square_0", "square_1", "clipped_a", "clipped_b") == (0, 1, 0, 1)
    assert step.stages("dy", "db", "dr", "dh", "da") == (1, 1, 1, 0, 0)


def test_weights_without_dims_have_slots_too():
    step = Step()
    x, gain = step.fed("x"), step.variable("gain", ())
    h = step.op("Relu", "h", x, stage=0)
    read = step.read(gain, "read")
    y = step.op("Mul", "y", h, read, stage=1)
    dgain = step.back("Sum", "dgain", y, shape=())
    m = step.variable("m", (), trainable=False)
    step.gradients = [dgain]
    step.assign("decay", m, dgain)
    step.assign("update", gain, step.op("Neg", "new", step.read(m, "new_m"), shape=()))
    assert step.stages("dgain", "m", "decay", "new_m", "new", "update") == (1,) * 6


def test_draws_and_their_seeds_lie_where_they_are_read():
    """Read by no op that is given: seed, its next value, the mask."""
    step = Step()
    x = step.fed("x")
    seed = step.variable("seed", (), trainable=False)
    key = step.read(seed, "key")
    mask = step.op("StatelessRandomUniformV2", "mask", key)
    step.assign("next", seed, step.op("AddV2", "added", key, step.build.const(1.0), shape=()))
    h = step.op("Relu", "h", x, stage=0)
    step.op("Mul", "y", h, mask, stage=1)
    assert step.stages("seed", "key", "mask", "next", "added") == (1, 1, 1, 1, 1)


def test_statistics_lie_where_they_are_written():
    """A moving mean that an early stage reads, and a later one moves."""
    step = Step()
    x, mean = step.fed("x"), step.variable("mean", trainable=False)
    h = step.op("Sub", "h", x, step.read(mean, "read"), stage=0)
    step.assign("move", mean, step.op("Relu", "y", h, stage=1), stage=1)
    assert step.stages("mean", "move", "read") == (1, 1, 1)


def test_results_of_metrics_lie_with_what_they_read():
    step = Step()
    x = step.fed("x")
    total, count = (step.variable(n, (), trainable=False) for n in ("total", "count"))
    y = step.op("Sum", "y", step.op("Neg", "h", x, stage=0), shape=(), stage=1)
    step.assign("add_total", total, y, stage=1)
    step.assign("add_count", count, step.build.const(1.0))
    both = (step.read(total, "read_total"), step.read(count, "read_count"))
    step.op("Identity", "result", step.op("DivNoNan", "mean", *both, shape=()), shape=())
    assert step.stages("total", "count", "add_count", "read_count", "mean", "result") == (1,) * 6


def test_what_is_to_be_assigned():
    """Neither what the update reads of weights, nor draws and constants; penalties are."""
    step = two_layers(update=False)
    a, b = (step.named[n].outputs[0] for n in "ab")
    penalty = step.op("L2Loss", "penalty", step.named["read_a"].outputs[0], shape=(), stage=0)
    dpenalty = step.back("Mul", "dpenalty", penalty, step.gradients[0])
    norm = step.op("L2Loss", "norm", step.read(b, "again"), shape=())
    step.assign("update_a", a, dpenalty)
    step.gradients[0] = dpenalty
    step.assign("update_b", b, step.op("Mul", "scaled", step.gradients[1], norm))
    graph = step.build.graph
    found = assignable(graph, Roles.of(graph, step.gradients))
    assert [op.name for op in found] == ["h", "r", "y", "penalty"]
    assert step.stages("norm", "again", "scaled") == (1, 1, 1)


def test_penalties_are_computed_where_their_weights_lie():
    """Though they are read with the loss, and nothing of the backward pass needs their values."""
    step = two_layers()
    a, b = (step.named[f"read_{n}"].outputs[0] for n in "ab")
    sums = [
        step.op("Sum", f"sum_{i}", step.op("Square", f"square_{i}", read), shape=())
        for i, read in enumerate((a, b))
    ]
    y = step.op("Sum", "loss", step.named["y"].outputs[0], shape=(), stage=1)
    penalty = step.op("AddV2", "penalty", *sums, shape=())
    step.build.graph.outputs = [step.op("AddV2", "total", y, penalty, shape=(), stage=1)]
    assert step.stages("square_0", "sum_0", "square_1", "sum_1", "penalty") == (0, 0, 1, 1, 1)


def test_constants_lie_where_they_are_read_first():
    step = Step()
    x = step.fed("x")
    one = step.build.const(1.0)
    step.named["one"] = one.op
    h = step.op("Mul", "h", step.op("Neg", "g", x, stage=0), one, stage=1)
    step.op("Mul", "y", h, one, stage=2)
    assert step.stages("one") == (1,)


def test_a_variable_that_two_stages_write_is_refused():
    step = Step()
    x, mean = step.fed("x"), step.variable("mean", trainable=False)
    h = step.op("Relu", "h", x, stage=0)
    step.assign("first", mean, h, stage=0)
    step.assign("second", mean, step.op("Neg", "y", h, stage=1), stage=1)
    with pytest.raises(PlanError, match=r"Variable 'mean' is written in stages 0 and 1; what"):
        step.stages()


def test_an_op_without_a_stage_is_named():
    step = Step()
    x = step.fed("x")
    step.op("Relu", "y", step.op("Neg", "h", x), stage=1)
    with pytest.raises(PlanError, match=r"No stage is given for 'h' of the forward pass"):
        step.stages()


def test_an_op_that_updates_weights_of_two_stages_is_refused():
    step = two_layers(update=False)
    a, b = (step.named[n].outputs[0] for n in "ab")
    both = step.build.emit("Both", (a, b, *step.gradients), [], name="both", stateful=True)
    step.build.graph.effects.append(both)
    with pytest.raises(PlanError, match=r"Op 'both' \(Both\) updates variables of stages 0 and 1"):
        step.stages()


# --- models -------------------------------------------------------------------------------------


def sent(graph: Graph, stages, phase, roles) -> int:
    """Bytes of tensors made in a phase that are sent, once to each stage that reads them."""
    pairs = {
        (t, stages[op])
        for op in graph.ops
        for t in op.inputs
        if stages[t.op] != stages[op] and roles.phase[t.op] == phase and t.dtype != "resource"
    }
    return sum(t.num_bytes for t, _ in pairs)


@pytest.mark.slow
@pytest.mark.parametrize("num_stages", [2, 4])
@pytest.mark.parametrize(
    "name", ["gpt", "gpt_mixed", "t5", "unet", "resnet", "clip_4_layers", "gshard_moe", "embedded"]
)
def test_what_holds_of_every_model(name, num_stages):
    """Wherever the forward pass is cut, be it amid a layer."""
    step = saved(name)
    graph = planning_graph(step.graph, step.gradients).graph
    roles = Roles.of(graph, step.gradient_tensors)
    ops = assignable(graph, roles)
    forward = {op: i * num_stages // len(ops) for i, op in enumerate(ops)}
    stages = stages_of_step(graph, roles, forward)
    assert list(stages) == graph.ops
    assert {*stages.values()} == {*range(num_stages)}
    consumers = graph.consumers()
    for op in graph.ops:
        for tensor in op.inputs:
            before, own = stages[tensor.op], stages[op]
            if tensor.op in forward and roles.phase[op] == FORWARD:
                assert before <= own
            if roles.phase[tensor.op] == BACKWARD and roles.phase[op] == BACKWARD:
                assert before >= own or not tensor.op.inputs
    for variable in graph.variables:
        touching = [op for op in consumers[variable.handle] if op not in forward]
        others = [op for op in consumers[variable.handle] if op in forward]
        assert {stages[op] for op in touching} <= {stages[variable.handle.op]}
        assert all(op.type in traits.VARIABLE_READS or op in forward for op in others)
        updates = [op for op in touching if roles.phase[op] == UPDATE]
        assert len(updates) == (variable.name in {g.variable for g in step.gradients})
    there, back = (sent(graph, stages, phase, roles) for phase in (FORWARD, BACKWARD))
    assert back <= 2 * there
