"""Ops that cut a box out of a tensor or set it into a larger one: slice, pad, and kin.

A dim that the box covers in full passes. One that it cuts at multiples of a common
length may be split inside pieces of that length (see `pieces`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

from tfpar.ir.constants import Constants
from tfpar.ir.graph import Op, Shape, Tensor
from tfpar.rules.local import LocalOp
from tfpar.rules.pieces import common_length, names_of, piece_token
from tfpar.rules.registry import rule
from tfpar.rules.rule import OpRule, make_rule


def _same_dims(left: Tensor, right: Tensor) -> tuple[str, str]:
    """Dims of equal size pass, others stay whole."""
    tokens = [
        f"d{d}" if n == m else "."
        for d, (n, m) in enumerate(zip(left.shape, right.shape, strict=True))
    ]
    return (" ".join(tokens),) * 2


# --- boxes given by begin and size ------------------------------------------------------


@rule("Slice")
def _slice(op: Op, constants: Constants) -> OpRule:
    x, y = op.inputs[0], op.outputs[0]
    begin = constants.value(op.inputs[1])
    left, right, units = [], [], {}
    for d, (n, m) in enumerate(zip(x.shape, y.shape, strict=True)):
        unit = n if n == m else 1
        if n != m and begin is not None and m:
            unit = common_length(n, m, int(begin[d]))
        units[f"d{d}"] = unit
        left.append(piece_token(f"d{d}", n, unit))
        right.append(piece_token(f"d{d}", m, unit))

    def lower(local: LocalOp) -> Sequence[Tensor]:
        if begin is None:
            return local.copy().outputs
        dtype = op.inputs[1].dtype
        moved = [
            _scaled(local, name, int(b), u)
            for (name, u), b in zip(units.items(), begin, strict=True)
        ]
        return local.copy([
            local.inputs[0],
            local.build.const(np.array(moved), dtype),
            local.build.const(np.array(local.local_output_shape()), dtype),
        ]).outputs  # fmt: skip

    return make_rule(
        op, f"{' '.join(left)} -> {' '.join(right)}", sizes=units, monotone=(0,),
        shape_operands={2: 0}, lower=lower, any_pattern=True,
    )  # fmt: skip


def _scaled(local: LocalOp, name: str, position: int, unit: int) -> int:
    """Where the global `position`, a multiple of `unit` if the factor is split, lies locally."""
    if not local.is_split(name):
        return position
    return position // unit * local.local_size(name)


@rule("XlaDynamicSlice")
def _xla_dynamic_slice(op: Op, constants: Constants) -> OpRule:
    left, right = _same_dims(op.inputs[0], op.outputs[0])
    return make_rule(op, f"{left} -> {right}", monotone=(0,), shape_operands={2: 0})


@rule("XlaDynamicUpdateSlice")
def _xla_dynamic_update_slice(op: Op, constants: Constants) -> OpRule:
    # The start of a dim that the update covers is clamped to 0.
    left, right = _same_dims(op.inputs[0], op.inputs[1])
    return make_rule(op, f"{left}, {right} -> {left}", linear=((0, 1),))


# --- strided slices ---------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class _Cut:
    """What one entry of a strided slice does to dim `dim` of the sliced tensor.

    Attributes:
        entry: position in begin, end and strides; None for a dim of the ellipsis.
        begin, end: canonical; `unit` is the common length of the pieces, or 1.
        step: the stride where it picks one of each `step` neighbours, else 1.
    """

    dim: int
    entry: int | None
    begin: int
    end: int
    unit: int
    step: int = 1


@dataclasses.dataclass(frozen=True)
class _StridedSlice:
    """A strided slice in factor notation.

    Attributes:
        whole: tokens of the sliced tensor; part: tokens of the slice.
        cuts: the dims that are not taken in full but may be split all the same.
        sizes: of the factors.
    """

    whole: str
    part: str
    cuts: list[_Cut]
    sizes: dict[str, int]


def _parse_strided(
    attrs: dict, sliced: Shape, part: Shape, begin, end, strides
) -> _StridedSlice | None:
    """Begin and end may be None (not known); strides may not."""
    masks = {
        k: attrs.get(f"{k}_mask", 0)
        for k in ("begin", "end", "ellipsis", "new_axis", "shrink_axis")
    }
    rank, count = len(sliced), len(strides)
    has = lambda kind, i: bool(masks[kind] >> i & 1)  # noqa: E731
    consumed = sum(not has("new_axis", i) and not has("ellipsis", i) for i in range(count))
    entries: list[int | None] = []
    for at in range(count):
        entries += [None] * (rank - consumed) if has("ellipsis", at) else [at]
    if not any(has("ellipsis", i) for i in range(count)):
        entries += [None] * (rank - consumed)
    whole, out, cuts, sizes, dim = [], [], [], {}, 0
    for i in entries:
        if i is not None and has("new_axis", i):
            out.append(".")
            continue
        name, n = f"d{dim}", sliced[dim]
        if i is None:
            whole.append(name)
            out.append(name)
        elif has("shrink_axis", i):
            whole.append(".")
        else:
            length = part[len(out)]
            known = begin is not None and end is not None
            if length == n and strides[i] == 1:
                tokens = (name, name)
            elif not known:
                tokens = (".", ".")
            else:
                low = None if has("begin", i) else int(begin[i])
                high = None if has("end", i) else int(end[i])
                lo, hi, step = slice(low, high, int(strides[i])).indices(n)
                tokens, cut = _cut_tokens(name, dim, i, n, length, lo, hi, step)
                if cut is not None:
                    cuts.append(cut)
                    sizes[name] = cut.unit if cut.step == 1 else n // cut.step
            whole.append(tokens[0])
            out.append(tokens[1])
        dim += 1
    if len(out) != len(part):
        return None
    return _StridedSlice(" ".join(whole), " ".join(out), cuts, sizes)


def _cut_tokens(
    name: str, dim: int, entry: int, n: int, length: int, lo: int, hi: int, step: int
) -> tuple[tuple[str, str], _Cut | None]:
    """Tokens of a dim that is cut, in the sliced tensor and in the slice."""
    if step == 1 and length:
        unit = common_length(n, lo, length)
        if unit > 1:
            tokens = piece_token(name, n, unit), piece_token(name, length, unit)
            return tokens, _Cut(dim, entry, lo, lo + length, unit)
    if step > 1 and n % step == 0 and lo < step and length == n // step:
        return (f"({name} .{step})", name), _Cut(dim, entry, lo, n, 1, step)
    return (".", "."), None


def _strided_rule(op: Op, constants: Constants, sliced: Tensor, part: Tensor):
    """The parsed slice and the lowering of an op with begin, end, strides at inputs 1 to 3."""
    begin, end, strides = (constants.value(t) for t in op.inputs[1:4])
    if strides is None:
        return None, None
    parsed = _parse_strided(op.attrs, sliced.shape, part.shape, begin, end, strides)
    if parsed is None:
        return None, None

    def lower(local: LocalOp) -> Sequence[Tensor]:
        operands = list(local.inputs)
        attrs = {}
        moved = [c for c in parsed.cuts if local.is_split(f"d{c.dim}")]
        if moved:
            assert begin is not None and end is not None
            begins, ends = np.array(begin), np.array(end)
            kept = -1
            for cut in moved:
                assert cut.entry is not None  # a dim of the ellipsis is taken whole
                size = local.local_size(f"d{cut.dim}")
                if cut.step == 1:
                    begins[cut.entry] = cut.begin // cut.unit * size
                    ends[cut.entry] = cut.end // cut.unit * size
                else:
                    begins[cut.entry], ends[cut.entry] = cut.begin, size * cut.step
                kept &= ~(1 << cut.entry)
            attrs = {k: op.attrs.get(k, 0) & kept for k in ("begin_mask", "end_mask")}
            operands[1:3] = [
                local.build.const(v, t.dtype)
                for v, t in zip((begins, ends), op.inputs[1:3], strict=True)
            ]
        for position, output in local.rule.shape_operands.items():
            shape = np.array(local.local_output_shape(output))
            operands[position] = local.build.const(shape, op.inputs[position].dtype)
        return local.copy(operands, **attrs).outputs

    return parsed, lower


@rule("StridedSlice")
def _strided_slice(op: Op, constants: Constants) -> OpRule | None:
    parsed, lower = _strided_rule(op, constants, op.inputs[0], op.outputs[0])
    if parsed is None:
        return None
    return make_rule(
        op, f"{parsed.whole} -> {parsed.part}", sizes=parsed.sizes, monotone=(0,), lower=lower,
        any_pattern=True,
    )  # fmt: skip


@rule("StridedSliceGrad")
def _strided_slice_grad(op: Op, constants: Constants) -> OpRule | None:
    parsed, lower = _strided_rule(op, constants, op.outputs[0], op.inputs[4])
    if parsed is None:
        return None
    return make_rule(
        op, f"., ., ., ., {parsed.part} -> {parsed.whole}", sizes=parsed.sizes, linear=((4,),),
        shape_operands={0: 0}, lower=lower, any_pattern=True,
    )  # fmt: skip


@rule("TensorStridedSliceUpdate", "ResourceStridedSliceAssign", "StridedSliceAssign")
def _strided_slice_update(op: Op, constants: Constants) -> OpRule | None:
    """The value must have the slice's own shape: one that broadcasts has no rule."""
    parsed, lower = _strided_rule(op, constants, op.inputs[0], op.inputs[4])
    if parsed is None:
        return None
    result = parsed.whole if op.outputs else ""
    return make_rule(
        op, f"{parsed.whole}, ., ., ., {parsed.part} -> {result}", sizes=parsed.sizes,
        linear=((0, 4),) if op.outputs else (), lower=lower, any_pattern=True,
    )  # fmt: skip


# --- padding ----------------------------------------------------------------------------


@rule("Pad", "PadV2")
def _pad(op: Op, constants: Constants) -> OpRule:
    x, y = op.inputs[0], op.outputs[0]
    paddings = constants.value(op.inputs[1])
    left, right, units = [], [], {}
    for d, (n, m) in enumerate(zip(x.shape, y.shape, strict=True)):
        unit = n if n == m else 1
        if n != m and paddings is not None and n:
            unit = common_length(n, *map(int, paddings[d]))
        units[f"d{d}"] = unit
        left.append(piece_token(f"d{d}", n, unit))
        right.append(piece_token(f"d{d}", m, unit))

    def lower(local: LocalOp) -> Sequence[Tensor]:
        if paddings is None:
            return local.copy().outputs
        moved = [
            [_scaled(local, name, int(p), unit) for p in row]
            for (name, unit), row in zip(units.items(), paddings, strict=True)
        ]
        constant = local.build.const(np.array(moved), op.inputs[1].dtype)
        return local.copy([local.inputs[0], constant, *local.inputs[2:]]).outputs

    return make_rule(
        op, f"{' '.join(left)} -> {' '.join(right)}", sizes=units, lower=lower, any_pattern=True,
        linear=((0,),) if op.type == "Pad" else ((0, 2),),
    )  # fmt: skip


@rule("MirrorPad", "MirrorPadGrad")
def _mirror_pad(op: Op, constants: Constants) -> OpRule:
    left, right = _same_dims(op.inputs[0], op.outputs[0])
    return make_rule(op, f"{left} -> {right}", linear=((0,),))


# --- permutations of the entries of a dim -----------------------------------------------


@rule("ReverseV2", "Roll")
def _permuted(op: Op, constants: Constants) -> OpRule | None:
    axes = constants.value(op.inputs[1 if op.type == "ReverseV2" else 2])
    if axes is None:
        return None
    names = names_of(op.inputs[0])
    for axis in np.atleast_1d(axes):
        names[int(axis)] = "."
    side = " ".join(names)
    return make_rule(op, f"{side} -> {side}", monotone=(0,))


@rule("Reverse")
def _reverse(op: Op, constants: Constants) -> OpRule | None:
    flags = constants.value(op.inputs[1])
    if flags is None:
        return None
    side = " ".join("." if flag else f"d{d}" for d, flag in enumerate(flags))
    return make_rule(op, f"{side} -> {side}", monotone=(0,))


@rule("ReverseSequence")
def _reverse_sequence(op: Op, constants: Constants) -> OpRule:
    names = names_of(op.inputs[0])
    names[op.attrs["seq_dim"]] = "."
    side = " ".join(names)
    batch = names[op.attrs.get("batch_dim", 0)]
    return make_rule(op, f"{side}, {batch} -> {side}", monotone=(0,), lower=_lower_reverse)


def _lower_reverse(local: LocalOp) -> Sequence[Tensor]:
    return local.copy([local.inputs[0], local.filled(1, 0)]).outputs
