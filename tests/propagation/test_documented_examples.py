"""Figures of the examples that open modules: they are what the modules do."""

from __future__ import annotations

from tests.propagation.by_hand import PAIR, ByHand, specs
from tfpar.ir import parse_graph
from tfpar.propagation import decide
from tfpar.propagation.decide import OperandState, choose_strategy
from tfpar.propagation.engine import propagate
from tfpar.propagation.factors import WHOLE
from tfpar.propagation.partitioned_graph import Anchors
from tfpar.propagation.prepared_graph import prepare
from tfpar.rules import PLAIN


def test_a_product_moves_the_smaller_of_its_inputs():
    """Of `propagation.decide`."""
    build = ByHand()
    y = build.product(build.fed("x", 8, 4), build.fed("w", 4, 6))
    rule, operands = prepare(build.graph).rules[y.op], [OperandState.of(t) for t in y.op.inputs]
    arriving = specs("S(0)", "S(1)")
    placements = [spec[0] for spec in arriving]
    placed = [(rule.factor("i"), PLAIN), (rule.factor("j"), PLAIN)]

    def moved(split):
        costs = decide._split_cost(rule, operands, placements, placed, rule.sizes, split, 2)
        return costs[0]

    assert decide._replicate_cost(operands, placements) == 128 + 96
    assert [moved(split) for split in placed] == [96, 128]
    chosen = choose_strategy(rule, operands, arriving, y.num_bytes, PAIR)
    assert (chosen.in_specs, chosen.out_specs) == (specs("S(0)", "R"), specs("S(0)"))
    assert chosen.splits[0] == placed[0] != WHOLE


def test_an_open_table_is_laid_for_the_product_behind_the_lookup():
    """Of `propagation.open_weights` and `propagation.roots`."""
    graph = parse_graph("""
    graph(%ids) {
      variable "table": float32[100,8] = %t, trainable
      variable "kernel": float32[8,4] = %k, trainable
      %ids: int32[6] = Placeholder {dtype = int32}
      %t: resource[100,8] = Placeholder {dtype = resource}
      %k: resource[8,4] = Placeholder {dtype = resource}
      %axis: int32[] = Const {dtype = int32, value = dense<int32[]: 0>}
      %read: float32[100,8] = ReadVariableOp(%t) {dtype = float32}
      %w: float32[8,4] = ReadVariableOp(%k) {dtype = float32}
      %rows: float32[6,8] = GatherV2(%read, %ids, %axis) {batch_dims = 0}
      %y: float32[6,4] = MatMul(%rows, %w) {transpose_a = false, transpose_b = false}
      return(%y)
    }
    """)
    rows, whole = specs("S(0)", "R")
    laid = propagate(prepare(graph), PAIR, Anchors(variables={"kernel": rows}, inputs=[whole]))
    assert laid.variable_specs[graph.variables[0]] == specs("S(1)")[0]
