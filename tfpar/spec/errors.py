"""The errors that tfpar raises, all children of `TfparError`.

A message says what happened, names the thing (op, variable, axis, rank, file)
and says what to do.
"""

from __future__ import annotations


class TfparError(Exception):
    """Base class of every error that tfpar raises on purpose."""


class ArgumentError(TfparError, ValueError):
    """An argument of another type than it may have, or out of range."""


class SpecError(TfparError, ValueError):
    """A mesh, placement or constraint that is malformed or cannot hold."""


class CaptureError(TfparError, RuntimeError):
    """The step cannot be captured as one graph."""


class GraphTextError(TfparError, ValueError):
    """The text of a graph is malformed."""


class RuleError(TfparError, ValueError):
    """An op rule that contradicts the op it describes."""


class CompilerError(TfparError, RuntimeError):
    """The compiler has lost a property of the step: a fault of tfpar."""


class PlanError(TfparError, ValueError):
    """A plan (or plan file) that does not fit the graph, the mesh or this version."""


class ScheduleError(TfparError, ValueError):
    """A schedule of a pipeline that is malformed, incomplete, or waits for itself."""


class OtherModelError(PlanError):
    """A plan for another model, or another step of it.

    Attributes:
        difference: what differs, in a few words.
    """

    def __init__(self, message: str, difference: str) -> None:
        super().__init__(message)
        self.difference = difference


class MemoryLimitError(PlanError):
    """No plan fits into the memory of a device.

    Attributes:
        needed_bytes: what the best plan that was found needs, in bytes.
    """

    def __init__(self, message: str, needed_bytes: float) -> None:
        super().__init__(message)
        self.needed_bytes = needed_bytes


class TimeLimitError(PlanError):
    """A search ended before it had found any plan."""


class RuntimeMismatchError(TfparError, RuntimeError):
    """Difference of what runs from what was planned (placement, values that should agree)."""
