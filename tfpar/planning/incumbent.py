"""Incumbent: the best plan that a search has found by the time that it is interrupted.

Whoever searches offers each better plan that it comes upon (`Problem.aim.offer`). Only the best is
kept, and it is made a plan only on request: an interrupted search ends at once.
"""

from __future__ import annotations

import functools
import math
import threading
from collections.abc import Callable

from tfpar.cost.cost import Cost
from tfpar.plans import Plan

MakePlan = Callable[[], Plan | None]
IncumbentCallback = Callable[[MakePlan, Cost | None], None]
"""Told of a plan: what makes it, and what it costs; None for one that is only better than none."""


class Incumbent:
    """The best plan that was offered: the fastest of those that fit, else what stores least.

    Args:
        excess: of what a plan costs, the bytes that it stores beyond what a rank may.
    """

    def __init__(self, excess: Callable[[Cost], float]) -> None:
        self._excess = excess
        self._least = math.inf, math.inf
        self._make: MakePlan | None = None
        self._lock = threading.Lock()

    def report_incumbent(self, make: MakePlan, cost: Cost | None = None) -> None:
        """Keep the plan that `make` makes if it is the best so far; see `IncumbentCallback`."""
        key = math.inf, math.inf
        if cost is not None:
            key = self._excess(cost), cost.seconds
        with self._lock:
            if self._make is None or key < self._least:
                self._least, self._make = key, make

    def plan(self) -> Plan | None:
        """Return the best plan, made now; None if there is none."""
        return None if self._make is None else self._make()


class SearchInterrupted(KeyboardInterrupt):
    """Ctrl-C ended the search for a plan; `plan` is the best that it had found.

    Models and functions of one `auto_parallel` have it used if they ask for a plan of the same
    problem again (a second `fit`), and a line in the log says so; a new `auto_parallel` searches
    to the end. `tap.plan` keeps nothing: whoever called it has the plan here, and may give it on
    as `auto_parallel(plan=...)`. No plan cache keeps it.

    Args:
        make: makes that plan.
    """

    def __init__(self, make: MakePlan) -> None:
        super().__init__(
            "the search for a plan was interrupted; the best so far is `plan` of this error, and a "
            "second fit in the same auto_parallel uses it"
        )
        self._make = make

    @functools.cached_property
    def plan(self) -> Plan | None:
        """The best plan that was found and fits, marked `cut_short`; None if none was. It is made
        when it is first asked for."""
        return self._make()
