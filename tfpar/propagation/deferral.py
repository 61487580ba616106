"""Where a Partial is resolved: where the fewest bytes cross.

A Partial(sum) may be reduced at once or carried through ops that are linear in it.
Carried through an AddN of several Partials it is reduced once for all (the dX of Q,
K and V); carried to a product of two of them (Q and K), each is scattered over what they share
for half of the bytes; carried past a fan-out it would be reduced several times. What is best is
a property of the graph, worked out once for all plans; a plan may bar it (`Carry.holds`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping

from tfpar.ir.graph import Graph, Op, Tensor
from tfpar.rules.rule import OpRule
from tfpar.spec import Mesh, Shard, Spec


@dataclasses.dataclass(frozen=True)
class Carry:
    """What a plan must grant, so that carrying a Partial on is worth it.

    Attributes:
        past: what the ops on the way multiply it with: split along the Partial's own axis, it
            would have to be gathered.
        meets: for each product on the way that scatters it, the sizes of the factors that
            could be split there.
    """

    past: tuple[Tensor, ...] = ()
    meets: tuple[tuple[int, ...], ...] = ()

    def holds(
        self, axis: int, made: Spec, mesh: Mesh, spec_of: Callable[[Tensor], Spec | None]
    ) -> bool:
        """Whether a tensor made as `made` is worth carrying as it is along `axis`."""
        for tensor in self.past:
            spec = spec_of(tensor)
            if spec is not None and isinstance(spec[axis], Shard):
                return False
        # Which of the other axes have split the factors by then, is not known yet.
        taken = tuple(a for a, p in enumerate(made) if isinstance(p, Shard))
        parts = mesh.group_size((axis, *taken))
        return all(any(size % parts == 0 for size in sizes) for sizes in self.meets)

    def joined(self, other: Carry) -> Carry:
        return Carry(
            tuple(dict.fromkeys(self.past + other.past)),
            tuple(dict.fromkeys(self.meets + other.meets)),
        )


def carried_tensors(
    graph: Graph, rules: Mapping[Op, OpRule], meetings: Meetings
) -> dict[Tensor, Carry]:
    """The tensors that, when Partial(sum), are better carried on than reduced, and on what terms.

    Backward over the graph: reducing `t` costs its bytes; carrying it costs what
    its consumers' results cost in turn; an AddN of n results of contractions costs each of
    them an n-th (other addends, such as a residual's gradient, are whole by then); the products
    that scatter it cost half of it, once for all. Ties reduce at once, which is where gradients
    can be packed.
    """
    cost: dict[Tensor, float] = {}
    consumers = graph.consumers()
    outputs = set(graph.outputs)
    carried: dict[Tensor, Carry] = {}
    for op in reversed(graph.ops):
        for tensor in op.outputs:
            own = float(tensor.num_bytes)
            later, terms, scattered = 0.0, Carry(), 0.0
            if tensor in outputs:
                later = own
            for consumer in consumers.get(tensor, ()):
                sizes = meetings.sizes.get((consumer, tensor))
                if sizes is not None:
                    terms, scattered = terms.joined(Carry(meets=(sizes,))), own / 2
                    continue
                further, on = _carry_cost(consumer, tensor, rules, cost, own, carried)
                later, terms = later + further, terms.joined(on)
                if later >= own:
                    break
            if later + scattered < own and consumers.get(tensor):
                carried[tensor] = terms
                cost[tensor] = later + scattered
            else:
                cost[tensor] = own
    return carried


def _carry_cost(
    op: Op,
    tensor: Tensor,
    rules: Mapping[Op, OpRule],
    cost: Mapping[Tensor, float],
    own: float,
    carried: Mapping[Tensor, Carry],
) -> tuple[float, Carry]:
    rule = rules[op]
    positions = [i for i, t in enumerate(op.inputs) if t is tensor]
    for group in (*rule.linear, *((i,) for i in rule.monotone)):
        if all(i in group for i in positions):
            total = sum(cost[t] for t in op.outputs)
            sharing = 1
            if len(group) > 1 and _is_contracted(tensor, rules):
                sharing = sum(_is_contracted(op.inputs[i], rules) for i in group)
            terms = Carry(past=tuple(t for i, t in enumerate(op.inputs) if i not in group))
            for output in op.outputs:
                terms = terms.joined(carried.get(output, Carry()))
            return total / sharing, terms
    return own, Carry()


def _is_contracted(tensor: Tensor, rules: Mapping[Op, OpRule]) -> bool:
    """Whether `tensor` is a reduction's result, relabelled at most: a fresh Partial."""
    while _relabels(rules[tensor.op]):
        tensor = tensor.op.inputs[0]
    return bool(rules[tensor.op].reduce)


def _relabels(rule: OpRule) -> bool:
    """Identity, Reshape, Cast, a sum over no dims: linear in their one tensor, of one size."""
    return bool(rule.monotone) or (rule.linear == ((0,),) and not rule.reduce)


# --- products of two Partials ------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Meetings:
    """Products in which fresh Partials meet, or one meets what such a product made.

    Attributes:
        sizes: (product, fresh Partial) -> the sizes of the factors over which it may be scattered:
            the other operand has them, and the result too.
        dims: the dims with such factors of what the products make, and of what comes of that
            before the next product.
    """

    sizes: Mapping[tuple[Op, Tensor], tuple[int, ...]]
    dims: Mapping[Tensor, frozenset[int]]

    @classmethod
    def of(cls, graph: Graph, rules: Mapping[Op, OpRule]) -> Meetings:
        fresh: set[Tensor] = set()
        sizes: dict[tuple[Op, Tensor], tuple[int, ...]] = {}
        dims: dict[Tensor, frozenset[int]] = {}
        for op in graph.ops:
            rule = rules[op]
            shared: set[int] = set()
            if is_product(rule):
                fresh.update(op.outputs)
                for i, tensor in enumerate(op.inputs):
                    for j, other in enumerate(op.inputs):
                        factors = _batch_factors(rule, i, j)
                        met = tensor in fresh and (other in fresh or other in dims)
                        if met and factors and i != j:
                            sizes[op, tensor] = tuple(rule.sizes[f] for f in factors)
                            shared.update(factors)
            else:
                if _keeps_fresh(op, rule, fresh):
                    fresh.update(op.outputs)
                for tensor, placed in zip(op.inputs, rule.inputs, strict=True):
                    shared.update(f for d in dims.get(tensor, ()) for f in placed[d])
            for tensor, placed in zip(op.outputs, rule.outputs, strict=True):
                kept = frozenset(d for d, dim in enumerate(placed) if shared.intersection(dim))
                if kept:
                    dims[tensor] = kept
        return cls(sizes, dims)


def is_product(rule: OpRule) -> bool:
    """A sum over what several inputs share."""
    return any(sum(rule.has_factor(d, f) for d in rule.inputs) > 1 for f in rule.reduce)


def _batch_factors(rule: OpRule, i: int, j: int) -> list[int]:
    """The factors of inputs `i` and `j`, and of every output, that may be split."""
    return [
        f
        for f in rule.splittable
        if all(rule.has_factor(d, f) for d in (rule.inputs[i], rule.inputs[j], *rule.outputs))
    ]


def _keeps_fresh(op: Op, rule: OpRule, fresh: set[Tensor]) -> bool:
    """Whether `op` relabels or scales a fresh Partial, or adds a bias to it."""
    linear = {i for group in rule.linear for i in group} | set(rule.monotone)
    if not any(op.inputs[i] in fresh for i in linear) or len(op.outputs) != 1:
        return False
    size = op.outputs[0].num_elements
    return sum(t.num_elements == size and t.op.type != "Const" for t in op.inputs) == 1
