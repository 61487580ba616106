"""Lists that can be had in another spec: those made of tensors, op by op, in plain sight.

A list cannot be sent, but it can be made anew of its elements, and those can. What came out of
a loop or branch, or went into it, stays as it lies.
"""

from __future__ import annotations

from tfpar.ir.graph import Op, Tensor
from tfpar.propagation.decide import Choice, input_specs
from tfpar.propagation.factors import CARRY, WHOLE, Split, splits_of
from tfpar.propagation.prepared import NEW_LIST_TYPES
from tfpar.rules.rule import PLAIN, OpRule
from tfpar.spec import Mesh, Partial, Spec

# Ops with one list as result, which says all of it.
_MAKING_TYPES = frozenset(
    {"TensorListFromTensor", "TensorListSetItem", "TensorListPushBack", "TensorListResize",
     "TensorListScatter", "TensorListScatterV2", "TensorListScatterIntoExistingList",
     "TensorListSplit", "TensorListConcatLists", "OptionalFromValue", "ZerosLike", "Identity"}
)  # fmt: skip


def makes_list(op: Op, rule: OpRule) -> bool:
    """Whether the list that `op` makes can be made in another spec, if the lists it takes can."""
    return op.type in NEW_LIST_TYPES or (op.type in _MAKING_TYPES and bool(rule.names))


def remaking(op: Op, rule: OpRule, spec: Spec, mesh: Mesh) -> Choice:
    """How `op` runs to give its list as `spec`."""
    out = rule.outputs[0]
    group = rule.linear[0] if rule.linear else rule.monotone
    splits: list[Split] = []
    for placement, split in zip(spec, splits_of(out, spec, rule.sizes, mesh.shape), strict=True):
        carried = isinstance(placement, Partial)
        splits.append((CARRY, PLAIN) if carried else split if split is not None else WHOLE)
    takes = [group] * mesh.num_axes
    reductions = [p.op if isinstance(p, Partial) else "sum" for p in spec]
    chosen = tuple(splits)
    return Choice(chosen, input_specs(rule, chosen, mesh, takes, reductions), (spec,))


def sources(op: Op) -> list[Tensor]:
    """The lists that `op` takes."""
    return [t for t in op.inputs if t.dtype == "variant"]
