"""Ops with windows on an image whose spatial dim is split: decompositions with halo exchange.

A dim of `parts * block` entries is seen as blocks, one for each part, which join the batch. There
each has what it reads of its neighbours beside its own rows, so that the op itself runs on it,
without padding along the dim:

    image   (b, parts * block, w, c)
      ->    (b, parts, left + block + right, w, c)      edges of the neighbours; padding at the ends
      ->    (b * parts, left + block + right, w, c)

A gradient of the image comes in the same form. What it holds for rows of the neighbours goes back
to them and is added up (the adjoint). Of a split dim only the edges of all blocks are gathered
(Rhino §4; GSPMD's halo exchange).
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any, TypedDict

from tfpar.ir.builder import GraphBuilder, neutral
from tfpar.ir.graph import Graph, Op, Tensor
from tfpar.rules.local import LocalOp
from tfpar.rules.pseudo import begin_decomposition
from tfpar.rules.rule import Expansion, Lowering
from tfpar.rules.windows import PADDINGS, SlidingWindow, Windows

IMAGE, RESULT = "{x}", "{y}"
"""Operands with and without the entries that windows share, as `notation` names them."""


_TOLD = frozenset(
    {"Conv", "Conv2D", "Conv2DBackpropInput", "Conv2DBackpropFilter", "MaxPool", "MaxPoolGrad"}
)
"""Op types that can be told how much to pad. Depthwise convolutions can, but once TensorFlow has
fused a bias into one, oneDNN's rewriting of that ends the process."""


class HaloFields(TypedDict, total=False):
    """Arguments of `make_rule`."""

    sizes: dict[str, int]
    shape_operands: Mapping[int, int]
    blocks: dict[str, int]
    expand: dict[str, Expansion]
    reduce: dict[str, str]
    lower: Lowering
    pseudo: bool
    any_pattern: bool


def halo_fields(
    op: Op,
    notation: str,
    windows: Windows,
    shape_operands: Mapping[int, int],
    reduction: str = "sum",
) -> HaloFields:
    """Return the arguments of `make_rule` that let the spatial dims of an op with windows split.

    Args:
        notation: the rule's, with `{x}` for images and `{y}` for results.
        shape_operands: the rule's: positions of operands that are a shape.
        reduction: what the op does with the entries of a window; padding is neutral in it.
    """
    roles = _roles(notation)
    fields: HaloFields = {
        "sizes": {w.factor: w.count for w in windows.splits},
        "shape_operands": shape_operands,
        "blocks": {w.factor: w.shortest for w in windows.splits if w.has_halo},
        "expand": {
            w.factor: functools.partial(
                _expand,
                window=w,
                windows=windows.along,
                roles=roles,
                shapes=shape_operands,
                reduction=reduction,
            )
            for w in windows.splits
            if w.has_halo
        },
    }
    if PADDINGS in op.attrs:
        lower = functools.partial(
            _lower_padded, windows=windows.along, roles=roles, reduction=reduction
        )
        fields["lower"], fields["pseudo"], fields["any_pattern"] = lower, True, True
    return fields


def _roles(notation: str) -> tuple[list[str], str]:
    """Split the notation into the role of each input, and that of the output."""
    inputs, output = notation.split("->")
    return [operand.strip() for operand in inputs.split(",")], output.strip()


# --- the decomposition ------------------------------------------------------------------


def _expand(
    op: Op,
    parts: int,
    *,
    window: SlidingWindow,
    windows: Sequence[SlidingWindow],
    roles: tuple[list[str], str],
    shapes: Mapping[int, int],
    reduction: str,
) -> Graph:
    """`op` on blocks along the dim of `window`, with their halos."""
    build, inputs = begin_decomposition(op)
    blocks = _Blocks(build, window, parts)
    fill = neutral(reduction, op.outputs[0].dtype)
    of_inputs, of_output = roles
    (output,) = op.outputs
    shape = list(output.shape)
    if of_output in (IMAGE, RESULT):
        shape = blocks.shape(shape, of_output)
    operands = list(inputs)
    for i, (tensor, role) in enumerate(zip(inputs, of_inputs, strict=False)):
        if role == IMAGE:
            operands[i] = blocks.joined(blocks.with_halos(blocks.cut(tensor), fill))
        elif role == RESULT:
            operands[i] = blocks.joined(blocks.cut(tensor))
        elif i in shapes:
            operands[i] = build.const(shape, tensor.dtype)
    attrs = _without(PADDINGS, op.attrs) | _padding_attrs(op, window, windows)
    made = build.one(op.type, operands, shape, output.dtype, attrs)
    if of_output in (IMAGE, RESULT):
        made = blocks.parted(made)
        made = blocks.without_halos(made) if of_output == IMAGE else made
        made = build.reshape(made, output.shape)
    build.graph.outputs = [made]
    return build.graph


def _without(name: str, attrs: Mapping[str, Any]) -> dict[str, Any]:
    return {n: value for n, value in attrs.items() if n != name}


def _padding_attrs(
    op: Op, window: SlidingWindow, windows: Sequence[SlidingWindow]
) -> dict[str, Any]:
    """Attributes that leave the padding of an op as it is, but for none along `window`."""
    paddings = [0] * (2 * (len(windows) + 2))
    for other in windows:
        if other is not window:
            paddings[2 * other.dim : 2 * other.dim + 2] = other.before, other.after
    attrs: dict[str, Any] = {"padding": "VALID"}
    if "explicit_paddings" in op.attrs:
        attrs["explicit_paddings"] = []
    if not any(paddings):
        return attrs
    # On a CPU, gradients of dilated convolutions know no explicit padding.
    if op.type in _TOLD and not any(n > 1 for n in op.attrs.get("dilations", ())):
        return {"padding": "EXPLICIT", "explicit_paddings": paddings}
    return attrs | {PADDINGS: paddings}


class _Blocks:
    """One dim of images as blocks, in the graph `build`; `self.dim` counts them."""

    def __init__(self, build: GraphBuilder, window: SlidingWindow, parts: int) -> None:
        self.build, self.window, self.parts = build, window, parts
        self.dim = window.dim
        self.block = window.length // parts

    def shape(self, shape: Sequence[int], role: str) -> list[int]:
        """The shape of all blocks as a batch, of an image (with halos) or result of `shape`."""
        batch, *rest = shape
        halos = self.window.left + self.window.right if role == IMAGE else 0
        rest[self.dim - 1] = rest[self.dim - 1] // self.parts + halos
        return [batch * self.parts, *rest]

    def cut(self, x: Tensor) -> Tensor:
        """(..., length, ...) as (..., parts, block, ...)."""
        at, shape = self.dim, list(x.shape)
        shape[at : at + 1] = [self.parts, shape[at] // self.parts]
        return self.build.reshape(x, shape)

    def joined(self, blocks: Tensor) -> Tensor:
        """(b, ..., parts, block, ...) as (b * parts, ..., block, ...)."""
        others = [d for d in range(1, len(blocks.shape)) if d != self.dim]
        x = self._moved(blocks, [0, self.dim, *others])
        return self.build.reshape(x, [x.shape[0] * x.shape[1], *x.shape[2:]])

    def parted(self, x: Tensor) -> Tensor:
        """Undo `joined`."""
        x = self.build.reshape(x, [x.shape[0] // self.parts, self.parts, *x.shape[1:]])
        others = [d for d in range(len(x.shape)) if d != 1]
        return self._moved(x, [*others[: self.dim], 1, *others[self.dim :]])

    def _moved(self, x: Tensor, perm: list[int]) -> Tensor:
        return x if perm == sorted(perm) else self.build.transpose(x, perm)

    def with_halos(self, blocks: Tensor, fill: Any) -> Tensor:
        """(..., parts, left + block + right, ...): with what each reads of its neighbours.

        Args:
            fill: what the first and the last block have in place of a neighbour.
        """
        left, right = self.window.left, self.window.right
        ahead = self._rows(blocks, self.block - left, left)
        back = self._rows(blocks, 0, right)
        before, behind = self._exchanged(ahead, back, fill)
        return self._stacked([*before, blocks, *behind])

    def without_halos(self, blocks: Tensor) -> Tensor:
        """The adjoint of `with_halos`: the halos are added to the rows that they are of."""
        left, right = self.window.left, self.window.right
        ahead = self._rows(blocks, left + self.block, right)
        back = self._rows(blocks, 0, left)
        before, behind = self._exchanged(ahead, back, 0)
        rows = [
            *self._sum(self._rows(blocks, left, right), before),
            *self._rows(blocks, left + right, self.block - left - right),
            *self._sum(self._rows(blocks, self.block, left), behind),
        ]
        return self._stacked(rows)

    def _rows(self, blocks: Tensor, start: int, count: int) -> list[Tensor]:
        """`count` rows of every block, if there are any."""
        if not count:
            return []
        begin, size = [0] * len(blocks.shape), list(blocks.shape)
        begin[self.dim + 1], size[self.dim + 1] = start, count
        return [self.build.slice(blocks, begin, size)]

    def _stacked(self, rows: Sequence[Tensor]) -> Tensor:
        return self.build.concat(rows, self.dim + 1)

    def _sum(self, rows: list[Tensor], others: list[Tensor]) -> list[Tensor]:
        return [self.build.binary("AddV2", a, b) for a, b in zip(rows, others, strict=True)]

    def _exchanged(
        self, ahead: list[Tensor], back: list[Tensor], fill: Any
    ) -> tuple[list[Tensor], list[Tensor]]:
        """Return the rows that each block gets from the one before and from the one behind.

        Args:
            ahead, back: rows of each block for the one behind it, and for the one before it.
        """
        edges = self._stacked([*ahead, *back])
        # Of padding, as of a shift, each rank needs what others have: here the edges are gathered.
        ends = [int(d == self.dim) for d in range(len(edges.shape))]
        edges = self.build.pad(edges, ends, fill or None, before=ends)
        first = sum(t.shape[self.dim + 1] for t in ahead)

        def taken(block: int, start: int, like: list[Tensor]) -> list[Tensor]:
            if not like:
                return []
            begin, size = [0] * len(edges.shape), list(like[0].shape)
            begin[self.dim], begin[self.dim + 1] = block, start
            return [self.build.slice(edges, begin, size)]

        return taken(0, 0, ahead), taken(2, first, back)


# --- padding that an op cannot be told --------------------------------------------------


def _lower_padded(
    local: LocalOp, windows: Sequence[SlidingWindow], roles: tuple[list[str], str], reduction: str
) -> list[Tensor]:
    """The op with the padding of `PADDINGS`: on images that are padded, and cut to size again."""
    build, op = local.build, local.op
    fill = neutral(reduction, op.outputs[0].dtype)
    before, after = [0] * (len(windows) + 2), [0] * (len(windows) + 2)
    for window in windows:
        before[window.dim], after[window.dim] = window.before, window.after
    of_inputs, of_output = roles
    made_shape = shape = local.local_output_shape()
    if of_output == IMAGE:
        made_shape = tuple(n + p + q for n, p, q in zip(shape, before, after, strict=True))
    operands = list(local.inputs)
    for i, role in enumerate(of_inputs):
        if role == IMAGE:
            operands[i] = build.pad(operands[i], after, fill or None, before)
        elif i in local.rule.shape_operands:
            operands[i] = build.const(made_shape, operands[i].dtype)
    if of_output not in (IMAGE, RESULT):
        made_shape = local.local_output_shape()
    attrs = _without(PADDINGS, op.attrs)
    made = build.one(op.type, operands, made_shape, op.outputs[0].dtype, attrs)
    return [build.slice(made, before, shape) if of_output == IMAGE else made]
