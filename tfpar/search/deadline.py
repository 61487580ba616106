"""When a search has to end."""

from __future__ import annotations

import math
import time

from tfpar.spec.arguments import number


class Deadline:
    """The end of a search that may take some seconds from now; None: as many as it takes.

    Attributes:
        cut_short: something was left out because the time was over.
    """

    def __init__(self, seconds: float | None = None) -> None:
        self._end = math.inf if seconds is None else time.monotonic() + seconds
        self.cut_short = False

    @property
    def left(self) -> float:
        """Seconds, infinite without an end; negative once it is over."""
        return self._end - time.monotonic()

    def over(self) -> bool:
        """Whether the time is over, so that what comes next has to be left out."""
        self.cut_short = self.cut_short or self.left <= 0
        return self.cut_short


def check_search_seconds(seconds: float | None) -> None:
    """Raise ArgumentError for what is no time that a search may take."""
    if seconds is not None:
        number("search_seconds", seconds, above=0, expected="a number of seconds above 0, or None")
