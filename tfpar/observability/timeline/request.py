"""Request for a timeline: its steps and its file."""

from __future__ import annotations

import dataclasses
import os
import re
from typing import Any

from tfpar.spec import arguments
from tfpar.spec.errors import ArgumentError
from tfpar.writable import check_writable

DEFAULT_STEPS = (10, 12)
"""The first and the last: past what is done once, and a few, as one may be out of the ordinary."""

_STEPS = "the first and the last step, as (10, 12): whole numbers from 1 on"
_TEXT = re.compile(r"(\d{1,18})(?:-(\d{1,18}))?")


@dataclasses.dataclass(frozen=True)
class TimelineRequest:
    """Request for a timeline.

    Attributes:
        path: of the file.
        first, last: steps, counted from 1.
        writes: this process writes it.

    Raises:
        ArgumentError: not a path, or not steps.
        TfparError: no file can be written there.
    """

    path: str
    first: int
    last: int
    writes: bool = True

    def __post_init__(self) -> None:
        if self.writes:
            check_writable("timeline", self.path)

    @classmethod
    def of(cls, path: Any, steps: Any = None, writes: bool = True) -> TimelineRequest:
        """Read what users give.

        Args:
            steps: the first and the last, as a pair or as text, `10-12` or `10`; None: the default.
        """
        path = os.path.abspath(arguments.path("path", path))
        first, last = _read(DEFAULT_STEPS if steps is None else steps)
        return cls(path, first, last, writes)

    @property
    def steps_text(self) -> str:
        """`10 to 12`."""
        return f"{self.first} to {self.last}" if self.last > self.first else f"{self.first}"


def _read(steps: Any) -> tuple[int, int]:
    given: Any = steps
    if isinstance(steps, str):
        found = _TEXT.fullmatch(steps.strip())
        if found is None:
            raise _refused(steps)
        given = int(found[1]), int(found[2] or found[1])
    pair = arguments.check_list("steps", given, _STEPS)
    if len(pair) != 2:
        raise _refused(steps)
    first, last = (arguments.integer("steps", step, 1, _STEPS) for step in pair)
    if first > last:
        raise _refused(steps)
    return first, last


def _refused(steps: Any) -> ArgumentError:
    return arguments.argument_error("steps", steps, _STEPS)
