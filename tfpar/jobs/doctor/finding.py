"""Findings of the doctor: the result of each check, and how to repair what it found."""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Callable

from tfpar.spec.errors import TfparError


class Status(str, enum.Enum):
    """`WARNING`: training goes on without it; `MISSING`: it is not here or broken, and needed."""

    OK = "ok"
    WARNING = "warning"
    MISSING = "missing"


@dataclasses.dataclass(frozen=True, slots=True)
class Finding:
    """Result of one check.

    Attributes:
        name: of the thing.
        found: what is there, in plain words.
        mend: what to do about it; empty if nothing has to be done.
    """

    name: str
    status: Status
    found: str
    mend: str = ""


def ok(name: str, found: str) -> Finding:
    """Return a finding with which all is well."""
    return Finding(name, Status.OK, found)


def warning(name: str, found: str, mend: str) -> Finding:
    """Return a finding that training can do without."""
    return Finding(name, Status.WARNING, found, mend)


def missing(name: str, found: str, mend: str) -> Finding:
    """Return a finding without which nothing trains."""
    return Finding(name, Status.MISSING, found, mend)


def look(name: str, check: Callable[[], Finding | None]) -> Finding | None:
    """Run a check; an error that it raises is a finding too, and the other checks go on."""
    try:
        return check()
    except TfparError as error:
        return missing(name, " ".join(str(error).split()), "Do what the message says.")
    except Exception as error:  # noqa: BLE001 - a doctor has no traceback to show
        found = " ".join(f"could not be looked at: {type(error).__name__}: {error}".split())
        return warning(name, found, "Report it to tfpar's authors, with this line.")
