"""Deadline of a search."""

from __future__ import annotations

import math
import threading
import time


class SearchStopped(Exception):
    """The search was given up: nobody waits for what this thread finds."""


class Deadline:
    """The end of a search that may take some seconds from now; None: as many as it takes.

    Attributes:
        candidates_left: plans that may still be priced; None: as many as there are.
        cut_short: something was left out because a time was over, or no candidates were left: those
            of the search, or what a part of it may take.
    """

    def __init__(self, seconds: float | None = None) -> None:
        self._end = math.inf if seconds is None else time.monotonic() + seconds
        self._stopped = threading.Event()
        self.candidates_left: int | None = None
        self.cut_short = False

    @property
    def left(self) -> float:
        """Seconds, infinite without an end; negative once it is over."""
        return self._end - time.monotonic()

    def over(self) -> bool:
        """Whether the time is over, so that what comes next has to be left out.

        Raises:
            SearchStopped: the search was given up.
        """
        self.check()
        is_over = self.left <= 0 or (self.candidates_left is not None and self.candidates_left <= 0)
        self.cut_short = self.cut_short or is_over
        return is_over

    def count_candidate(self) -> None:
        """Count a plan that is priced."""
        if self.candidates_left is not None:
            self.candidates_left -= 1

    def without_end(self) -> Deadline:
        """Return a deadline for a part of the search that has to come to something however late it
        is."""
        patient = Deadline()
        patient._stopped = self._stopped
        return patient

    def stop(self) -> None:
        """Give the search up, in whatever threads it runs."""
        self._stopped.set()

    @property
    def stopped(self) -> bool:
        """Whether the search was given up."""
        return self._stopped.is_set()

    def check(self) -> None:
        """Raise SearchStopped if the search was given up."""
        if self.stopped:
            raise SearchStopped
