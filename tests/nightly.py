"""Tests that take fewer cases by day than at night."""

from __future__ import annotations

import os

_VARIABLE = "TFPAR_TEST_NIGHTLY"


def is_nightly() -> bool:
    """Whether tests that are marked `nightly` run too, and sweeps take all of their cases."""
    return os.environ.get(_VARIABLE) == "1"


def set_nightly(marks: str) -> None:
    """Tell this process, and those that it starts, by the marks that pytest was asked for."""
    os.environ[_VARIABLE] = "0" if "not nightly" in marks else "1"
