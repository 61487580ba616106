"""How alike two orders are: of what was predicted, and of what was measured."""

from __future__ import annotations

from collections.abc import Sequence


def spearman(one: Sequence[float], other: Sequence[float]) -> float | None:
    """Spearman's rank correlation; None where one of the two has a single rank."""
    ranks = [_ranks(values) for values in (one, other)]
    mean = (len(one) + 1) / 2
    (x, y) = ([rank - mean for rank in found] for found in ranks)
    size = (sum(a * a for a in x) * sum(b * b for b in y)) ** 0.5
    return sum(a * b for a, b in zip(x, y, strict=True)) / size if size else None


def _ranks(values: Sequence[float]) -> list[float]:
    """From 1; equal values have the mean of theirs."""
    below = [sum(v < value for v in values) for value in values]
    equal = [sum(v == value for v in values) for value in values]
    return [b + (e + 1) / 2 for b, e in zip(below, equal, strict=True)]


def shown(rho: float | None) -> str:
    """A correlation as text."""
    return "-" if rho is None else f"{rho:.3f}"
