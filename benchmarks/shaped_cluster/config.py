"""What a job measures, and how its ranks tell it: what launcher and ranks both know."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field

MARK = "@shaped "
"""Starts a rank's line with its result."""

LAYOUTS = ("data", "megatron", "chosen", "pipeline")
MODELS = ("gpt", "wide")


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """A model under one layout on one cluster, at several bandwidths.

    Attributes:
        model: one of `MODELS`.
        layout: one of `LAYOUTS`; `chosen` and `pipeline` (a stage for each rank, in 1F1B) are
            searched for the first of the bandwidths.
        mbits: of a node's link, in Mbit/s; None is without a limit.
        machines: a cluster file, of the machines without a limit; written if it is not there.
        steps: how many are timed at each bandwidth.
        size: keyword arguments of the model's builder.
        microbatches: of `pipeline`.
    """

    model: str
    layout: str
    nodes: int
    ranks_per_node: int
    mbits: tuple[float | None, ...]
    machines: str
    steps: int = 3
    size: Mapping[str, int] = field(default_factory=dict)
    microbatches: int = 8

    @property
    def cluster(self) -> str:
        """`2x2` is two nodes of two ranks."""
        return f"{self.nodes}x{self.ranks_per_node}"

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Config:
        fields = json.loads(text)
        return cls(**{**fields, "mbits": tuple(fields["mbits"])})
