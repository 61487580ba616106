"""Objective of a plan and budget of a search: two values that problems hold."""

from __future__ import annotations

import dataclasses
from typing import Literal

from tfpar.planning.deadline import Deadline
from tfpar.spec.arguments import integer, number

ObjectiveName = Literal["step_time", "latency", "samples_per_dollar"]
"""What users ask a plan to be best at: the seconds of the step that is planned; the seconds of the
forward pass, whether or not the model trains; the samples that a dollar of rent computes."""

OBJECTIVES: tuple[ObjectiveName, ...] = ("step_time", "latency", "samples_per_dollar")

UNCERTAINTY = 0.1
"""Relative difference of two predictions from which they tell which plan is faster.

Measured by `python -m benchmarks.prediction`, which says by how much the ratio of two predicted
steps differs from that of the measured ones: for plans predicted within a quarter of each other, on
ranks in one process, 5.7 % in the middle on 2 ranks (42 pairs) and 8.7 % on 4 (49 pairs).
"""


@dataclasses.dataclass(frozen=True)
class Objective:
    """Plans are compared by the bytes that a device would store beyond a limit, then by seconds.

    So the limit also says what comes first: `math.inf` asks for the fastest plan whatever it
    stores, and 0 for the one that stores least, however slow.

    Attributes:
        memory_limit: in bytes; None: what a device of the cluster has.
        uncertainty: how far apart, as a part of a step, the predictions for two plans have to be to
            tell which is faster; of those nearer the simplest is taken
            (`planning.intra_op.tie_breaking`).
        surcharge_s: penalty on each collective, in seconds, with which a search finds plans with
            fewer of them. Prices that plans report are without it.
    """

    memory_limit: float | None = None
    uncertainty: float = UNCERTAINTY
    surcharge_s: float = 0.0


@dataclasses.dataclass(frozen=True)
class Budget:
    """Limits of a search.

    Attributes:
        seconds: about; then it returns the best plan found so far. None: as many as it takes.
        steps: of the training that the plan is for: without `seconds`, a search that is left to
            itself takes no longer than they can gain (`planning.intra_op.gain`). None: that does
            not matter.

    Raises:
        ArgumentError: no time at all.
    """

    seconds: float | None = None
    steps: int | None = None

    def __post_init__(self) -> None:
        if self.seconds is not None:
            expected = "a number of seconds above 0, or None"
            number("search_seconds", self.seconds, above=0, expected=expected)

    def start(self) -> Deadline:
        """Return the end of a search that begins now."""
        return Deadline(self.seconds)


@dataclasses.dataclass(frozen=True)
class Trials:
    """Settings of measured trials: several plans are run before one is taken.

        with tap.auto_parallel([2, 8], trials=tap.Trials(plans=5, seconds=300)): ...

    Args:
        plans: the most that are run, the best by prediction first; what they take corrects the
            prediction for the others. None further is tried once none is likely to be faster. Of 1
            it is only measured what was predicted.
        steps: that each takes on the first batch, besides one to warm up; the median counts.
        seconds: of all trials, about. No further plan is tried then, and the one that is being
            tried takes no further step. None: as many as it takes.

    Raises:
        ArgumentError: no plan, step or time.
    """

    plans: int = 3
    steps: int = 5
    seconds: float | None = 60.0

    def __post_init__(self) -> None:
        for name in ("plans", "steps"):
            object.__setattr__(self, name, integer(name, getattr(self, name), 1))
        if self.seconds is not None:
            expected = "a number of seconds above 0, or None"
            number("seconds", self.seconds, above=0, expected=expected)
