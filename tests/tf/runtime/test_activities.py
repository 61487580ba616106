"""What other ranks wait for is bounded in time, be it within something else that is."""

from __future__ import annotations

import types
from typing import Any

import pytest
import tensorflow as tf

from tfpar.jobs.launch import TaskProgress
from tfpar.tf.distributed.exchange import PeerLostError
from tfpar.tf.distributed.world import World


class Told:
    """What a beacon is told: activities, and whether they are bounded."""

    def __init__(self) -> None:
        self.now: tuple[str, bool] = "", False

    def at(self, activity: str, bounded: bool = False, **_: Any) -> None:
        self.now = activity, bounded


@pytest.fixture
def world() -> World:
    return World(types.SimpleNamespace(rank=0), types.SimpleNamespace(size=1), Told())  # type: ignore[arg-type]


def test_an_activity_stays_bounded_after_one_that_it_holds(world):
    with world.at("train step 1"):
        with world.at("gathering a weight"):
            assert world.beacon.now == ("gathering a weight", True)
        assert world.beacon.now == ("train step 1", True)
    assert world.beacon.now == ("after train step 1", False)


def test_a_lost_peer_is_told_with_the_task_and_with_what_did_not_come(world):
    text = "Connection reset by peer: {{node transfer/1_to_0/round1/B1/microbatch2/0}}"
    reached = TaskProgress("0B2", "waits")
    with pytest.raises(PeerLostError) as raised, world.at("train step 4", lambda: reached):
        raise tf.errors.UnavailableError(None, None, text)
    told = str(raised.value)
    assert "in train step 4, waiting for what the backward pass of microbatch 2 (0B2) reads" in told
    assert "What 1B2 makes did not get from rank 1 to rank 0." in told


def test_a_lost_peer_is_told_with_what_to_look_at(world):
    with (
        pytest.raises(PeerLostError, match="Its own output says why. All read it together.$"),
        world.at("gathering a weight", hint="All read it together."),
    ):
        raise tf.errors.UnavailableError(None, None, "Connection reset by peer")


def test_an_error_within_is_told_where_it_was_raised(world):
    with pytest.raises(ZeroDivisionError), world.at("train step 1"), world.at("gathering"):
        _ = 1 / 0
    assert world.beacon.now == ("train step 1", False)
