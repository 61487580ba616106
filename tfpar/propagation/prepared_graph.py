"""Prepared graph: all that propagation computes of a graph once for all plans."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Collection, Hashable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from tfpar.ir.constants import Constants
from tfpar.ir.graph import Graph, Op, Tensor, Variable, freeze
from tfpar.ir.passes.block_sums import split_block_sums
from tfpar.ir.passes.fold_constants import fold_constants
from tfpar.ir.passes.slots import find_separate_slots
from tfpar.ir.roles import NARROW
from tfpar.ir.traits import ADDITIONS, NEW_LISTS, REFERENCES, REGIONS, WHOLE_UPDATES
from tfpar.propagation.deferral import Carry, Meetings, carried_tensors, is_product
from tfpar.propagation.follow import Follow, followed_weights
from tfpar.rules.registry import find_rule
from tfpar.rules.rule import OpRule, find_relabelled_inputs, replicate_rule
from tfpar.spec import Mesh, Spec

if TYPE_CHECKING:
    from tfpar.propagation.consumer_spec import ReachedConsumer
    from tfpar.propagation.decide import OpStrategy
    from tfpar.propagation.memo_trie import MemoTrie
    from tfpar.propagation.partitioned_graph import Decision, OpPlan


# A search propagates thousands of plans of one graph, and most ops run in them as they ran before.
# Each field is the memo of one function; the key is all that its result depends on.

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
    decompositions: dict[tuple[OpRule, int | None, int, bool], PreparedGraph] = dataclasses.field(
        default_factory=dict
    )
    known_specs: dict[tuple[tuple[int, ...], Tensor, Spec], Spec] = dataclasses.field(
        default_factory=dict
    )
    reached: dict[Tensor, Sequence[ReachedConsumer]] = dataclasses.field(default_factory=dict)
    answers: dict[tuple[Mesh, frozenset[int]], dict[Hashable, MemoTrie[Any]]] = dataclasses.field(
        default_factory=dict
    )


@dataclasses.dataclass(eq=False)
class PreparedGraph:
    """A graph with its rules, deferral choices and the memo of its propagation.

    Attributes:
        rules: the rule of every op; ops of one signature share one object.
        fallbacks: ops without a rule, which run replicated.
        once: those of them with an effect or a state of their own (a random generator, a
            Python function): run by every rank they would differ.
        carried: see `deferral.carried_tensors`.
        narrow: see `narrow_gradients.find_narrow_gradients`.
        deferred: ops whose outputs are all `carried`.
        sparse: ops that gather their inputs where that moves less than reducing what they give
            (`OpRule.sparse`): not those whose result is added to something that is reduced anyway.
        weights: tensors that hold a weight's values and nothing else: reads, casts, reshapes.
        meetings: see `deferral.Meetings`.
        leaving: what comes of a meeting and is multiplied with a weight: by which ops, and which
            input the weight is.
        position: of each op in the graph.
        zeros: tensors that are zero everywhere (Partial for free), and new lists.
        ordinary: ops whose decision depends on the rule and the specs of their inputs alone, on no
            lists, draws or sizes that readers choose; with their rule, whether they are `deferred`,
            and whether what they make, if it is not Partial, is kept as it is made.
        caches: the memo of its propagation, for all plans.
        bodies: prepared function bodies by name.
    """

    graph: Graph
    constants: Constants
    rules: dict[Op, OpRule]
    fallbacks: list[Op]
    once: frozenset[Op]
    carried: Mapping[Tensor, Carry]
    narrow: frozenset[Tensor]
    zeros: frozenset[Tensor]
    consumers: dict[Tensor, list[Op]]
    ordinary: Mapping[Op, tuple[OpRule, bool, bool]]
    deferred: frozenset[Op]
    sparse: frozenset[Op]
    weights: frozenset[Tensor]
    meetings: Meetings
    leaving: Mapping[Tensor, Sequence[tuple[Op, int]]]
    position: Mapping[Op, int]
    caches: PropagationMemo = dataclasses.field(default_factory=PropagationMemo)
    bodies: dict[str, PreparedGraph] = dataclasses.field(default_factory=dict)

    @functools.cached_property
    def slots_apart(self) -> Mapping[str, Tensor]:
        """Tensors of the stand-ins for the optimizer, by weight; see `passes.separate_slots`."""
        return find_separate_slots(self.graph)

    @functools.cached_property
    def followed(self) -> Mapping[Variable, Follow]:
        """The weight that each optimizer slot follows; see `follow.followed_weights`."""
        return followed_weights(self.graph, self.rules)

    def all_fallbacks(self) -> list[Op]:
        """Return `fallbacks`, and those of the bodies prepared so far."""
        found = list(self.fallbacks)
        for body in self.bodies.values():
            found += body.all_fallbacks()
        return found

    def body(self, name: str, known: Mapping[int, np.ndarray]) -> PreparedGraph:
        """Return the prepared body of function `name`, of whose arguments some values are known."""
        if name not in self.bodies:
            body = self.graph.functions[name]
            self.bodies[name] = prepare(body, {body.inputs[i]: v for i, v in known.items()})
        return self.bodies[name]


def prepare(
    graph: Graph,
    known: Mapping[Tensor, np.ndarray] | None = None,
    *,
    reduces: bool = True,
    whole: Collection[Tensor] = (),
) -> PreparedGraph:
    """Fold what is known, look up every rule once and decide where Partials are resolved.

    Args:
        reduces: what the graph gives is reduced within it; else by who reads it.
        whole: tensors that are reduced where they are made, such as those that are sent to other
            ranks.
    """
    constants = Constants(graph, known)
    fold_constants(graph, constants)
    split_block_sums(graph, constants)
    by_signature: dict[Any, OpRule] = {}
    rules: dict[Op, OpRule] = {}
    fallbacks: list[Op] = []
    for op in graph.ops:
        key = _signature(op, constants)
        rule = by_signature.get(key)
        if rule is None:
            rule = find_rule(op, constants)
            if rule is None:
                rule = replicate_rule(op)
                if op.type not in REGIONS and (op.inputs or op.stateful):
                    fallbacks.append(op)
            else:
                by_signature[key] = rule
        rules[op] = rule
    zeros = frozenset(t for op in graph.ops if _makes_zeros(op) for t in op.outputs)
    once = frozenset(op for op in fallbacks if _runs_once(op))
    weights = _weight_values(graph, rules)
    meetings = Meetings.of(graph, rules)
    leaving = _leaving(graph, rules, weights, meetings)
    narrow = find_narrow_gradients(graph, rules)
    carried = carried_tensors(graph, rules, meetings, reduces, whole)
    consumers = graph.consumers()
    deferred = frozenset(op for op in graph.ops if all(t in carried for t in op.outputs))
    sparse = frozenset(
        op for op in graph.ops if rules[op].sparse and not _is_added_up(op, consumers)
    )
    ordinary = {
        op: (rule, op in deferred, not any(t in leaving or t in narrow for t in op.outputs))
        for op, rule in rules.items()
        if _is_ordinary(op, rule, zeros) and op not in once
    }
    position = {op: i for i, op in enumerate(graph.ops)}
    return PreparedGraph(
        graph,
        constants,
        rules,
        fallbacks,
        once,
        carried,
        narrow,
        zeros,
        consumers,
        ordinary,
        deferred,
        sparse,
        weights,
        meetings,
        leaving,
        position,
    )


def _weight_values(graph: Graph, rules: Mapping[Op, OpRule]) -> frozenset[Tensor]:
    """See `PreparedGraph.weights`."""
    found = {v.handle for v in graph.variables if v.trainable}
    for op in graph.ops:
        if op.inputs and op.inputs[0] in found and len(op.outputs) == 1:
            if 0 in find_relabelled_inputs(op, rules[op]) and all(
                t.op.type == "Const" for t in op.inputs[1:]
            ):
                found.update(op.outputs)
    return frozenset(found)


def _leaving(
    graph: Graph, rules: Mapping[Op, OpRule], weights: frozenset[Tensor], meetings: Meetings
) -> dict[Tensor, list[tuple[Op, int]]]:
    """See `PreparedGraph.leaving`."""
    found: dict[Tensor, list[tuple[Op, int]]] = {}
    for op in graph.ops:
        at = [i for i, t in enumerate(op.inputs) if t in weights]
        if at and is_product(rules[op]):
            for tensor in op.inputs:
                if tensor in meetings.dims:
                    found.setdefault(tensor, []).append((op, at[0]))
    return found


def _is_ordinary(op: Op, rule: OpRule, zeros: frozenset[Tensor]) -> bool:
    return (
        bool(op.inputs)
        and op.type not in REGIONS
        and not (rule.drawn or rule.generates or rule.sparse)
        and not any(t.dtype == "variant" or t in zeros for t in (*op.inputs, *op.outputs))
    )


def _is_added_up(op: Op, consumers: Mapping[Tensor, Sequence[Op]]) -> bool:
    """Whether what `op` gives is added to something else, and reduced with that in any case."""
    return any(r.type in ADDITIONS for t in op.outputs for r in consumers.get(t, ()))


def _runs_once(op: Op) -> bool:
    """Whether one rank must run `op` for all; a lookup table is on one device."""
    pinned = any(t.dtype in REFERENCES for t in (*op.inputs, *op.outputs))
    return op.type.startswith("LookupTable") if pinned else op.stateful


def _makes_zeros(op: Op) -> bool:
    if op.type == "Const":
        value = op.attrs["value"]
        return value.dtype.kind in "fiu" and not value.any()
    return op.type in NEW_LISTS


def _signature(op: Op, constants: Constants) -> Any:
    """Equal for ops that must have equal rules."""
    operands = []
    for tensor in op.inputs:
        value = None
        if tensor.dtype in ("int32", "int64", "bool"):
            value = constants.value(tensor)
        operands.append(
            (tensor.shape, tensor.dtype, None if value is None else (value.shape, value.tobytes()))
        )
    attrs = (
        ()
        if op.type == "Const"
        else tuple((k, freeze(v)) for k, v in sorted(op.attrs.items()) if not k.startswith("_"))
    )
    return (op.type, attrs, tuple(operands), tuple((t.shape, t.dtype) for t in op.outputs))


# --- Narrow gradients: collectives stand on the 16-bit side of a Cast ---
#
# Most of that needs nothing done. A Cast down runs on whatever part a rank has, and a Partial is
# carried through it since that costs fewer bytes (`deferral`); before a Cast up it is reduced for
# the
# same reason. One case is left: a gradient that comes split in one way, is cast up, goes through
# the
# optimizer's arithmetic and only then meets its weight, split in another way. It is moved before
# the cast.


def find_narrow_gradients(graph: Graph, rules: Mapping[Op, OpRule]) -> frozenset[Tensor]:
    """Find the 16-bit tensors of which nothing is made but, entry by entry, updates of
    variables."""
    readers = graph.consumers()
    returned = set(graph.outputs)
    updating: set[Tensor] = set()
    for op in reversed(graph.ops):
        for tensor in op.outputs:
            if tensor in readers and tensor not in returned:
                if all(_only_updates(r, rules[r], updating) for r in readers[tensor]):
                    updating.add(tensor)
    return frozenset(
        t for t in updating if t.dtype in NARROW and all(_casts_up(r) for r in readers[t])
    )


def _only_updates(op: Op, rule: OpRule, updating: set[Tensor]) -> bool:
    if op.type in WHOLE_UPDATES:
        return True
    return bool(op.outputs) and not rule.reduce and all(t in updating for t in op.outputs)


def _casts_up(op: Op) -> bool:
    return op.type == "Cast" and op.outputs[0].dtype not in NARROW
