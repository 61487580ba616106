"""Strategies of one op along one mesh axis, among which Rhino's planner chooses."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from tfpar.propagation.factors import CARRY, WHOLE, Split, has_factor, shard_of, size_after
from tfpar.rules.rule import PLAIN, SAME, Dims, OpRule
from tfpar.spec import Partial, Placement, Replicate


@dataclasses.dataclass(frozen=True)
class AxisSplit:
    """Split of an op along one mesh axis: a factor, replication, or a carried Partial.

    Attributes:
        split: a factor with its pattern, REPLICATE or CARRY.
        group: of CARRY, the inputs whose Partials pass; reduction: theirs.
    """

    split: Split = WHOLE
    group: tuple[int, ...] = ()
    reduction: str = "sum"


def carrying(group: Sequence[int], reduction: str) -> AxisSplit:
    """Return the split that lets Partials of the inputs `group` pass."""
    return AxisSplit((CARRY, PLAIN), tuple(group), reduction)


@dataclasses.dataclass(frozen=True)
class AxisStrategy:
    """An axis split, with the placements that follow from it along the axis.

    Attributes:
        needs: the placement that each input is read in.
        made: what the outputs come as; kept: what they are kept as.
    """

    axis_split: AxisSplit
    needs: tuple[Placement, ...]
    made: tuple[Placement, ...]
    kept: tuple[Placement, ...]


def axis_strategy_of(
    rule: OpRule, axis_split: AxisSplit, sizes: Sequence[int], parts: int
) -> AxisStrategy:
    """Return the strategy that follows from `axis_split`: outputs are kept as they are made.

    Args:
        sizes: of the factors, as the axes before left them.
        parts: ranks along the axis.
    """
    needs = tuple(
        _placement(dims, rule, axis_split, sizes, parts, i) for i, dims in enumerate(rule.inputs)
    )
    made = tuple(_placement(dims, rule, axis_split, sizes, parts, None) for dims in rule.outputs)
    return AxisStrategy(axis_split, needs, made, made)


def _placement(
    dims: Dims,
    rule: OpRule,
    axis_split: AxisSplit,
    sizes: Sequence[int],
    parts: int,
    position: int | None,
) -> Placement:
    factor = axis_split.split[0]
    if factor == CARRY:
        passes = position is None or position in axis_split.group
        return Partial(axis_split.reduction) if passes else Replicate()
    if factor < 0:
        return Replicate()
    if has_factor(dims, factor):
        return shard_of(dims, axis_split.split, sizes, parts) or Replicate()
    if position is None and rule.reduce.get(factor, SAME) != SAME:
        return Partial(rule.reduce[factor])
    return Replicate()


def sizes_after(rule: OpRule, splits: Sequence[Split], mesh_shape: Sequence[int]) -> list[int]:
    """Return the sizes of the factors that `splits` along the first axes leave."""
    sizes = list(rule.sizes)
    for (factor, pattern), parts in zip(splits, mesh_shape, strict=False):
        if factor >= 0:
            sizes[factor] = size_after(sizes[factor], pattern, parts)
    return sizes
