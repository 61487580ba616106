"""Reads and writes of variables. A handle has the dims of its variable."""

from __future__ import annotations

from tfpar.ir.constants import Constants
from tfpar.ir.graph import Op
from tfpar.rules.registry import rule
from tfpar.rules.rule import OpRule, make_rule


@rule("ReadVariableOp")
def _read(op: Op, constants: Constants) -> OpRule:
    return make_rule(op, "... -> ...")


@rule("AssignVariableOp", "AssignAddVariableOp", "AssignSubVariableOp")
def _assign(op: Op, constants: Constants) -> OpRule:
    return make_rule(op, "..., ... -> ")
