"""Strategies of the ops of a graph along one mesh axis.

Here is `relu(x @ kernel)` on two ranks. `strategies` has for each node what its ops can do:

    x, fed      R, S(0)
    kernel      R, S(1), S(0)
    MatMul      R,R -> R;  S(0),R -> S(0);  S(1),S(0) -> P(sum);  R,S(1) -> S(1)
    Relu        R -> R;  S(0) -> S(0);  S(1) -> S(1)

A *node* is one op, or all ops at one place of a block that repeats: these are decided together, so
a deep model is no harder than a shallow one. Batches that are fed are one node too.

Mesh axes are decided one after another (Rhino §4: recursively on each dimension of the mesh). Along
the axes before, ops run as was chosen (`before`); along those behind nothing is split yet. So a
strategy here is a placement along one axis for each operand, and `AxisStrategySpace.specs` gives
whole specs.

What one space does not decide: ops that hold graphs, lists or a state of their own are left to
propagation (`is_left_alone`), and can run replicated or as where only the batch is split.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Mapping, Sequence

from tfpar.ir.graph import Op
from tfpar.ir.traits import REGIONS, SOURCES
from tfpar.planning.deadline import Deadline
from tfpar.planning.folding.folded_model import FoldedModel
from tfpar.planning.intra_op.rhino.axis_strategy import (
    AxisSplit,
    AxisStrategy,
    axis_strategy_of,
    sizes_after,
)
from tfpar.planning.intra_op.rhino.growth import Growth
from tfpar.planning.problem import Problem
from tfpar.propagation.decide import OpStrategy
from tfpar.propagation.engine import propagate
from tfpar.propagation.factors import WHOLE
from tfpar.propagation.partitioned_graph import Decision, OpPlan
from tfpar.propagation.prepared_graph import PreparedGraph
from tfpar.propagation.rule_decision import expand_decision
from tfpar.spec import (
    Mesh,
    Partial,
    Placement,
    Replicate,
    Shard,
    Spec,
    fits,
    replicated_spec,
)

Chosen = dict[Op, tuple[AxisStrategy, ...]]
"""Decisions so far: of each op, a strategy for each of the first mesh axes."""


@dataclasses.dataclass(frozen=True)
class AxisConstraints:
    """Constraints on operands along one axis.

    Attributes:
        batch: whether the inputs that hold the batch are split; None leaves that open.
        variables: by name, the placement that a constraint asks for.
        tensors: by tensor name, likewise.
    """

    batch: bool | None = None
    variables: Mapping[str, Placement] = dataclasses.field(default_factory=dict)
    tensors: Mapping[str, Placement] = dataclasses.field(default_factory=dict)


class AxisStrategySpace:
    """The strategies of all ops along mesh axis `axis`.

    Args:
        before: what was chosen along the axes before.
        given: what is given along this one.
        deadline: is looked at while strategies, and what they cost, are worked out, which takes
            long for large graphs; raises once the search has been given up.

    Attributes:
        nodes: the ops of each node, which run in the same way.
        place: the node of each op.
        strategies: of each node.
    """

    def __init__(
        self,
        problem: Problem,
        model: FoldedModel,
        mesh: Mesh,
        axis: int,
        before: Chosen,
        given: AxisConstraints,
        deadline: Deadline | None = None,
    ) -> None:
        self.deadline = deadline or Deadline()
        self.problem, self.model, self.mesh, self.axis = problem, model, mesh, axis
        self.before, self.given = before, given
        self.prepared: PreparedGraph = model.prepared
        self.graph = model.prepared.graph
        self.parts = mesh.shape[axis]
        self.variables = {v.handle.op: v for v in self.graph.variables}
        copies = model.folded.copies
        fed = {copies[t.op].outputs[t.index] for t in problem.step.batched if t.op in copies}
        self.fed = {t.op for t in self.graph.inputs if t in fed}
        self.left_alone = frozenset(op for op in self.graph.ops if is_left_alone(op, self.prepared))
        self._decisions: dict[tuple[object, ...], Decision] = {}
        self._specs: dict[tuple[int, str], list[tuple[Spec, ...]]] = {}
        self.data_parallel = model.data_parallel(self.parts, frozenset(self.fed))
        self.growth = self._grown()
        self.nodes, self.place = self._tied()
        self.strategies = [
            [strategy for strategy in self._strategies(ops) if self._fits(ops[0], strategy)]
            for ops in self.nodes
        ]

    # --- what ops can do ---------------------------------------------------------

    def _sizes(self, op: Op) -> list[int]:
        splits = [strategy.axis_split.split for strategy in self.before.get(op, ())]
        return sizes_after(self.prepared.rules[op], splits, self.mesh.shape)

    def _grown(self) -> Growth:
        decided = [
            op
            for op in self.graph.ops
            if op not in self.left_alone
            and op not in self.variables
            and op.type not in SOURCES
            and op.type != "NoOp"
        ]
        growth = Growth(self.prepared, decided, self._sizes, self.parts, self.deadline)
        for op in self.fed:
            growth.place(op.outputs[0], Shard(0))
        for variable in self.graph.variables:
            if variable.name in self.given.variables:
                growth.place(variable.handle, self.given.variables[variable.name])
        for op in self.graph.ops:
            for tensor in op.outputs:
                if tensor.name in self.given.tensors:
                    growth.place(tensor, self.given.tensors[tensor.name])
        for op in decided:
            for split in self.data_parallel[op].strategy.splits:
                if split[0] >= 0:
                    growth.add(op, AxisSplit(split))
        growth.begin()
        growth.grow()
        return growth

    def _tied(self) -> tuple[list[list[Op]], dict[Op, int]]:
        """Return the nodes, each of ops that run in the same way, and the number of each op's
        node."""
        leader: dict[Op, Op] = {}
        there = set(self.graph.ops)
        for row in self.model.folded.rows:
            ops = [op for op in row if op in there]
            for op in ops[1:]:
                if op not in self.left_alone and self._are_alike(ops[0], op):
                    leader[op] = ops[0]
        first = next((op for op in self.graph.ops if op in self.fed), None)
        nodes: list[list[Op]] = []
        place: dict[Op, int] = {}
        for op in self.graph.ops:
            if op in self.fed and first is not None:
                head = first
            elif op.inputs or op in self.variables or op in self.growth.axis_splits:
                head = leader.get(op, op)
            else:
                continue  # constants and the like are replicated, and cost nothing
            if head not in place:
                place[head] = len(nodes)
                nodes.append([])
            place[op] = place[head]
            nodes[place[head]].append(op)
        return nodes, place

    def _are_alike(self, one: Op, other: Op) -> bool:
        """Whether two ops at one place of a block have the same strategies."""
        rules = self.prepared.rules
        return (
            (rules[one] is rules[other] or one in self.variables)
            and self._given_of(one) == self._given_of(other)
            and self.before.get(one) == self.before.get(other)
            and all(  # what reads a variable has the spec of the variable
                self._are_alike(a.op, b.op)
                for a, b in zip(one.inputs, other.inputs, strict=True)
                if a.dtype == "resource"
            )
        )

    def _given_of(self, op: Op) -> list[Placement | None]:
        """Return the constrained placements of a variable, or of the outputs of an op; None where
        free."""
        if op in self.variables:
            return [self.given.variables.get(self.variables[op].name)]
        return [self.given.tensors.get(tensor.name) for tensor in op.outputs]

    def _strategies(self, ops: Sequence[Op]) -> list[AxisStrategy]:
        self.deadline.check()
        op = ops[0]
        if op in self.fed:
            return self._strategies_of_batch(op)
        if op in self.variables:
            return self._strategies_of_variable(ops)
        if op in self.left_alone or op not in self.growth.axis_splits:
            return self._strategies_left_alone(op)
        rule, sizes = self.prepared.rules[op], self._sizes(op)
        axis_splits = {AxisSplit(): None}
        for member in ops:
            axis_splits.update(self.growth.axis_splits[member])
        found = []
        for axis_split in axis_splits:
            strategy = axis_strategy_of(rule, axis_split, sizes, self.parts)
            if any(axis_split.split[0] == factor for factor in rule.expand):
                decision = self.decision(op, strategy)
                made = tuple(spec[self.axis] for spec in decision.strategy.out_specs)
                strategy = dataclasses.replace(strategy, made=made, kept=made)
            found += self._kept(ops, strategy)
        return found

    def _kept(self, ops: Sequence[Op], strategy: AxisStrategy) -> list[AxisStrategy]:
        """`strategy`, once for each placement in which its output is worth keeping.

        A Partial that one op reads may as well be reduced when it is read. One that several read
        is better reduced once for all of them, or scattered as some of them want it.
        """
        given = self._given_of(ops[0])
        if any(given):
            kept = tuple(g or made for g, made in zip(given, strategy.made, strict=True))
            return [dataclasses.replace(strategy, kept=kept)]
        if len(strategy.made) != 1 or not isinstance(strategy.made[0], Partial):
            return [strategy]
        if max(len(self.prepared.consumers.get(op.outputs[0], ())) for op in ops) < 2:
            return [strategy]
        wanted: dict[Placement, None] = {Replicate(): None, strategy.made[0]: None}
        for op in ops:
            wanted.update(
                {
                    p: None
                    for p in self.growth.placements.get(op.outputs[0], ())
                    if isinstance(p, Shard)
                }
            )
        return [dataclasses.replace(strategy, kept=(p,)) for p in wanted]

    def _fits(self, op: Op, strategy: AxisStrategy) -> bool:
        """Whether the operands of `op` can be cut so.

        An operand may be split already along the axes before, and the same dim is then cut once
        more: what is left of it has to divide as this placement wants. Of a batch in microbatches
        less is left than its dim says.
        """
        samples = self.problem.batch.samples
        if samples is not None and samples % self._batch_parts(op, strategy):
            return False
        tensors = {"needs": op.inputs, "made": op.outputs, "kept": op.outputs}
        return all(
            fits(tensor.shape or (), spec, self.mesh)
            for which, operands in tensors.items()
            if any(isinstance(p, Shard) for p in getattr(strategy, which))
            for tensor, spec in zip(operands, self.specs(op, strategy, which), strict=True)
        )

    def _batch_parts(self, op: Op, strategy: AxisStrategy) -> int:
        """In how many parts `op` cuts the batch: on how many ranks it does what it does where
        only the batch is split."""
        along = (*self.before.get(op, ()), strategy)
        if op in self.fed or op in self.left_alone:  # whole, or as where the batch is split
            cuts = [any(isinstance(p, Shard) for p in (*s.needs, *s.made)) for s in along]
        elif op in self.data_parallel:
            factor, _ = self.data_parallel[op].strategy.splits[0]
            cuts = [factor >= 0 and s.axis_split.split[0] == factor for s in along]
        else:  # a variable
            return 1
        return math.prod(itertools.compress(self.mesh.shape, cuts))

    def _strategies_of_batch(self, op: Op) -> list[AxisStrategy]:
        placements: list[Placement] = [Replicate(), Shard(0)]
        if self.given.batch is not None:
            placements = [placements[self.given.batch]]
        return [AxisStrategy(AxisSplit(), (), (p,), (p,)) for p in placements]

    def _strategies_of_variable(self, ops: Sequence[Op]) -> list[AxisStrategy]:
        given = self.given.variables.get(self.variables[ops[0]].name)
        placements: dict[Placement, None] = {given or Replicate(): None}
        if given is None:
            for op in ops:
                found = self.growth.placements.get(op.outputs[0], {})
                placements.update({p: None for p in found if isinstance(p, Shard)})
        return [AxisStrategy(AxisSplit(), (), (p,), (p,)) for p in placements]

    def _strategies_left_alone(self, op: Op) -> list[AxisStrategy]:
        """Whole, and as where only the batch is split."""
        strategies = [_unsplit(op)]
        decision = self.data_parallel.get(op)
        if decision is not None:
            strategy = decision.strategy
            needs = tuple(spec[0] for spec in strategy.in_specs)
            made = tuple(spec[0] for spec in strategy.out_specs)
            strategies.append(AxisStrategy(AxisSplit(), needs, made, made))
        return strategies

    # --- specs -------------------------------------------------------------------

    def specs(self, op: Op, strategy: AxisStrategy, which: str) -> tuple[Spec, ...]:
        """Return the specs of the inputs ("needs") or outputs ("made", "kept") of `op` with
        `strategy`."""
        strategies = (*self.before.get(op, ()), strategy)
        rest = replicated_spec(self.mesh.num_axes - len(strategies))
        return tuple(
            (*along, *rest) for along in zip(*(getattr(s, which) for s in strategies), strict=True)
        )

    def specs_of(self, op: Op, which: str) -> list[tuple[Spec, ...]]:
        """Return `specs` for each strategy of the op's node, of which all ops have the same."""
        number = self.place[op]
        key = number, which
        if key not in self._specs:
            self._specs[key] = [self.specs(op, s, which) for s in self.strategies[number]]
        return self._specs[key]

    def decision(self, op: Op, strategy: AxisStrategy) -> Decision:
        before, rule = self.before.get(op, ()), self.prepared.rules[op]
        key = (rule, before, strategy.axis_split)
        if key not in self._decisions:
            splits = tuple(s.axis_split.split for s in (*before, strategy))
            splits += (WHOLE,) * (self.mesh.num_axes - len(splits))
            all_axes = OpStrategy(
                splits, self.specs(op, strategy, "needs"), self.specs(op, strategy, "made")
            )
            self._decisions[key] = expand_decision(
                op, all_axes, self.prepared, self.mesh, propagate
            )
        return self._decisions[key]

    # --- what is chosen ----------------------------------------------------------

    def nothing_split(self) -> Chosen:
        """Return `before`, and nothing split along this axis."""
        return self.chosen([0] * len(self.nodes))

    def unsplit(self, num_axes: int) -> Chosen:
        """Nothing split along so many first mesh axes, whatever is given."""
        return {op: (_unsplit(op),) * num_axes for op in self.place}

    def data_parallel_picks(self) -> list[int]:
        """Data parallelism along this axis, or the nearest to it that the strategies allow."""
        picks = []
        for ops, strategies in zip(self.nodes, self.strategies, strict=True):
            distances = [self._distance(ops[0], strategy) for strategy in strategies]
            picks.append(distances.index(min(distances)))
        return picks

    def _distance(self, op: Op, strategy: AxisStrategy) -> int:
        """Count the operands that `strategy` places in another way than data parallelism does."""
        if op in self.fed or op in self.variables:
            return int(isinstance(strategy.kept[0], Shard) != (op in self.fed))
        parallel = self.data_parallel[op].strategy
        wanted = (spec[0] for spec in (*parallel.in_specs, *parallel.out_specs))
        return sum(p != w for p, w in zip((*strategy.needs, *strategy.made), wanted, strict=True))

    def chosen(self, picks: Sequence[int]) -> Chosen:
        """Return `before`, and along this axis the strategies that `picks` stand for."""
        found: Chosen = {}
        for number, ops in enumerate(self.nodes):
            for op in ops:
                found[op] = (*self.before.get(op, ()), self.strategies[number][picks[number]])
        return found


def _unsplit(op: Op) -> AxisStrategy:
    inputs, outputs = ((Replicate(),) * len(some) for some in (op.inputs, op.outputs))
    return AxisStrategy(AxisSplit(), inputs, outputs, outputs)


def is_left_alone(op: Op, prepared: PreparedGraph) -> bool:
    """Whether propagation decides how `op` runs: it holds other graphs, lists or a state."""
    return (
        op.type in REGIONS
        or op in prepared.once
        or any(t.dtype == "variant" for t in (*op.inputs, *op.outputs))
    )


def op_plans(chosen: Chosen, prepared: PreparedGraph) -> dict[str, OpPlan]:
    """Return the op plans for `Anchors.ops`, of all ops that are decided and read something or draw
    it."""
    found = {}
    for op, strategies in chosen.items():
        if is_left_alone(op, prepared) or not (op.inputs or prepared.rules[op].drawn):
            continue
        parts = (
            tuple(zip(*(getattr(strategy, which) for strategy in strategies), strict=True))
            for which in ("needs", "made", "kept")
        )
        found[op.name] = OpPlan(*parts)
    return found
