"""Which cases a job runs, one after another."""

from __future__ import annotations

from tests.distributed.training import (
    data,
    files,
    layouts,
    monitored,
    pipelines,
    refusals,
    steps,
    tried,
)
from tests.distributed.training.place import Case

SAME_AS_ONE: dict[str, list[Case]] = {
    "two": [*layouts.ON_TWO, *data.SEEDED, *files.CASES, *steps.CASES],
    "four": [*layouts.ON_FOUR, *pipelines.ON_FOUR],
    "four_with_tensorflow": pipelines.WITH_TENSORFLOW,
    "tried": tried.CASES,
    "monitored": monitored.CASES,
}
"""What gives the same on so many ranks as on one device."""

SETS: dict[str, list[Case]] = {
    **SAME_AS_ONE,
    "two": [*SAME_AS_ONE["two"], *data.UNSEEDED, *refusals.CASES],
}
