"""Whether a partial sum is reduced at once, or later where that moves fewer bytes.

The gradient of an attention layer's input is a sum of three, each from a product that leaves a
partial sum:

    %dq, %dk, %dv  each P(sum), 1 MB       reduced at once: 3 MB
    %dx = AddN(%dq, %dk, %dv)  1 MB        carried through the sum, reduced behind it: 1 MB

An op that is linear in a Partial can pass it on, so it may be *carried* from op to op. Three cases
make up most of what happens:

- Several meet in an AddN, as above: one reduction serves all.
- Two meet in a product, such as queries and keys. Their product is not linear in both, so they have
  to be resolved, but each can be scattered over a factor that both have, such as the heads. That
  moves half of what reducing moves.
- One is read by several ops: each would carry a Partial of its own, to be reduced several times. It
  is reduced before.

What is best depends on the graph alone, so it is worked out once for all plans, backwards
(`carried_tensors`). A plan may make it wrong; `Carry` says on what terms it holds.
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
    """On what terms it is worth carrying a Partial: what must be true of a plan.

    Attributes:
        past: the tensors that it is multiplied with on the way. None of them may be split along
            the axis of the Partial, or it would have to be gathered.
        meets: for each product that it is scattered for, the factors over which it could be. One
            of them must be divisible by the size of the axis.
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
        """Return the terms for an op's input, from those for its output.

        Args:
            made, read: the dims of the output and of the input, in factors.
        """
        meets = tuple(
            tuple((None if d is None else _led_by(read, made[d][:1]), size) for d, size in factors)
            for factors in self.meets
        )
        return Carry(self.past, meets)


def _led_by(dims: Dims, factor: tuple[int, ...]) -> int | None:
    """The dim of which `factor` (of one, or none) is the major one."""
    return next((d for d, dim in enumerate(dims) if factor and dim[:1] == factor), None)


def _divides(axis: int, made: Spec, mesh: Mesh, dim: int | None, size: int) -> bool:
    """Whether `axis` can split the factor evenly, beside the axes that split it already."""
    taken = [a for a, p in enumerate(made) if isinstance(p, Shard) and dim in (None, p.dim)]
    return size % mesh.group_size((axis, *taken)) == 0


def carried_tensors(
    graph: Graph,
    rules: Mapping[Op, OpRule],
    meetings: Meetings,
    reduces: bool = True,
    whole: Collection[Tensor] = (),
) -> dict[Tensor, Carry]:
    """Return the tensors that, when Partial(sum), are better carried on than reduced, and on what
    terms.

    The graph is walked backwards. For each tensor two numbers are compared:

    - To reduce it costs its bytes.
    - To carry it costs what is then paid for the results of its readers, added up. An AddN of n
      fresh Partials charges each of them an n-th; other addends (the gradient of a residual) are
      whole by then and pay nothing. Products that scatter it cost half of its bytes, once for all
      of them.

    If both are the same, it is reduced at once: there gradients can be packed.

    Args:
        reduces, whole: see `prepared_graph.prepare`.
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
            used = leaves or consumers.get(tensor)
            if later + scattered < own and used and tensor not in whole:
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
    """Whether `tensor` is a fresh Partial: the result of a reduction, reshaped or cast at most."""
    while _relabels(rules[tensor.op]):
        tensor = tensor.op.inputs[0]
    return bool(rules[tensor.op].reduce)


def _relabels(rule: OpRule) -> bool:
    """Identity, Reshape, Cast, a sum over no dims: linear in their one tensor, of one size."""
    return bool(rule.monotone) or (rule.linear == ((0,),) and not rule.reduce)


# --- products of two Partials ------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Meetings:
    """Products in which fresh Partials meet: `Q @ K^T`, and then the scores times `V`.

    Attributes:
        factors: by (product, fresh Partial that it reads), the factors over which the Partial may
            be scattered: those that the other operand and the result have too.
        dims: the dims that have such factors, of the results of these products and of what is
            made of them before the next product.
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
    """The factors that input `i` of a product shares with another fresh Partial, or with what was
    made in such a product before."""
    others = (j for j, t in enumerate(op.inputs) if j != i and (t in fresh or t in dims))
    return list(dict.fromkeys(f for j in others for f in _batch_factors(rule, i, j)))


def is_product(rule: OpRule) -> bool:
    """Whether an op multiplies several inputs and sums over what they share."""
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
