"""The planners that there are, by name."""

from __future__ import annotations

from collections.abc import Callable

from tfpar.search.auto import AutoPlanner
from tfpar.search.problem import Planner
from tfpar.search.rhino import RhinoPlanner
from tfpar.search.tap import TapPlanner
from tfpar.spec import TfparError

PLANNERS: dict[str, Callable[..., Planner]] = {
    "auto": AutoPlanner, "tap": TapPlanner, "rhino": RhinoPlanner,
}  # fmt: skip

TAKEN_BY = {"level": ("rhino",), "search_seconds": ("auto", "tap", "rhino")}
"""The planners that each option is for."""


def search_seconds_of(planner: Planner) -> float | None:
    """What a search of `planner` may take; None if it knows no such limit."""
    return getattr(planner, "search_seconds", None)


def find_planner(
    planner: Planner | str | None, level: int | None = None, search_seconds: float | None = None
) -> Planner | None:
    """The planner called so, or the one given.

    Args:
        level, search_seconds: see the planners; `TAKEN_BY` says which take them.

    Raises:
        TfparError: no planner has that name, or it does not take one of these.
    """
    given = {"level": level, "search_seconds": search_seconds}
    options = {name: value for name, value in given.items() if value is not None}
    if isinstance(planner, str) and planner not in PLANNERS:
        raise TfparError(
            f"There is no planner {planner!r}. There are {', '.join(map(repr, PLANNERS))}; None "
            f"searches nothing."
        )
    for name in options:
        if planner not in TAKEN_BY[name]:
            known = " or ".join(map(repr, TAKEN_BY[name]))
            raise TfparError(f"{name} is for planner={known}, not for planner={planner!r}.")
    return PLANNERS[planner](**options) if isinstance(planner, str) else planner
