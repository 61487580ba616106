"""Tasks: what the ranks of a stage run as one piece (Rhino §6.1).

A *stage* is a part of the step on ranks of its own, a *microbatch* a part of each rank's batch. The
ranks that run tasks together are an *actor*, with one stage or several (virtual stages).

    F   forward pass of a microbatch
    B   its backward pass, whole
    I   the half of the backward pass that the stages before wait for: gradients of inputs
    W   the other half, which only the update waits for: gradients of weights
    U   the update of the stage's weights, once a step
    J   a join: what has to see all microbatches before any of them goes on

A microbatch of a stage has a B, or an I and a W; never both. A schedule orders F, B, I and W. When
U and J run follows from it (`tfpar.pipeline.graph`).
"""

from __future__ import annotations

import re
from typing import Literal, NamedTuple, cast

Kind = Literal["F", "B", "I", "W", "U", "J"]

SCHEDULED: tuple[Kind, ...] = ("F", "B", "I", "W")
"""Task kinds that a schedule orders."""

BACKWARD: tuple[Kind, ...] = ("B", "I")
"""Task kinds that send gradients to the stages before."""

LAST: tuple[Kind, ...] = ("B", "W")
"""After which a microbatch has added its part to the gradients of weights."""


class Task(NamedTuple):
    """One run of a part of a stage; see the module.

    Attributes:
        micro: the microbatch; of a join its number within the stage; 0 of an update.
    """

    kind: Kind
    stage: int
    micro: int = 0

    def __str__(self) -> str:
        """`2F0`: forward of microbatch 0 at stage 2; `2U`: its update."""
        return f"{self.stage}{self.kind}{'' if self.kind == 'U' else self.micro}"

    @classmethod
    def parse(cls, text: str) -> Task:
        """Parse the task that is written so.

        Raises:
            ValueError: it is none.
        """
        found = _WRITTEN.fullmatch(text)
        if found is None:
            raise ValueError(f"{text!r} is no task; one is written as 2F0.")
        stage, kind, micro = found.groups()
        return cls(cast(Kind, kind), int(stage), int(micro or 0))

    @property
    def described(self) -> str:
        """Describe its work in words: `the backward pass of microbatch 3 (1B3)`."""
        of = "" if self.kind == "U" else f" of microbatch {self.micro}"
        return f"{_WORDS[self.kind]}{of} ({self})"


_MOST = 6  # that a message lists

_WRITTEN = re.compile(r"(\d+)([FBIWUJ])(\d*)", re.ASCII)

_WORDS: dict[Kind, str] = {
    "F": "the forward pass",
    "B": "the backward pass",
    "I": "the backward pass for inputs",
    "W": "the backward pass for weights",
    "U": "the update",
    "J": "the join",
}


def format_tasks(tasks: list[Task]) -> str:
    """Tasks as a message lists them: `0F1, 0B1 and 3 more`."""
    shown = ", ".join(map(str, tasks[:_MOST]))
    return shown if len(tasks) <= _MOST else f"{shown} and {len(tasks) - _MOST} more"
