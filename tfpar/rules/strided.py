"""Strided slices, their gradient, and writes to them.

Each dim of the sliced tensor is taken whole (it passes), cut (see `_Cut`), or stays whole.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

from tfpar.ir.constants import Constants
from tfpar.ir.graph import Op, Shape, Tensor
from tfpar.rules.indexing import lookup_reduction
from tfpar.rules.local import LocalOp
from tfpar.rules.pieces import common_length, piece_token
from tfpar.rules.registry import rule
from tfpar.rules.rule import OpRule, make_rule


@dataclasses.dataclass(frozen=True)
class _Cut:
    """Part of a dim of length n that an entry of the slice takes, and that may be split all the
    same.

    One of three: `[begin, end)`, multiples of `unit` (split inside each piece of that length);
    every `step`-th entry from `begin` on (split between groups of `step` neighbours);
    the entry at `begin` alone (it lies on one rank, the others give zeros).

    Attributes:
        dim: of the sliced tensor.
        entry: position in begin, end and strides.
    """

    dim: int
    entry: int
    kind: str
    begin: int
    end: int
    unit: int = 1
    step: int = 1

    @property
    def name(self) -> str:
        return f"d{self.dim}"

    def bounds(self, local: LocalOp) -> list[tuple[int, int]]:
        """Begin and end on every rank."""
        size = local.local_size(self.name)
        if self.kind == "pieces":
            at = self.begin // self.unit * size, self.end // self.unit * size
        elif self.kind == "neighbours":
            at = self.begin, size * self.step
        else:
            starts = [
                min(max(self.begin - start, 0), size - 1) for start in local.starts(self.name)
            ]
            return [(start, start + 1) for start in starts]
        return [at] * local.mesh.size


@dataclasses.dataclass(frozen=True)
class _Slice:
    """A strided slice in factor notation.

    Attributes:
        whole: tokens of the sliced tensor; part: tokens of the slice.
        cuts: the dims that are cut but may be split.
        sizes: of the factors.
        rank: of the sliced tensor.
    """

    whole: str
    part: str
    cuts: list[_Cut]
    sizes: dict[str, int]
    rank: int

    @property
    def picked(self) -> list[str]:
        """The factors of which the slice takes a single entry."""
        return [cut.name for cut in self.cuts if cut.kind == "entry"]

    @property
    def any_pattern(self) -> set[str]:
        """The factors whose positions do not matter."""
        return {f"d{d}" for d in range(self.rank)} - set(self.picked)


def _entries(masks: dict[str, int], rank: int, count: int) -> list[int | None]:
    """The entries in order, None for each dim of the ellipsis."""
    ellipsis = [i for i in range(count) if masks["ellipsis"] >> i & 1]
    consumed = sum(not masks["new_axis"] >> i & 1 for i in range(count) if i not in ellipsis)
    covered: list[int | None] = [None] * (rank - consumed)
    at = ellipsis[0] if ellipsis else count
    return [*range(at), *covered, *range(at + 1, count)]


def _parse(op: Op, constants: Constants, sliced: Shape, part: Shape, pick: bool) -> _Slice | None:
    """The slice that inputs 1 to 3 (begin, end, strides) describe; None if it is not known.

    Args:
        pick: whether a dim of which a single entry is taken may be split.
    """
    begin, end, strides = (constants.value(t) for t in op.inputs[1:4])
    if strides is None:
        return None
    places = None if begin is None or end is None else (begin, end)
    kinds = ("begin", "end", "ellipsis", "new_axis", "shrink_axis")
    masks = {kind: op.attrs.get(f"{kind}_mask", 0) for kind in kinds}
    whole: list[str] = []
    out: list[str] = []
    cuts: list[_Cut] = []
    sizes: dict[str, int] = {}
    for i in _entries(masks, len(sliced), len(strides)):
        if i is not None and masks["new_axis"] >> i & 1:
            out.append(".")
            continue
        dim = len(whole)
        name, n = f"d{dim}", sliced[dim]
        shrinks = i is not None and masks["shrink_axis"] >> i & 1
        cut = None
        tokens: tuple[str, str | None]
        if i is None or (not shrinks and part[len(out)] == n and strides[i] == 1):
            tokens = name, name
        elif shrinks:
            tokens = ".", None
            if pick and places:
                tokens = name, None
                cut = _Cut(dim, i, "entry", int(places[0][i]) % n, 0)
        elif not places:
            tokens = ".", "."
        else:
            low = None if masks["begin"] >> i & 1 else int(places[0][i])
            high = None if masks["end"] >> i & 1 else int(places[1][i])
            tokens, cut = _cut(dim, i, n, part[len(out)], slice(low, high, int(strides[i])))
        whole.append(tokens[0])
        if tokens[1] is not None:
            out.append(tokens[1])
        if cut is not None:
            cuts.append(cut)
            sizes[name] = {"pieces": cut.unit, "neighbours": n // cut.step, "entry": n}[cut.kind]
    if len(out) != len(part):
        return None
    return _Slice(" ".join(whole), " ".join(out), cuts, sizes, len(sliced))


def _cut(
    dim: int, entry: int, n: int, length: int, taken: slice
) -> tuple[tuple[str, str], _Cut | None]:
    """Tokens of a dim that is cut, in the sliced tensor and in the slice."""
    begin, _, step = taken.indices(n)
    name = f"d{dim}"
    if step == 1 and length:
        unit = common_length(n, begin, length)
        if unit > 1:
            tokens = piece_token(name, n, unit), piece_token(name, length, unit)
            return tokens, _Cut(dim, entry, "pieces", begin, begin + length, unit)
    if step > 1 and n % step == 0 and begin < step and length == n // step:
        return (f"({name} .{step})", name), _Cut(dim, entry, "neighbours", begin, n, step=step)
    return (".", "."), None


def _lower(local: LocalOp, cuts: Sequence[_Cut], constants: Constants) -> Sequence[Tensor]:
    """The op with begin and end in the rank's own part of the dims that are split."""
    op, build = local.op, local.build
    operands = list(local.inputs)
    attrs = {}
    moved = [cut for cut in cuts if local.is_split(cut.name)]
    if moved:
        ranks = range(local.mesh.size)
        limits = [[np.array(constants.value(t)) for _ in ranks] for t in op.inputs[1:3]]
        kept = -1
        for cut in moved:
            kept &= ~(1 << cut.entry)
            for rank, bounds in enumerate(cut.bounds(local)):
                for values, bound in zip(limits, bounds, strict=True):
                    values[rank][cut.entry] = bound
        attrs = {k: op.attrs.get(k, 0) & kept for k in ("begin_mask", "end_mask")}
        operands[1:3] = [
            build.per_rank(values, t.dtype)
            for values, t in zip(limits, op.inputs[1:3], strict=True)
        ]
    for position, output in local.rule.shape_operands.items():
        shape = np.array(local.local_output_shape(output))
        operands[position] = build.const(shape, op.inputs[position].dtype)
    inside = _inside(local, moved)
    if inside is not None and op.type == "StridedSliceGrad":
        operands[4] = build.select(inside, operands[4], build.const(0, operands[4].dtype))
    outputs = local.copy(operands, **attrs).outputs
    if inside is not None and op.type == "StridedSlice":
        return [build.select(inside, outputs[0], build.const(0, outputs[0].dtype))]
    return outputs


def _inside(local: LocalOp, cuts: Sequence[_Cut]) -> Tensor | None:
    """Whether this rank holds the entries that are picked; None where none is."""
    picked = [cut for cut in cuts if cut.kind == "entry"]
    if not picked:
        return None
    holds = np.ones(local.mesh.size, bool)
    for cut in picked:
        holds &= [cut.begin in part for part in local.indices(cut.name)]
    return local.build.per_rank([np.array(h) for h in holds])


@rule("StridedSlice")
def _strided_slice(op: Op, constants: Constants) -> OpRule | None:
    reduction = lookup_reduction(op.inputs[0].dtype)
    x, y = op.inputs[0].shape, op.outputs[0].shape
    parsed = _parse(op, constants, x, y, pick=reduction is not None)
    if parsed is None:
        return None
    return make_rule(
        op,
        f"{parsed.whole} -> {parsed.part}",
        sizes=parsed.sizes,
        monotone=(0,),
        reduce={name: reduction for name in parsed.picked if reduction},
        masked=False,
        lower=lambda local: _lower(local, parsed.cuts, constants),
        any_pattern=parsed.any_pattern,
    )


@rule("StridedSliceGrad")
def _strided_slice_grad(op: Op, constants: Constants) -> OpRule | None:
    parsed = _parse(op, constants, op.outputs[0].shape, op.inputs[4].shape, pick=True)
    if parsed is None:
        return None
    return make_rule(
        op,
        f"., ., ., ., {parsed.part} -> {parsed.whole}",
        sizes=parsed.sizes,
        linear=((4,),),
        shape_operands={0: 0},
        lower=lambda local: _lower(local, parsed.cuts, constants),
        any_pattern=parsed.any_pattern,
        generates=True,
    )


@rule("TensorStridedSliceUpdate", "ResourceStridedSliceAssign")
def _strided_slice_update(op: Op, constants: Constants) -> OpRule | None:
    """The value must have the slice's own shape: one that broadcasts has no rule."""
    parsed = _parse(op, constants, op.inputs[0].shape, op.inputs[4].shape, pick=False)
    if parsed is None:
        return None
    result = parsed.whole if op.outputs else ""
    return make_rule(
        op,
        f"{parsed.whole}, ., ., ., {parsed.part} -> {result}",
        sizes=parsed.sizes,
        linear=((0, 4),) if op.outputs else (),
        any_pattern=parsed.any_pattern,
        lower=lambda local: _lower(local, parsed.cuts, constants),
    )
