"""Where a Partial is resolved: where the fewest bytes cross.

A Partial(sum) may be reduced at once or carried through ops that are linear in it.
Carried through an AddN of several Partials it is reduced once for all (the dX of Q,
K and V); carried to a product of two of them (Q and K), each is scattered over what they share
for half of the bytes; carried past a fan-out it would be reduced several times. What is best is
a property of the graph, worked out once for all plans; a plan may bar it (`Carry.holds`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Mapping

from tfpar.ir.graph import Graph, Op, Tensor
from tfpar.rules.rule import Dims, OpRule
from tfpar.spec import Mesh, Shard, Spec

Factor = tuple[int | None, int]
"""A factor as a tensor has it: (dim that it leads, if that is known; size)."""


@dataclasses.dataclass(frozen=True)
class Carry:
    """What a plan must grant, so that carrying a Partial on is worth it.

    Attributes:
        past: what the ops on the way multiply it with: split along the Partial's own axis, it
            would have to be gathered.
        meets: for each product on the way that scatters it, the factors that could be split there.
    """

    past: tuple[Tensor, ...] = ()
    meets: tuple[tuple[Factor, ...], ...] = ()

    def holds(
        self, axis: int, made: Spec, mesh: Mesh, spec_of: Callable[[Tensor], Spec | None]
    ) -> bool:
        """Whether a tensor made as `made` is worth carrying as it is along `axis`."""
        for tensor in self.past:
            spec = spec_of(tensor)
            if spec is not None and isinstance(spec[axis], Shard):
                return False
        return all(
            any(_divides(axis, made, mesh, *factor) for factor in factors) for factors in self.meets
        )

    def joined(self, other: Carry) -> Carry:
        return Carry(
            tuple(dict.fromkeys(self.past + other.past)),
            tuple(dict.fromkeys(self.meets + other.meets)),
        )

    def before(self, made: Dims, read: Dims) -> Carry:
        """What holds of an op's input of dims `read`, from what holds of its output of `made`."""
        meets = tuple(
            tuple((None if d is None else _led_by(read, made[d][:1]), size) for d, size in factors)
            for factors in self.meets
        )
        return Carry(self.past, meets)


def _led_by(dims: Dims, factor: tuple[int, ...]) -> int | None:
    """The dim of which `factor` (of one, or none) is the major one."""
    return next((d for d, dim in enumerate(dims) if factor and dim[:1] == factor), None)


def _divides(axis: int, made: Spec, mesh: Mesh, dim: int | None, size: int) -> bool:
    """Whether `axis` can split the factor evenly, with what other axes split of it already."""
    taken = [a for a, p in enumerate(made) if isinstance(p, Shard) and dim in (None, p.dim)]
    return size % mesh.group_size((axis, *taken)) == 0


def carried_tensors(
    graph: Graph, rules: Mapping[Op, OpRule], meetings: Meetings, reduces: bool = True
) -> dict[Tensor, Carry]:
    """The tensors that, when Partial(sum), are better carried on than reduced, and on what terms.

    Backward over the graph: reducing `t` costs its bytes; carrying it costs what
    its consumers' results cost in turn; an AddN of n results of contractions costs each of
    them an n-th (other addends, such as a residual's gradient, are whole by then); the products
    that scatter it cost half of it, once for all. Ties reduce at once, which is where gradients
    can be packed.

    Args:
        reduces: see `prepared.prepare`.
    """
    cost: dict[Tensor, float] = {}
    consumers = graph.consumers()
    outputs = set(graph.outputs)
    carried: dict[Tensor, Carry] = {}
    for op in reversed(graph.ops):
        for tensor in op.outputs:
            own = float(tensor.num_bytes)
            later, terms, scattered = 0.0, Carry(), 0.0
            leaves = tensor in outputs
            if leaves and reduces:
                later = own
            for consumer in consumers.get(tensor, ()):
                factors = meetings.factors.get((consumer, tensor))
                if factors is not None:
                    terms, scattered = terms.joined(Carry(meets=(factors,))), own / 2
                    continue
                further, on = _carry_cost(consumer, tensor, rules, cost, own, carried)
                later, terms = later + further, terms.joined(on)
                if later >= own:
                    break
            if later + scattered < own and (leaves or consumers.get(tensor)):
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
            for output, made in zip(op.outputs, rule.outputs, strict=True):
                later = carried.get(output, Carry())
                terms = terms.joined(later.before(made, rule.inputs[positions[0]]))
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
        factors: (product, fresh Partial) -> the factors over which it may be scattered: the other
            operand has them, and the result too.
        dims: the dims with such factors of what the products make, and of what comes of that
            before the next product.
    """

    factors: Mapping[tuple[Op, Tensor], tuple[Factor, ...]]
    dims: Mapping[Tensor, frozenset[int]]

    @classmethod
    def of(cls, graph: Graph, rules: Mapping[Op, OpRule]) -> Meetings:
        fresh: set[Tensor] = set()
        found: dict[tuple[Op, Tensor], tuple[Factor, ...]] = {}
        dims: dict[Tensor, frozenset[int]] = {}
        for op in graph.ops:
            rule = rules[op]
            shared: set[int] = set()
            if is_product(rule):
                for i, tensor in enumerate(op.inputs):
                    met = _met(op, rule, i, fresh, dims) if tensor in fresh else ()
                    if met:
                        read = rule.inputs[i]
                        found[op, tensor] = tuple((_led_by(read, (f,)), rule.sizes[f]) for f in met)
                        shared.update(met)
                fresh.update(op.outputs)
            else:
                if _keeps_fresh(op, rule, fresh):
                    fresh.update(op.outputs)
                for tensor, placed in zip(op.inputs, rule.inputs, strict=True):
                    shared.update(f for d in dims.get(tensor, ()) for f in placed[d])
            for tensor, placed in zip(op.outputs, rule.outputs, strict=True):
                kept = frozenset(d for d, dim in enumerate(placed) if shared.intersection(dim))
                if kept:
                    dims[tensor] = kept
        return cls(found, dims)


def _met(
    op: Op, rule: OpRule, i: int, fresh: Collection[Tensor], dims: Collection[Tensor]
) -> list[int]:
    """The factors that input `i` of a product shares with another fresh Partial, or with what came
    of two."""
    others = (j for j, t in enumerate(op.inputs) if j != i and (t in fresh or t in dims))
    return list(dict.fromkeys(f for j in others for f in _batch_factors(rule, i, j)))


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
