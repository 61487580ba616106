"""How the readers of a Partial want it: reduced whole, or scattered.

Looks ahead through pointwise ops to variables, anchors and tensors laid already: the
slots of ZeRO-1, a residual that is split along the sequence.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from tfpar.ir.graph import Op, Tensor
from tfpar.propagation.factors import splits_of
from tfpar.spec import Replicate, Shard, Spec

if TYPE_CHECKING:
    from tfpar.propagation.engine import Propagation

_DEPTH = 12
"""Ops to look ahead: past Adam's arithmetic from a gradient to its slots."""

Wish = Shard | Replicate | None
"""None: no reader cares."""


def wish(
    propagation: Propagation, tensor: Tensor, axis: int, made: Spec, depth: int = _DEPTH,
    even: bool = True,
) -> Wish:  # fmt: skip
    """The Shard along `axis` on which all readers of `tensor` (made as `made`) agree.

    Args:
        even: only one that divides the dim.
    """
    wanted: Shard | None = None
    for op in propagation.prepared.consumers.get(tensor, ()):
        of_reader = _wish_of(propagation, op, tensor, axis, depth, even)
        if isinstance(of_reader, Replicate) or (
            wanted is not None and of_reader not in (None, wanted)
        ):
            return Replicate()
        wanted = of_reader or wanted
    if wanted is not None and any(
        isinstance(p, Shard) and p.dim == wanted.dim for a, p in enumerate(made) if a != axis
    ):
        return Replicate()
    return wanted


def _wish_of(
    propagation: Propagation, op: Op, tensor: Tensor, axis: int, depth: int, even: bool
) -> Wish:
    rule = propagation.prepared.rules[op]
    mesh = propagation.mesh
    dims_here = rule.inputs[op.inputs.index(tensor)]
    mine = {dim[0]: d for d, dim in enumerate(dims_here) if len(dim) == 1}
    for other, dims in zip(op.inputs, rule.inputs, strict=True):
        spec = None if other is tensor else _known_spec(propagation, other)
        if spec is None:
            continue
        if isinstance(spec[axis], Shard):
            split = splits_of(dims, spec, rule.sizes, mesh.shape)[axis]
            if split is None or split[0] not in mine:
                return Replicate()
            if even and rule.sizes[split[0]] % mesh.shape[axis]:
                return Replicate()
            return Shard(mine[split[0]], *split[1])
        if other.dtype == "resource":
            return Replicate()
    if depth == 0 or not mine:
        return Replicate()
    wanted: Shard | None = None
    for out, dims in zip(op.outputs, rule.outputs, strict=True):
        back = {d: mine[dim[0]] for d, dim in enumerate(dims) if len(dim) == 1 and dim[0] in mine}
        if not back:
            if dims or not all(f in rule.reduce for f in mine):
                return Replicate()
            continue  # reduced away: any placement serves
        further = _wish_of_output(propagation, out, axis, depth - 1, even)
        if further is None:
            continue
        if isinstance(further, Replicate) or further.dim not in back:
            return Replicate()
        here = Shard(back[further.dim])
        if wanted is not None and wanted != here:
            return Replicate()
        wanted = here
    return wanted


def _wish_of_output(
    propagation: Propagation, tensor: Tensor, axis: int, depth: int, even: bool
) -> Wish:
    anchor = propagation.anchor_of(tensor)
    if anchor is not None and axis < len(anchor):
        placement = anchor[axis]
        return placement if isinstance(placement, Shard) else Replicate()
    return wish(propagation, tensor, axis, propagation.replicated, depth, even)


def _known_spec(propagation: Propagation, tensor: Tensor) -> Spec | None:
    spec = propagation.specs.get(tensor)
    if spec is None and tensor.op.type == "ReadVariableOp":
        return propagation.specs.get(tensor.op.inputs[0])
    return spec
