"""Registry of planners, by name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tfpar.planning.intra_op.auto import AutoPlanner
from tfpar.planning.intra_op.exhaustive import ExhaustivePlanner
from tfpar.planning.intra_op.rhino import RhinoPlanner
from tfpar.planning.intra_op.tap.planner import TapPlanner
from tfpar.planning.objective import Budget
from tfpar.planning.problem import Planner
from tfpar.spec import ArgumentError
from tfpar.spec.arguments import argument_error

PLANNERS: dict[str, Callable[..., Planner]] = {
    "auto": AutoPlanner,
    "tap": TapPlanner,
    "rhino": RhinoPlanner,
    "exhaustive": ExhaustivePlanner,
}


def _is_planner(value: Any) -> bool:
    """Whether `value` is what `planning.problem.Planner` describes."""
    if isinstance(value, type):
        return False
    return callable(getattr(value, "solve", None)) and isinstance(getattr(value, "name", None), str)


def find_planner(planner: Planner | str | None, level: int | None = None) -> Planner | None:
    """Find the planner called so, or the one given.

    Args:
        level: of Rhino's planner.

    Raises:
        ArgumentError: it is no planner, none has that name, or it has no levels.
    """
    named = isinstance(planner, str)
    known = ", ".join(map(repr, PLANNERS))
    if named and planner not in PLANNERS:
        raise ArgumentError(
            f"There is no planner {planner!r}. There are {known}; None searches nothing."
        )
    if not (named or planner is None or _is_planner(planner)):
        raise argument_error("planner", planner, f"one of {known}, None, or a planner of your own")
    if level is not None:
        if planner != "rhino":
            raise ArgumentError(f"level is for planner='rhino', not for planner={planner!r}.")
        return RhinoPlanner(level)
    return PLANNERS[planner]() if isinstance(planner, str) else planner


def make_budget(planner: Planner | None, search_seconds: float | None) -> Budget:
    """Return the budget of a search of `planner`.

    Raises:
        ArgumentError: no time at all, or nothing is searched.
    """
    if planner is None and search_seconds is not None:
        raise ArgumentError("search_seconds is for a planner, and planner=None searches nothing.")
    return Budget(search_seconds)
