"""What other ranks wait for is bounded in time, be it within something else that is."""

from __future__ import annotations

import types
from typing import Any

import pytest

from tfpar.distributed.world import World


class Told:
    """What a beacon is told: activities, and whether they are bounded."""

    def __init__(self) -> None:
        self.now: tuple[str, bool] = "", False

    def at(self, activity: str, bounded: bool = False, **_: Any) -> None:
        self.now = activity, bounded


@pytest.fixture
def world() -> World:
    return World(None, types.SimpleNamespace(size=1, rank=0), Told())  # type: ignore[arg-type]


def test_an_activity_stays_bounded_after_one_that_it_holds(world):
    with world.at("train step 1"):
        with world.at("gathering a weight"):
            assert world.beacon.now == ("gathering a weight", True)
        assert world.beacon.now == ("train step 1", True)
    assert world.beacon.now == ("after train step 1", False)


def test_an_error_within_is_told_where_it_was_raised(world):
    with pytest.raises(ZeroDivisionError), world.at("train step 1"), world.at("gathering"):
        _ = 1 / 0
    assert world.beacon.now == ("train step 1", False)
