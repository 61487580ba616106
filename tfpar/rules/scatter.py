"""Writes by index: scatter into zeros, into a tensor, into a variable.

A dim that is written to may be split: each rank shifts the indices to its own part
and leaves out what falls elsewhere.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from tfpar.ir.constants import Constants
from tfpar.ir.graph import Op, Tensor
from tfpar.rules.indexing import lookup_reduction, shifted_indices
from tfpar.rules.local import LocalOp
from tfpar.rules.registry import rule
from tfpar.rules.rule import OpRule, make_rule


class _Scatter:
    """Notation of a scatter by index vectors into `target`, `indices` and `updates` given."""

    def __init__(self, target: Tensor, indices: Tensor, index_names: bool) -> None:
        depth = indices.shape[-1]
        count = len(indices.shape) - 1
        self.written = [f"v{d}" for d in range(depth)]
        self.rest = [f"r{d}" for d in range(depth, len(target.shape))]
        self.index = [f"i{d}" if index_names else "." for d in range(count)]

    @property
    def target(self) -> str:
        return " ".join([*self.written, *self.rest])

    @property
    def indices(self) -> str:
        return " ".join([*self.index, "."])

    @property
    def updates(self) -> str:
        return " ".join([*self.index, *self.rest])

    def shifted(self, local: LocalOp, indices: Tensor) -> Tensor:
        """Indices into this rank's part; -1 for those that fall elsewhere."""
        if not any(local.is_split(f) for f in self.written):
            return indices
        moved, inside = shifted_indices(local, indices, self.written)
        return local.build.select(inside, moved, local.build.const(-1, indices.dtype))


@rule("ScatterNd")
def _scatter_nd(op: Op, constants: Constants) -> OpRule:
    """Updates add up, so they may be split: each rank scatters its own."""
    indices, updates, shape = op.inputs
    reduction = lookup_reduction(updates.dtype)
    form = _Scatter(op.outputs[0], indices, reduction is not None)

    def lower(local: LocalOp) -> Sequence[Tensor]:
        indices, updates, _ = local.inputs
        local_shape = local.build.const(np.array(local.local_output_shape()), shape.dtype)
        return local.copy(
            [form.shifted(local, indices), updates, local_shape], bad_indices_policy=b"IGNORE"
        ).outputs

    return make_rule(
        op,
        f"{form.indices}, {form.updates} -> {form.target}",
        reduce={name: reduction for name in form.index if reduction},
        linear=((1,),) if reduction == "sum" else (),
        lower=lower,
        any_pattern={*form.rest, *form.index},
        generates=True,
    )


_TENSOR_SCATTERS = ("Add", "Sub", "Update", "Max", "Min")


@rule(
    *(f"TensorScatter{kind}" for kind in _TENSOR_SCATTERS),
    "ScatterNdNonAliasingAdd",
    *(f"ResourceScatterNd{kind}" for kind in _TENSOR_SCATTERS),
)
def _tensor_scatter(op: Op, constants: Constants) -> OpRule:
    form = _Scatter(op.inputs[0], op.inputs[1], False)

    def lower(local: LocalOp) -> Sequence[Tensor]:
        target, indices, updates = local.inputs
        moved = form.shifted(local, indices)
        return local.copy([target, moved, updates], bad_indices_policy=b"IGNORE").outputs

    jointly = op.outputs and not op.type.endswith(("Max", "Min"))
    return make_rule(
        op,
        f"{form.target}, {form.indices}, {form.updates} -> {form.target if op.outputs else ''}",
        linear=((0, 2),) if jointly else (),
        lower=lower,
        any_pattern=set(form.rest),
    )


@rule(*(f"ResourceScatter{kind}" for kind in _TENSOR_SCATTERS), unknown_sizes=True)
def _resource_scatter(op: Op, constants: Constants) -> OpRule:
    """Whole rows by their number: the same as a scatter by index vectors of length 1."""
    handle, indices, updates = op.inputs
    rest = [f"r{d}" for d in range(1, len(handle.shape))]
    scalar = not updates.shape
    rows = [] if scalar else [*["."] * len(indices.shape), *rest]
    table = ["." if scalar else "v", *rest]

    def lower(local: LocalOp) -> Sequence[Tensor]:
        if not local.is_split("v"):
            return local.copy().outputs
        build = local.build
        target, indices, updates = local.inputs
        moved, inside = shifted_indices(local, indices, ["v"])
        moved = build.select(inside, moved, build.const(-1, moved.dtype))
        attrs = {
            "T": op.attrs["dtype"],
            "Tindices": op.attrs["Tindices"],
            "use_locking": True,
            "bad_indices_policy": b"IGNORE",
        }
        build.emit(
            op.type.replace("Scatter", "ScatterNd"),
            [target, build.expand_dims(moved, -1), updates],
            [],
            attrs,
            name=op.name,
            stateful=True,
        )
        return []

    return make_rule(
        op,
        f"{' '.join(table)}, {' '.join('.' * len(indices.shape))}, {' '.join(rows)} -> ",
        lower=lower,
        any_pattern=set(rest),
    )


@rule("ResourceScatterMul", "ResourceScatterDiv")
def _resource_scale(op: Op, constants: Constants) -> OpRule:
    rest = " ".join(f"r{d}" for d in range(1, len(op.inputs[0].shape)))
    index = " ".join("." * len(op.inputs[1].shape))
    updates = f"{index} {rest}" if op.inputs[2].shape else ""
    return make_rule(op, f". {rest}, {index}, {updates} -> ", lower=_lower_scale, any_pattern=True)


def _lower_scale(local: LocalOp) -> Sequence[Tensor]:
    # A division by zero is refused, in padding too.
    return local.copy([*local.inputs[:2], local.filled(2, 1)]).outputs


@rule("DynamicStitch", "ParallelDynamicStitch")
def _dynamic_stitch(op: Op, constants: Constants) -> OpRule:
    """Rows of several tensors in a new order: what lies inside a row passes."""
    count = len(op.inputs) // 2
    rest = [f"r{d}" for d in range(1, len(op.outputs[0].shape))]
    rows = [" ".join("." * len(t.shape)) for t in op.inputs[:count]]
    data = [f"{row} {' '.join(rest)}" for row in rows]
    return make_rule(op, f"{', '.join([*rows, *data])} -> {' '.join(['.', *rest])}")
