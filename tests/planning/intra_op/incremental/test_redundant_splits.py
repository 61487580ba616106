"""Weights whose split shares no work."""

from __future__ import annotations

import pytest

from tests.propagation.by_hand import GRID, PAIR, ByHand, passed
from tfpar.ir import BACKWARD, FORWARD
from tfpar.planning.intra_op.incremental.fragments import weight_of_values
from tfpar.planning.intra_op.incremental.incremental import find_redundant_splits, why_idle
from tfpar.spec import parse_spec


def found(build, y, laid, fed=(), mesh=PAIR, phase=FORWARD, judged=True):
    """The idle splits of a pass over the graph that makes `y`, with "w" laid as it is said."""
    prepared = build.prepared(y)
    state = passed(prepared, mesh, {"w": laid}, fed)
    phases = dict.fromkeys(prepared.graph.ops, phase)
    weights = prepared.graph.variables if judged else ()
    values = weight_of_values(prepared)
    return list(find_redundant_splits(state.result.decisions, state.specs, phases, values, weights))


def product():
    """x @ transpose(w)"""
    build = ByHand()
    turned = build.transpose(build.weight("w", 8, 6), (1, 0))
    return build, build.product(build.fed("x", 4, 6), turned)


def unsplittable():
    """An op without a rule, which runs whole."""
    build = ByHand()
    return build, build.one("Mystery", (build.weight("w", 8, 6),), (8, 6), "float32")


@pytest.mark.parametrize("laid", ["S(0)", "S(1)", "R"])
def test_a_split_that_the_product_shares_is_not_idle(laid):
    assert not found(*product(), laid, ["R"])


def test_a_weight_that_is_gathered_for_a_split_batch_shares_the_work_of_the_batch():
    build, y = product()
    assert not found(build, y, "S(0)", ["S(0)"])


def test_a_weight_that_is_gathered_for_an_op_that_runs_whole_is_idle():
    build, y = unsplittable()
    (idle,) = found(build, y, "R,S(0)", mesh=GRID)
    (weight,) = build.graph.variables
    assert idle == (weight, 1, y.op)


@pytest.mark.parametrize("given", [{"phase": BACKWARD}, {"judged": False}])
def test_only_the_forward_pass_and_weights_that_are_judged_count(given):
    build, y = unsplittable()
    assert not found(build, y, "R,S(0)", mesh=GRID, **given)


def test_what_is_wrong_names_weight_op_and_axis():
    build, y = unsplittable()
    (weight,) = build.graph.variables
    text = why_idle(weight, parse_spec("R,S(0)"), 1, y.op, GRID)
    assert "w is R,S(0), but Mystery" in text and "runs whole along 'model'" in text
