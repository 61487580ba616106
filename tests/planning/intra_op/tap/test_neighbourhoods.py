"""Weights are searched in units, whose plans come one change apart."""

from __future__ import annotations

import math

import pytest

from tfpar.ir import Op, Variable
from tfpar.planning.intra_op.tap.neighbourhoods import (
    MAX_TOGETHER,
    adjacent,
    every,
    group_units,
    nearby,
)
from tfpar.planning.intra_op.weights import WeightGroup
from tfpar.spec import Replicate, Shard

OPTIONS = [(Replicate(),), (Shard(0),), (Shard(1),)]


def group(name: str, options: int = 3, chosen: int = 0) -> WeightGroup:
    handle = Op(f"handle/{name}", "Placeholder").add_output((4, 4), "resource")
    return WeightGroup([Variable(name, (4, 4), "float32", True, handle)], OPTIONS[:options], chosen)


def names(units):
    return [[g.name for g in unit] for unit in units]


@pytest.mark.parametrize("sizes", [[3], [2, 3], [3, 2, 3]])
def test_every_plan_of_a_unit_comes_once_and_changes_one_weight(sizes):
    unit = [group(str(i), n) for i, n in enumerate(sizes)]
    found = list(every(unit))
    assert len(set(found)) == len(found) == math.prod(sizes)
    assert found[0] == (0,) * len(sizes)
    for one, other in zip(found, found[1:], strict=False):
        assert sum(a != b for a, b in zip(one, other, strict=True)) == 1


def test_what_is_adjacent_differs_in_one_weight_at_most():
    unit = [group("a", chosen=1), group("b"), group("c")]
    found = set(adjacent(unit))
    apart = {sum(a != b for a, b in zip(picks, (1, 0, 0), strict=True)) for picks in found}
    assert apart == {0, 1} and len(found) == 1 + 3 * 2


def test_what_is_nearby_differs_in_two_weights_at_most():
    unit = [group("a", chosen=1), group("b"), group("c")]
    found = set(nearby(unit))
    apart = {sum(a != b for a, b in zip(picks, (1, 0, 0), strict=True)) for picks in found}
    assert apart == {0, 1, 2} and len(found) == 1 + 3 * 2 + 3 * 4


def test_few_weights_are_one_unit():
    few = [group("a/kernel"), group("b/kernel")]
    assert group_units(few, 9) == [few]


def test_many_weights_are_parted_by_the_branches_of_their_names():
    groups = [group(f"block/{layer}/{i}") for layer in ("mlp", "attention") for i in range(4)]
    assert names(group_units(groups, 81)) == [
        [f"block/mlp/{i}" for i in range(4)],
        [f"block/attention/{i}" for i in range(4)],
    ]


def test_small_neighbouring_branches_stay_together():
    groups = [group(f"layer_{i}/kernel") for i in range(6)]
    units = group_units(groups, 81)
    assert [len(unit) for unit in units] == [4, 2]
    assert all(3 ** len(unit) <= MAX_TOGETHER for unit in units)


def test_names_that_show_nothing_are_halved():
    groups = [group("same") for _ in range(4)]
    assert [len(unit) for unit in group_units(groups, 9)] == [2, 2]
