"""The planners that there are, by name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tfpar.search.auto import AutoPlanner
from tfpar.search.problem import Planner
from tfpar.search.rhino import RhinoPlanner
from tfpar.search.tap import TapPlanner
from tfpar.spec import ArgumentError
from tfpar.spec.arguments import refused

PLANNERS: dict[str, Callable[..., Planner]] = {
    "auto": AutoPlanner, "tap": TapPlanner, "rhino": RhinoPlanner,
}  # fmt: skip

TAKEN_BY = {"level": ("rhino",), "search_seconds": ("auto", "tap", "rhino")}
"""The planners that each option is for."""


def search_seconds_of(planner: Planner) -> float | None:
    """What a search of `planner` may take; None if it knows no such limit."""
    return getattr(planner, "search_seconds", None)


def _is_planner(value: Any) -> bool:
    """Whether `value` is what `search.problem.Planner` describes."""
    if isinstance(value, type):
        return False
    return callable(getattr(value, "solve", None)) and isinstance(getattr(value, "name", None), str)


def find_planner(
    planner: Planner | str | None, level: int | None = None, search_seconds: float | None = None
) -> Planner | None:
    """The planner called so, or the one given.

    Args:
        level, search_seconds: see the planners; `TAKEN_BY` says which take them.

    Raises:
        ArgumentError: it is no planner, none has that name, or it does not take one of these.
    """
    given = {"level": level, "search_seconds": search_seconds}
    options = {name: value for name, value in given.items() if value is not None}
    named = isinstance(planner, str)
    known = ", ".join(map(repr, PLANNERS))
    if named and planner not in PLANNERS:
        raise ArgumentError(
            f"There is no planner {planner!r}. There are {known}; None searches nothing."
        )
    if not (named or planner is None or _is_planner(planner)):
        raise refused("planner", planner, f"one of {known}, None, or a planner of your own")
    for name in options:
        if not named or planner not in TAKEN_BY[name]:
            known = " or ".join(map(repr, TAKEN_BY[name]))
            raise ArgumentError(f"{name} is for planner={known}, not for planner={planner!r}.")
    return PLANNERS[planner](**options) if isinstance(planner, str) else planner
