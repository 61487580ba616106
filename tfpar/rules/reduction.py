"""Reductions over dims given as a constant operand."""

from __future__ import annotations

import dataclasses
import math
from typing import TYPE_CHECKING

import numpy as np

from tfpar.ir.constants import Constants
from tfpar.ir.graph import Op, Tensor
from tfpar.rules.local import LocalOp
from tfpar.rules.registry import rule
from tfpar.rules.rule import OpRule, RuleFields, make_rule

if TYPE_CHECKING:
    from typing_extensions import Unpack

_KINDS = {"Sum": "sum", "Max": "max", "Min": "min", "Prod": "prod", "Any": "any", "All": "all"}


def _reduction(
    op: Op, constants: Constants, kind: str, **fields: Unpack[RuleFields]
) -> OpRule | None:
    axes = constants.value(op.inputs[1])
    if axes is None:
        return None
    rank = len(op.inputs[0].shape)
    reduced = {int(a) % rank for a in np.atleast_1d(axes)} if rank else set()
    names = [f"r{d}" if d in reduced else f"d{d}" for d in range(rank)]
    keep = op.attrs.get("keep_dims", False)
    kept = [("1" if d in reduced else n) for d, n in enumerate(names) if keep or d not in reduced]
    return make_rule(
        op,
        f"{' '.join(names)} -> {' '.join(kept)}",
        reduce={f"r{d}": kind for d in reduced},
        **fields,
    )


@rule(*_KINDS)
def _reduce(op: Op, constants: Constants) -> OpRule | None:
    kind = _KINDS[op.type]
    return _reduction(op, constants, kind, linear=((0,),) if kind == "sum" else ())


@rule("Mean")
def _mean(op: Op, constants: Constants) -> OpRule | None:
    return _reduction(op, constants, "sum", linear=((0,),), lower=_lower_mean, any_pattern=True)


def _lower_mean(local: LocalOp) -> list[Tensor]:
    """A mean over a split dim is a sum divided by the global count."""
    if not any(f in local.rule.reduce for f, _ in local.splits):
        return local.copy().outputs
    build, x = local.build, local.inputs[0]
    outputs = [(local.local_output_shape(), x.dtype)]
    total = build.emit("Sum", local.inputs, outputs, local.op.attrs, name=local.op.name).outputs[0]
    count = math.prod(local.rule.sizes[f] for f in local.rule.reduce)
    return [build.binary("RealDiv", total, build.const(count, x.dtype))]


@rule("L2Loss")
def _l2_loss(op: Op, constants: Constants) -> OpRule:
    names = [f"r{d}" for d in range(len(op.inputs[0].shape))]
    return make_rule(op, f"{' '.join(names)} -> ", reduce=dict.fromkeys(names, "sum"))


@rule("EuclideanNorm")
def _euclidean_norm(op: Op, constants: Constants) -> OpRule | None:
    """Dims that are kept split; those that are reduced stay whole (a root is not a sum)."""
    whole = _reduction(op, constants, "sum")
    return None if whole is None else dataclasses.replace(whole, reduce={})
