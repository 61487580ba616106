"""The planners that there are, by name."""

from __future__ import annotations

from collections.abc import Callable

from tfpar.search.problem import Planner
from tfpar.search.rhino import RhinoPlanner
from tfpar.search.tap import TapPlanner
from tfpar.spec import TfparError

PLANNERS: dict[str, Callable[[], Planner]] = {"tap": TapPlanner, "rhino": RhinoPlanner}


def find_planner(planner: Planner | str | None) -> Planner | None:
    """The planner called so, or the one given.

    Raises:
        TfparError: no planner has that name.
    """
    if not isinstance(planner, str):
        return planner
    if planner not in PLANNERS:
        raise TfparError(
            f"There is no planner {planner!r}. There are {', '.join(map(repr, PLANNERS))}; None "
            f"searches nothing."
        )
    return PLANNERS[planner]()
