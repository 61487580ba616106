"""The one registry of op rules: op type -> function from an op to its `OpRule`."""

from __future__ import annotations

from collections.abc import Callable

from tfpar.ir.constants import Constants
from tfpar.ir.graph import Op
from tfpar.rules.rule import OpRule
from tfpar.spec import ArgumentError
from tfpar.spec.arguments import argument_error, flag, text

RuleFunction = Callable[["Op", Constants], OpRule | None]
"""Gives the rule of an op instance; None where this instance has none (replicate)."""

_RULES: dict[str, RuleFunction] = {}
_PARTLY_STATIC: set[str] = set()
_UNKNOWN_SIZES: set[str] = set()


def rule(
    *op_types: str, partly_static: bool = False, unknown_sizes: bool = False
) -> Callable[[RuleFunction], RuleFunction]:
    """Register the decorated function as the rule of `op_types`.

    The function takes the op and `Constants`, by which it reads operands that
    must be known (axes, permutations), and returns a rule made by `make_rule`.

    Args:
        partly_static: the rule also serves instances with tensors of unknown rank, which
            it leaves whole.
        unknown_sizes: the rule also serves instances with dims of unknown size (rows that
            only the step itself counts); `make_rule` leaves such dims whole.
    """

    def register(function: RuleFunction) -> RuleFunction:
        for op_type in op_types:
            if op_type in _RULES:
                raise ValueError(f"op type {op_type!r} has a rule already")
            _RULES[op_type] = function
        if partly_static:
            _PARTLY_STATIC.update(op_types)
        if unknown_sizes:
            _UNKNOWN_SIZES.update(op_types)
        return function

    return register


def register_rule(op_type: str, function: RuleFunction, *, replace: bool = False) -> None:
    """Give `op_type` a rule of your own.

    Args:
        function: takes the op (`ir.Op`) and `Constants`; returns `make_rule(op, ...)`
            or None.
        replace: allow replacing an existing rule.

    Raises:
        ArgumentError: no op type or no function, or there is a rule already and `replace` is False.
    """
    text("op_type", op_type, "the type of an op, such as 'MatMul'")
    if not callable(function):
        raise argument_error(
            "function", function, "a function of an op and Constants that gives its rule"
        )
    if op_type in _RULES and not flag("replace", replace):
        raise ArgumentError(
            f"Op type {op_type!r} has a rule already; pass replace=True to replace it."
        )
    _RULES[op_type] = function


def has_rule(op_type: str) -> bool:
    return op_type in _RULES


def registered_types() -> tuple[str, ...]:
    """Return every op type that has a rule, sorted."""
    return tuple(sorted(_RULES))


def rule_function(op_type: str) -> RuleFunction:
    """Return the function that gives the rules of `op_type`.

    Raises:
        KeyError: no rule is registered for it.
    """
    return _RULES[op_type]


def find_rule(op: Op, constants: Constants) -> OpRule | None:
    """Find the rule of `op`, or None where it has none or its shapes are not static."""
    function = _RULES.get(op.type)
    if function is None:
        return None
    tensors = (*op.inputs, *op.outputs)
    if op.type in _PARTLY_STATIC:
        tensors = tuple(t for t in tensors if t.shape is not None)
    known = [t.shape is not None if op.type in _UNKNOWN_SIZES else t.is_static for t in tensors]
    if not all(known):
        return None
    return function(op, constants)
