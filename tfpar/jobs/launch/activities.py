"""Activities of ranks, as they say them, and what the launcher reads from them."""

from __future__ import annotations

import re

_CALLS = {"train step": "fit", "test step": "evaluate", "predict step": "predict"}
_STEP = re.compile(r"(?P<name>.* step) (?P<number>\d+)")


def step(name: str, number: int) -> str:
    """A step of a program: `train step 17`, the 17th of the job."""
    return f"{name} {number}"


def end_of_epoch(number: int) -> str:
    return f"end of epoch {number}"


def comparing(what: str) -> str:
    return f"comparing {what}"


def is_end_of_epoch(activity: str) -> bool:
    return activity.startswith("end of epoch ")


def step_of(activity: str) -> tuple[str, int] | None:
    """Name and number of the step that is run; None if it is something else."""
    found = _STEP.fullmatch(activity)
    return None if found is None else (found["name"], int(found["number"]))


def describe_activity(activity: str) -> str:
    """Add to an activity the model's method that does it, where that has another name."""
    call = next((call for name, call in _CALLS.items() if name in activity), None)
    return activity if call is None else f"{activity} of `{call}`"
