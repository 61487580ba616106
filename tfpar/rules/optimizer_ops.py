"""Fused optimizer updates: variable, slots and gradient share all of their dims."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from tfpar.ir.builder import GraphBuilder
from tfpar.ir.constants import Constants
from tfpar.ir.graph import DType, Op, Tensor
from tfpar.rules.indexing import shifted_indices
from tfpar.rules.local import LocalOp
from tfpar.rules.registry import rule
from tfpar.rules.rule import OpRule, make_rule

# Per op type one letter per operand: `t` a handle or tensor of the variable's dims, `s` a scalar.
_OPERANDS = {
    "ResourceApplyGradientDescent": "tst",
    "ResourceApplyProximalGradientDescent": "tssst",
    "ResourceApplyMomentum": "ttsts",
    "ResourceApplyKerasMomentum": "ttsts",
    "ResourceApplyAdam": "tttsssssst",
    "ResourceApplyAdamWithAmsgrad": "ttttsssssst",
    "ResourceApplyAdaMax": "tttssssst",
    "ResourceApplyAdagrad": "ttst",
    "ResourceApplyAdagradV2": "ttsst",
    "ResourceApplyProximalAdagrad": "ttssst",
    "ResourceApplyAdagradDA": "ttttssss",
    "ResourceApplyAdadelta": "tttssst",
    "ResourceApplyRMSProp": "tttsssst",
    "ResourceApplyCenteredRMSProp": "ttttsssst",
    "ResourceApplyFtrl": "ttttssss",
    "ResourceApplyFtrlV2": "ttttsssss",
    "ResourceApplyAddSign": "ttsssst",
    "ResourceApplyPowerSign": "ttsssst",
}


@rule(*_OPERANDS)
def _apply(op: Op, constants: Constants) -> OpRule:
    dims = ", ".join("..." if o == "t" else "" for o in _OPERANDS[op.type])
    return make_rule(op, f"{dims} -> ")


# As above, with `r` for the gradient's rows and `i` for the rows that they update.
_SPARSE_OPERANDS = {
    "ResourceSparseApplyProximalGradientDescent": "tsssri",
    "ResourceSparseApplyMomentum": "ttsris",
    "ResourceSparseApplyKerasMomentum": "ttsris",
    "ResourceSparseApplyAdagrad": "ttsri",
    "ResourceSparseApplyAdagradV2": "ttssri",
    "ResourceSparseApplyProximalAdagrad": "ttsssri",
    "ResourceSparseApplyAdadelta": "tttsssri",
    "ResourceSparseApplyRMSProp": "tttssssri",
    "ResourceSparseApplyCenteredRMSProp": "ttttssssri",
    "ResourceSparseApplyFtrl": "tttrissss",
    "ResourceSparseApplyFtrlV2": "tttrisssss",
}


@rule(*_SPARSE_OPERANDS, unknown_sizes=True)
def _sparse_apply(op: Op, constants: Constants) -> OpRule:
    """Each rank updates the named rows that it holds; how many is known only as the step runs."""
    operands = _SPARSE_OPERANDS[op.type]
    rest = " ".join(f"d{d}" for d in range(1, len(op.inputs[0].shape)))
    kinds = {"t": f"v {rest}", "r": f". {rest}", "i": ".", "s": ""}
    dims = ", ".join(kinds[o] for o in operands)

    def lower(local: LocalOp) -> Sequence[Tensor]:
        inputs = list(local.inputs)
        if local.is_split("v"):
            rows, numbers = operands.index("r"), operands.index("i")
            moved, inside = shifted_indices(local, inputs[numbers], ["v"])
            inputs[numbers], inputs[rows] = _where(local.build, inside, [moved, inputs[rows]])
        return local.copy(inputs).outputs

    return make_rule(op, f"{dims} -> ", lower=lower, any_pattern={*rest.split()})


def _where(build: GraphBuilder, keep: Tensor, tensors: Sequence[Tensor]) -> list[Tensor]:
    """The rows of each tensor for which the boolean vector `keep` holds; any number of them."""
    found = build.one("Where", [keep], (None, 1), "int64", {"T": DType("bool")})
    at = build.reshape(found, (None,))
    kept = []
    for tensor in tensors:
        attrs = {
            "Tparams": DType(tensor.dtype),
            "Tindices": DType("int64"),
            "Taxis": DType("int32"),
            "batch_dims": 0,
        }
        inputs = [tensor, at, build.const(np.int32(0))]
        kept.append(build.one("GatherV2", inputs, (None, *tensor.shape[1:]), tensor.dtype, attrs))
    return kept
