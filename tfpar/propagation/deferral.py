"""Where a Partial is resolved: where the fewest bytes cross.

A Partial(sum) may be reduced at once or carried through ops that are linear in it.
Carried through an AddN of several Partials it is reduced once for all (the dX of Q,
K and V); carried past a fan-out it would be reduced several times. The choice is
a property of the graph alone, so it is made once and serves every plan.
"""

from __future__ import annotations

from collections.abc import Mapping

from tfpar.ir.graph import Graph, Op, Tensor
from tfpar.rules.rule import OpRule


def carried_tensors(graph: Graph, rules: Mapping[Op, OpRule]) -> frozenset[Tensor]:
    """The tensors that, when Partial(sum), are better carried on than reduced.

    Backward over the graph: reducing `t` costs its bytes; carrying it costs what
    its consumers' results cost in turn; an AddN of n results of contractions costs each of
    them an n-th (other addends, such as a residual's gradient, are whole by then). Ties
    reduce at once, which is where gradients can be packed.
    """
    cost: dict[Tensor, float] = {}
    consumers = graph.consumers()
    outputs = set(graph.outputs)
    carried: set[Tensor] = set()
    for op in reversed(graph.ops):
        for tensor in op.outputs:
            own = float(tensor.num_bytes)
            later = 0.0
            if tensor in outputs:
                later = own
            for consumer in consumers.get(tensor, ()):
                later += _carry_cost(consumer, tensor, rules, cost, own)
                if later >= own:
                    break
            if later < own and consumers.get(tensor):
                carried.add(tensor)
                cost[tensor] = later
            else:
                cost[tensor] = own
    return frozenset(carried)


def _carry_cost(
    op: Op,
    tensor: Tensor,
    rules: Mapping[Op, OpRule],
    cost: Mapping[Tensor, float],
    own: float,
) -> float:
    rule = rules[op]
    positions = [i for i, t in enumerate(op.inputs) if t is tensor]
    for group in (*rule.linear, *((i,) for i in rule.monotone)):
        if all(i in group for i in positions):
            total = sum(cost[t] for t in op.outputs)
            sharing = 1
            if len(group) > 1 and _is_contracted(tensor, rules):
                sharing = sum(_is_contracted(op.inputs[i], rules) for i in group)
            return total / sharing
    return own


def _is_contracted(tensor: Tensor, rules: Mapping[Op, OpRule]) -> bool:
    """Whether `tensor` is a reduction's result, relabelled at most: a fresh Partial."""
    while _relabels(rules[tensor.op]):
        tensor = tensor.op.inputs[0]
    return bool(rules[tensor.op].reduce)


def _relabels(rule: OpRule) -> bool:
    """Identity, Reshape, Cast, a sum over no dims: linear in their one tensor, of one size."""
    return bool(rule.monotone) or (rule.linear == ((0,),) and not rule.reduce)
