"""Fused optimizer updates: variable, slots and gradient share all of their dims."""

from __future__ import annotations

from tfpar.ir.constants import Constants
from tfpar.ir.graph import Op
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


@rule(*_SPARSE_OPERANDS)
def _sparse_apply(op: Op, constants: Constants) -> OpRule:
    """Which rows are updated is known only as the step runs: rows stay whole."""
    rest = " ".join(f"d{d}" for d in range(1, len(op.inputs[0].shape)))
    kinds = {"t": f". {rest}", "r": f". {rest}", "i": ".", "s": ""}
    dims = ", ".join(kinds[o] for o in _SPARSE_OPERANDS[op.type])
    return make_rule(op, f"{dims} -> ")
