"""What the parts measure, and how their ranks are told: what launcher and ranks both know."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass

MARK = "@pipeline "
"""Starts a rank's line with its result."""

SYSTEMS = ("gpipe", "1f1b", "accumulation")


@dataclass(frozen=True, slots=True, kw_only=True)
class Memory:
    """A deep MLP whose activations are most of its memory, one rank a process.

    Attributes:
        microbatch: its rows; the batch has as many times that as there are microbatches.
        features: of the inputs and the outputs; few, so that the batch itself takes no memory.
    """

    ranks: int = 4
    systems: tuple[str, ...] = SYSTEMS
    microbatches: tuple[int, ...] = (2, 4, 8, 16)
    microbatch: int = 1024
    features: int = 16
    width: int = 512
    layers: int = 16

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Memory:
        fields = json.loads(text)
        for name in ("systems", "microbatches"):
            fields[name] = tuple(fields[name])
        return cls(**fields)
