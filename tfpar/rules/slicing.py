"""Ops that cut a box out of a tensor or set it into a larger one: slice, pad, and kin.

A dim that the box covers in full passes. One that it cuts at multiples of a common
length may be split inside pieces of that length (see `pieces`).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from tfpar.ir.constants import Constants
from tfpar.ir.graph import Op, Tensor
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
        return local.copy(
            [
                local.inputs[0],
                local.build.const(np.array(moved), dtype),
                local.build.const(np.array(local.local_output_shape()), dtype),
            ]
        ).outputs

    return make_rule(
        op,
        f"{' '.join(left)} -> {' '.join(right)}",
        sizes=units,
        monotone=(0,),
        shape_operands={2: 0},
        lower=lower,
        any_pattern=True,
    )


def _scaled(local: LocalOp, name: str, position: int, unit: int) -> int:
    """Convert the global `position`, a multiple of `unit` if the factor is split, to a local
    one."""
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
        op,
        f"{' '.join(left)} -> {' '.join(right)}",
        sizes=units,
        lower=lower,
        any_pattern=True,
        linear=((0,),) if op.type == "Pad" else ((0, 2),),
    )


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
