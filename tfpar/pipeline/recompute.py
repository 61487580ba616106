"""Recomputed stages: those whose backward pass runs their forward pass again.

They are given as True (all), False (none), or the numbers of some.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from tfpar.spec.arguments import argument_error, check_list, flag, integer

RecomputeOf = bool | Sequence[int]
"""The stages that are recomputed: all, none, or some, whose numbers ascend once they are read."""


def read_recompute(name: str, value: Any, num_stages: int) -> RecomputeOf:
    """Read recomputed stages to the one form that equal ones have."""
    if not hasattr(value, "__iter__"):
        return flag(name, value)
    expected = f"True, False, or numbers of stages from 0 to {num_stages - 1}"
    stages = [integer(name, one, 0, expected) for one in check_list(name, value, expected)]
    if stages and max(stages) >= num_stages:
        raise argument_error(name, value, expected)
    return recompute_of(stages, num_stages)


def recompute_of(stages: Iterable[int], num_stages: int) -> RecomputeOf:
    """Return the form that these stages have."""
    found = tuple(sorted({*stages}))
    return len(found) == num_stages if len(found) in (0, num_stages) else found


def recomputes(recompute: RecomputeOf, stage: int) -> bool:
    """Whether a stage is one of them."""
    return recompute if isinstance(recompute, bool) else stage in recompute


def dealt_recompute(recompute: RecomputeOf, num_actors: int, each: int) -> RecomputeOf:
    """Return the virtual stages of the actors whose one stage is recomputed, where stages are dealt
    out to actors in turn."""
    stages = range(num_actors * each)
    return recompute_of((s for s in stages if recomputes(recompute, s % num_actors)), len(stages))


def recompute_text(recompute: RecomputeOf) -> str:
    """Name some of the stages: `stage 1`, `stages 0-2 and 5`; empty where they are all or none."""
    if isinstance(recompute, bool):
        return ""
    ends = [s for s in recompute if s + 1 not in recompute]
    starts = [s for s in recompute if s - 1 not in recompute]
    *others, last = (f"{a}" if a == b else f"{a}-{b}" for a, b in zip(starts, ends, strict=True))
    several = "s" if len(recompute) > 1 else ""
    return f"stage{several} {', '.join(others)}{' and ' if others else ''}{last}"
