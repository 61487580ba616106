"""Ops that run as several: the decomposition that a rule gives for a factor, once it is split.

Softmax cross entropy over split classes, batch normalisation over a split batch: the op itself
could not run so (`OpRule.expand`).
"""

from __future__ import annotations

import dataclasses

from tfpar.ir.graph import Op
from tfpar.propagation.decide import OpStrategy
from tfpar.propagation.partitioned_graph import Anchors, Decision
from tfpar.propagation.prepared_graph import PreparedGraph, prepare
from tfpar.propagation.state import Within
from tfpar.spec import Mesh, Partial


def expand_decision(
    op: Op,
    strategy: OpStrategy,
    prepared: PreparedGraph,
    mesh: Mesh,
    within: Within,
    confined: bool = False,
) -> Decision:
    """Return `strategy` as a decision: of the op's decomposition if it splits what asks for that.

    Args:
        prepared: the graph of `op`.
        within: propagates the decomposition; see `state.Within`.
        confined: nothing may cross ranks in it.
    """
    rule = prepared.rules[op]
    for factor in rule.expand:
        axes = tuple(a for a, s in enumerate(strategy.splits) if s[0] == factor)
        parts = mesh.group_size(axes)
        if parts > 1:
            key = (rule, strategy, mesh, confined)
            known = prepared.caches.expansions
            if key not in known:
                partial = [
                    spec if any(isinstance(p, Partial) for p in spec) else None
                    for spec in strategy.out_specs
                ]
                # What the op would leave Partial its decomposition leaves so too: who reads it
                # says where it is reduced.
                graph = _decomposition(op, prepared, factor, parts, any(partial))
                anchors = Anchors(inputs=strategy.in_specs, outputs=partial)
                inner = within(graph, mesh, anchors, confined=confined)
                made = dataclasses.replace(strategy, out_specs=tuple(inner.output_specs))
                known[key] = Decision(made, expansion=inner)
            return known[key]
    return Decision(strategy)


def _decomposition(
    op: Op, prepared: PreparedGraph, factor: int, parts: int, leaves_partial: bool
) -> PreparedGraph:
    rule = prepared.rules[op]
    key = (rule, factor, parts, leaves_partial)
    known = prepared.caches.decompositions
    if key not in known:
        known[key] = prepare(rule.expand[factor](op, parts), reduces=not leaves_partial)
    return known[key]
