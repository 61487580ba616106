"""Lists of tensors in what XLA compiles: the arrays that a loop reads and writes, and its stacks.

XLA has a list's elements in one buffer, whose size it must know, and hands no list on to what is
not compiled with it. So of lists that are made of each other, and of all ops that take them, either
everything is in one region or nothing is.
"""

from __future__ import annotations

from collections.abc import Sequence

from tfpar.ir.graph import Graph, Op
from tfpar.ir.traits import ADDITIONS, FIXED_LISTS, LOOPS, NEW_LISTS, UNCHANGED


def has_list(op: Op) -> bool:
    """Whether `op` takes or makes a list."""
    return any(t.dtype == "variant" for t in (*op.inputs, *op.outputs))


def can_compile_lists(op: Op) -> bool:
    """Whether XLA computes what the kernels would with the lists that `op` takes or makes."""
    if op.type in LOOPS | UNCHANGED | ADDITIONS or op.type == "ZerosLike":
        return True
    if op.type not in FIXED_LISTS or op.attrs.get("resize_if_index_out_of_bounds"):
        return False
    if str(op.attrs.get("element_dtype")) == "variant":
        return False
    if op.type not in NEW_LISTS:
        return True
    length = op.inputs[1].op
    return length.type == "Const" and int(length.attrs["value"]) >= 0


def is_list_maker(op: Op) -> bool:
    """Whether all that `op` makes is lists."""
    return bool(op.outputs) and all(t.dtype == "variant" for t in op.outputs)


def lists_in_pieces(graph: Graph, regions: Sequence[Sequence[Op]]) -> set[Op]:
    """Return the ops of regions whose lists, or what these are made of, are not in one region."""
    region_of = {op: i for i, ops in enumerate(regions) for op in ops}
    group: dict[Op, set[Op]] = {}
    for op in graph.ops:
        for tensor in op.inputs:
            if tensor.dtype == "variant":
                one, other = group.setdefault(tensor.op, {tensor.op}), group.setdefault(op, {op})
                if one is not other:
                    one |= other
                    group.update(dict.fromkeys(other, one))
    return {
        op
        for op, members in group.items()
        if op in region_of and any(region_of.get(m) != region_of[op] for m in members)
    }
