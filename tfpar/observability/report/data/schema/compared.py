"""Schema of the plans that a plan is compared with."""

from __future__ import annotations

import dataclasses
from typing import Literal

from tfpar.observability.report.data.schema.plan import PartOfStep


@dataclasses.dataclass(frozen=True)
class CandidateSummary:
    """A plan that was found or priced, and why it lost.

    Attributes:
        kind: `plan`: this one; `layout`: the best on another mesh; `pipeline`: another number of
            stages; `move`: what a move made of a plan that did not fit into memory; `baseline`:
            `one device` or `data parallel`; `trial`: it was run.
        seconds, memory_bytes: None where they are not known.
        why: it was not taken; empty for the plan, and for baselines.
        parts: of its time, where they are known.
        measured_s: of a trial.
    """

    name: str
    kind: Literal["plan", "layout", "pipeline", "move", "baseline", "trial"]
    seconds: float | None
    memory_bytes: float | None
    fits: bool | None
    why: str = ""
    parts: tuple[PartOfStep, ...] = ()
    measured_s: float | None = None


@dataclasses.dataclass(frozen=True)
class WhatIf:
    """The best plan for the same model on other machines.

    Attributes:
        seconds, memory_bytes: None: no plan was found; `note` says why.
    """

    cluster: str
    mesh: str
    ranks: int
    seconds: float | None
    memory_bytes: float | None
    fits: bool
    note: str = ""
