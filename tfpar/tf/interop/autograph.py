"""Hooks into AutoGraph: its scopes and undefined values, and loops over classes of our own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tensorflow.python.autograph.core.function_wrappers import FunctionScope
from tensorflow.python.autograph.operators import control_flow, py_builtins
from tensorflow.python.autograph.operators.variables import Undefined, UndefinedReturnValue

__all__ = ["FunctionScope", "Undefined", "UndefinedReturnValue", "on_enumerate", "on_loop"]


def on_loop(cls: type, loop: Callable[..., None]) -> None:
    """Have `for _ in` what is of class `cls` run by `loop`.

    Args:
        loop: called with the object, the test whether to go on or None, the body, getter and
            setter of the loop's state, the names of its entries, and options.
    """
    control_flow.for_loop_registry.register(cls, loop)


def on_enumerate(cls: type, enumerated: Callable[..., Any]) -> None:
    """Have `enumerate` of what is of class `cls` done by `enumerated(it, start)`."""
    py_builtins.enumerate_registry.register(cls, enumerated)
