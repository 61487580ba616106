"""What a job on unequal nodes measures: what launcher and ranks both know."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from typing import Any

CHOSEN, DATA, MEGATRON = "chosen", "data", "megatron"
"""What is chosen, and what it is held against."""

NAMES = (
    DATA,
    "data, unequal shares",
    "zero",
    MEGATRON,
    "megatron 2x2",
    "2 stages, equal layers",
    "2 stages",
    "2 stages, gpipe",
    "4 stages, equal layers",
    "4 stages",
    "4 stages, few microbatches",
    "4 stages, gpipe",
    CHOSEN,
)
"""Of plans; `unequal_plans` has them."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """A GPT under a plan, or the calibration of the nodes.

    Attributes:
        size: keyword arguments of the model's builder.
        cores: of each node.
        batch: samples of a step.
        microbatches: of pipelines.
        steps: how many are timed.
        calibration_s: what calibration may take, about.
        plan: one of `NAMES`; none: nodes are calibrated.
        machines: the cluster file, which calibration writes.
        groups: where the groups of nodes are found, see `cores.held`.
    """

    size: Mapping[str, int]
    cores: tuple[float, ...]
    batch: int
    microbatches: int
    steps: int
    calibration_s: float
    plan: str = ""
    machines: str = ""
    groups: str = ""

    def at(self, **changes: Any) -> Config:
        """The same with other values of some attributes."""
        return dataclasses.replace(self, **changes)

    def to_json(self) -> str:
        return json.dumps(dataclasses.asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Config:
        fields = json.loads(text)
        return cls(**{**fields, "cores": tuple(fields["cores"])})
