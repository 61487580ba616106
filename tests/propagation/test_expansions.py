"""Ops that run as several where one factor is split."""

from tests.propagation.by_hand import FLOAT, PAIR, ByHand, before
from tfpar.propagation.rule_decision import decide_by_rule
from tfpar.spec import Mesh, parse_spec


def loss():
    """Softmax cross entropy of 4 rows and 8 classes."""
    build = ByHand()
    inputs = build.fed("logits", 4, 8), build.fed("labels", 4, 8)
    attrs = {"T": FLOAT}
    outputs = [((4,), "float32"), ((4, 8), "float32")]
    op = build.emit("SoftmaxCrossEntropyWithLogits", inputs, outputs, attrs)
    return build.prepared(*op.outputs), op


def decided(prepared, op, laid, mesh=PAIR, **given):
    return decide_by_rule(before(op, prepared, mesh, {}, [laid, laid], **given), op)


def test_an_op_whose_plain_factor_is_split_runs_itself():
    prepared, op = loss()
    decision = decided(prepared, op, "S(0)")
    assert decision.expansion is None
    assert decision.strategy.out_specs == (parse_spec("S(0)"), parse_spec("S(0)"))


def test_split_classes_run_as_the_decomposition_which_reduces_over_them():
    prepared, op = loss()
    inner = decided(prepared, op, "S(1)").expansion
    assert inner is not None and inner.prepared is not prepared
    assert {kind for kind, _, _ in inner.collectives()} == {"all_reduce"}


def test_what_the_op_gives_is_what_its_decomposition_gives():
    prepared, op = loss()
    decision = decided(prepared, op, "S(1)")
    assert decision.strategy.out_specs == tuple(decision.expansion.output_specs)
    assert decision.strategy.in_specs == tuple(
        decision.expansion.specs[t] for t in decision.expansion.graph.inputs
    )


def test_an_axis_of_one_rank_splits_nothing():
    prepared, op = loss()
    assert decided(prepared, op, "S(1)", Mesh.of([1])).expansion is None


def test_alike_ops_share_what_they_run_as():
    build = ByHand()
    logits = build.fed("logits", 4, 8)
    first, second = build.unary("Softmax", logits), build.unary("Softmax", logits)
    prepared = build.prepared(first, second)
    state = before(first.op, prepared, PAIR, {}, ["S(1)"])
    one, other = (decide_by_rule(state, t.op) for t in (first, second))
    assert one.expansion is other.expansion is not None
    wider = before(first.op, prepared, Mesh.of([4]), {}, ["S(1)"])
    assert decide_by_rule(wider, first.op).expansion is not one.expansion
