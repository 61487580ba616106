"""Pseudo ops: steps of decompositions that depend on how a dim is cut.

They stand in decompositions like ops of TensorFlow's and are emitted as a few of
those. Each comes as a function that adds it to a decomposition, and a rule.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from tfpar.ir.builder import GraphBuilder
from tfpar.ir.constants import Constants
from tfpar.ir.graph import DType, Op, Tensor
from tfpar.rules.local import LocalOp
from tfpar.rules.registry import rule
from tfpar.rules.rule import SAME, OpRule, make_rule
from tfpar.spec import local_indices


def begin_decomposition(op: Op, name: str = "") -> tuple[GraphBuilder, list[Tensor]]:
    """Return a builder of the graph that stands for `op`, and a placeholder for each input.

    Args:
        name: of the graph's ops; by default the op's type.
    """
    build = GraphBuilder(name=name or op.type.lower())
    return build, [build.placeholder(t, f"in{i}") for i, t in enumerate(op.inputs)]


def blocks(build: GraphBuilder, x: Tensor, parts: int, fill: Any) -> tuple[Tensor, Tensor, Tensor]:
    """View the last dim of `x` as `parts` blocks, each where a shard is already.

    Returns:
        (..., parts, block): the blocks, with padding set to `fill` behind what is real.
        (parts,): the index in `x` of each block's first entry; its length for an empty block.
        (parts,): how many entries of each block are real.
    """
    *batch, length = x.shape
    each = ((parts,), "int32")
    outputs = [((*batch, parts, -(-length // parts)), x.dtype), each, each]
    view, starts, counts = build.emit("TfparBlocks", (x,), outputs, {"fill": fill}).outputs
    return view, starts, counts


@rule("TfparBlocks")
def _blocks(op: Op, constants: Constants) -> OpRule:
    batch = _batch(op.inputs[0])
    *_, parts, block = op.outputs[0].shape
    return make_rule(
        op,
        f"{batch} (parts block) -> {batch} parts ., parts, parts",
        sizes={"parts": parts, "block": block},
        reduce=dict.fromkeys(batch.split(), SAME),
        lower=_lower_blocks,
        pseudo=True,
        any_pattern=batch.split(),
    )


def _lower_blocks(local: LocalOp) -> list[Tensor]:
    build, x, fill = local.build, local.inputs[0], local.op.attrs["fill"]
    shape = local.op.inputs[0].shape
    dim = len(shape) - 1
    *batch, parts, block = local.local_output_shape(0)
    starts, counts = [], []
    for rank in range(local.mesh.size):
        at = np.full(parts * block, -1)
        stored = local_indices(
            shape[dim], dim, local.in_specs[0], local.mesh, local.mesh.coordinates(rank)
        )
        at[: len(stored)] = stored
        real = [b[b >= 0] for b in at.reshape(parts, block)]
        starts.append(np.array([b[0] if len(b) else shape[dim] for b in real], np.int32))
        counts.append(np.array([len(b) for b in real], np.int32))
    x = local.mask_padding(x, 0, dim, fill)
    x = build.pad(x, [0] * dim + [parts * block - x.shape[dim]], fill)
    view = build.reshape(x, [*batch, parts, block])
    return [view, build.per_rank(starts), build.per_rank(counts)]


def label_mask(build: GraphBuilder, labels: Tensor, like: Tensor) -> Tensor:
    """Booleans of the shape of `like`: which class, along its last dim, is the label."""
    return build.one("TfparLabelMask", (labels, like), like.shape, "bool")


@rule("TfparLabelMask")
def _label_mask(op: Op, constants: Constants) -> OpRule:
    batch = _batch(op.inputs[1])
    return make_rule(
        op,
        f"{batch}, {batch} c -> {batch} c",
        lower=_lower_label_mask,
        pseudo=True,
        any_pattern=True,
    )


def _lower_label_mask(local: LocalOp) -> list[Tensor]:
    build, labels = local.build, local.inputs[0]
    classes = build.per_rank([i.astype(labels.dtype) for i in local.indices("c")])
    return [build.binary("Equal", build.expand_dims(labels, -1), classes)]


def less_label(
    build: GraphBuilder, view: Tensor, at: Tensor, inside: Tensor, classes: int
) -> Tensor:
    """Probabilities in blocks, less 1 at the label, as one last dim again.

    Args:
        view: (rows, parts, block), of `blocks`.
        at, inside: (rows, parts): where in its block the label is, if it is in that one.

    Returns:
        (rows, classes).
    """
    inputs = (view, at, inside)
    return build.one("TfparLessLabel", inputs, (view.shape[0], classes), view.dtype)


@rule("TfparLessLabel")
def _less_label(op: Op, constants: Constants) -> OpRule:
    _, parts, block = op.inputs[0].shape
    return make_rule(
        op,
        "rows parts ., rows parts, rows parts -> rows (parts block)",
        sizes={"parts": parts, "block": block},
        lower=_lower_less_label,
        pseudo=True,
        any_pattern=["rows"],
    )


def _lower_less_label(local: LocalOp) -> list[Tensor]:
    build, (view, at, inside) = local.build, local.inputs
    rows, parts, block = view.shape
    flat = build.reshape(view, (rows * parts, block))
    row = build.const(np.arange(rows * parts, dtype=np.int32)[:, None])
    where = build.concat([row, build.reshape(at, (rows * parts, 1))], 1)
    one = build.reshape(build.cast(inside, view.dtype), (rows * parts,))
    attrs = {"T": DType(view.dtype), "Tindices": DType("int32")}
    less = build.one("TensorScatterSub", (flat, where, one), flat.shape, view.dtype, attrs)
    less = build.reshape(less, (rows, parts * block))
    return [build.slice(less, [0, 0], local.local_output_shape(0))]


def take_last(build: GraphBuilder, x: Tensor, index: Tensor) -> Tensor:
    """Emit `x[..., index]`: of each row of the last dim one entry, or several.

    Args:
        index: of the shape of `x` without its last dim, or with another one.
    """
    dims = len(x.shape) - 1
    at = build.expand_dims(index, -1) if len(index.shape) == dims else index
    attrs = {
        "Tparams": DType(x.dtype),
        "Tindices": DType("int32"),
        "Taxis": DType("int32"),
        "batch_dims": dims,
    }
    inputs = (x, at, build.const(dims, "int32"))
    taken = build.one("GatherV2", inputs, at.shape, x.dtype, attrs)
    return build.reshape(taken, index.shape)


def whole(build: GraphBuilder, x: Tensor) -> Tensor:
    """Gather the last dim of `x`."""
    return build.one("TfparWhole", (x,), x.shape, x.dtype)


@rule("TfparWhole")
def _whole(op: Op, constants: Constants) -> OpRule:
    batch = _batch(op.inputs[0])
    return make_rule(
        op,
        f"{batch} . -> {batch} .",
        lower=lambda local: [local.inputs[0]],
        pseudo=True,
        any_pattern=True,
    )


def _batch(tensor: Tensor) -> str:
    return " ".join(f"d{d}" for d in range(len(tensor.shape) - 1))
