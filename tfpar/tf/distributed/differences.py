"""The difference between what rank 0 says and what another rank does, in words."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TypeVar

T = TypeVar("T")


def first_differing(told: Sequence[T]) -> tuple[int, T]:
    """The first rank that says something else than rank 0, and what it says."""
    return next((rank, said) for rank, said in enumerate(told) if said != told[0])


def differing_fields(first: Mapping[str, str], other: Mapping[str, str], rank: int) -> list[str]:
    """The fields in which `rank` differs from rank 0, with both values; both have all fields."""
    return [
        f"{name}={value} on rank 0 and {other[name]} on rank {rank}"
        for name, value in first.items()
        if value != other[name]
    ]
