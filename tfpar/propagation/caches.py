"""Memo of propagation, which serves all plans of a graph.

A search propagates thousands of plans of one graph, and most ops run in them as they ran before.
Each field is the memo of one function; the key is all that its result depends on.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Hashable, Sequence
from typing import TYPE_CHECKING, Any

from tfpar.ir.graph import Op, Tensor
from tfpar.rules.rule import OpRule
from tfpar.spec import Mesh, Spec

if TYPE_CHECKING:
    from tfpar.propagation.consumer_spec import ReachedConsumer
    from tfpar.propagation.decide import OpStrategy
    from tfpar.propagation.memo_trie import MemoTrie
    from tfpar.propagation.partitioned_graph import Decision, OpPlan
    from tfpar.propagation.prepared_graph import PreparedGraph

Arriving = tuple[Spec | None, ...]
"""The specs in which an op's inputs come; FREE for what is open."""

DecisionKey = tuple[OpRule, Arriving, tuple[bool, ...], Mesh, bool, tuple[int, ...], bool, bool]
"""(rule, arriving, which inputs are loose, mesh, confined, axes that it may not use, deferred,
sparse).

Ops of one rule may be read differently, and run differently for that: the last two say how."""

RegionKey = tuple[Op, tuple[Spec, ...], tuple[bool, ...], Mesh, bool, tuple[int, ...]]
"""(op, arriving, which inputs are loose, mesh, confined, axes that it may not use)."""


@dataclasses.dataclass(eq=False)
class PropagationMemo:
    """The memory of each function of this package that has one.

    Attributes:
        decisions: of `rule_decision.decide_by_rule`.
        repeated: of `fast_path.make_fast_path`, by mesh: decisions of ordinary ops, by (rule,
            arriving, deferred).
        planned: of `planned_op.apply_op_plan`, by (rule, plan, mesh); None if it cannot run so.
        regions: of `regions.partition_region`.
        expansions: of `expansions.expand_decision`, by (rule, strategy, mesh, confined).
        decompositions: the graphs that stand for ops with a split factor, by (rule, factor, parts,
            whether they may leave Partials).
        known_specs: of `view.known_spec`, by (mesh shape, tensor, spec that it is made of).
        reached: of `consumer_spec.nearest`: the ops that come of a tensor.
        answers: of `memo_trie.memoize_strategy`, by mesh and the axes along which a plan splits
            data.
    """

    decisions: dict[DecisionKey, Decision] = dataclasses.field(default_factory=dict)
    repeated: dict[Mesh, dict[tuple[OpRule, Arriving, bool], Decision]] = dataclasses.field(
        default_factory=dict
    )
    planned: dict[tuple[OpRule, OpPlan, Mesh], Decision | None] = dataclasses.field(
        default_factory=dict
    )
    regions: dict[RegionKey, tuple[Decision, tuple[int, ...]]] = dataclasses.field(
        default_factory=dict
    )
    expansions: dict[tuple[OpRule, OpStrategy, Mesh, bool], Decision] = dataclasses.field(
        default_factory=dict
    )
    decompositions: dict[tuple[OpRule, int, int, bool], PreparedGraph] = dataclasses.field(
        default_factory=dict
    )
    known_specs: dict[tuple[tuple[int, ...], Tensor, Spec], Spec] = dataclasses.field(
        default_factory=dict
    )
    reached: dict[Tensor, Sequence[ReachedConsumer]] = dataclasses.field(default_factory=dict)
    answers: dict[tuple[Mesh, frozenset[int]], dict[Hashable, MemoTrie[Any]]] = dataclasses.field(
        default_factory=dict
    )
