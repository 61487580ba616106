"""What runs alike in all plans is laid once, and nothing else is."""

from tests.propagation.by_hand import PAIR, ByHand, begun
from tfpar.planning.intra_op.incremental.incremental import propagate_invariant_ops
from tfpar.propagation import OpPlan


def scaled_product():
    """(x @ w) * sqrt(c)"""
    build = ByHand()
    handle = build.variable("w", 8, 6)
    scale = build.unary("Sqrt", build.const(2.0, "float32"))
    made = build.product(build.fed("x", 4, 8), build.read(handle))
    y = build.binary("Mul", made, scale)
    return build.prepared(y), scale, made, y


def test_constants_are_fixed_and_what_is_computed_of_them_alone():
    prepared, scale, made, y = scaled_product()
    state = begun(prepared, PAIR, {"w": "S(1)"}, ["R"])
    fixed = propagate_invariant_ops(state)
    assert {op for op in fixed if op.type != "Placeholder"} == {scale.op, scale.op.inputs[0].op}
    assert state.spec(scale) == state.replicated
    assert set(state.result.decisions) == {scale.op, scale.op.inputs[0].op}
    assert made not in state.specs and y not in state.specs


def test_what_a_plan_says_of_a_constant_is_not_passed_over():
    prepared, scale, *_ = scaled_product()
    whole = begun(prepared, PAIR, {"w": "S(1)"}, ["R"]).replicated
    planned = {scale.op.name: OpPlan((whole,), (whole,), (whole,))}
    state = begun(prepared, PAIR, {"w": "S(1)"}, ["R"], ops=planned)
    assert scale.op not in propagate_invariant_ops(state)


def test_what_readers_have_a_say_on_is_not_fixed():
    build = ByHand()
    drawn = build.draw(4, 6)
    sizes, value = build.const([4, 6], "int32"), build.const(0.5, "float32")
    filled = build.one("Fill", (sizes, value), (4, 6), "float32")
    prepared = build.prepared(build.binary("AddV2", drawn, filled))
    fixed = propagate_invariant_ops(begun(prepared, PAIR, {}, []))
    assert not fixed & {drawn.op, filled.op}
