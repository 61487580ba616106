"""Lists that can be made again in another spec: those made of tensors, op by op, in plain sight.

A list cannot be sent, but it can be made again of its elements, and those can. What came out of a
loop or branch, or went into it, keeps its spec.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

from tfpar.ir.graph import Op, Tensor
from tfpar.ir.traits import LIST_MAKERS, NEW_LISTS
from tfpar.propagation.decide import OpStrategy, input_specs
from tfpar.propagation.factors import CARRY, WHOLE, Split, splits_of
from tfpar.rules.rule import PLAIN, OpRule
from tfpar.spec import Mesh, Partial, Spec


def makes_list(op: Op, rule: OpRule) -> bool:
    """Whether the list that `op` makes can be made in another spec, if the lists it takes can."""
    return op.type in NEW_LISTS or (op.type in LIST_MAKERS and bool(rule.names))


def remaking(op: Op, rule: OpRule, spec: Spec, mesh: Mesh) -> OpStrategy:
    """Return the strategy with which `op` gives its list as `spec`."""
    out = rule.outputs[0]
    group = rule.linear[0] if rule.linear else rule.monotone
    splits: list[Split] = []
    for placement, split in zip(spec, splits_of(out, spec, rule.sizes, mesh.shape), strict=True):
        is_partial = isinstance(placement, Partial)
        splits.append((CARRY, PLAIN) if is_partial else split if split is not None else WHOLE)
    takes = [group] * mesh.num_axes
    reductions = [p.op if isinstance(p, Partial) else "sum" for p in spec]
    chosen = tuple(splits)
    return OpStrategy(chosen, input_specs(rule, chosen, mesh, takes, reductions), (spec,))


def is_loose(tensor: Tensor, rules: Mapping[Op, OpRule], zeros: Collection[Tensor]) -> bool:
    """Whether `tensor` is one of `zeros`, or a list that can be made in another spec."""
    if tensor in zeros:
        return True
    if tensor.dtype != "variant":
        return False
    op = tensor.op
    return makes_list(op, rules[op]) and all(is_loose(t, rules, zeros) for t in sources(op))


def sources(op: Op) -> list[Tensor]:
    """Return the lists that `op` takes."""
    return [t for t in op.inputs if t.dtype == "variant"]
